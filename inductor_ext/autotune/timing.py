"""What candidates take, and which of them is taken.

`measure` times all candidates of a problem against each other: in rounds, each of which calls every
candidate once, in an order of its own, so that clocks, temperature and neighbours disturb all
alike. It begins when two batches of calls agree, so that clocks have risen. The more rounds there
have been, the less a candidate may be behind to be measured further; rounds end when the medians of
those that are left are settled, or with the budget.

`decide` takes the candidate with the lowest median if it beats stock by 2 %, and by three standard
errors of the median difference within a round; else stock. A candidate that is ahead by less may be
behind in a model, at other addresses and clocks, and stock needs no compile; what is given away is
2 % at most.

Both know a `Stopwatch` only. `CudaStopwatch` is the one for a GPU: operands come from DRAM, as in a
model, where a layer's weights were last read a step ago. Needs torch and a GPU there alone.
"""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

__all__ = ["CudaStopwatch", "Sample", "Stopwatch", "Verdict", "decide", "measure"]


class Stopwatch(Protocol):
    """Calls candidates and says how long they took."""

    def round(self, order: Sequence[int]) -> list[float]:
        """Microseconds of one call of each of these candidates, called in this order."""

    def now(self) -> float:
        """Seconds since some moment."""


@dataclass(frozen=True)
class Sample:
    """What a candidate took in the first rounds, one number for each."""

    times: tuple[float, ...]
    """Microseconds."""

    @property
    def microseconds(self) -> float:
        """The median."""
        return statistics.median(self.times)

    @property
    def deviation(self) -> float:
        """Microseconds: the standard error of the median, estimated by `_standard_error`."""
        return _standard_error(self.times)


def _standard_error(values: Sequence[float]) -> float:
    """Of the median: 1.2533 s / sqrt(n), with s = 1.4826 times the median absolute deviation.

    Both factors hold for normally distributed values; outliers do not move this s.
    """
    middle = statistics.median(values)
    absolute = statistics.median(abs(value - middle) for value in values)
    return 1.2533 * 1.4826 * absolute / math.sqrt(len(values))


_FEWEST_ROUNDS = 5
_MOST_ROUNDS = 100
_SETTLED = 0.003
"""Standard error of a median, as a share of it, that needs no more rounds."""
_SETTLED_ROUNDS = 12
"""Below which no error is believed."""
_STAGES = ((5, 1.3), (10, 1.12), (20, 1.06), (40, 1.03))
"""After so many rounds, how many times the best median is too much to go on."""
_STEADY = 0.01
_WARM_UP_SHARE = 0.25
_WARM_UP_CALLS = 10


def measure(stopwatch: Stopwatch, count: int, budget: float, seed: int = 0) -> list[Sample]:
    """Time candidates against each other.

    Args:
        stopwatch: that calls them.
        count: of candidates, 1 or more.
        budget: milliseconds after which no round begins, but for the first five.
        seed: of the orders.

    Returns:
        Of each candidate, what it took; a candidate that fell behind has fewer rounds than others.
    """
    began = stopwatch.now()

    def spent() -> float:
        return (stopwatch.now() - began) * 1e3

    _warm_up(stopwatch, lambda: spent() > _WARM_UP_SHARE * budget)
    shuffle = random.Random(seed).sample
    times: list[list[float]] = [[] for _ in range(count)]
    alive = list(range(count))
    for done in range(1, _MOST_ROUNDS + 1):
        order = shuffle(alive, len(alive))
        for index, taken in zip(order, stopwatch.round(order), strict=True):
            times[index].append(taken)
        if done < _FEWEST_ROUNDS:
            continue
        margin = next((margin for rounds, margin in _STAGES if rounds == done), None)
        if margin is not None:
            alive = _ahead(times, alive, margin)
        if spent() > budget or (done >= _SETTLED_ROUNDS and _settled(times, alive)):
            break
    return [Sample(tuple(each)) for each in times]


def _warm_up(stopwatch: Stopwatch, enough: Callable[[], bool]) -> None:
    last = math.inf
    while True:
        middle = statistics.median(stopwatch.round([0] * _WARM_UP_CALLS))
        if abs(middle - last) <= _STEADY * middle or enough():
            return
        last = middle


def _ahead(times: Sequence[Sequence[float]], alive: Sequence[int], margin: float) -> list[int]:
    """Those that are not clearly behind."""
    medians = {index: statistics.median(times[index]) for index in alive}
    best = min(alive, key=medians.__getitem__)
    error = _standard_error(times[best])

    def behind(index: int) -> bool:
        doubt = 3 * math.hypot(error, _standard_error(times[index]))
        return medians[index] > margin * medians[best] + doubt

    return [index for index in alive if not behind(index)]


def _settled(times: Sequence[Sequence[float]], alive: Sequence[int]) -> bool:
    samples = [Sample(tuple(times[index])) for index in alive]
    return all(each.deviation <= _SETTLED * each.microseconds for each in samples)


@dataclass(frozen=True)
class Verdict:
    """Which candidate is taken."""

    index: int
    gain: float
    """Microseconds by which it, or else the best of the others, is ahead of stock."""
    needed: float
    """Microseconds by which it had to be."""


TIE = 0.02
"""Share of stock's time by which a candidate has to be ahead."""


def decide(samples: Sequence[Sample], stock: int = 0) -> Verdict:
    """Choose among candidates by what they took.

    Args:
        samples: as `measure` returns them.
        stock: index of the one that ties go to.

    Returns:
        The winner, stock if there is nobody else.
    """
    others = [index for index in range(len(samples)) if index != stock]
    if not others:
        return Verdict(stock, 0.0, 0.0)
    best = min(others, key=lambda index: samples[index].microseconds)
    # Of the rounds that both were in: what disturbed a round disturbed both.
    pairs = zip(samples[stock].times, samples[best].times, strict=False)
    differences = [theirs - ours for theirs, ours in pairs]
    gain = statistics.median(differences)
    needed = max(TIE * samples[stock].microseconds, 3 * _standard_error(differences))
    return Verdict(best if gain > needed else stock, gain, needed)


# --- on a GPU -----------------------------------------------------------------------------------


_LEAD = 200_000
"""Cycles of the GPU, a tenth of a millisecond, by which the host is ahead of a round at first; as
many more for each call that has to go through Python while the GPU waits."""

_MOST_LEAD = 32 * _LEAD
"""What the lead grows to where other processes keep the host busy."""


class CudaStopwatch:
    """Times calls on a CUDA device by events around them, operands in DRAM and the launch included.

    Each call is captured into a CUDA graph of its own; where that fails it is made anew each time,
    behind a kernel that keeps the GPU busy while the host is enqueueing. Between two calls a buffer
    of twice the L2 is read. It is not written: what is written has to leave the cache again, which
    takes up to 7 us of the kernel that is timed next [measured on an H200].

    Where the GPU was at a call before the host had enqueued it, it may have waited: the round is
    made again with a longer lead, for this and all further ones.

    A context manager: its end gives back the captured graphs and the memory of their outputs.
    """

    def __init__(self, calls: Sequence[Callable[[], object]], device: int) -> None:
        """Call everything twice, and capture it.

        Args:
            calls: what is to be timed; each has been called before.
            device: index of the CUDA device.

        Raises:
            Exception: whatever a call raises.
        """
        import torch

        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[Any] = []
        l2 = torch.cuda.get_device_properties(device).L2_cache_size
        self._cache = torch.zeros(max(1, 2 * l2 // 4), dtype=torch.float32, device=f"cuda:{device}")
        self._sink = torch.zeros((), dtype=torch.float32, device=f"cuda:{device}")
        self._runs: list[Callable[[], object]] = []
        self.captured: list[bool] = []
        """Of each call, whether it is a graph."""
        self.lead = _LEAD
        """Cycles, see `_LEAD`."""
        torch.cuda.synchronize(device)
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            for call in calls:
                graph = self._capture(call)
                self._runs.append(call if graph is None else graph.replay)
                self.captured.append(graph is not None)
            self._stream.synchronize()

    def _capture(self, call: Callable[[], object]) -> Any:
        """The call as a graph; None if it cannot be one."""
        import torch

        # Outside of the capture first: libraries allocate what they need for a new stream.
        call()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[self._device]
        random = generator.clone_state()
        # Other threads may use the device meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            try:
                call()
            finally:
                graph.capture_end()
        except Exception:
            # torch's allocator is told of the end of a capture only if that went well.
            with contextlib.suppress(Exception):
                torch._C._cuda_endAllocateToPool(self._device, self._pool)
            # Nor is the generator, which would draw no numbers outside of a capture.
            generator.graphsafe_set_state(random)
            return None
        self._graphs.append(graph)
        graph.replay()
        self._stream.synchronize()
        return graph

    def __enter__(self) -> CudaStopwatch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._runs = []
        for graph in self._graphs:
            graph.reset()
        self._graphs = []

    def round(self, order: Sequence[int]) -> list[float]:
        """See `Stopwatch`."""
        while True:
            times, waited = self._round(order)
            if not waited or self.lead >= _MOST_LEAD:
                return times
            self.lead *= 2

    def _round(self, order: Sequence[int]) -> tuple[list[float], bool]:
        """Microseconds of a round, and whether the GPU may have waited for the host in it."""
        import torch

        plain = sum(not self.captured[index] for index in order)
        waited = False
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            events = [
                (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
                for _ in order
            ]
            torch.cuda._sleep(self.lead * (1 + plain))
            for index, (start, end) in zip(order, events, strict=True):
                torch.amax(self._cache, dim=0, out=self._sink)
                start.record()
                self._runs[index]()
                # What goes through Python may wait for the GPU itself.
                waited |= not plain and start.query()
                end.record()
            self._stream.synchronize()
        return [1e3 * start.elapsed_time(end) for start, end in events], waited

    def now(self) -> float:
        """See `Stopwatch`."""
        return time.perf_counter()
