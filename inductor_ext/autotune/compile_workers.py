"""Start and warm-up of Inductor's compile workers.

The workers take several seconds to start: their parent process imports torch. Inductor's own
backend starts them before it imports the rest of Inductor; so does `start`. Until they are ready,
Inductor compiles kernels in the compiling thread, one by one; in `sending_early` it sends them to
the workers instead, which is faster if there are many.

The first kernel that a worker process compiles takes 0.2 to 0.4 s longer than later ones, because
of imports and LLVM initialization. There is one worker per core, and each of them gets its first
kernel at a different time. `warm_up` has every worker compile an empty kernel. A failure of the
warm-up is ignored.
"""

from __future__ import annotations

import contextlib
import fcntl
import threading
from collections.abc import Callable, Iterator
from unittest import mock

_warm: list[object] = []
"""The process pool whose workers have been warmed up, if any."""


def start() -> None:
    """Start the compile workers, if Inductor's options allow it; do not wait for them."""
    from torch._inductor.async_compile import maybe_warm_pool

    # Some processes are not allowed to start others.
    with contextlib.suppress(RuntimeError):
        maybe_warm_pool()


@contextlib.contextmanager
def sending_early() -> Iterator[None]:
    """Send the kernels of this thread to the workers while these are starting."""
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile

    stock: Callable[[], bool] = AsyncCompile.use_process_pool
    thread = threading.get_ident()

    def use_process_pool() -> bool:
        if stock():
            return True
        # There is no future if Inductor's options allow no workers.
        ready = AsyncCompile._ready_future
        is_starting = ready is not None and not ready.done()
        is_allowed = not config.triton.proton_profiling
        return is_starting and is_allowed and threading.get_ident() == thread

    with mock.patch.object(AsyncCompile, "use_process_pool", staticmethod(use_process_pool)):
        yield


def wait_until_ready() -> bool:
    """Wait for the workers; return whether there is no worker that may never answer."""
    from torch._inductor.async_compile import AsyncCompile

    try:
        AsyncCompile.wait_pool_ready()
    except Exception:
        # They have not answered for two minutes, or cannot start.
        return False
    return True


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
        _enlarge_pipe(pool)
        for _ in range(get_compile_threads()):
            # Each idle worker takes one.
            pool.submit(compile_nothing, 10 * capability[0] + capability[1])


_PIPE_BYTES = 1 << 20
"""Buffer of the pipe to the workers: the most that Linux gives to ordinary users by default."""


def _enlarge_pipe(pool: object) -> None:
    """Let kernels be sent before the workers read them.

    The buffer of a pipe is 64 KiB by default, which about three kernels fill. If it cannot be
    enlarged, further kernels wait for the start of the workers.

    Args:
        pool: `torch._inductor.compile_worker.subproc_pool.SubprocPool`; others have no pipe.
    """
    pipe = getattr(pool, "write_pipe", None)
    if pipe is not None:
        with contextlib.suppress(AttributeError, OSError):
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


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
