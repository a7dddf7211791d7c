"""Times of calls on a GPU, in microseconds, with operands in DRAM.

Before each measurement a buffer four times the size of the L2 cache is read, which evicts what
earlier calls left there. Reading, not writing: written lines have to go to memory first, and would
do that during the measured kernel. Contenders take turns in an order that is shuffled every round,
for power and clocks drift.

Without a GPU, calls are timed by the wall clock; that is for tests.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

__all__ = ["Mode", "Timer", "batches"]

Mode = Literal["graph", "call"]
"""`graph`: the replay of a CUDA graph of one call, enqueued while the GPU is busy. `call`: an
ordinary call by a host that waits for it, with what the host does before the kernels start."""

WARM_UP = 0.1
"""Seconds of work before the first measurement, for clocks to settle."""

BUDGET: Mapping[Mode, float] = {"graph": 0.3, "call": 0.1}
"""Seconds that all rounds should take."""

FEWEST, MOST = 15, 150
"""Rounds."""


class Timer:
    """Measures calls.

    Args:
        device: "cuda" or "cpu".
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self._random = random.Random(0)
        self._buffer: Any = None
        if device == "cuda":
            import torch

            size = torch.cuda.get_device_properties(0).L2_cache_size
            self._buffer = torch.zeros(size, dtype=torch.int32, device=device)

    def capture(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """The call as a CUDA graph; what it returns stays where the first replay puts it.

        Raises:
            RuntimeError: it does what no graph can hold.
        """
        import torch

        # Not torch.cuda.graph, which collects garbage first: that takes longer than measuring.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            # Libraries allocate what they need for a new stream.
            call()
            stream.synchronize()
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                call()
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return graph.replay

    def measure(
        self, calls: Mapping[str, Callable[[], Any]], mode: Mode, rounds: int | None = None
    ) -> dict[str, list[float]]:
        """Microseconds of every round, by key.

        Args:
            calls: what to measure; for `graph`, what `capture` returned.
            mode: see `Mode`.
            rounds: how often; None for as many as fit `BUDGET`, within `FEWEST` and `MOST`.
        """
        if not calls:
            return {}
        start = time.perf_counter()
        count = 0
        while count < 2 or time.perf_counter() - start < WARM_UP * (self.device == "cuda"):
            count += 1
            self._round(calls, mode)
        start = time.perf_counter()
        self._round(calls, mode)
        once = time.perf_counter() - start
        if rounds is None:
            rounds = min(MOST, max(FEWEST, int(BUDGET[mode] / once)))
        values: dict[str, list[float]] = {key: [] for key in calls}
        for _ in range(rounds):
            for key, value in self._round(calls, mode).items():
                values[key].append(value)
        return values

    def _round(self, calls: Mapping[str, Callable[[], Any]], mode: Mode) -> dict[str, float]:
        order = list(calls)
        self._random.shuffle(order)
        if self.device == "cpu":
            return {key: _wall(calls[key]) for key in order}
        import torch

        spans = {}
        for key in order:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._buffer.amax()
            if mode == "call":
                torch.cuda.synchronize()
            begin.record()
            calls[key]()
            end.record()
            spans[key] = begin, end
        torch.cuda.synchronize()
        return {key: begin.elapsed_time(end) * 1e3 for key, (begin, end) in spans.items()}


def _wall(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def batches(
    call: Callable[[], Any], synchronize: Callable[[], None], seconds: float = 0.02
) -> Callable[[], float]:
    """A measurement of whole calls, one after the other without waiting, as a server makes them.

    Args:
        call: what to measure; it is called here, to see how long it takes.
        synchronize: waits for the device.
        seconds: that one measurement should take.

    Returns:
        A function that takes one measurement and gives seconds a call.
    """

    def timed(count: int) -> float:
        synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        synchronize()
        return (time.perf_counter() - start) / count

    timed(2)
    count = max(1, min(100, round(seconds / timed(2))))
    return lambda: timed(count)
