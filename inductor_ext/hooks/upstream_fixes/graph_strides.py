"""Strides of the new values of tensors with gaps, before Inductor's in-place pass.

A tensor has gaps if it does not fill its memory, such as `x[:, :5]`. In eager mode a tensor that is
overwritten keeps its strides. In an FX graph its new value is another tensor, which has no gaps
after operators such as `add` and `index_put`, and has those of the operand after scatters into
slices. Views of it that a custom operator overwrites are recorded with the strides of the graph.
Inductor may then make operators in-place, and the memory has the strides of eager mode again.

The same holds for offsets. A copy of `x[1:]` begins at offset 0. If Inductor removes the copy,
views and copies of it are still computed as recorded, from offset 0 of `x`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from inductor_ext import exc
from inductor_ext.hooks.upstream_fixes import aliasing, graph_writes
from inductor_ext.hooks.upstream_fixes.aliasing import Write

CUSTOM_OPERATOR = torch.ops.higher_order.auto_functionalized_v2

COPIED = "only_clone_these_tensors"
"""Key of a node's `meta`: which operands of a custom operator Inductor copies; None for all."""

_BASE_LAYOUTS = "inductor_ext_base_layouts"
"""Key of a node's `meta`: the strides and the offset, in the traced graph, of each operand that a
custom operator overwrites, or of the operand of `as_strided`. The operator overwrites views that
are recorded with sizes, strides and offsets."""

_EAGER_VALUES = "eager_input_vals"
"""Key of a node's `meta`: fake tensors of the operands of a custom operator as AOTAutograd traced
it, by which Inductor copies them."""

_COPY_BACK = torch.ops.aten.copy_.default
_aten = torch.ops.aten
_AS_STRIDED = (_aten.as_strided.default, _aten.as_strided_scatter.default)


def record_layouts(graph: Graph) -> None:
    """Record strides and offsets of operands, as the graph has been traced.

    A later call finds a graph from which copies have been removed, and records nothing.
    """
    _use_whole_tensors(graph)
    for node, operands in find_operands(graph):
        layouts = [
            _layout(operand.meta["val"]) if isinstance(operand, Node) else None
            for operand in operands
        ]
        node.meta.setdefault(_BASE_LAYOUTS, layouts)


def _use_whole_tensors(graph: Graph) -> None:
    """Replace the operands of `as_strided` that are views by the tensors that own their memory.

    `as_strided` does not depend on the view but for the offset, if none is given. Inductor takes a
    view of a value that it computes for a tensor of its own, and offsets would be counted from
    there; in torch 2.11 it takes a missing offset for 0.
    """
    from torch.fx.passes.reinplace import _is_view_op

    for node in graph.find_nodes(op="call_function", target=_aten.as_strided.default):
        operand: Any = node.args[0]
        offset = node.args[3] if len(node.args) > 3 else None
        if offset is None:
            offset = operand.meta["val"].storage_offset()
        if _BASE_LAYOUTS in node.meta or isinstance(offset, torch.SymInt):
            continue
        while operand.op == "call_function" and _is_view_op(operand.target):
            source = operand.args[0]
            if source.meta["val"].dtype != operand.meta["val"].dtype:
                break
            operand = source
        node.args = (operand, *node.args[1:3], offset)


def describe_layouts(gm: GraphModule) -> str:
    """Return a text for the operands of a graph and its subgraphs that have another layout than
    recorded.
    """
    return "".join(
        f"{node.name}{layout}"
        for module in gm.modules()
        if isinstance(module, GraphModule)
        for node, operands in find_operands(module.graph)
        for operand, layout in zip(operands, node.meta.get(_BASE_LAYOUTS, ()), strict=False)
        if isinstance(operand, Node) and not _has_layout(operand, layout)
    )


def find_operands(graph: Graph) -> Iterator[tuple[Node, Sequence[Any]]]:
    """Yield the nodes whose operands must have the recorded layout, with these operands."""
    for node in graph.find_nodes(op="call_function", target=CUSTOM_OPERATOR):
        bases: Any = node.kwargs.get("_all_bases", ())
        yield node, bases
    for target in _AS_STRIDED:
        for node in graph.find_nodes(op="call_function", target=target):
            yield node, node.args[:1]


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


def copy_bases_of_other_layouts(graph: Graph, writes: list[Write]) -> bool:
    """Copy operands with other strides or offsets than recorded; return if any.

    They are those of `as_strided`, and of custom operators that overwrite views recorded with
    sizes, strides and offsets. Operators such as index_put return a tensor without gaps, also for
    an operand with gaps. Made in-place, they return one with the layout of the operand.

    Raises:
        UnsupportedMutationError: a copy does not have the recorded layout either.
    """
    sources = {result: write.operand for write in writes for result in write.results}
    readers = [
        (write.node, write.path, write.node.meta[_BASE_LAYOUTS][write.path[2]], write.results)
        for write in writes
        if _reads_layout(write)
    ]
    for target in _AS_STRIDED:
        for node in graph.find_nodes(op="call_function", target=target):
            if _BASE_LAYOUTS in node.meta:
                readers.append((node, ("args", 0), node.meta[_BASE_LAYOUTS][0], ()))
    copied = False
    for node, path, layout, results in readers:
        operand: Any = aliasing.get_operand(node, path)
        source = operand
        while source is not None and _has_layout(source, layout):
            source = sources.get(source)
        if source is None:
            continue
        # Only operators that return a tensor without gaps change strides, and so does a copy.
        base = copy(operand, before=node)
        _require_layout(base, layout, node)
        aliasing.replace_operand(node, path, base)
        for result in results:
            result.meta["val"] = _like(result.meta["val"], base.meta["val"])
            sources[result] = base
        copied = True
    return copied


def copy_operands_as_they_are(graph: Graph) -> None:
    """Copy operands that custom operators must not overwrite, if their layout is not the recorded.

    Inductor copies such an operand by the recorded sizes, strides and offset. It may have replaced
    the operand, a copy of `x[1:]`, by `x[1:]` itself, which has another offset.

    Raises:
        UnsupportedMutationError: a copy does not have the recorded layout either.
    """
    for write in graph_writes.find_custom_writes(graph):
        node, (_, *keys) = write.node, write.path
        if _EAGER_VALUES not in node.meta or not _is_copied(write):
            continue
        args, kwargs = node.meta[_EAGER_VALUES]
        recorded = aliasing.get_item(kwargs, tuple(keys))
        if _has_layout(write.operand, _layout(recorded)):
            continue
        base = copy(write.operand, before=node)
        offset = recorded.storage_offset() if _reads_layout(write) else 0
        _require_layout(base, (*recorded.stride(), offset), node)
        aliasing.replace_operand(node, write.path, base)
        values = aliasing.replace_item(kwargs, tuple(keys), _like(recorded, base.meta["val"]))
        node.meta[_EAGER_VALUES] = args, values
        if node.target is CUSTOM_OPERATOR and node.meta.get(COPIED) is not None:
            # Otherwise Inductor copies the copy.
            node.meta[COPIED] = [index for index in node.meta[COPIED] if index != keys[-1]]


def _is_copied(write: Write) -> bool:
    copied = write.node.meta.get(COPIED)
    name = write.path[2] if write.node.target is CUSTOM_OPERATOR else write.path[1]
    return copied is None or name in copied


def _require_layout(base: Node, layout: tuple[Any, ...], reader: Node) -> None:
    if _has_layout(base, layout):
        return
    *strides, offset = layout
    is_custom = reader.target not in _AS_STRIDED
    raise exc.UnsupportedMutationError(
        operator=reader.args[0] if is_custom else "as_strided",
        why=f"{'it overwrites' if is_custom else 'it is called with'} a tensor with the strides "
        f"{base.meta['val'].stride()}, which was recorded with {tuple(strides)} and the offset "
        f"{offset}",
        fix="Call the operator with a contiguous clone, and then copy the clone into the tensor.",
    )


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


def _reads_layout(write: Write) -> bool:
    """Whether a custom operator overwrites a view that is recorded with strides and an offset."""
    if write.node.target is not CUSTOM_OPERATOR:
        return False
    kwargs = write.node.kwargs
    prefixes = graph_writes.find_view_prefixes(kwargs, write.path[2])
    return _BASE_LAYOUTS in write.node.meta and any(f"{p}_stride" in kwargs for p in prefixes)


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (*tensor.stride(), tensor.storage_offset())


def begins_elsewhere(node: Node, other: Node) -> bool:
    """Whether the elements of two nodes begin at different offsets of their memory."""
    offset, other_offset = (_hint(n.meta["val"].storage_offset()) for n in (node, other))
    return bool(offset != other_offset)


def _has_layout(node: Node, layout: tuple[Any, ...]) -> bool:
    *strides, offset = layout
    actual = node.meta["val"].storage_offset()
    return _has_strides(node, strides) and _hint(actual) == _hint(offset)


def _has_strides(node: Node, strides: Sequence[Any]) -> bool:
    """Whether a node has these strides; those of dimensions of size 1 do not count."""
    value = node.meta["val"]
    return all(
        _hint(actual) == _hint(stride) or (isinstance(size, int) and size == 1)
        for size, actual, stride in zip(value.shape, value.stride(), strides, strict=True)
    )


def _hint(size: int | torch.SymInt) -> Any:
    """Return the size of the example, or the expression of a size that depends on data."""
    if isinstance(size, int):
        return size
    return size.node.expr if size.node.hint is None else size.node.hint


def _like(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor like `value` with the strides of another tensor of its size, from offset
    0."""
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
