"""Builds Triton's C launchers in compile workers, in parallel with kernel compilation.

Inductor launches most kernels with a launcher of its own, but leaves two kinds to Triton:
programmatic dependent launches, and kernels that need memory for TMA descriptors that they create.
Up to version 3.6 Triton has gcc build a C module for the argument types of such a kernel, which
takes 0.3 s for each combination, in the process that loads the kernel, at load time. `prepare` has
a compile worker build the module as soon as the types are known; loading then finds it in Triton's
cache. Failures are ignored: the launcher is then built at load time.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

requested_launchers: set[tuple[object, ...]] = set()
"""Launchers already requested from compile workers."""


def prepare(kernel: Mapping[str, Any]) -> None:
    """Have a compile worker build the launcher of a kernel, without waiting for it.

    Does nothing if there are no workers or if Triton does not build launchers. Errors are ignored
    here; they appear when the kernel is loaded, which then builds the launcher.

    Args:
        kernel: Inductor's description of the kernel for Triton (`triton_meta`).
    """
    # This is only an optimization: it must not make a compile fail.
    with contextlib.suppress(Exception):
        from torch._inductor.async_compile import AsyncCompile
        from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

        if not are_launchers_built() or not AsyncCompile.use_process_pool():
            return
        signature, constants = kernel["signature"], kernel["constants"]
        folder = triton_cache_dir(kernel["device"].index)
        launcher = (folder, *signature.values(), *map(repr, constants.items()))
        if launcher not in requested_launchers:
            AsyncCompile.process_pool().submit(build, signature, constants, folder)
            requested_launchers.add(launcher)


def build(signature: Mapping[str, str], constants: Mapping[Any, Any], folder: str) -> None:
    """Build a launcher in a worker, if it is not in Triton's cache.

    Args:
        signature: Triton's type of each argument, by name.
        constants: constant arguments, by name or by index.
        folder: Triton's cache directory.
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
    """Stand-in for the metadata of a compiled kernel: the launcher's code does not depend on it."""

    def __getattr__(self, name: str) -> None:
        return None


@functools.cache
def are_launchers_built() -> bool:
    """Whether this Triton builds launchers from C source."""
    from triton.backends.nvidia import driver

    return hasattr(driver, "make_launcher")
