"""What a run really takes from the allocators, graph by graph, beside what was planned.

A call is run once under torch's profiler, which sees every allocation on every device and, by name,
the calls of compiled graphs. What a graph takes is the highest sum of allocations less frees since
its call began: memory above what was alive then. That is compared with the same of its plan. A plan
may count inputs as freed during the call; whether they are is up to the callers. So of the plan's
inputs those count as freed that the run has freed, and the others as not the graph's own.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from inductor_ext.events import MemoryPlanRecord
from inductor_ext.memory.planner import peak_report

__all__ = ["Allocation", "Measured", "growth", "measure"]

_CALL = "## Call CompiledFxGraph "
"""How Inductor names a graph's call to the profiler; the cache key and " ##" follow."""

_ROUNDING = 512
"""Bytes. A plan counts a storage with the allocator's rounding, at most to this."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """Memory that a graph took on a device when it was called, above what was alive before."""

    graph: str
    kind: str
    cache_key: str | None
    device: str
    predicted: int
    """Bytes, by the plan."""
    measured: int
    """Bytes, by the allocator; the highest of the graph's calls."""

    @property
    def deviation(self) -> float:
        """Percent by which the run took more than planned."""
        if not self.predicted:
            return 0.0 if not self.measured else float("inf")
        return 100 * (self.measured - self.predicted) / self.predicted

    def describe(self) -> str:
        """One line for a person."""
        return (
            f"{self.graph} ({self.kind}) on {self.device}: predicted "
            f"{peak_report.human_bytes(self.predicted)}, "
            f"measured {peak_report.human_bytes(self.measured)}, "
            f"deviation {self.deviation:+.1f} %"
        )


@dataclasses.dataclass(frozen=True)
class Allocation:
    """A change of allocated memory."""

    time: int
    """Nanoseconds."""
    device: str
    pointer: int
    bytes: int
    """Negative for what is freed."""


def growth(allocations: Iterable[Allocation]) -> tuple[int, list[int]]:
    """What a sequence of allocations takes at most, and the sizes of what it frees of others'.

    Returns:
        Bytes above the beginning, and bytes of each block that was freed and not allocated in it.
    """
    total = highest = 0
    own: set[int] = set()
    foreign = []
    for allocation in allocations:
        total += allocation.bytes
        highest = max(highest, total)
        if allocation.bytes > 0:
            own.add(allocation.pointer)
        elif allocation.pointer in own:
            own.discard(allocation.pointer)
        else:
            foreign.append(-allocation.bytes)
    return highest, foreign


_Window = tuple[str, int, int]
"""A call of a compiled graph: its key, start and end in nanoseconds."""


def _predict(record: MemoryPlanRecord, device: str, freed: Iterable[int]) -> int:
    """The same of a plan: `freed` are the sizes of the inputs that the run has freed."""
    sizes = collections.Counter(freed)
    storages = []
    before = 0
    for storage in record.storages:
        if storage.kind == "input":
            size = next((s for s in sorted(sizes) if s <= storage.bytes < s + _ROUNDING), None)
            if storage.device != device or size is None:
                continue
            sizes[size] -= 1
            if not sizes[size]:
                del sizes[size]
            before += storage.bytes
        storages.append(storage)
    own = dataclasses.replace(record, storages=tuple(storages))
    return max(0, max(peak_report.held(own, device)) - before)


def measure(
    records: Sequence[MemoryPlanRecord], call: Callable[[], object]
) -> tuple[Measured, ...]:
    """Run `call` once and compare what its graphs take with their plans.

    Args:
        records: of the graphs that may run; those that do not are left out of the result.
        call: has run before.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with profile(activities=activities, profile_memory=True) as profiled:
        call()
    windows, allocations = _events(profiled)
    plans = _by_graph(records)
    windows = _told_apart(windows, plans)
    if not windows and len(plans) == 1:
        # An ahead-of-time compiled model does not name itself; the whole call is its own.
        (only,) = plans
        windows = [(only, 0, allocations[-1].time if allocations else 0)]
    found: dict[tuple[str, str], Measured] = {}
    for key, start, end in windows:
        inside = [a for a in allocations if start <= a.time <= end]
        for measured in _compare(plans.get(key, []), inside):
            place = (key, measured.device)
            if place not in found or found[place].measured < measured.measured:
                found[place] = measured
    return tuple(found.values())


_UNKNOWN = str(None)
"""What a graph outside of the cache is called with for a key."""


def _by_graph(records: Iterable[MemoryPlanRecord]) -> dict[str, list[MemoryPlanRecord]]:
    """The plans of each graph, by its key; a graph without one by a number of its own."""
    plans: dict[str, list[MemoryPlanRecord]] = {}
    for number, record in enumerate(records):
        key = f"{_UNKNOWN}{number}" if record.cache_key is None else record.cache_key
        plans.setdefault(key, []).append(record)
    return plans


def _told_apart(windows: Sequence[_Window], plans: Iterable[str]) -> list[_Window]:
    """The calls of which it is known what they call.

    Graphs without a key are, if they are as many as their calls: graphs are compiled in the order
    of their first calls.
    """
    keys = [key for key in plans if key.startswith(_UNKNOWN)]
    unknown = [window for window in windows if window[0] == _UNKNOWN]
    known = [window for window in windows if window[0] != _UNKNOWN]
    if len(keys) == len(unknown):
        known += [(key, *window[1:]) for key, window in zip(keys, unknown, strict=True)]
    elif len(keys) == 1:
        known += [(keys[0], *window[1:]) for window in unknown]
    return known


def _compare(
    records: Sequence[MemoryPlanRecord], inside: Sequence[Allocation]
) -> Iterator[Measured]:
    """Of a graph's generated functions the one that calls the others counts."""
    devices = dict.fromkeys(device for record in records for device in peak_report.devices(record))
    for device in devices:
        taken, freed = growth(a for a in inside if a.device == device)
        predictions = [(_predict(record, device, freed), record) for record in records]
        predicted, record = max(predictions, key=lambda pair: pair[0])
        yield Measured(record.graph, record.kind, record.cache_key, device, predicted, taken)


def _events(profiled: Any) -> tuple[list[_Window], list[Allocation]]:
    """The calls of compiled graphs and all changes of memory, each by time."""
    from torch._C._profiler import _EventType

    windows = []
    allocations = []
    # The flat list of events has no pointers, which tell whose block is freed.
    waiting = collections.deque(profiled.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.popleft()
        waiting.extend(event.children)
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            allocations.append(
                Allocation(event.start_time_ns, str(fields.device), fields.ptr, fields.alloc_size)
            )
        elif event.name.startswith(_CALL):
            key = event.name[len(_CALL) :].removesuffix(" ##")
            windows.append((key, event.start_time_ns, event.end_time_ns))
    allocations.sort(key=lambda allocation: allocation.time)
    return sorted(windows, key=lambda window: window[1]), allocations
