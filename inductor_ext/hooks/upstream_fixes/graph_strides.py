"""Strides of the new values of tensors with gaps, before Inductor's in-place pass.

A tensor has gaps if it does not fill its memory, such as `x[:, :5]`. In eager mode a tensor that is
overwritten keeps its strides. In an FX graph its new value is another tensor, which has no gaps
after operators such as `add` and `index_put`, and has those of the operand after scatters into
slices. Views of it that a custom operator overwrites are recorded with the strides of the graph.
Inductor may then make operators in-place, and the memory has the strides of eager mode again.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.fx import Graph, Node

from inductor_ext import exc
from inductor_ext.hooks.upstream_fixes import aliasing, graph_writes
from inductor_ext.hooks.upstream_fixes.aliasing import Write

CUSTOM_OPERATOR = torch.ops.higher_order.auto_functionalized_v2

_BASE_STRIDES = "inductor_ext_base_strides"
"""Key of a node's `meta`: the strides of the operands of a custom operator in the traced graph. The
views of them that it overwrites are recorded with sizes and strides."""

_COPY_BACK = torch.ops.aten.copy_.default
_aten = torch.ops.aten


def record_strides(graph: Graph) -> None:
    """Record the strides of operands of custom operators, as the graph has been traced."""
    for node in graph.find_nodes(op="call_function", target=CUSTOM_OPERATOR):
        bases = node.kwargs.get("_all_bases", ())
        node.meta[_BASE_STRIDES] = [
            base.meta["val"].stride() if isinstance(base, Node) else None for base in bases
        ]


def keep_strides_of_scatters(graph: Graph) -> None:
    """Have the scatters of a graph keep the strides of their operands until `restore_scatters`.

    Inductor takes the result of a scatter into a tensor with gaps for one without. Offsets of views
    of the result would be computed from the wrong strides.
    """
    from torch._inductor.fx_passes.reinplace import _generalized_scatter

    for node in graph.find_nodes(op="call_function", target=_generalized_scatter):
        operand = node.args[0]
        if _has_gaps(operand):
            node.target = _scatter_with_strides
            # Torch 2.11 does not compute the values of targets that it does not know again.
            node.meta["val"] = _like(node.meta["val"], operand.meta["val"])


def restore_scatters(graph: Graph) -> None:
    """Give the scatters of a graph the target that Inductor knows."""
    from torch._inductor.fx_passes.reinplace import _generalized_scatter

    for node in graph.find_nodes(op="call_function", target=_scatter_with_strides):
        node.target = _generalized_scatter


def _scatter_with_strides(operand: torch.Tensor, values: torch.Tensor, views: Any) -> torch.Tensor:
    """Compute a fake result of Inductor's `_generalized_scatter`."""
    from torch._inductor.fx_passes.reinplace import _inplace_generalized_scatter

    if torch._debug_has_internal_overlap(operand) == 1:
        result = operand.clone()
    else:
        result = operand.new_empty_strided(operand.size(), operand.stride())
    return _inplace_generalized_scatter(result, values, views)


def copy_bases_of_other_strides(writes: list[Write]) -> bool:
    """Copy operands of custom operators that have other strides than recorded; return if any.

    Custom operators overwrite views that are recorded with sizes and strides. Operators such as
    index_put return a tensor without gaps, also for an operand with gaps. Made in-place, they
    return one with the strides of the operand.

    Raises:
        UnsupportedMutationError: a copy does not have the recorded strides either.
    """
    sources = {result: write.operand for write in writes for result in write.results}
    copied = False
    for write in writes:
        if write.node.target is not CUSTOM_OPERATOR or not _reads_strides(write):
            continue
        strides = write.node.meta[_BASE_STRIDES][write.path[2]]
        node: Any = write.operand
        while node is not None and _has_strides(node, strides):
            node = sources.get(node)
        if node is None:
            continue
        # Only operators that return a tensor without gaps change strides, and so does a copy.
        base = copy(write.operand, before=write.node)
        if not _has_strides(base, strides):
            raise exc.UnsupportedMutationError(
                operator=write.node.args[0],
                why="it overwrites views of a tensor with the strides "
                f"{base.meta['val'].stride()}, which are recorded for {strides}",
                fix="Call the operator with a contiguous clone, and then copy the clone into the "
                "tensor.",
            )
        aliasing.replace_operand(write.node, write.path, base)
        for result in write.results:
            result.meta["val"] = _like(result.meta["val"], base.meta["val"])
            sources[result] = base
        copied = True
    return copied


def refuse_as_strided(graph: Graph) -> None:
    """Refuse `as_strided` of a new value of an input with gaps.

    In eager mode it reads the input's memory. In the graph, the new value of an input that is
    overwritten has no gaps until it is copied back.

    Raises:
        UnsupportedMutationError: there is such a call.
    """
    calls = graph.find_nodes(op="call_function", target=_aten.as_strided.default)
    if not calls:
        return
    for write_back in graph.find_nodes(op="call_function", target=_COPY_BACK):
        target, source = write_back.args[:2]
        if target.op != "placeholder" or not _has_gaps(target):
            continue
        new_values = {source, *_find_ancestors(source)}
        for value in (call.args[0] for call in calls):
            if (
                value in new_values
                and value.meta["val"].shape == target.meta["val"].shape
                and value.op != "placeholder"
                and not _has_strides(value, target.meta["val"].stride())
            ):
                raise exc.UnsupportedMutationError(
                    operator="as_strided",
                    why="it reads the memory of an input that has been overwritten before and "
                    f"that has gaps: size {tuple(target.meta['val'].shape)}, strides "
                    f"{target.meta['val'].stride()}",
                    fix="Pass an input without gaps, or index it instead of calling as_strided().",
                )


def _has_gaps(node: Any) -> bool:
    """Whether a copy of a tensor has other strides."""
    from torch._inductor.virtualized import V

    with V.fake_mode:
        return not _has_strides(node, node.meta["val"].clone().stride())


def _find_ancestors(node: Any) -> set[Node]:
    found: set[Node] = set()
    pending = [node]
    while pending:
        new = set(pending.pop().all_input_nodes) - found
        found |= new
        pending += new
    return found


def _reads_strides(write: Write) -> bool:
    """Whether a custom operator overwrites a view that is recorded with strides."""
    kwargs = write.node.kwargs
    prefixes = graph_writes.find_view_prefixes(kwargs, write.path[2])
    return _BASE_STRIDES in write.node.meta and any(f"{p}_stride" in kwargs for p in prefixes)


def _has_strides(node: Node, strides: tuple[Any, ...]) -> bool:
    actual = node.meta["val"].stride()
    return [_hint(stride) for stride in actual] == [_hint(stride) for stride in strides]


def _hint(size: int | torch.SymInt) -> Any:
    """Return the size of the example, or the expression of a size that depends on data."""
    if isinstance(size, int):
        return size
    return size.node.expr if size.node.hint is None else size.node.hint


def _like(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor like `value` with the strides of another tensor of its size."""
    from torch._inductor.virtualized import V

    with V.fake_mode:
        return torch.empty_strided(
            value.shape, other.stride(), dtype=value.dtype, device=value.device
        )


def copy_read(operand: Node, node: Node) -> Node:
    """Insert a copy of an operand that a node reads, in front of the node.

    That of a custom operator keeps the strides: the operator may depend on them, and Inductor takes
    sizes of the other operands from them if they are equal.
    """
    insert = _copy_with_gaps if node.target is CUSTOM_OPERATOR else copy
    return insert(operand, node)


def copy_written(write: Write) -> Node:
    """Insert a copy of an operand, in front of its node, with the strides of the node's result."""
    from torch._inductor.fx_passes.reinplace import _generalized_scatter

    insert = _copy_with_gaps if write.node.target is _generalized_scatter else copy
    return insert(write.operand, write.node)


def copy(node: Node, before: Node) -> Node:
    """Insert a copy of a node in front of another one."""
    from torch._inductor.virtualized import V

    with node.graph.inserting_before(before):
        result = node.graph.call_function(_aten.clone.default, (node,))
    with V.fake_mode:
        result.meta["val"] = _aten.clone.default(node.meta["val"])
    return result


def _copy_with_gaps(node: Node, before: Node) -> Node:
    """Insert a copy of a node with the strides of the node, which `clone` keeps without gaps only.

    Scatters keep the strides of their operand, so the copy is a scatter of the whole node.
    """
    from torch._inductor.virtualized import V

    if not _has_gaps(node):
        return copy(node, before)
    args = (node, node, 0, 0, sys.maxsize)
    with node.graph.inserting_before(before):
        result = node.graph.call_function(_aten.slice_scatter.default, args)
    with V.fake_mode:
        value = node.meta["val"]
        result.meta["val"] = _aten.slice_scatter.default(value, value, *args[2:])
    return result
