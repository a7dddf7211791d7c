"""The plan of a function with dynamic sizes, at other sizes than those it was made for (pure).

The generated code does not change with the sizes: live ranges, arenas and reuse stay, and the bytes
are those of the expressions in the record. An arena that the code plans again at run time counts
with the size of its expression, which is an upper bound.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from inductor_ext.memory.planner import peak_report
from inductor_ext.memory.planner.interval import live_bytes
from inductor_ext.memory.planner.size_expression import evaluate
from inductor_ext.memory.records import (
    DynamicPlan,
    MemoryPlanRecord,
    PlannedArena,
    PlannedSpan,
    PlannedStorage,
)


def resize_plan(record: MemoryPlanRecord, values: Mapping[str, int]) -> MemoryPlanRecord:
    """Return the plan at other sizes.

    `peak_reordered_from` is None, because it is known at the size hints only.

    Args:
        record: a plan whose `dynamic` is known.
        values: the value of every symbol.

    Raises:
        ValueError: an expression has no value, or a size is negative; the text names it.
    """
    plan = record.dynamic
    if plan is None or plan.unknown:
        raise ValueError("the plan is not known at other sizes")
    numbers = dict(values)
    for name, text in plan.definitions:
        numbers[name] = evaluate(text, numbers)
    storages = tuple(
        dataclasses.replace(
            storage,
            bytes=_evaluate_bytes(size, numbers),
            offset=_evaluate_bytes(offset, numbers) if offset else None,
        )
        for storage, size, offset in zip(record.storages, plan.storages, plan.offsets, strict=True)
    )
    arenas = _resize_arenas(record, plan, storages, numbers)
    before, bound = (
        _sum_peaks(spans, record.steps, numbers) for spans in (plan.before, plan.bound)
    )
    sizes = tuple(dataclasses.replace(size, hint=values[size.name]) for size in plan.sizes)
    resized = dataclasses.replace(
        record,
        peak_before=before,
        lower_bound=bound,
        peak_reordered_from=None,
        storages=storages,
        arenas=arenas,
        dynamic=dataclasses.replace(plan, sizes=sizes),
    )
    peaks = (
        max(peak_report.allocated_bytes(resized, device)) for device in peak_report.devices(resized)
    )
    return dataclasses.replace(resized, peak=sum(peaks))


def _resize_arenas(
    record: MemoryPlanRecord,
    plan: DynamicPlan,
    storages: Sequence[PlannedStorage],
    numbers: Mapping[str, int],
) -> tuple[PlannedArena, ...]:
    arenas = []
    for index, (arena, size) in enumerate(zip(record.arenas, plan.arenas, strict=True)):
        members = [s for s in storages if s.arena == index]
        spans = ((s.start, max(s.end, s.start + 1), s.bytes) for s in members)
        bound = max(live_bytes(spans, arena.end), default=0)
        arenas.append(
            dataclasses.replace(arena, bytes=_evaluate_bytes(size, numbers), lower_bound=bound)
        )
    return tuple(arenas)


def _evaluate_bytes(text: str, numbers: Mapping[str, int]) -> int:
    value = evaluate(text, numbers)
    if value < 0:
        raise ValueError(f"{text!r} is {value}, which is not a size")
    return value


def _sum_peaks(spans: Iterable[PlannedSpan], steps: int, numbers: Mapping[str, int]) -> int:
    """Return the sum of the devices' peaks."""
    by_device: dict[str, list[tuple[int, int, int]]] = {}
    for span in spans:
        size = _evaluate_bytes(span.bytes, numbers)
        limits = max(span.start, 0), min(span.end, steps)
        by_device.setdefault(span.device, []).append((*limits, size))
    return sum(max(live_bytes(inside, steps), default=0) for inside in by_device.values())
