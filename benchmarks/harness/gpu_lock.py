"""A GPU lock for benchmark processes: all compile in parallel, one at a time uses a GPU.

Most of a benchmark's time is compiling, which needs only CPUs. Measurements on the GPU, those of
tuning in Inductor and in the extension as well as the final ones, must not be disturbed: in the
processes of `work_on`, both kinds wait for the lock. `turn` is for other work that keeps a GPU
busy; outside of these processes it does not wait.

The total number of compile workers is limited to the number of CPUs, because tuning on a busy host
may measure the host. In a test of five cases, compiled alone and among 16 processes with 16 workers
each, Inductor's kernels were 10 and 13 % slower among the processes in two cases, and not slower
in three.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeVar

from benchmarks.harness import resumable

__all__ = ["outcomes", "turn", "work_on"]

Item = TypeVar("Item")
Result = TypeVar("Result")

_lock: AbstractContextManager[Any] | None = None
"""The lock shared by the processes that use the same GPU; re-entrant."""


def turn() -> AbstractContextManager[Any]:
    """Return a context manager that holds the GPU lock."""
    return contextlib.nullcontext() if _lock is None else _lock


def outcomes(
    items: Sequence[Item],
    make: Callable[..., Callable[[Item], Result]],
    processes: int,
    seconds: float | None,
) -> Iterator[Result]:
    """Run a bench on every item, in this process or in several; yield the results.

    Args:
        items: see `work_on`.
        make: makes the bench; its argument `seconds` says whether compile times are part of the
            results, which holds if nothing else is compiled at the same time.
        processes: number of processes; 1 for this process only.
        seconds: time limit for everything, including the start of the bench; None for no limit.
    """
    if processes > 1:
        return work_on(items, functools.partial(make, seconds=False), processes, seconds)
    begin = time.monotonic()
    bench = make(seconds=True)
    left = seconds and seconds - (time.monotonic() - begin)
    return map(bench, resumable.within(items, left))


def work_on(
    items: Sequence[Item],
    make: Callable[[], Callable[[Item], Result]],
    processes: int,
    seconds: float | None,
) -> Iterator[Result]:
    """Run a function on every item in several processes; yield the results as they become ready.

    Args:
        items: started one after the other while the next one fits, as in `resumable.within`.
        make: makes the function, once per process. It is pickled, as are items and results.
        processes: number of processes that work at the same time. They share the visible GPUs, and
            every process sees only its own GPU.
        seconds: time limit for everything; None for no limit.
    """
    begin, longest = time.monotonic(), 0.0
    left = list(reversed(items))
    running: set[Future[tuple[float, Result]]] = set()
    context = multiprocessing.get_context("spawn")
    gpus = _visible_gpus()
    locks = [context.RLock() for _ in gpus]
    places: multiprocessing.SimpleQueue[int] = context.SimpleQueue()
    for process in range(processes):
        places.put(process % len(gpus))
    workers_each = max(1, len(os.sched_getaffinity(0)) // processes - 1)
    given = (places, gpus, locks, workers_each, make)
    with ProcessPoolExecutor(processes, context, _start, given) as workers:
        while True:
            fits = seconds is None or time.monotonic() - begin + longest <= seconds
            while left and fits and len(running) < processes:
                running.add(workers.submit(_timed, left.pop()))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for item in done:
                taken, result = item.result()
                longest = max(longest, taken)
                yield result


_work: Callable[[Any], Any]
"""The function that this process runs on items."""


def _timed(item: Any) -> tuple[float, Any]:
    begin = time.monotonic()
    result = _work(item)
    return time.monotonic() - begin, result


def _visible_gpus() -> list[str]:
    """Return the GPU names from `CUDA_VISIBLE_DEVICES`; one empty name if there is no GPU."""
    import torch

    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return named.split(",")[: max(1, count)]


def _start(
    places: multiprocessing.SimpleQueue[int],
    gpus: Sequence[str],
    locks: Sequence[AbstractContextManager[Any]],
    compile_workers: int,
    make: Callable[[], Callable[[Any], Any]],
) -> None:
    from torch._inductor import config as inductor_config

    global _lock, _work
    place = places.get()
    _lock = locks[place]
    # CUDA has not been initialized in this process yet.
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[place]
    inductor_config.compile_threads = compile_workers
    _let_measurements_wait()
    _work = make()


def _let_measurements_wait() -> None:
    """Make all GPU measurements in this process hold the GPU lock, from now on."""
    from torch._inductor.runtime.benchmarking import benchmarker

    from inductor_ext.autotune.timing import CudaStopwatch

    kind = type(benchmarker)
    kind.benchmark_gpu = _in_turn(kind.benchmark_gpu)  # type: ignore[method-assign]
    begin, end = CudaStopwatch.__init__, CudaStopwatch.__exit__

    @functools.wraps(begin)
    def begin_in_turn(self: CudaStopwatch, *given: Any) -> None:
        with contextlib.ExitStack() as held:
            held.enter_context(turn())
            begin(self, *given)
            # From here on, `end` releases the lock.
            held.pop_all()

    @functools.wraps(end)
    def end_of_turn(
        self: CudaStopwatch,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            end(self, kind, error, trace)
        finally:
            turn().__exit__(kind, error, trace)

    CudaStopwatch.__init__ = begin_in_turn  # type: ignore[method-assign, assignment]
    CudaStopwatch.__exit__ = end_of_turn  # type: ignore[method-assign]


def _in_turn(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*given: Any, **named: Any) -> Any:
        with turn():
            return function(*given, **named)

    return called
