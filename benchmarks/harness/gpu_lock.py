"""A GPU lock for benchmark processes: all compile in parallel, one at a time uses a GPU.

Most of a benchmark's time is compiling, which needs only CPUs. Measurements on the GPU, those of
tuning in Inductor and in the extension as well as the final ones, must not be disturbed: in the
processes of `run_in_processes`, both kinds wait for the lock. `hold_gpu` is for other work that
keeps a GPU busy; outside of these processes it does not wait.

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

__all__ = ["hold_gpu", "run", "run_in_processes", "start_process", "time_work"]

Item = TypeVar("Item")
Result = TypeVar("Result")

_lock: AbstractContextManager[Any] | None = None
"""The lock shared by the processes that use the same GPU; re-entrant."""


def hold_gpu() -> AbstractContextManager[Any]:
    """Return a context manager that holds the GPU lock."""
    return contextlib.nullcontext() if _lock is None else _lock


def run(
    items: Sequence[Item],
    make_bench: Callable[..., Callable[[Item], Result]],
    processes: int,
    seconds: float | None,
) -> Iterator[Result]:
    """Run a bench on every item, in this process or in several; yield the results.

    Args:
        items: see `run_in_processes`.
        make_bench: makes the bench; its argument `seconds` says whether compile times are part of
            the results, which holds if nothing else is compiled at the same time.
        processes: number of processes; 1 for this process only.
        seconds: time limit for everything, including the start of the bench; None for no limit.
    """
    if processes > 1:
        make = functools.partial(make_bench, seconds=False)
        return run_in_processes(items, make, processes, seconds)
    begin = time.monotonic()
    bench = make_bench(seconds=True)
    left = seconds and seconds - (time.monotonic() - begin)
    return map(bench, resumable.take_within(items, left))


def run_in_processes(
    items: Sequence[Item],
    make_function: Callable[[], Callable[[Item], Result]],
    processes: int,
    seconds: float | None,
) -> Iterator[Result]:
    """Run a function on every item in several processes; yield the results as they become ready.

    Args:
        items: started one after the other while the next one fits, as in `resumable.take_within`.
        make_function: makes the function, once per process. It is pickled, as are items and
            results.
        processes: number of processes that work at the same time. They share the visible GPUs, and
            every process sees only its own GPU.
        seconds: time limit for everything; None for no limit.
    """
    begin, longest = time.monotonic(), 0.0
    left = list(reversed(items))
    running: set[Future[tuple[float, Result]]] = set()
    context = multiprocessing.get_context("spawn")
    gpus = _list_visible_gpus()
    locks = [context.RLock() for _ in gpus]
    gpu_indices: multiprocessing.SimpleQueue[int] = context.SimpleQueue()
    for process in range(processes):
        gpu_indices.put(process % len(gpus))
    compile_workers = max(1, len(os.sched_getaffinity(0)) // processes - 1)
    arguments = (gpu_indices, gpus, locks, compile_workers, make_function)
    with ProcessPoolExecutor(processes, context, start_process, arguments) as workers:
        while True:
            fits = seconds is None or time.monotonic() - begin + longest <= seconds
            while left and fits and len(running) < processes:
                running.add(workers.submit(time_work, left.pop()))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                duration, result = future.result()
                longest = max(longest, duration)
                yield result


_work: Callable[[Any], Any]
"""The function that this process runs on items."""


def time_work(item: Any) -> tuple[float, Any]:
    begin = time.monotonic()
    result = _work(item)
    return time.monotonic() - begin, result


def _list_visible_gpus() -> list[str]:
    """Return the GPU names from `CUDA_VISIBLE_DEVICES`; one empty name if there is no GPU."""
    import torch

    count = torch.cuda.device_count()
    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return names.split(",")[: max(1, count)]


def start_process(
    gpu_indices: multiprocessing.SimpleQueue[int],
    gpus: Sequence[str],
    locks: Sequence[AbstractContextManager[Any]],
    compile_workers: int,
    make_function: Callable[[], Callable[[Any], Any]],
) -> None:
    from torch._inductor import config as inductor_config

    global _lock, _work
    index = gpu_indices.get()
    _lock = locks[index]
    # CUDA has not been initialized in this process yet.
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[index]
    inductor_config.compile_threads = compile_workers
    _lock_measurements()
    _work = make_function()


def _lock_measurements() -> None:
    """Make all GPU measurements in this process hold the GPU lock, from now on."""
    from torch._inductor.runtime.benchmarking import benchmarker

    from inductor_ext.autotune.timing import CudaStopwatch

    kind = type(benchmarker)
    kind.benchmark_gpu = _with_lock(kind.benchmark_gpu)  # type: ignore[method-assign]
    begin, end = CudaStopwatch.__init__, CudaStopwatch.__exit__

    @functools.wraps(begin)
    def acquire_and_begin(self: CudaStopwatch, *args: Any) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(hold_gpu())
            begin(self, *args)
            # From here on, `end` releases the lock.
            stack.pop_all()

    @functools.wraps(end)
    def end_and_release(
        self: CudaStopwatch,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            end(self, kind, error, trace)
        finally:
            hold_gpu().__exit__(kind, error, trace)

    CudaStopwatch.__init__ = acquire_and_begin  # type: ignore[method-assign, assignment]
    CudaStopwatch.__exit__ = end_and_release  # type: ignore[method-assign]


def _with_lock(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with hold_gpu():
            return function(*args, **kwargs)

    return call
