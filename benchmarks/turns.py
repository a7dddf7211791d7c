"""Processes that share a GPU: all compile at the same time, and one at a time uses the GPU.

Compiling is what most of a benchmark's time goes into, and needs processors only. What Inductor and
the extension measure while they tune, and what is measured in the end, must not be disturbed:

    with turns.pool(4) as workers:
        workers.submit(function, argument)

runs functions in processes in which both kinds of measurements wait for their turn. `turn` is for
whatever else keeps a GPU busy; outside of such a pool it waits for nobody.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

__all__ = ["pool", "turn"]

_lock: AbstractContextManager[Any] | None = None
"""Of the pool that this process belongs to; who holds it may take it again."""


def turn() -> AbstractContextManager[Any]:
    """While the block runs, no other process of the pool has its turn."""
    return contextlib.nullcontext() if _lock is None else _lock


@contextlib.contextmanager
def pool(
    count: int, start: Callable[..., None], *arguments: Any
) -> Iterator[concurrent.futures.ProcessPoolExecutor]:
    """Processes that take turns.

    Args:
        count: of processes.
        start: called in each of them before all else, with `arguments`.
        arguments: what can be pickled.
    """
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        count, context, _start, (context.RLock(), start, arguments)
    ) as workers:
        yield workers


def _start(
    lock: AbstractContextManager[Any], start: Callable[..., None], arguments: Sequence[Any]
) -> None:
    global _lock
    _lock = lock
    _let_measurements_wait()
    start(*arguments)


def _let_measurements_wait() -> None:
    """From now on, whatever measures on the GPU in this process does it in its turn."""
    from torch._inductor.runtime.benchmarking import benchmarker

    from inductor_ext.selection.timing import CudaStopwatch

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
