"""Fusion of the scales and the bias of int8 by int8 matmuls with int32 accumulators.

Quantized activations times quantized weights have this form (torchao's dynamic quantization, static
scales). If Inductor fuses the scales, the epilogue loads both scales for every element and converts
the int32 accumulators to another layout, for which 128x256 tiles have no registers left. An
extension kernel multiplies in the layout of the accumulators, as it does for float8.
`fuse_int8_scales` replaces a planned matmul and the operations after it by one call, whose lowering
is `fused.scaled_int_mm`.

Nothing is fused if Inductor is set to round as eager mode does (`emulate_precision_casts`): the
intermediate values are float32, whatever dtype the model gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Any

from inductor_ext import numerics
from inductor_ext.lowerings.graph import epilogue_region
from inductor_ext.lowerings.graph.fx_nodes import add_call, is_computed_in_float32
from inductor_ext.lowerings.graph.matmul_nodes import (
    NotCovered,
    broadcast_kind,
    concrete_sizes,
    value_of,
)
from inductor_ext.lowerings.graph.rewrite import replace_call

if TYPE_CHECKING:
    from torch import fx


def fuse_int8_scales(
    graph: fx.Graph, node: fx.Node, target: Callable[..., Any]
) -> tuple[fx.Node, list[fx.Node]]:
    """Replace an int8 matmul, its scales and its bias by one call.

    Args:
        graph: of the node, with a flattened epilogue (`epilogue_region.flatten_epilogue`).
        node: aten._int_mm, [M, N].
        target: a function of A, B, the row scales, the column scales, and the bias if any.

    Returns:
        The call, which is the last of the replaced nodes and keeps its metadata, and the other
        replaced nodes. The unchanged node and an empty list if scales of rows and columns do not
        both follow.
    """
    if numerics.has_exact_pointwise():
        return node, []
    nodes, last = [node], node
    operands_by_role: dict[str, fx.Node] = {}
    for following in epilogue_region.find_region(node)[1:]:
        if set(nodes[-1].users) != {following}:
            break
        if not _is_cast(following):
            role = _operand_role(following, nodes[-1], operands_by_role)
            if role is None:
                break
            kind, operand = role
            operands_by_role[kind] = operand
        nodes.append(following)
        if {"rows", "columns"} <= operands_by_role.keys():
            last = following
    if last is node:
        return node, []
    replaced = nodes[: nodes.index(last)]
    with graph.inserting_before(last):
        operands = [
            _unexpand(graph, operands_by_role[kind])
            for kind in ("rows", "columns", "biases")
            if kind in operands_by_role
        ]
    replace_call(last, target, (*node.args, *operands))
    last.meta.pop("eager_input_vals", None)
    for following in reversed(replaced):
        graph.erase_node(following)
    return last, replaced


def _is_cast(node: fx.Node) -> bool:
    """Whether a node casts to a dtype that kernels compute in float32, possibly from int32."""
    import torch

    cast = node.target is torch.ops.prims.convert_element_type.default
    return cast and is_computed_in_float32(node.meta["val"])


def _operand_role(
    node: fx.Node, value: fx.Node, roles: Container[str]
) -> tuple[str, fx.Node] | None:
    """Return the role of the other operand of an operation on the accumulators, and that operand.

    Args:
        node: the only user of the value.
        value: the accumulators, [M, N].
        roles: the roles that were found before: "rows" and "columns" (scales), and "biases" after
            both.

    Returns:
        None if a kernel cannot do that.
    """
    import torch

    aten = torch.ops.aten
    first, second = (*node.args, None, None)[:2]
    operand = second if first is value else first
    if node.kwargs or not isinstance(operand, torch.fx.Node):
        return None
    other = operand.meta.get("val")
    if not isinstance(other, torch.Tensor) or not is_computed_in_float32(other):
        return None
    try:
        spread = broadcast_kind(other, concrete_sizes(value_of(value).shape))
    except NotCovered:
        return None
    if node.target is aten.mul.Tensor:
        kinds = {"scalar": ("rows", "columns"), "column": ("rows",), "row": ("columns",)}
    elif node.target is aten.add.Tensor and "rows" in roles and "columns" in roles:
        kinds = {"row": ("biases",)}
    else:
        return None
    return next(((kind, operand) for kind in kinds.get(spread, ()) if kind not in roles), None)


def _unexpand(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Add a view that undoes the expansion of a node: torchao expands scales to the output size."""
    import torch

    for axis, stride in enumerate(node.meta["val"].stride()):
        if stride == 0:
            node = add_call(graph, node, torch.ops.aten.slice.Tensor, node, axis, 0, 1)
    return node
