"""Warm-up of Inductor's compile workers.

The first kernel that a worker process compiles takes 0.2 to 0.4 s longer than later ones, because
of imports and LLVM initialization. There is one worker per core, and each of them gets its first
kernel at a different time. `warm_up` has every worker compile an empty kernel. A failure of the
warm-up is ignored.
"""

from __future__ import annotations

import contextlib

_warm: list[object] = []
"""The process pool whose workers have been warmed up, if any."""


def warm_up(capability: tuple[int, int]) -> None:
    """Have each compile worker of this process compile an empty kernel, once; do not wait for it.

    Args:
        capability: compute capability to compile for.
    """
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads

    if get_compile_threads() <= 1:
        return
    # Some processes are not allowed to start others.
    with contextlib.suppress(RuntimeError):
        pool = AsyncCompile.process_pool()
        if pool in _warm:
            return
        _warm[:] = [pool]
        for _ in range(get_compile_threads()):
            # Each idle worker takes one.
            pool.submit(compile_nothing, 10 * capability[0] + capability[1])


def compile_nothing(capability: int) -> None:
    """Compile an empty kernel and discard it (in a worker).

    Errors are ignored: they will occur again, and be reported, when a real kernel is compiled.

    Args:
        capability: such as 90.
    """
    import tempfile

    with contextlib.suppress(Exception), tempfile.TemporaryDirectory() as folder:
        import torch._inductor.runtime.triton_heuristics  # noqa: F401
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        with triton.knobs.cache.scope():
            # A kernel in the cache would not be compiled.
            triton.knobs.cache.dir = folder
            source = ASTSource(triton.jit(_nothing), {}, {})
            triton.compile(source, target=GPUTarget("cuda", capability, 32))


def _nothing() -> None:
    pass
