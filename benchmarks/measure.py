"""How time and memory are measured, the same way for every contender.

Times are wall-clock seconds taken in alternation, so that whatever else the machine does falls on
all contenders alike; memory is bytes, on the CPU.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

__all__ = [
    "Sample",
    "allocated",
    "alternate",
    "peak_allocated",
    "peak_of_changes",
    "resident",
    "summarize",
]


Key = TypeVar("Key", bound=Hashable)


class Sample(NamedTuple):
    """Repeated measurements of one quantity."""

    median: float
    spread: float
    """Distance of the quartiles as a fraction of the median."""


def summarize(values: Sequence[float]) -> Sample:
    """The median and spread of positive `values`; the spread of a single value is 0."""
    median = statistics.median(values)
    if len(values) == 1:
        return Sample(median, 0.0)
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return Sample(median, (upper - lower) / median)


def alternate(contenders: Mapping[Key, Callable[[], float]], rounds: int) -> dict[Key, list[float]]:
    """Take one measurement of each contender in turn, `rounds` times.

    Every round starts one contender further on, so that none is always behind the same other.

    Args:
        contenders: by key, a call that measures once and returns the value.
    """
    values: dict[Key, list[float]] = {key: [] for key in contenders}
    order = list(contenders)
    for index in range(rounds):
        start = index % len(order)
        for key in order[start:] + order[:start]:
            values[key].append(contenders[key]())
    return values


def peak_of_changes(changes: Iterable[int]) -> int:
    """The highest level that a sequence of changes reaches from 0, in the unit of the changes."""
    return max(itertools.accumulate(changes, initial=0))


def peak_allocated(call: Callable[[], object]) -> int:
    """Most bytes that `call` holds at once from torch's CPU allocator, beyond what was held before.

    Compiled code and AOT packages allocate there too. It is a property of the program: unlike
    resident memory it does not depend on what the C library keeps for later or on earlier calls.
    """
    return peak_of_changes(allocated(call))


def allocated(call: Callable[[], object]) -> list[int]:
    """What `call` takes from torch's CPU allocator (positive) and gives back (negative), in order.

    Bytes, as they were asked for.
    """
    from torch.profiler import ProfilerActivity, profile

    # Kept across cycles, or else torch 2.11 warns of losing events, although there is one cycle.
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        call()
    results: Any = profiler.profiler
    records = [r for r in results.kineto_results.events() if r.name() == "[memory]"]
    return [r.nbytes() for r in sorted(records, key=lambda r: r.start_ns())]


def resident() -> tuple[int, int]:
    """Bytes of memory resident in this process: (now, at the highest so far). Linux only.

    From the process's own status, since `getrusage` counts what the parent held before it started
    this program.
    """
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    now, highest = (int(fields[name].removesuffix("kB")) * 1024 for name in ("VmRSS", "VmHWM"))
    return now, highest
