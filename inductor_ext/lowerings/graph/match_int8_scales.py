"""Products of int8 by int8 with their scales: sums of 32 bits, multiplied by what their rows and
their columns have, and given biases.

That is what quantised activations by quantised weights are (torchao's dynamic quantisation, static
scales). Left to Inductor, the kernel's epilogue loads both scales for every element and gives sums
of 32 bits another layout; tiles of 128x256 have no registers left for that. A kernel of ours
multiplies where the sums are, as it does with those of float8. `take` puts a planned product and
the operations behind it into one call, whose lowering is `gemm.scaled_int_mm`.

Nothing is taken where Inductor is told to round as eager code does (`emulate_precision_casts`): in
between sums are float32, whatever dtype the model gives them there.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Any

from inductor_ext import numerics
from inductor_ext.lowerings.graph import epilogue_region, matmul_nodes
from inductor_ext.lowerings.graph.formula import call, is_computed_in_float32
from inductor_ext.lowerings.graph.fusion import become

if TYPE_CHECKING:
    import torch
    from torch import fx

__all__ = ["take"]


def take(
    graph: fx.Graph, node: fx.Node, target: Callable[..., Any]
) -> tuple[fx.Node, list[fx.Node]]:
    """Replace a product of integers, its scales and its biases by one call.

    Args:
        graph: the node's, flattened behind it (`epilogues.flatten`).
        node: aten._int_mm, [M, N].
        target: a function of a, b, the scales of rows and of columns and, if there are any, biases.

    Returns:
        The call, which is the last of what it replaces and has the metadata of that, and the others
        that it replaces; the node itself, unchanged, and none where scales of both do not follow.
    """
    if numerics.has_exact_pointwise():
        return node, []
    nodes, last = [node], node
    found: dict[str, fx.Node] = {}
    for each in epilogue_region.region(node)[1:]:
        if set(nodes[-1].users) != {each}:
            break
        if not _is_cast(each):
            role = _role(each, nodes[-1], found)
            if role is None:
                break
            kind, given = role
            found[kind] = given
        nodes.append(each)
        if {"rows", "columns"} <= found.keys():
            last = each
    if last is node:
        return node, []
    replaced = nodes[: nodes.index(last)]
    with graph.inserting_before(last):
        operands = [
            _narrow(graph, found[kind]) for kind in ("rows", "columns", "biases") if kind in found
        ]
    become(last, target, (*node.args, *operands))
    last.meta.pop("eager_input_vals", None)
    for each in reversed(replaced):
        graph.erase_node(each)
    return last, replaced


def _is_cast(node: fx.Node) -> bool:
    """Whether a node gives sums, of integers as well, a dtype that kernels compute in float32."""
    import torch

    cast = node.target is torch.ops.prims.convert_element_type.default
    return cast and is_computed_in_float32(node.meta["val"])


def _role(node: fx.Node, value: fx.Node, known: Container[str]) -> tuple[str, fx.Node] | None:
    """Of which kind the other operand of an operation on sums is, and that operand.

    Args:
        node: the only one that uses the value.
        value: sums, [M, N].
        known: the kinds that sums have: scales of "rows", of "columns", and "biases" after both.

    Returns:
        None where a kernel cannot do that.
    """
    import torch

    aten = torch.ops.aten
    first, second = (*node.args, None, None)[:2]
    given = second if first is value else first
    if node.kwargs or not isinstance(given, torch.fx.Node):
        return None
    other = given.meta.get("val")
    if not isinstance(other, torch.Tensor) or not is_computed_in_float32(other):
        return None
    try:
        spread = matmul_nodes.broadcast(
            other, matmul_nodes.sizes(matmul_nodes.value_of(value).shape)
        )
    except matmul_nodes.NotCovered:
        return None
    if node.target is aten.mul.Tensor:
        kinds = {"scalar": ("rows", "columns"), "column": ("rows",), "row": ("columns",)}
    elif node.target is aten.add.Tensor and "rows" in known and "columns" in known:
        kinds = {"row": ("biases",)}
    else:
        return None
    return next(((kind, given) for kind in kinds.get(spread, ()) if kind not in known), None)


def _expanded(value: torch.Tensor) -> list[int]:
    """Dimensions with one element, which has the place of several: torchao spreads scales over the
    sums that they are for.
    """
    return [axis for axis, stride in enumerate(value.stride()) if stride == 0]


def _narrow(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """What is spread out, as it was before: a view of it, in the graph."""
    import torch

    for axis in _expanded(node.meta["val"]):
        node = call(graph, node, torch.ops.aten.slice.Tensor, node, axis, 0, 1)
    return node
