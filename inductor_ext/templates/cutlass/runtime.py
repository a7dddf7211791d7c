"""Run-time support of generated code: `load` returns a CUTLASS kernel as a callable `Launcher`.

The generated code contains the kernel's source; the built kernel is in this machine's store
(`store`; settings `artifact_cache_dir`, `artifact_cache_size`). If it is missing, for example on
another machine that shares Inductor's cache, nvcc rebuilds it; if that is not possible,
`exc.MissingKernelError` says what to do. Each launch packs its arguments into new memory, so
threads may launch concurrently.

The import is light: torch, but not Inductor.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import torch

from inductor_ext import _compat, events, exc, settings
from inductor_ext.storage.artifact_store import ArtifactStore
from inductor_ext.storage.paths import kernel_folder
from inductor_ext.templates.cutlass import launch, nvcc_build
from inductor_ext.templates.cutlass.source import Source

Head = tuple[int, int, int, int, int, int, int, int]
"""The fields of `Call` before the addresses."""


class Launcher:
    """A loaded kernel, for launches with a given number of operands and scalars."""

    def __init__(self, library: ctypes.CDLL, name: str, operands: int, scalars: int) -> None:
        self.name = name
        layout = launch.make_call_layout(operands, scalars)
        self._pack = layout.pack_into
        self._memory: Any = ctypes.c_char * layout.size
        self._scalars_at = launch.OPERANDS_AT + launch.OPERAND_BYTES * operands
        self._size, self._run = launch.bind_functions(library)

    def _pack_call(self, head: Head, rest: tuple[float, ...]) -> Any:
        memory = self._memory()
        base = ctypes.addressof(memory)
        self._pack(memory, 0, *head, base + launch.OPERANDS_AT, base + self._scalars_at, *rest)
        return memory

    def __call__(self, stream: int, workspace: int, head: Head, *rest: float) -> None:
        """Launch the kernel.

        Args:
            stream: CUDA stream handle.
            workspace: address of `workspace_size` bytes of device memory; 0 for none.
            head: the fields of `Call` before the addresses.
            rest: address, leading stride and batch stride of each operand (strides in elements),
                then the scalars.

        Raises:
            exc.KernelLaunchError: the kernel or CUDA returns an error.
        """
        error = self._run(self._pack_call(head, rest), workspace, stream)
        if error:
            raise exc.KernelLaunchError(kernel=self.name, why=launch.describe_error(error))

    def with_workspace(self, stream: int, device: str, head: Head, *rest: float) -> None:
        """Launch the kernel with a workspace of the required size from torch's allocator.

        Args:
            stream: handle of the current CUDA stream.
            device: argument of torch.device.
            head, rest: see `__call__`.

        Raises:
            exc.KernelLaunchError: see `__call__`.
        """
        size = self.workspace_size(head, *rest)
        memory = torch.empty(size, dtype=torch.uint8, device=device)
        # Freed right after the launch: the allocator reuses it on the same stream, in order.
        self(stream, memory.data_ptr(), head, *rest)

    def workspace_size(self, head: Head, *rest: float) -> int:
        """Return the bytes of a launch's workspace.

        Args:
            head, rest: see `__call__`; only the alignment of the addresses matters.

        Raises:
            exc.KernelLaunchError: the kernel cannot run the launch.
        """
        size: int = self._size(self._pack_call(head, rest))
        if size < 0:
            raise exc.KernelLaunchError(kernel=self.name, why="it does not support these operands")
        return size


def store(values: settings.Settings | None = None) -> ArtifactStore:
    """Return the store of built kernels, without creating or touching files.

    Args:
        values: by default those of the current compile in this thread, else the current config.
    """
    if values is None:
        values = getattr(_compat.peek_choices(), "settings", None)
    if values is None:
        from inductor_ext import config

        values = config.snapshot({})
    return ArtifactStore(
        kernel_folder(values.artifact_cache_dir),
        settings.parse_bytes(values.artifact_cache_size),
        events.warn_once,
    )


libraries: dict[str, ctypes.CDLL] = {}
"""Loaded libraries by kernel key; never unloaded."""

_lock = threading.Lock()


def load(name: str, architecture: str, text: str, *, operands: int, scalars: int) -> Launcher:
    """Load a kernel into this process, from the store or built now.

    Args:
        name, architecture, text: of its `Source`.
        operands: number of operands of a launch.
        scalars: number of scalars of a launch.

    Raises:
        exc.MissingKernelError: it is not in the store, and cannot be built on this machine.
        exc.KernelBuildError: nvcc fails to build it.
    """
    source = Source(name, text, architecture)
    key = nvcc_build.key(source)
    with _lock:
        if key not in libraries:
            artifacts = store()
            try:
                with nvcc_build.built(source, artifacts) as file:
                    libraries[key] = ctypes.CDLL(str(file))
            except exc.MissingToolchainError as error:
                raise exc.MissingKernelError(
                    kernel=name, folder=artifacts.folder, why=f"it cannot be built here: {error}"
                ) from None
    return Launcher(libraries[key], name, operands, scalars)


def address(key: str, function: str) -> int:
    """Return the address of a function of a loaded kernel, for generated C++.

    Args:
        key: `nvcc_build.key` of the kernel.
        function: name of the function.

    Raises:
        KeyError: the kernel has not been loaded.
    """
    return ctypes.cast(getattr(libraries[key], function), ctypes.c_void_p).value or 0
