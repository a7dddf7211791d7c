"""The memory of a whole training step over time, across its graphs: `MemoryReport.measure_step`.

A step is a call that runs compiled graphs, and whatever is between them: autograd, the optimizer,
code that is not compiled. It is run twice under torch's profiler (`memory_measure`), which records
each allocation and each free on every device; the second run counts, because what it frees of the
first one is known. Levels are bytes above the level at the beginning of
the step, so that weights and optimizer state, which exist before it, are not in them. A level below
zero means that the step has freed memory that existed before.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

from inductor_ext import events, exc
from inductor_ext.hooks.records import CompileRecord
from inductor_ext.memory.planner.peak_report import human_bytes
from inductor_ext.memory.records import MemoryPlanRecord
from inductor_ext.reports import memory_measure
from inductor_ext.reports.memory_measure import Allocation, Profile, Window

COMPILED = "compiled"
EAGER = "eager"


@dataclasses.dataclass(frozen=True)
class GraphCall:
    """A call of a compiled graph in a step."""

    number: int | None
    """Number of the plan in the report, from 1; None if the report has no plan for the graph."""
    kind: str
    """As in `MemoryPlanRecord`; "unknown" without a plan."""
    start: int
    """Nanoseconds since the beginning of the step."""
    end: int
    base: int
    """Level at the start of the call, in bytes."""
    planned: int | None
    """Peak above `base` according to the plan; None if the report has no plan for the graph."""
    measured: int
    """Peak above `base` according to the allocator."""

    @property
    def label(self) -> str:
        """The number and kind of the plan."""
        return self.kind if self.number is None else f"{self.number}. {self.kind}"


@dataclasses.dataclass(frozen=True)
class Span:
    """A step of an optimizer."""

    name: str
    start: int
    """Nanoseconds since the beginning of the step."""
    end: int


@dataclasses.dataclass(frozen=True)
class StepTimeline:
    """The memory of a step on one device."""

    mode: str
    """"compiled" or "eager"."""
    device: str
    duration: int
    """Nanoseconds, with the overhead of the profiler."""
    times: tuple[int, ...]
    """Nanoseconds since the beginning of the step, of each change of the level; the first is 0."""
    levels: tuple[int, ...]
    """Bytes above the level at the beginning, from each of these times on; the first is 0."""
    calls: tuple[GraphCall, ...] = ()
    optimizer_steps: tuple[Span, ...] = ()

    @property
    def peak(self) -> int:
        """Bytes above the level at the beginning of the step."""
        return max(self.levels)

    @property
    def lowest(self) -> int:
        """The lowest level in bytes; at most 0."""
        return min(self.levels)

    @property
    def peak_time(self) -> int:
        """Nanoseconds from the beginning to the peak."""
        return self.times[self.levels.index(self.peak)]

    def find_peak_owner(self) -> str:
        """Return what runs at the peak: a graph, the optimizer, or code outside of both."""
        time = self.peak_time
        for call in self.calls:
            if call.start <= time <= call.end:
                return call.label
        for span in self.optimizer_steps:
            if span.start <= time <= span.end:
                return span.name
        return "outside of graphs" if self.calls else "eager mode"

    def describe(self) -> list[str]:
        """Return the lines of the text report."""
        peak = human_bytes(self.peak)
        lines = [f"{self.mode} on {self.device}: peak {peak}, in {self.find_peak_owner()}"]
        for call in self.calls:
            planned = "not known" if call.planned is None else human_bytes(call.planned)
            lines.append(
                f"  {call.label}: begins at {human_bytes(call.base)}, planned peak {planned}, "
                f"measured {human_bytes(call.measured)}"
            )
        return lines


def measure_step(
    title: str,
    records: Sequence[MemoryPlanRecord],
    step: Callable[[], object],
    eager: Callable[[], object] | None,
) -> tuple[StepTimeline, ...]:
    """Run a step twice, then the eager step twice, and return timelines, one per device and mode.

    Args:
        title: title of the report, for errors.
        records: plans of the graphs that the step may run.
        step: the step.
        eager: the same step in eager mode; None to measure the compiled step only.

    Raises:
        exc.NotMeasurableError: the step compiles something or allocates nothing, or the eager step
            runs a compiled graph.
        exc.NothingMeasuredError: the step runs none of the report's graphs.
    """
    compiles: list[CompileRecord] = []

    def run() -> None:
        with events.capture(CompileRecord) as records_of_run:
            step()
        compiles[:] = records_of_run

    profile = memory_measure.profile_call(run, repeat=True)
    if compiles:
        raise exc.NotMeasurableError(
            what="step",
            why="it compiled a graph, which allocates memory of its own",
            fix="Run the step at these sizes before, and create the report after that.",
        )
    plans = memory_measure.group_by_graph(records)
    windows = _match_calls(profile, plans)
    if not any(key in plans for key, *_ in windows):
        raise exc.NothingMeasuredError(title=title)
    timelines = list(_make_timelines(COMPILED, profile, windows, plans, records))
    if not timelines:
        raise exc.NotMeasurableError(
            what="step",
            why="it allocates no memory, as a replay of a CUDA graph does not",
            fix="Measure it without CUDA graphs.",
        )
    if eager is not None:
        profile = memory_measure.profile_call(eager, repeat=True)
        if profile.calls:
            raise exc.NotMeasurableError(
                what="eager step",
                why="it ran a compiled graph",
                fix="Pass a function that calls the module or function itself, or a copy of it, "
                "and not what torch.compile returned.",
            )
        timelines += _make_timelines(EAGER, profile, [], {}, records)
    return tuple(timelines)


_Plans = dict[str, list[MemoryPlanRecord]]


def _match_calls(profile: Profile, plans: _Plans) -> list[Window]:
    """Return all calls of graphs; those that can be identified have the keys of their plans."""
    identified = memory_measure.identify_calls(profile.calls, plans)
    if not profile.calls and len(plans) == 1:
        # An AOT-compiled model does not report its name; the whole step is attributed to it.
        (only,) = plans
        return [(only, profile.start, profile.end)]
    ranges = {window[1:] for window in identified}
    others = [window for window in profile.calls if window[1:] not in ranges]
    return sorted([*identified, *others], key=lambda window: window[1])


def _make_timelines(
    mode: str,
    profile: Profile,
    windows: Sequence[Window],
    plans: _Plans,
    records: Sequence[MemoryPlanRecord],
) -> Iterator[StepTimeline]:
    """Yield the timeline of each device on which the step allocates."""
    inside = [a for a in profile.allocations if profile.start <= a.time <= profile.end]
    spans = tuple(
        Span(name, start - profile.start, end - profile.start)
        for name, start, end in profile.optimizer_steps
    )
    for device in dict.fromkeys(allocation.device for allocation in inside):
        on_device = [a for a in inside if a.device == device]
        levels = itertools.accumulate((a.bytes for a in on_device), initial=0)
        yield StepTimeline(
            mode=mode,
            device=device,
            duration=profile.end - profile.start,
            times=(0, *(a.time - profile.start for a in on_device)),
            levels=tuple(levels),
            calls=tuple(
                _make_call(window, profile.start, on_device, plans.get(window[0], []), records)
                for window in windows
            ),
            optimizer_steps=spans,
        )


def _make_call(
    window: Window,
    begin: int,
    allocations: Sequence[Allocation],
    plans: Sequence[MemoryPlanRecord],
    records: Sequence[MemoryPlanRecord],
) -> GraphCall:
    """Return a call, with the plan of its graph's function that needs most."""
    _, start, end = window
    device = allocations[0].device
    base = sum(a.bytes for a in allocations if a.time < start)
    inside = [a for a in allocations if start <= a.time <= end]
    measured, freed = memory_measure.growth(inside)
    predictions = [(memory_measure.predict(plan, device, freed), plan) for plan in plans]
    planned, plan = max(predictions, key=lambda pair: pair[0], default=(None, None))
    number = None if plan is None else next(i for i, r in enumerate(records, 1) if r is plan)
    kind = "unknown" if plan is None else plan.kind
    return GraphCall(number, kind, start - begin, end - begin, base, planned, measured)
