"""Fixes for comparisons of a tensor with values selected from it, such as `x == x.amax()`.

Both sides are equal somewhere in eager mode, and the gradients of `amax` and of similar functions
divide by the number of such places. Compiled code has none if it computes `x` twice, by different
instructions, or if it rounds only one side to float16 or bfloat16.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from inductor_ext.hooks import lowering_table
from inductor_ext.hooks.registry import Hook
from inductor_ext.hooks.upstream_fixes.graph_nodes import keeps_value, operator_name

if TYPE_CHECKING:
    from torch.fx import Graph, Node

HOOKS: tuple[Hook, ...] = ()

_REALIZE = "inductor_realize_to_strides"
"""Key of a node's `meta` by which Inductor computes the node into memory."""

_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")

_SELECTIONS = frozenset(
    {
        *("amax", "amin", "max", "min", "median", "nanmedian", "mode", "kthvalue", "topk", "sort"),
        *("cummax", "cummin", "scatter_reduce", "index_reduce"),
    }
)
"""Operators whose (first) result consists of values of an operand."""

_SAME_VALUES = frozenset({"clone", "abs", "neg"})
_CONVERSIONS = frozenset({"_to_copy", "convert_element_type"})
"""Operators besides views that are computed again to the same values; conversions, if no value is
rounded."""

_MOVED_VALUES = frozenset({"gather", "index", "index_select"})


def install_hooks() -> None:
    """Register the lowerings, once per process."""
    import torch

    packets = [getattr(torch.ops.aten, name) for name in _COMPARISONS]
    overloads = [getattr(packet, name) for packet in packets for name in ("Tensor", "Scalar")]
    lowering_table.register_once(_lower_comparison, *overloads)


def _lower_comparison(stock: Callable[..., Any], x: Any, other: Any) -> Any:
    """Compare values of float16 and bfloat16 as they would be in memory."""
    return stock(_round(x), _round(other))


def _round(x: Any) -> Any:
    """Round a value that is computed in float32 to its own dtype."""
    import torch
    from torch._inductor.ir import Pointwise, TensorBox
    from torch._inductor.virtualized import ops

    if not isinstance(x, TensorBox) or not _is_computed(x):
        return x
    dtype = x.get_dtype()
    if dtype not in (torch.float16, torch.bfloat16):
        return x
    load = x.make_loader()

    def load_rounded(index: Any) -> Any:
        return ops.to_dtype(ops.to_dtype(load(index), dtype, use_compute_types=False), dtype)

    return Pointwise.create(
        device=x.get_device(), dtype=dtype, inner_fn=load_rounded, ranges=x.get_size()
    )


def _is_computed(x: Any) -> bool:
    """Whether generated code computes a value, instead of an operator or the caller."""
    from torch._inductor.ir import BaseView, ComputedBuffer, Loops, MutableBox

    while isinstance(x, (MutableBox, BaseView)):
        x = x.data
    return isinstance(x, (Loops, ComputedBuffer))


def keep_selected_values(graph: Graph) -> None:
    """Mark the tensors of a graph that are compared with values selected from them."""
    import torch
    from torch.utils.checkpoint import CheckpointPolicy

    comparisons = {getattr(torch.ops.aten, name).Tensor for name in _COMPARISONS}
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in comparisons:
            continue
        sources = [_find_source(operand) for operand in node.all_input_nodes]
        selected = {
            source for operand in node.all_input_nodes for source in _find_selected(operand)
        }
        for source in selected.intersection(sources):
            if source.op == "call_function" and _is_floating_point(source):
                source.meta[_REALIZE] = True
                # torch may compute the comparison in the backward, even if it must be saved.
                source.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _find_source(node: Node) -> Node:
    """Return the node that computes the values of a node."""
    from torch.fx.passes.reinplace import _is_view_op

    while (
        node.op == "call_function"
        and node.args
        and (_is_view_op(node.target) or operator_name(node) in _SAME_VALUES or _is_widening(node))
    ):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _is_widening(node: Node) -> bool:
    """Whether a node converts numbers to a dtype that has all of them."""
    if operator_name(node) not in _CONVERSIONS:
        return False
    source, target = node.all_input_nodes[0].meta.get("val"), node.meta.get("val")
    return source is not None and target is not None and keeps_value(source.dtype, target.dtype)


def _find_selected(node: Node) -> list[Node]:
    """Return the nodes from whose values those of a node are selected, if they are."""
    node = _find_source(node)
    while node.op == "call_function" and operator_name(node) in _MOVED_VALUES:
        node = _find_source(node.all_input_nodes[0])
    if node.target is operator.getitem and node.args[1] == 0:
        node = node.all_input_nodes[0]
    if node.op != "call_function" or operator_name(node) not in _SELECTIONS:
        return []
    return [_find_source(operand) for operand in node.all_input_nodes]


def _is_floating_point(node: Node) -> bool:
    import torch

    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()
