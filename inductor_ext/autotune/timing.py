"""Time candidates against each other and choose one.

`measure` times all candidates of a problem in rounds. Each round calls every candidate once, in
random order, so that clocks, temperature and other load affect all candidates equally. Rounds begin
when two batches of calls agree, because clocks ramp up first. As rounds accumulate, candidates are
dropped at decreasing distance from the best. Rounds end when the medians of the remaining
candidates have converged, or when the budget is used up.

`decide` selects the candidate with the lowest median if it beats Inductor's path by 2 % and by
three standard errors of the median difference within a round; else Inductor's path. A candidate
that is ahead by less may be slower in a model, with other addresses and clocks, and Inductor's path
needs no compile. This gives away at most 2 %.

Both use a `Stopwatch` only. `CudaStopwatch` is the one for a GPU: operands come from DRAM, as in a
model, where the weights of a layer were last read one step ago. Only it needs torch and a GPU.
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


class Stopwatch(Protocol):
    """Calls candidates and returns their times."""

    def round(self, order: Sequence[int]) -> list[float]:
        """Call each of these candidates once, in this order; return microseconds per call."""

    def now(self) -> float:
        """Return seconds since an arbitrary moment."""


@dataclass(frozen=True)
class Sample:
    """The times of a candidate in its rounds, one per round."""

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
    """Return the standard error of the median: 1.2533 s / sqrt(n).

    s is 1.4826 times the median absolute deviation, which is robust against outliers. Both factors
    hold for normally distributed values.
    """
    middle = statistics.median(values)
    absolute = statistics.median(abs(value - middle) for value in values)
    return 1.2533 * 1.4826 * absolute / math.sqrt(len(values))


_FEWEST_ROUNDS = 5
_MOST_ROUNDS = 100
_SETTLED = 0.003
"""A median whose standard error is at most this fraction of it needs no more rounds."""
_SETTLED_ROUNDS = 12
"""Below this number of rounds the standard error is not reliable."""
_STAGES = ((5, 1.3), (10, 1.12), (20, 1.06), (40, 1.03))
"""(rounds, factor): after this many rounds, candidates above factor times the best median are
dropped."""
_STEADY = 0.01
_WARM_UP_SHARE = 0.25
_WARM_UP_CALLS = 10


def measure(stopwatch: Stopwatch, count: int, budget: float, seed: int = 0) -> list[Sample]:
    """Time candidates against each other.

    Args:
        stopwatch: calls the candidates.
        count: number of candidates, 1 or more.
        budget: milliseconds after which no round begins, except for the first five.
        seed: of the random orders.

    Returns:
        The sample of each candidate; a candidate that was dropped has fewer rounds.
    """
    start = stopwatch.now()

    def elapsed() -> float:
        return (stopwatch.now() - start) * 1e3

    _warm_up(stopwatch, lambda: elapsed() > _WARM_UP_SHARE * budget)
    shuffle = random.Random(seed).sample
    times: list[list[float]] = [[] for _ in range(count)]
    alive = list(range(count))
    for num_rounds in range(1, _MOST_ROUNDS + 1):
        order = shuffle(alive, len(alive))
        for index, microseconds in zip(order, stopwatch.round(order), strict=True):
            times[index].append(microseconds)
        if num_rounds < _FEWEST_ROUNDS:
            continue
        margin = next((margin for rounds, margin in _STAGES if rounds == num_rounds), None)
        if margin is not None:
            alive = _drop_slower(times, alive, margin)
        if elapsed() > budget or (num_rounds >= _SETTLED_ROUNDS and _has_converged(times, alive)):
            break
    return [Sample(tuple(values)) for values in times]


def _warm_up(stopwatch: Stopwatch, enough: Callable[[], bool]) -> None:
    last = math.inf
    while True:
        middle = statistics.median(stopwatch.round([0] * _WARM_UP_CALLS))
        if abs(middle - last) <= _STEADY * middle or enough():
            return
        last = middle


def _drop_slower(
    times: Sequence[Sequence[float]], alive: Sequence[int], margin: float
) -> list[int]:
    """Return the candidates that are not clearly slower than the best."""
    medians = {index: statistics.median(times[index]) for index in alive}
    best = min(alive, key=medians.__getitem__)
    error = _standard_error(times[best])

    def is_behind(index: int) -> bool:
        doubt = 3 * math.hypot(error, _standard_error(times[index]))
        return medians[index] > margin * medians[best] + doubt

    return [index for index in alive if not is_behind(index)]


def _has_converged(times: Sequence[Sequence[float]], alive: Sequence[int]) -> bool:
    samples = [Sample(tuple(times[index])) for index in alive]
    return all(sample.deviation <= _SETTLED * sample.microseconds for sample in samples)


@dataclass(frozen=True)
class Verdict:
    """The selected candidate."""

    index: int
    gain: float
    """Microseconds by which the selected candidate is faster than Inductor's path; if that is
    selected, those of the best other candidate."""
    needed: float
    """Microseconds by which the candidate had to be faster."""


TIE = 0.02
"""Fraction of the time of Inductor's path by which a candidate has to be faster."""


def decide(samples: Sequence[Sample], stock: int = 0) -> Verdict:
    """Select a candidate by the samples.

    Args:
        samples: as returned by `measure`.
        stock: index of the candidate that wins ties.

    Returns:
        The selected candidate; `stock` if there are no others.
    """
    others = [index for index in range(len(samples)) if index != stock]
    if not others:
        return Verdict(stock, 0.0, 0.0)
    best = min(others, key=lambda index: samples[index].microseconds)
    # Pair the rounds that both took part in: a disturbance in a round affects both.
    pairs = zip(samples[stock].times, samples[best].times, strict=False)
    differences = [stock_time - candidate_time for stock_time, candidate_time in pairs]
    gain = statistics.median(differences)
    needed = max(TIE * samples[stock].microseconds, 3 * _standard_error(differences))
    return Verdict(best if gain > needed else stock, gain, needed)


# --- on a GPU -----------------------------------------------------------------------------------


_LEAD = 200_000
"""Initial lead of the host at the start of a round, in GPU cycles: 200,000 cycles are a tenth of a
millisecond. The same amount is added for each call that is not a CUDA graph and is enqueued from
Python."""

_MOST_LEAD = 32 * _LEAD
"""Maximum lead, reached when other processes keep the host busy."""


class CudaStopwatch:
    """Times calls on a CUDA device with events, with operands in DRAM and the launch included.

    Each call is captured into a CUDA graph of its own. If capturing fails, the call is executed
    each time, behind a kernel that keeps the GPU busy while the host enqueues. Between two calls a
    buffer of twice the size of L2 is read. It is not written, because written data has to be
    evicted from L2, which takes up to 7 us of the kernel that is timed next [measured on an H200].

    If the GPU reached a call before the host had enqueued it, the GPU may have waited. The round is
    then repeated with a longer lead, which is kept for all further rounds.

    A context manager: on exit it frees the captured graphs and the memory of their outputs.
    """

    def __init__(self, calls: Sequence[Callable[[], object]], device: int) -> None:
        """Call each function twice, and capture it.

        Args:
            calls: the functions to time; each has been called before.
            device: index of the CUDA device.

        Raises:
            Exception: any exception that a call raises.
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
        """Whether each call was captured as a graph."""
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
        """Return the call as a graph; None if it cannot be captured."""
        import torch

        # First call outside of the capture: libraries allocate memory for a new stream.
        call()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[self._device]
        random = generator.clone_state()
        # thread_local, because other threads may use the device meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            try:
                call()
            finally:
                graph.capture_end()
        except Exception:
            # torch ends the allocator's capture state only if the capture succeeded.
            with contextlib.suppress(Exception):
                torch._C._cuda_endAllocateToPool(self._device, self._pool)
            # The same holds for the generator, which would draw no numbers outside of a capture.
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
        """Return the microseconds of a round, and whether the GPU may have waited for the host."""
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
                # A call that is not a graph may itself wait for the GPU.
                waited |= not plain and start.query()
                end.record()
            self._stream.synchronize()
        return [1e3 * start.elapsed_time(end) for start, end in events], waited

    def now(self) -> float:
        """See `Stopwatch`."""
        return time.perf_counter()
