"""Launchers of kernels that Inductor leaves to Triton, built while these are compiled.

Inductor launches most kernels by code of its own; not those that begin before the one ahead of them
ends (programmatic dependent launch), nor those with memory for TMA descriptors that they make. Up
to version 3.6 Triton has gcc build a C module for the types of such a kernel's arguments, which
takes 0.3 s for each combination, in the process that loads the kernel, when it is loaded. `prepare`
has a compile worker do that as soon as the types are known; it is found in Triton's cache then.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

__all__ = ["build", "prepare"]

_begun: set[tuple[object, ...]] = set()
"""What compile workers were asked for."""


def prepare(kernel: Mapping[str, Any]) -> None:
    """Have a compile worker build the launcher of a kernel, and do not wait for it.

    Where there are no workers, or Triton builds no launchers, nothing happens. What goes wrong is
    told when the kernel is loaded, which builds the launcher then.

    Args:
        kernel: what Inductor knows of it for Triton (`triton_meta`).
    """
    # No compile is to fail for what would have saved time.
    with contextlib.suppress(Exception):
        from torch._inductor.async_compile import AsyncCompile
        from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

        if not _are_built() or not AsyncCompile.use_process_pool():
            return
        signature, constants = kernel["signature"], kernel["constants"]
        folder = triton_cache_dir(kernel["device"].index)
        wanted = (folder, *signature.values(), *map(repr, constants.items()))
        if wanted not in _begun:
            AsyncCompile.process_pool().submit(build, signature, constants, folder)
            _begun.add(wanted)


def build(signature: Mapping[str, str], constants: Mapping[Any, Any], folder: str) -> None:
    """In a worker: build a launcher, if it is not in Triton's cache.

    Args:
        signature: Triton's type of each argument, by name.
        constants: arguments that are constants, by name or by index.
        folder: of Triton's cache.
    """
    with contextlib.suppress(Exception):
        import triton
        from triton.backends.nvidia.driver import CudaLauncher

        function = SimpleNamespace(arg_names=list(signature))
        source = SimpleNamespace(fn=function, signature=signature, constants=constants)
        with triton.knobs.cache.scope():
            triton.knobs.cache.dir = folder
            CudaLauncher(source, _Metadata())


class _Metadata:
    """What is known of a kernel that is compiled: nothing that its launcher's code depends on."""

    def __getattr__(self, name: str) -> None:
        return None


@functools.cache
def _are_built() -> bool:
    """Whether launchers are built from a text."""
    from triton.backends.nvidia import driver

    return hasattr(driver, "make_launcher")
