"""Measures the memory that each graph allocates during a run, and compares it with its plan.

A call is run once under torch's profiler, which records every allocation on every device and the
calls of compiled graphs by name. The measured value of a graph is the maximum of allocations minus
frees since its call began: memory above what was allocated at that time. It is compared with the
same quantity of the graph's plan. A plan may count inputs as freed during the call, but whether
they are freed depends on the caller. Inputs that the run has freed therefore count as the graph's
own and freed; all other inputs are not counted.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from inductor_ext.memory.planner import peak_report
from inductor_ext.memory.records import MemoryPlanRecord, PlannedStorage

_CALL = "## Call CompiledFxGraph "
"""Prefix of the name of a graph's call in the profiler; the cache key and " ##" follow."""

_OPTIMIZER_STEP = "Optimizer.step#"
"""Prefix of the name of an optimizer's step in the profiler."""

_WHOLE = "inductor_ext.memory_report"
"""Name of the whole call in the profiler."""

_ROUNDING = 512
"""Bytes. A plan rounds sizes up like the allocator, to at most this granularity."""

_LARGE = 1 << 20
"""Bytes. On a GPU, a block for more than this may be up to this much larger than its tensor: the
allocator does not split off so small a rest (`kSmallSize` of torch's CUDACachingAllocator)."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """Memory that a graph allocated on a device during a call, above what was allocated before."""

    graph: str
    kind: str
    cache_key: str | None
    device: str
    predicted: int
    """Bytes, according to the plan."""
    measured: int
    """Bytes, according to the allocator; the maximum over the graph's calls."""

    @property
    def deviation(self) -> float:
        """Percentage by which the measured memory exceeds the prediction."""
        if not self.predicted:
            return 0.0 if not self.measured else float("inf")
        return 100 * (self.measured - self.predicted) / self.predicted

    def describe(self) -> str:
        """Return a one-line summary."""
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
    """Negative for a free."""


@dataclasses.dataclass(frozen=True)
class Profile:
    """What happened during a call. Times are in nanoseconds; the lists are sorted by time."""

    start: int
    end: int
    calls: list[Window]
    """Calls of compiled graphs, by the key in the profiler."""
    allocations: list[Allocation]
    optimizer_steps: list[Window]
    """Steps of optimizers, by name."""


def growth(allocations: Iterable[Allocation]) -> tuple[int, list[int]]:
    """Return the peak of a sequence of allocations, and the sizes of foreign blocks that it frees.

    Returns:
        Bytes above the beginning, and the bytes of every block that was freed but not allocated in
            the sequence.
    """
    total = highest = 0
    live_blocks: set[int] = set()
    foreign = []
    for allocation in allocations:
        total += allocation.bytes
        highest = max(highest, total)
        if allocation.bytes > 0:
            live_blocks.add(allocation.pointer)
        elif allocation.pointer in live_blocks:
            live_blocks.discard(allocation.pointer)
        else:
            foreign.append(-allocation.bytes)
    return highest, foreign


Window = tuple[str, int, int]
"""A call of a compiled graph, or another range of the run: its key or name, start and end in
nanoseconds."""


def find_freed(inputs: Iterable[PlannedStorage], freed: Sequence[int]) -> list[PlannedStorage]:
    """Return the inputs that a run has freed, of those that a plan counts as freed.

    The profiler knows the size of a freed block, but not which input it was, and several inputs
    often have one size. The inputs in the order of their planned ends are therefore aligned with
    the blocks in the order in which they were freed (longest common subsequence). Of inputs that
    fit equally well, gradients of the graph's results are not freed: autograd may keep them. Blocks
    out of order, such as those of inputs that end at the same step, are then matched by size alone.

    Args:
        inputs: storages that end before the last step.
        freed: bytes of each block that the run freed and had not allocated, in order.
    """
    ordered = sorted(inputs, key=lambda storage: storage.end)
    pairs = dict(_align(ordered, freed))
    found = [ordered[i] for i in pairs]
    remaining = [storage for i, storage in enumerate(ordered) if i not in pairs]
    used = set(pairs.values())
    blocks = [block for j, block in enumerate(freed) if j not in used]
    for storage in sorted(remaining, key=_is_gradient):
        block = min((b for b in blocks if _can_hold(b, storage)), default=None)
        if block is not None:
            blocks.remove(block)
            found.append(storage)
    return found


def _is_gradient(storage: PlannedStorage) -> bool:
    """Whether AOTAutograd names an input of a backward graph as the gradient of a result."""
    return storage.name.startswith("tangents_")


def _can_hold(block: int, storage: PlannedStorage) -> bool:
    """Whether a block may be that of a storage, whose planned size is rounded up."""
    is_large = storage.device != "cpu" and storage.bytes > _LARGE
    return storage.bytes - _ROUNDING < block <= storage.bytes + (_LARGE if is_large else 0)


def _align(inputs: Sequence[PlannedStorage], freed: Sequence[int]) -> list[tuple[int, int]]:
    """Return the pairs of positions of the longest common subsequence with fewest gradients."""
    # A pair counts more than all preferences together.
    values = [len(inputs) + 1 - _is_gradient(storage) for storage in inputs]
    # totals[i][j] is the value of the best pairs of inputs[i:] and freed[j:].
    totals = [[0] * (len(freed) + 1) for _ in range(len(inputs) + 1)]
    for i in reversed(range(len(inputs))):
        for j in reversed(range(len(freed))):
            totals[i][j] = max(totals[i + 1][j], totals[i][j + 1])
            if _can_hold(freed[j], inputs[i]):
                totals[i][j] = max(totals[i][j], values[i] + totals[i + 1][j + 1])
    pairs = []
    i = j = 0
    while i < len(inputs) and j < len(freed):
        if totals[i][j] == totals[i + 1][j]:
            i += 1
        elif totals[i][j] == totals[i][j + 1]:
            j += 1
        else:
            pairs.append((i, j))
            i, j = i + 1, j + 1
    return pairs


def predict(record: MemoryPlanRecord, device: str, freed: Sequence[int]) -> int:
    """Return the plan's prediction of `growth`, given the sizes of the inputs the run freed."""
    storages = [s for s in record.storages + record.held_inputs if s.device == device]
    # An input whose memory an output reuses is not freed.
    inputs = [s for s in storages if s.kind == "input" and s.end < record.steps]
    freed_inputs = find_freed(inputs, freed)
    others = [s for s in storages if s.kind != "input"]
    device_record = dataclasses.replace(record, storages=(*others, *freed_inputs))
    before = sum(storage.bytes for storage in freed_inputs)
    return max(0, max(peak_report.allocated_bytes(device_record, device)) - before)


def measure(
    records: Sequence[MemoryPlanRecord], call: Callable[[], object]
) -> tuple[Measured, ...]:
    """Run `call` once and compare the memory that its graphs allocate with their plans.

    Args:
        records: plans of the graphs that may run; graphs that do not run are left out of the
            result.
        call: must have run before, so that nothing is compiled.
    """
    profile = profile_call(call)
    allocations = profile.allocations
    plans = group_by_graph(records)
    windows = identify_calls(profile.calls, plans)
    if not windows and len(plans) == 1:
        # An AOT-compiled model does not report its name; the whole call is attributed to it.
        (only,) = plans
        windows = [(only, 0, allocations[-1].time if allocations else 0)]
    results: dict[tuple[str, str], Measured] = {}
    for key, start, end in windows:
        inside = [a for a in allocations if start <= a.time <= end]
        for run in compare(plans.get(key, []), inside):
            place = (key, run.device)
            if place not in results or results[place].measured < run.measured:
                results[place] = run
    return tuple(results.values())


_UNKNOWN = str(None)
"""The key in the profiler's name of a graph that is not in the cache."""


def group_by_graph(records: Iterable[MemoryPlanRecord]) -> dict[str, list[MemoryPlanRecord]]:
    """Group the plans by graph key; a graph without a key gets a unique one."""
    plans: dict[str, list[MemoryPlanRecord]] = {}
    for number, record in enumerate(records):
        key = f"{_UNKNOWN}{number}" if record.cache_key is None else record.cache_key
        plans.setdefault(key, []).append(record)
    return plans


def identify_calls(
    windows: Sequence[Window], plans: Mapping[str, Sequence[MemoryPlanRecord]]
) -> list[Window]:
    """Return the calls whose graph can be identified.

    Calls of graphs without a key are matched by order if there are as many of them as graphs:
    graphs are compiled in the order of their first calls, except for backward graphs. If there is
    only one such graph, all these calls are its own.

    Args:
        windows: the calls.
        plans: plans by graph key (`group_by_graph`).
    """
    keys = [key for key in plans if key.startswith(_UNKNOWN)]
    unknown = [window for window in windows if window[0] == _UNKNOWN]
    identified = [window for window in windows if window[0] != _UNKNOWN]
    has_backward = any(record.kind == "backward" for key in keys for record in plans[key])
    # A backward may be called after the forwards of graphs that are compiled later.
    in_order = not has_backward or len(keys) == 2
    if len(keys) == len(unknown) and in_order:
        identified += [(key, *window[1:]) for key, window in zip(keys, unknown, strict=True)]
    elif len(keys) == 1:
        identified += [(keys[0], *window[1:]) for window in unknown]
    return identified


def compare(
    records: Sequence[MemoryPlanRecord], inside: Sequence[Allocation]
) -> Iterator[Measured]:
    """Compare per device, using the generated function with the highest prediction."""
    devices = dict.fromkeys(device for record in records for device in peak_report.devices(record))
    for device in devices:
        measured, freed = growth(a for a in inside if a.device == device)
        predictions = [(predict(record, device, freed), record) for record in records]
        prediction, record = max(predictions, key=lambda pair: pair[0])
        yield Measured(record.graph, record.kind, record.cache_key, device, prediction, measured)


def profile_call(call: Callable[[], object], *, repeat: bool = False) -> Profile:
    """Run `call` under torch's profiler. Its result is freed inside the profile.

    Args:
        call: runs the graphs.
        repeat: whether to run it twice and return the second run. On a CPU the profiler does not
            record that memory is freed which was allocated before the profile.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with profile(activities=activities, profile_memory=True) as prof:
        if repeat:
            call()
        with record_function(_WHOLE):
            call()
    return _read_events(prof)


def _read_events(prof: Any) -> Profile:
    """Return what happened from the beginning of the range `_WHOLE` on."""
    from torch._C._profiler import _EventType

    windows = []
    allocations = []
    optimizer_steps = []
    whole = (0, 0)
    # The flat list of events has no pointers, which are needed to find out whose block is freed.
    queue = collections.deque(prof.profiler.kineto_results.experimental_event_tree())
    while queue:
        event = queue.popleft()
        queue.extend(event.children)
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            allocations.append(
                Allocation(event.start_time_ns, str(fields.device), fields.ptr, fields.alloc_size)
            )
        elif event.tag != _EventType.TorchOp:
            # A range has a second event on a GPU, from the begin of its first kernel on.
            continue
        elif event.name.startswith(_CALL):
            key = event.name[len(_CALL) :].removesuffix(" ##")
            windows.append((key, event.start_time_ns, event.end_time_ns))
        elif event.name.startswith(_OPTIMIZER_STEP):
            name = event.name[len(_OPTIMIZER_STEP) :]
            optimizer_steps.append((name, event.start_time_ns, event.end_time_ns))
        elif event.name == _WHOLE:
            whole = (event.start_time_ns, event.end_time_ns)
    allocations.sort(key=lambda allocation: allocation.time)
    start, end = whole
    return Profile(
        start,
        end,
        sorted((w for w in windows if w[1] >= start), key=lambda window: window[1]),
        [allocation for allocation in allocations if allocation.time >= start],
        sorted((w for w in optimizer_steps if w[1] >= start), key=lambda window: window[1]),
    )
