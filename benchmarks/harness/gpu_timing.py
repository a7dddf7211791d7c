"""Measures calls on a GPU, in microseconds, with operands in DRAM.

Calls are timed as in tuning (`autotune.timing.CudaStopwatch`), and also as ordinary calls by a host
that waits for every result. Before every measurement, a buffer of twice the L2 cache size is read
to evict data of earlier calls. Variants alternate, in an order that is shuffled every round,
because power and clocks drift.

Without a GPU, calls are timed by the wall clock; that is meant for tests.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from inductor_ext.autotune.timing import CudaStopwatch

__all__ = ["Mode", "Timer", "time_batches"]

Mode = Literal["graph", "call"]
"""`graph`: replay of a CUDA graph of one call, enqueued while the GPU is busy. `call`: an ordinary
call by a host that waits for it, including the host work before the kernels start."""

WARM_UP = 0.1
"""Seconds of work before the first measurement, for clocks to settle."""

BUDGET: Mapping[Mode, float] = {"graph": 0.3, "call": 0.1}
"""Target duration of all rounds, in seconds."""

MIN_ROUNDS, MAX_ROUNDS = 15, 150
"""Limits on the number of rounds."""


Round = Callable[[Sequence[int]], list[float]]
"""Makes one call for every index, in this order; returns their microseconds."""


class Timer:
    """Measures calls.

    Args:
        device: "cuda" or "cpu".
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self._random = random.Random(0)

    def measure(
        self, calls: Mapping[str, Callable[[], Any]], mode: Mode, rounds: int | None = None
    ) -> dict[str, list[float]]:
        """Return the microseconds of every round, by key, without calls that cannot be captured.

        Args:
            calls: the calls to measure; they have been called before.
            mode: see `Mode`.
            rounds: number of rounds; None for as many as fit `BUDGET`, from `MIN_ROUNDS` to
                `MAX_ROUNDS`.
        """
        keys = list(calls)
        with self._rounds(list(calls.values()), mode) as (take, usable):
            start = time.perf_counter()
            count = 0
            while count < 2 or time.perf_counter() - start < WARM_UP * (self.device == "cuda"):
                count += 1
                take(usable)
            start = time.perf_counter()
            take(usable)
            once = time.perf_counter() - start
            if rounds is None:
                rounds = min(MAX_ROUNDS, max(MIN_ROUNDS, int(BUDGET[mode] / once)))
            values: dict[str, list[float]] = {keys[index]: [] for index in usable}
            for _ in range(rounds):
                order = self._random.sample(usable, len(usable))
                for index, value in zip(order, take(order), strict=True):
                    values[keys[index]].append(value)
        return values

    @contextlib.contextmanager
    def _rounds(
        self, calls: Sequence[Callable[[], Any]], mode: Mode
    ) -> Iterator[tuple[Round, list[int]]]:
        """Return a function that makes one round, and the calls that can take part."""
        indices = list(range(len(calls)))
        if self.device == "cpu":
            yield lambda order: [_time_on_host(calls[index]) for index in order], indices
        elif mode == "graph":
            with CudaStopwatch(calls, 0) as stopwatch:
                yield stopwatch.round, [i for i in indices if stopwatch.captured[i]]
        else:
            yield _IdleTimer(calls).round, indices


class _IdleTimer:
    """Times calls on an idle GPU by a host that waits for them."""

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        import torch

        self._calls = calls
        size = torch.cuda.get_device_properties(0).L2_cache_size
        self._buffer = torch.zeros(size // 2, dtype=torch.float32, device="cuda")

    def round(self, order: Sequence[int]) -> list[float]:
        import torch

        microseconds = []
        for index in order:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._buffer.amax()
            torch.cuda.synchronize()
            begin.record()
            self._calls[index]()
            end.record()
            end.synchronize()
            microseconds.append(begin.elapsed_time(end) * 1e3)
        return microseconds


def _time_on_host(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def time_batches(
    call: Callable[[], Any], synchronize: Callable[[], None], seconds: float = 0.02
) -> Callable[[], float]:
    """Return a function that times back-to-back calls without waiting in between, as in a server.

    Args:
        call: the call to measure; it is called here to estimate its duration.
        synchronize: waits for the device.
        seconds: target duration of one measurement.

    Returns:
        A function that takes one measurement and returns seconds per call.
    """

    def time_calls(count: int) -> float:
        synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        synchronize()
        return (time.perf_counter() - start) / count

    time_calls(2)
    count = max(1, min(100, round(seconds / time_calls(2))))
    return lambda: time_calls(count)
