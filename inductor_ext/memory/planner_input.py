"""Converts the storages of a wrapper to the values that the pure planner works on.

The planner needs sizes as integers, at the size hint and at samples of the size symbols, and for
each device the memory that is live beside the storages of the wrapper.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import sympy  # type: ignore[import-untyped]
from torch._inductor import ir
from torch._inductor.codegen import wrapper as wrapper_ir
from torch._inductor.utils import align as align64
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import FloorDiv

from inductor_ext.memory.extern_memory import size_hint
from inductor_ext.memory.planner import placement_policy
from inductor_ext.memory.planner.arena_plan import Request
from inductor_ext.memory.planner.interval import round_up
from inductor_ext.memory.planner.symbolic.evaluator import ExpressionEvaluator
from inductor_ext.memory.planner.symbolic.stacking import scaled_samples
from inductor_ext.memory.wrapper_reader import ALIGNMENT, Storage, WrapperMemory


def to_live_ranges(
    memory: WrapperMemory,
    *,
    pool: str = "none",
    reuse: bool = False,
    known: Mapping[Any, int] = MappingProxyType({}),
    samples: Sequence[Mapping[Any, int]] = (),
) -> list[placement_policy.LiveRange]:
    """Convert the storages for the pure planner, index by index.

    Args:
        memory: the storages.
        pool: which of them may be placed in arenas, as Inductor's memory_pool.
        reuse: whether a storage may reuse the memory of an earlier one.
        known: the first step at which an unbacked symbol has a value, see `find_first_uses`.
        samples: values of the size symbols, besides the hint, at which sizes are needed.
    """
    ranges = []
    program = ExpressionEvaluator([storage.bytes for storage in memory.storages])
    columns = [program(sample) for sample in samples]
    for index, storage in enumerate(memory.storages):
        alignment = ALIGNMENT.get(storage.device.type, 1)
        request = group = None
        is_pooled = pool != "none" and not (pool == "intermediates" and storage.is_output)
        if is_pooled and storage.placeable:
            first_uses = [known[symbol] for symbol in unbacked_symbols(storage.bytes)]
            request = Request(
                name=str(index),
                start=storage.start,
                end=storage.end,
                size=storage.bytes,
                alignment=alignment,
                known_from=max(first_uses, default=None),
            )
            apart = storage.is_output and pool == "outputs"
            # A workspace has no stream in the scheduler, but it has a context.
            stream = _stream(V.graph.scheduler, storage.node.get_name())
            group = (storage.scope, stream, storage.context, apart)
        can_reuse = storage.kind not in ("extern", "input") and not _is_comm(storage.node)
        ranges.append(
            placement_policy.LiveRange(
                size=storage.hint,
                start=storage.start,
                end=storage.end,
                device=str(storage.device),
                is_allocated_by_code=storage.is_allocated_by_code,
                request=request,
                group=group,
                reuse_key_out=_reuse_key(storage, storage.freed_by.node)
                if reuse and storage.is_reusable
                else None,
                reuse_key_in=_reuse_key(storage, storage.node) if reuse and can_reuse else None,
                sample_sizes=tuple(
                    round_up(max(column[index], 0), alignment) for column in columns
                ),
            )
        )
    return ranges


def _reuse_key(storage: Storage, node: Any) -> Hashable:
    """Return the reuse key of a node that uses a storage: Inductor's, in the same context."""
    return storage.scope, storage.context, wrapper_ir.buffer_reuse_key(node)


def list_other_memory(memory: WrapperMemory, *, backward: bool) -> dict[str, list[list[int]]]:
    """Return other live memory by device, one profile per assumption about the callers.

    Callees and kernels always need their memory. The caller keeps dropped inputs alive, except in a
    backward: most of its inputs were saved by the forward and are freed when dropped, unless the
    graph is retained. The first assumption is that the dropped inputs do not count. The second one,
    for a backward only, is that they are live until the code drops them.
    """
    inner = [
        placement_policy.LiveRange(size=size, start=start, end=end, device=device)
        for start, end, peaks in memory.calls
        for device, size in peaks.items()
    ]
    inner += [
        placement_policy.LiveRange(size=size_hint(size), start=step, end=step + 1, device=device)
        for step, device, size in memory.scratch
    ]
    dropped = [
        placement_policy.LiveRange(
            size=storage.hint, start=0, end=storage.end, device=str(storage.device)
        )
        for storage in memory.inputs
    ]
    other = {}
    for device in {str(storage.device) for storage in (*memory.storages, *memory.inputs)}:
        other[device] = [placement_policy.device_live_bytes(inner, memory.steps, device)]
        if backward:
            other[device].append(
                placement_policy.device_live_bytes([*inner, *dropped], memory.steps, device)
            )
    return other


def max_live_bytes(
    storages: Sequence[placement_policy.LiveRange],
    other: dict[str, list[list[int]]],
    steps: int,
    assumption: int,
) -> dict[str, int]:
    """Return the peak by device, including the memory of one assumption of `list_other_memory`."""
    peaks = {}
    for device, profiles in other.items():
        live_bytes = placement_policy.device_live_bytes(storages, steps, device)
        total = (a + b for a, b in zip(live_bytes, profiles[assumption], strict=True))
        peaks[device] = max(total, default=0)
    return peaks


def find_first_uses(storages: Iterable[Storage]) -> dict[Any, int]:
    """Map an unbacked symbol to the first step at which a size uses it: it is known from there."""
    first: dict[Any, int] = {}
    for storage in storages:
        for symbol in unbacked_symbols(storage.bytes):
            first[symbol] = min(first.get(symbol, storage.start), storage.start)
    return first


_MAX_SAMPLES = 9
"""Number of values of the size symbols, including the hint, at which a plan must not need more
memory than separate allocations."""


def list_samples(storages: Sequence[Storage]) -> list[dict[Any, int]]:
    """Return the samples other than the hint at which all storages have a valid size."""
    symbols: dict[Any, int] = {}
    for storage in storages:
        if isinstance(storage.bytes, sympy.Expr):
            for symbol in sorted(storage.bytes.free_symbols, key=str):
                symbols.setdefault(symbol, max(size_hint(symbol), 1))
    if not symbols:
        return []
    program = ExpressionEvaluator([storage.bytes for storage in storages])

    def has_sizes(sample: Mapping[Any, int]) -> bool:
        try:
            return min(program(sample)) >= 0
        except ValueError:
            # For example `x.view(n // 2, 2, -1)` divides by zero if n is 1.
            return False

    return [sample for sample in scaled_samples(symbols)[1:_MAX_SAMPLES] if has_sizes(sample)]


def unbacked_symbols(expression: Any) -> set[Any]:
    """Return the symbols of a size whose values are known only at run time."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return set(free_unbacked_symbols(expression)) if isinstance(expression, sympy.Expr) else set()


def round_up_expression(expression: Any, alignment: int) -> Any:
    """Round `expression` up to a multiple of `alignment` in terms that Inductor can print."""
    if alignment == 64:
        return align64(expression)
    return alignment * FloorDiv(expression + alignment - 1, alignment)


def _stream(scheduler: Any, name: str) -> int:
    find = getattr(scheduler, "get_buf_stream", None)
    return find(name) if find is not None else 0


def _is_comm(node: Any) -> bool:
    return isinstance(getattr(node, "layout", None), ir.CommBufferLayout)
