"""Time and memory measurements, done the same way for every variant.

Times are wall-clock seconds. Variants are measured in alternation, so that other load on the
machine affects all of them alike. Memory is CPU memory in bytes.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

__all__ = [
    "Sample",
    "alternate",
    "find_peak",
    "measure_gpu_peak",
    "measure_peak_allocated",
    "read_private_mib",
    "read_resident_memory",
    "record_allocations",
    "summarize",
]


Key = TypeVar("Key", bound=Hashable)


class Sample(NamedTuple):
    """Repeated measurements of one quantity."""

    median: float
    spread: float
    """Interquartile range as a fraction of the median."""


def summarize(values: Sequence[float]) -> Sample:
    """Return the median and spread of positive `values`; the spread of a single value is 0."""
    median = statistics.median(values)
    if len(values) == 1:
        return Sample(median, 0.0)
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return Sample(median, (upper - lower) / median)


def alternate(variants: Mapping[Key, Callable[[], float]], rounds: int) -> dict[Key, list[float]]:
    """Take one measurement of every variant in alternation, `rounds` times.

    A variant heats the GPU for the next one. Therefore the order of a round is a row of a Williams
    design: in as many rounds as there are variants (twice as many if their number is odd), every
    variant follows every other one equally often.

    Args:
        variants: by key, a function that takes one measurement and returns the value.
        rounds: the number of measurements of every variant.
    """
    values: dict[Key, list[float]] = {key: [] for key in variants}
    keys = list(variants)
    for index in range(rounds):
        for position in _list_row(len(keys), index):
            values[keys[position]].append(variants[keys[position]]())
    return values


def _list_row(count: int, index: int) -> list[int]:
    """Return a row of the Williams design for `count` treatments.

    Source: E. J. Williams, Experimental designs balanced for the estimation of residual effects of
    treatments, 1949. The first row is 0, 1, n - 1, 2, n - 2, and so on; the others add the index.
    """
    first = [-(step // 2) if step % 2 == 0 else (step + 1) // 2 for step in range(count)]
    row = [(value + index) % count for value in first]
    return row[::-1] if count % 2 and index // count % 2 else row


def find_peak(changes: Iterable[int]) -> int:
    """Return the highest level that a sequence of changes reaches from 0, in their unit."""
    return max(itertools.accumulate(changes, initial=0))


def measure_peak_allocated(call: Callable[[], object]) -> int:
    """Return the peak bytes of `call` in torch's CPU allocator, above the level before.

    Compiled code and AOT packages use the same allocator. Unlike resident memory, the result does
    not depend on what the C library caches or on earlier calls.
    """
    return find_peak(record_allocations(call))


def measure_gpu_peak(call: Callable[[], object]) -> int:
    """Return the peak bytes of `call` in torch's CUDA allocator, above the level before."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def record_allocations(call: Callable[[], object]) -> list[int]:
    """Return allocations (positive) and frees (negative) of `call`, in order.

    Bytes, as requested from torch's CPU allocator.
    """
    from torch.profiler import ProfilerActivity, profile

    # Otherwise torch 2.11 warns about losing events across cycles, although there is only one
    # cycle.
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        call()
    results: Any = profiler.profiler
    records = [r for r in results.kineto_results.events() if r.name() == "[memory]"]
    return [r.nbytes() for r in sorted(records, key=lambda r: r.start_ns())]


def read_resident_memory() -> tuple[int, int]:
    """Return this process's resident memory in bytes: (now, peak). Linux only.

    Read from the process's own status, because `getrusage` includes what the parent process used
    before it started this program.
    """
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    now, highest = (int(fields[name].removesuffix("kB")) * 1024 for name in ("VmRSS", "VmHWM"))
    return now, highest


def read_private_mib(process: int | None = None) -> float:
    """Return the resident memory of a process in MiB, without pages of files. Linux only.

    Args:
        process: its number. Default: None, this process.
    """
    status = Path(f"/proc/{'self' if process is None else process}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return int(fields["RssAnon"].removesuffix("kB")) / 1024
