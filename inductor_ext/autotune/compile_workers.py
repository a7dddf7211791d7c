"""Inductor's compile workers, made ready before a kernel waits for them.

The first kernel that one of these processes compiles takes it 0.2 to 0.4 s more than any later one,
for imports and for what LLVM sets up; and there are as many of them as cores, each of which gets
its first kernel at another time. `warm_up` has all of them compile an empty one.
"""

from __future__ import annotations

import contextlib

__all__ = ["warm_up"]

_warm: list[object] = []
"""The pool of this process, when its workers have been warmed up."""


def warm_up(capability: tuple[int, int]) -> None:
    """Have each compile worker of this process compile a kernel, once, and wait for none.

    Args:
        capability: compute capability that the kernel is compiled for.
    """
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads

    if get_compile_threads() <= 1:
        return
    # Some processes may not have others.
    with contextlib.suppress(RuntimeError):
        pool = AsyncCompile.process_pool()
        if pool in _warm:
            return
        _warm[:] = [pool]
        for _ in range(get_compile_threads()):
            # Idle workers take turns.
            pool.submit(compile_nothing, 10 * capability[0] + capability[1])


def compile_nothing(capability: int) -> None:
    """In a worker: compile an empty kernel, and forget it. What cannot be compiled is told later.

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
            # What is there has nothing to be compiled.
            triton.knobs.cache.dir = folder
            source = ASTSource(triton.jit(_nothing), {}, {})
            triton.compile(source, target=GPUTarget("cuda", capability, 32))


def _nothing() -> None:
    pass
