"""Memory plans written by hand and drawn at random: valid plans, placed by first fit."""

from __future__ import annotations

import dataclasses
import random
from typing import Any
from xml.etree import ElementTree

from inductor_ext.memory import plan_store
from inductor_ext.memory.planner import peak_report
from inductor_ext.memory.records import MemoryPlanRecord, PlannedArena, PlannedStorage
from inductor_ext.reports.memory_measure import Measured
from inductor_ext.reports.memory_report import MemoryReport
from inductor_ext.reports.model_state import ModelState
from inductor_ext.reports.other_sizes import BatchPeak
from inductor_ext.reports.step_timeline import GraphCall, Span, StepTimeline


def storage(
    name: str,
    size: int,
    start: int,
    end: int,
    offset: int | None = None,
    *,
    arena: int | None = None,
    kind: str = "intermediate",
    operator: str = "addmm",
    module: str = "encoder.layer.0",
    device: str = "cpu",
) -> PlannedStorage:
    if offset is not None and arena is None:
        arena = 0
    return PlannedStorage(name, size, start, end, kind, device, arena, offset, operator, module)


def plan(
    storages: tuple[PlannedStorage, ...], arenas: tuple[PlannedArena, ...] = (), **fields: Any
) -> MemoryPlanRecord:
    """A record whose totals are those of its parts."""
    steps = max([1, *(part.end for part in (*storages, *arenas))])
    values: dict[str, Any] = {
        "graph": "call",
        "kind": "inference",
        "cache_key": None,
        "strategy": "arenas",
        "peak_before": 0,
        "peak": 0,
        "lower_bound": 0,
        "steps": steps,
        "calls_before": len(storages),
        "calls": len(arenas) + sum(storage.arena is None for storage in storages),
        "peak_reordered_from": None,
        "seconds": 0.25,
        "arenas": arenas,
        "storages": storages,
    }
    record = MemoryPlanRecord(**{**values, **fields})
    devices = peak_report.devices(record)
    total = sum(max(peak_report.allocated_bytes(record, device)) for device in devices)
    bound = sum(max(peak_report.storage_bytes(record, device)) for device in devices)
    totals = {"peak_before": total, "peak": total, "lower_bound": bound}
    return dataclasses.replace(record, **{**totals, **fields})


SMALL = plan(
    (
        storage("buf0", 4096, 0, 3, 0),
        storage("buf1", 1024, 1, 4, 4096, operator="mul", module="encoder.layer.1"),
        storage("buf2", 1024, 2, 6, kind="output", operator="amax, sub", module=""),
        storage("buf3", 2048, 3, 5, 0),
    ),
    (PlannedArena("arena_0", "cpu", 6144, 5120, 0, 5, "6144"),),
    peak_before=9216,
    lower_bound=6144,
)


def random_plan(count: int, loose: int, seed: int) -> MemoryPlanRecord:
    """`count` storages, the first `loose` of them outside of the two arenas."""
    rng = random.Random(seed)
    steps = 2 * count + 10
    modules = ["", "embed", *(f"layers.{i}.{part}" for i in range(3) for part in ("attn", "mlp"))]
    placed: list[list[PlannedStorage]] = [[], []]
    own = []
    for index in range(count):
        start = rng.randrange(steps - 3)
        end = min(steps, start + rng.choice((1, 2, 3, 8, 40, steps // 3)))
        size = 1 << rng.randrange(6, 22)
        module = rng.choice(modules)
        if index < loose:
            kind = rng.choice(("extern", "output", "input", "subgraph"))
            own.append(storage(f"own{index}", size, start, end, kind=kind, module=module))
            continue
        arena = rng.randrange(2)
        offset = 0
        for other in sorted(placed[arena], key=lambda other: other.offset or 0):
            if other.start < end and start < other.end:
                if offset + size <= (other.offset or 0):
                    break
                offset = max(offset, (other.offset or 0) + other.bytes)
        placed[arena].append(
            storage(f"buf{index}", size, start, end, offset, arena=arena, module=module)
        )
    arenas = tuple(
        PlannedArena(
            f"arena_{index}",
            "cpu",
            max(s.offset + s.bytes for s in inside if s.offset is not None),
            1,
            min(s.start for s in inside),
            max(s.end for s in inside),
            "s0*64",
        )
        for index, inside in enumerate(placed)
    )
    return plan((*own, *placed[0], *placed[1]), arenas)


def many(count: int, loose: int) -> MemoryPlanRecord:
    """`count` storages of growing size, each alive for three steps, in an arena of four places."""
    own = [storage(f"own{i}", 64 + i, i, i + 3, module=f"m{i % 5}") for i in range(loose)]
    inside = [
        storage(f"buf{i}", 64 + i % 192, i, i + 3, 256 * (i % 4), module=f"m{i % 3}")
        for i in range(count - loose)
    ]
    arena = PlannedArena("arena_0", "cpu", 1024, 1024, 0, count - loose + 2, "1024")
    return plan((*own, *inside), (arena,))


REPORT = MemoryReport(
    "a model",
    (SMALL, plan((storage("big", 8192, 0, 1),), graph="partition_0", kind="backward")),
    (Measured("call", "inference", None, "cpu", 7168, 7168),),
)

WHOLE = dataclasses.replace(
    REPORT,
    state=(ModelState("cpu", 4096, 512, 4096, 1024, 8192), ModelState("cuda:0", 0, 64, 0, 0)),
    steps=(
        StepTimeline(
            "compiled",
            "cpu",
            8_000_000,
            (0, 1_000_000, 3_000_000, 7_000_000),
            (0, 6144, -1024, 0),
            (GraphCall(1, "inference", 500_000, 3_500_000, 0, 7168, 6144),),
            (Span("AdamW.step", 4_000_000, 7_500_000),),
        ),
        StepTimeline("eager", "cpu", 2_000_000, (0, 100_000, 1_900_000), (0, 8192, 0)),
    ),
    batches=(BatchPeak(4, 7168, 6144, "call (inference)"), BatchPeak(8, 0, 0, "call (aot)")),
)
"""A report with every part."""

SVG = "{http://www.w3.org/2000/svg}"


def drawings(html: str) -> tuple[ElementTree.Element, list[ElementTree.Element]]:
    """The page and its drawings, as XML."""
    page = ElementTree.fromstring(html)
    return page, list(page.iter(f"{SVG}svg"))


def forget_plans() -> None:
    """Drop the plans in this process's memory; those in files stay."""
    plan_store._plans.clear()
