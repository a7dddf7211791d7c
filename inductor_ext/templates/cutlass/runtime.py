"""CUTLASS kernels in generated code, which gets them by `load` and launches them by a call.

The code holds a kernel's source. What was built of it lies in the store of this machine (`store`).
Where that is gone, as on another machine that shares Inductor's cache, nvcc builds it again; where
that cannot be, `exc.MissingKernelError` says what to do. A launch fills memory of its own, so that
threads may launch side by side.

Light: it imports torch, and nothing of Inductor.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import torch

from inductor_ext import _compat, events, exc, settings
from inductor_ext.storage import artifact_store
from inductor_ext.templates.cutlass import launch, nvcc_build
from inductor_ext.templates.cutlass.source import Source

__all__ = ["Launcher", "address", "load", "store"]

Head = tuple[int, int, int, int, int, int, int, int]
"""A call's fields before the addresses."""


class Launcher:
    """A kernel in this process, for calls with as many operands and scalars."""

    def __init__(self, library: ctypes.CDLL, name: str, operands: int, scalars: int) -> None:
        self.name = name
        layout = launch.packing(operands, scalars)
        self._pack = layout.pack_into
        self._memory: Any = ctypes.c_char * layout.size
        self._scalars_at = launch.OPERANDS_AT + launch.OPERAND_BYTES * operands
        self._size, self._run = launch.functions(library)

    def _filled(self, head: Head, rest: tuple[float, ...]) -> Any:
        memory = self._memory()
        at = ctypes.addressof(memory)
        self._pack(memory, 0, *head, at + launch.OPERANDS_AT, at + self._scalars_at, *rest)
        return memory

    def __call__(self, stream: int, workspace: int, head: Head, *rest: float) -> None:
        """Launch.

        Args:
            stream: CUDA's handle.
            workspace: address of memory of the device, of `workspace_size` bytes; 0 for none.
            head: the call's fields before the addresses.
            rest: of each operand address, stride and stride of the batch, in elements; scalars.

        Raises:
            exc.KernelLaunchError: the kernel or CUDA refuses it.
        """
        error = self._run(self._filled(head, rest), workspace, stream)
        if error:
            raise exc.KernelLaunchError(kernel=self.name, why=launch.reason(error))

    def with_workspace(self, stream: int, device: str, head: Head, *rest: float) -> None:
        """Launch with a workspace from torch's allocator, of the size that the kernel asks for.

        Args:
            stream: CUDA's handle of the current stream.
            device: as of torch.device.
            head, rest: as of a call.

        Raises:
            exc.KernelLaunchError: as of a call.
        """
        size = self.workspace_size(head, *rest)
        memory = torch.empty(size, dtype=torch.uint8, device=device)
        # Who gets the memory next uses it behind this launch, in the same stream.
        self(stream, memory.data_ptr(), head, *rest)

    def workspace_size(self, head: Head, *rest: float) -> int:
        """Bytes of the workspace of a launch.

        Args:
            head, rest: as of a call; of addresses only the alignment counts.

        Raises:
            exc.KernelLaunchError: the kernel cannot run it.
        """
        size: int = self._size(self._filled(head, rest))
        if size < 0:
            raise exc.KernelLaunchError(kernel=self.name, why="it does not take such operands")
        return size


def store(values: settings.Settings | None = None) -> artifact_store.Store:
    """The store of kernels; nothing is made or touched by asking for it.

    Args:
        values: by default those of the compile under way in this thread, else what holds now.
    """
    if values is None:
        values = getattr(_compat.peek_choices(), "settings", None)
    if values is None:
        from inductor_ext import config

        values = config.snapshot({})
    return artifact_store.Store(
        artifact_store.kernel_folder(values.artifact_cache_dir),
        settings.parse_bytes(values.artifact_cache_size),
        events.warn_once,
    )


_libraries: dict[str, ctypes.CDLL] = {}
"""By the kernels' keys; they stay in the process."""

_lock = threading.Lock()


def load(name: str, architecture: str, text: str, *, operands: int, scalars: int) -> Launcher:
    """A kernel in this process, from the store or built now.

    Args:
        name, architecture, text: of its `Source`.
        operands: of a call.
        scalars: of a call.

    Raises:
        exc.MissingKernelError: it is not there, and cannot be built on this machine.
        exc.KernelBuildError: nvcc does not build it.
    """
    source = Source(name, text, architecture)
    key = nvcc_build.key(source)
    with _lock:
        if key not in _libraries:
            kept = store()
            try:
                with nvcc_build.built(source, kept) as file:
                    _libraries[key] = ctypes.CDLL(str(file))
            except exc.MissingToolchainError as error:
                raise exc.MissingKernelError(
                    kernel=name, folder=kept.folder, why=f"it cannot be built here: {error}"
                ) from None
    return Launcher(_libraries[key], name, operands, scalars)


def address(key: str, function: str) -> int:
    """Of a function of a kernel that this process has loaded, for generated C++.

    Args:
        key: the kernel's, of `build.key`.
        function: its name.

    Raises:
        KeyError: no such kernel has been loaded.
    """
    return ctypes.cast(getattr(_libraries[key], function), ctypes.c_void_p).value or 0
