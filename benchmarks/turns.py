"""Processes that share GPUs: all compile at the same time, and one at a time uses each GPU.

Compiling is what most of a benchmark's time goes into, and needs processors only. What Inductor and
the extension measure while they tune, and what is measured in the end, must not be disturbed: in
the processes of `work_on` both kinds of measurements wait for their turn. `turn` is for whatever
else keeps a GPU busy; elsewhere it waits for nobody.

All compile workers together are no more than there are processors: tuning that waits for a busy
host may measure the host. Of five cases that were compiled alone and among 16 processes with 16
workers each, stock's kernels took 10 and 13 % longer among them in two, and no longer in three.
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

from benchmarks import slices

__all__ = ["outcomes", "turn", "work_on"]

Item = TypeVar("Item")
Result = TypeVar("Result")

_lock: AbstractContextManager[Any] | None = None
"""Of the processes that this one takes turns with; who holds it may take it again."""


def turn() -> AbstractContextManager[Any]:
    """While the block runs, no other process has its turn."""
    return contextlib.nullcontext() if _lock is None else _lock


def outcomes(
    items: Sequence[Item],
    make: Callable[..., Callable[[Item], Result]],
    processes: int,
    seconds: float | None,
) -> Iterator[Result]:
    """What a bench makes of each item, in this process or in several.

    Args:
        items: see `work_on`.
        make: makes the bench; `seconds` says whether how long compiles take is a result, as it is
            where nothing else is compiled.
        processes: how many; with 1 it is this one.
        seconds: for all, the start of the bench included; None for no limit.
    """
    if processes > 1:
        return work_on(items, functools.partial(make, seconds=False), processes, seconds)
    begin = time.monotonic()
    bench = make(seconds=True)
    left = seconds and seconds - (time.monotonic() - begin)
    return map(bench, slices.within(items, left))


def work_on(
    items: Sequence[Item],
    make: Callable[[], Callable[[Item], Result]],
    processes: int,
    seconds: float | None,
) -> Iterator[Result]:
    """What a function makes of each item, in the order in which they are ready.

    Args:
        items: begun one after the other, as long as the next one fits, as in `slices.within`.
        make: makes the function, once in each process. It is pickled, as are items and results.
        processes: how many work at the same time. They divide the GPUs that are visible, and each
            process sees no other than its own.
        seconds: for all; None for no limit.
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
            for each in done:
                taken, result = each.result()
                longest = max(longest, taken)
                yield result


_work: Callable[[Any], Any]
"""What this process does to items."""


def _timed(item: Any) -> tuple[float, Any]:
    begin = time.monotonic()
    result = _work(item)
    return time.monotonic() - begin, result


def _visible_gpus() -> list[str]:
    """Names of the GPUs, as `CUDA_VISIBLE_DEVICES` has them; an empty one where there are none."""
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
    # Nobody has asked for a GPU in this process yet.
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[place]
    inductor_config.compile_threads = compile_workers
    _let_measurements_wait()
    _work = make()


def _let_measurements_wait() -> None:
    """From now on, whatever measures on the GPU in this process does it in its turn."""
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
            # From here on it is `end` that ends the turn.
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
