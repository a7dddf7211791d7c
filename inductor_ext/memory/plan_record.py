"""Builds the `MemoryPlanRecord` of a function."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import sympy  # type: ignore[import-untyped]
from torch._inductor import ir
from torch._inductor.virtualized import V

from inductor_ext import events
from inductor_ext.memory import reorder_kernels
from inductor_ext.memory.arena_lines import ArenaVariable
from inductor_ext.memory.extern_memory import size_hint
from inductor_ext.memory.planner import placement_policy
from inductor_ext.memory.planner.arena_plan import Arena
from inductor_ext.memory.records import MemoryPlanRecord, PlannedArena, PlannedStorage
from inductor_ext.memory.wrapper_reader import Storage, WrapperMemory


def graph_kind(is_inference: bool) -> str:
    """Return the kind of the current graph, as in `MemoryPlanRecord`."""
    if V.graph.aot_mode:
        return "aot"
    if V.graph.is_backward:
        return "backward"
    return "inference" if is_inference else "forward"


def make_record(wrapper: Any, kind: str, start: float, **fields: Any) -> MemoryPlanRecord:
    """Return the record of a wrapper's function.

    Args:
        wrapper: the wrapper.
        kind: as returned by `graph_kind`.
        start: `time.process_time()` when planning began.
        fields: the other fields of the record.
    """
    return MemoryPlanRecord(
        graph=wrapper.launcher_fn_name,
        kind=kind,
        cache_key=None,
        peak_reordered_from=reorder_kernels.peak_before_reorder(V.graph),
        seconds=round(time.process_time() - start, 4),
        **fields,
    )


def unplanned_record(wrapper: Any, kind: str, start: float, reason: str) -> MemoryPlanRecord:
    """Return the record of a function that gets Inductor's plan without being read."""
    sizes = dict.fromkeys(
        ("peak_before", "peak", "lower_bound", "steps", "calls_before", "calls"), 0
    )
    return make_record(
        wrapper, kind, start, strategy="stock", arenas=(), storages=(), reason=reason, **sizes
    )


def storage_rows(
    memory: WrapperMemory, decision: placement_policy.Decision | None, inputs: bool
) -> tuple[PlannedStorage, ...]:
    """Return the storages for the record; a reused storage ends where its reuse starts."""
    place: dict[int, tuple[int, int]] = {}
    until: dict[int, int] = {}
    if decision is not None:
        for number, arena in enumerate(decision.arenas):
            defined: dict[Any, int] = {}
            for symbol, value in arena.definitions:
                defined[symbol] = size_hint(value.xreplace(defined))
            for member in arena.members:
                offset = sympy.sympify(member.offset).xreplace(defined)
                place[int(member.request.name)] = (number, size_hint(offset))
        until = {old: memory.storages[new].start for new, old in decision.reused_from.items()}
    rows = []
    for index, storage in enumerate([*memory.storages, *(memory.inputs if inputs else ())]):
        arena_number, offset = place.get(index, (None, None))
        row = storage_row(storage)
        end = until.get(index, row.end)
        rows.append(dataclasses.replace(row, end=end, arena=arena_number, offset=offset))
    inner = [(start, end, peaks, "subgraph") for start, end, peaks in memory.calls]
    inner += [
        (step, step + 1, {device: size_hint(size)}, "scratch")
        for step, device, size in memory.scratch
    ]
    for start, end, peaks, name in inner:
        kind = "subgraph" if name == "subgraph" else "extern"
        rows += [
            PlannedStorage(name, size, start, end, kind, device, None, None, "", "")
            for device, size in peaks.items()
        ]
    return tuple(rows)


def storage_row(storage: Storage) -> PlannedStorage:
    """Return a storage outside of arenas for the record."""
    return PlannedStorage(
        name=storage.node.get_name(),
        bytes=storage.hint,
        start=storage.start,
        end=storage.end,
        kind=storage.kind,
        device=str(storage.device),
        arena=None,
        offset=None,
        operator=_operator_names(storage.node),
        module=_module_path(storage.node),
    )


def arena_row(variable: ArenaVariable, arena: Arena) -> PlannedArena:
    """Return an arena for the record."""
    return PlannedArena(
        name=variable.name,
        device=str(variable.device),
        bytes=arena.peak_hint,
        lower_bound=arena.lower_bound,
        start=arena.start,
        end=arena.end,
        size=str(arena.size),
    )


def _operator_names(node: Any) -> str:
    names = {
        getattr(target, "__name__", str(target)).split(".")[0]
        for origin in getattr(node, "origins", None) or ()
        if origin.op == "call_function"
        for target in (origin.target,)
    }
    return ", ".join(sorted(names)) or (
        "" if isinstance(node, ir.InputBuffer) else type(node).__name__
    )


def _module_path(node: Any) -> str:
    """Return the path of the module whose result a buffer is.

    A kernel's operators may come from several modules; the buffer has the result of the last one.
    Operators that passes have inserted come from none.
    """
    origins = sorted(getattr(node, "origins", None) or (), reverse=True)
    paths = (events.module_path(origin.meta) for origin in origins)
    return next(filter(None, paths), "")
