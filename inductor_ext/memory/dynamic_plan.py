"""Describes a plan with dynamic sizes by expressions, for `MemoryPlanRecord.dynamic`.

The expressions are those that the generated code evaluates, as text. A plan that they do not
reproduce at the size hints is recorded as not known at other sizes, with the reason.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import sympy  # type: ignore[import-untyped]
from torch._inductor.codegen.wrapper import pexpr
from torch._inductor.virtualized import V

from inductor_ext.memory.budget import find_input_dimensions, is_tensor
from inductor_ext.memory.extern_memory import size_hint
from inductor_ext.memory.planner import placement_policy
from inductor_ext.memory.planner.resized_plan import resize_plan
from inductor_ext.memory.planner_input import unbacked_symbols
from inductor_ext.memory.records import (
    DynamicPlan,
    DynamicSize,
    MemoryPlanRecord,
    PlannedSpan,
)
from inductor_ext.memory.symbolic_peak import round_bytes
from inductor_ext.memory.wrapper_reader import Storage, WrapperMemory


def add_dynamic_plan(
    record: MemoryPlanRecord,
    wrapper: Any,
    memory: tuple[WrapperMemory, WrapperMemory, WrapperMemory],
    decision: placement_policy.Decision | None,
    *,
    inputs: bool,
) -> MemoryPlanRecord:
    """Return the record with its plan as expressions, if any size depends on a symbol.

    Args:
        record: the plan at the size hints.
        wrapper: the wrapper of the function.
        memory: its storages under the plan that is used, under Inductor's buffer reuse, and if
            every buffer is freed after its last use.
        decision: the plan that is used; None if it is Inductor's.
        inputs: whether inputs count that the function frees.
    """
    applied, before, bound = memory
    symbols: set[Any] = set()
    for part in memory:
        used = [*(s.bytes for s in (*part.storages, *part.inputs)), *(e[2] for e in part.scratch)]
        symbols = symbols.union(*(getattr(size, "free_symbols", ()) for size in used))
    # A called function has dynamic sizes of its own.
    called = applied.calls and _has_symbols(wrapper)
    if not symbols and not called:
        return record
    sizes = tuple(_describe_size(wrapper, symbol) for symbol in sorted(symbols, key=str))
    unknown = DynamicPlan(sizes, (), (), (), (), (), ())
    if called:
        why = "it calls a subgraph, whose memory is recorded at the size hints only"
        return dataclasses.replace(record, dynamic=dataclasses.replace(unknown, unknown=why))
    dynamic = dataclasses.replace(
        _write_expressions(applied, decision, inputs=inputs),
        sizes=sizes,
        before=_list_spans(before, inputs=inputs),
        bound=_list_spans(bound, inputs=inputs),
    )
    described = dataclasses.replace(record, dynamic=dynamic)
    why = _find_difference(record, described)
    if why:
        described = dataclasses.replace(record, dynamic=dataclasses.replace(unknown, unknown=why))
    return described


def _find_difference(record: MemoryPlanRecord, described: MemoryPlanRecord) -> str:
    """Return why the expressions are not the plan at the size hints; empty if they are."""
    assert described.dynamic is not None
    try:
        again = resize_plan(described, {size.name: size.hint for size in described.dynamic.sizes})
    except ValueError as error:
        return str(error)
    for name in ("peak", "peak_before", "lower_bound", "storages", "arenas"):
        if getattr(again, name) != getattr(record, name):
            return f"its expressions do not reproduce the {name} of the plan"
    return ""


def _has_symbols(wrapper: Any) -> bool:
    values = wrapper.get_graph_inputs().values()
    sizes = (list(value.get_size()) if is_tensor(value) else [value] for value in values)
    return any(getattr(size, "free_symbols", None) for listed in sizes for size in listed)


def _describe_size(wrapper: Any, symbol: sympy.Symbol) -> DynamicSize:
    shape_env = V.graph.sizevars.shape_env
    limits = shape_env.var_to_range.get(symbol)
    lowest = highest = None
    if limits is not None:
        lowest, highest = _to_limit(limits.lower), _to_limit(limits.upper)
    return DynamicSize(
        name=str(symbol),
        hint=size_hint(symbol),
        lowest=0 if lowest is None else max(lowest, 0),
        highest=highest,
        inputs=find_input_dimensions(wrapper, symbol),
        is_data=symbol in unbacked_symbols(symbol),
    )


_UNLIMITED = 1 << 62
"""Upper limits of this size and above are those of the integer type."""


def _to_limit(limit: Any) -> int | None:
    value = int(limit) if getattr(limit, "is_Integer", False) or isinstance(limit, int) else None
    return None if value is None or abs(value) >= _UNLIMITED else value


def _write_expressions(
    memory: WrapperMemory, decision: placement_policy.Decision | None, *, inputs: bool
) -> DynamicPlan:
    """Return storages, offsets and arenas, in the order of `plan_record.storage_rows`."""
    definitions: list[tuple[str, str]] = []
    offsets: dict[int, str] = {}
    arenas = []
    for arena in decision.arenas if decision is not None else ():
        definitions += [(str(symbol), _write(value)) for symbol, value in arena.definitions]
        arenas.append(_write(arena.size))
        for member in arena.members:
            offsets[int(member.request.name)] = _write(member.offset)
    storages = [*memory.storages, *(memory.inputs if inputs else ())]
    scratch = [_write(size) for _, _, size in memory.scratch]
    return DynamicPlan(
        sizes=(),
        definitions=tuple(definitions),
        storages=(*(_write_bytes(storage) for storage in storages), *scratch),
        offsets=(*(offsets.get(i, "") for i in range(len(storages))), *[""] * len(scratch)),
        arenas=tuple(arenas),
        before=(),
        bound=(),
    )


def _list_spans(memory: WrapperMemory, *, inputs: bool) -> tuple[PlannedSpan, ...]:
    """Return the memory in use, as `planner_input.max_live_bytes` counts it."""
    spans = [
        PlannedSpan(str(storage.device), storage.start, storage.end, _write_bytes(storage))
        for storage in memory.storages
    ]
    spans += [
        PlannedSpan(device, step, step + 1, _write(size)) for step, device, size in memory.scratch
    ]
    if inputs:
        spans += [
            PlannedSpan(str(storage.device), 0, storage.end, _write_bytes(storage))
            for storage in memory.inputs
        ]
    return tuple(spans)


def _write_bytes(storage: Storage) -> str:
    return _write(round_bytes(storage))


def _write(expression: Any) -> str:
    text: str = pexpr(sympy.sympify(expression))
    return text
