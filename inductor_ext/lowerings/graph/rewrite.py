"""Replacement of FX nodes: a fusion becomes one call, and nodes move or change in place.

Nodes whose values are used outside keep their identity, so that fusions of one graph that share no
node can be applied in any order.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from inductor_ext.lowerings.graph.fusion import Fusion, ViewedNode
from inductor_ext.lowerings.graph.fx_nodes import is_view, shape
from inductor_ext.lowerings.graph.matmul_nodes import is_matmul, value_of
from inductor_ext.lowerings.node_info import FusedCall
from inductor_ext.lowerings.operands import FusedOperands

if TYPE_CHECKING:
    import torch
    from torch import fx


def apply(graph: fx.Graph, fusion: Fusion, target: Callable[..., Any]) -> tuple[fx.Node, FusedCall]:
    """Replace the nodes of a fusion by one call.

    The call gets the operands of the fusion, A as [M, K], and a packed weight as two views. The
    output nodes keep their identity and metadata: they become the call, or elements of its
    result if there are several, in their original shapes. Fusions of one graph that share no node
    can therefore be applied in any order.

    Args:
        graph: the graph in which the fusion was found.
        fusion: a fusion of `fusion_search.find_fusions` or `match_dequantized`.
        target: a function of the operands, for Inductor with the attribute
            `_inductor_lowering_function`. It returns [M, columns], or a tuple with one [M, columns]
            per fused matmul.

    Returns:
        The call, and what reads its arguments.
    """
    anchor = min(fusion.outputs)
    hoist(anchor, fusion.inputs)
    matmul = next(filter(is_matmul, fusion.nodes))
    with graph.inserting_before(anchor):
        operands = call_operands(graph, fusion, matmul)
        arguments = operands.flatten()
        (first, *others) = fusion.outputs
        if others:
            call = graph.call_function(target, arguments)
            call.meta = dict(anchor.meta)
            call.meta["val"] = tuple(_flat_value(output, matmul) for output in fusion.outputs)
            for index, output in enumerate(fusion.outputs):
                if len(shape(output)) == 2:
                    replace_call(output, operator.getitem, (call, index))
                    continue
                with graph.inserting_before(output):
                    part = graph.call_function(operator.getitem, (call, index))
                part.meta = {**output.meta, "val": _flat_value(output, matmul)}
                _become_view(output, part, fusion)
        elif len(shape(first)) == 2:
            call = first
            replace_call(first, target, arguments)
        else:
            call = graph.call_function(target, arguments)
            call.meta = {**first.meta, "val": _flat_value(first, matmul)}
            _become_view(first, call, fusion)
    call.meta.pop("eager_input_vals", None)
    for node in reversed(fusion.nodes):
        if node not in fusion.outputs:
            graph.erase_node(node)
    return call, FusedCall.of(operands, fusion.constants)


def _flat_value(output: fx.Node, matmul: fx.Node) -> torch.Tensor:
    """Return an output's value as [M, columns]."""
    value: torch.Tensor = output.meta["val"]
    if value.dim() == 2:
        return value
    return value.new_empty((matmul.meta["val"].shape[0], value.shape[-1]))


def _become_view(output: fx.Node, flat: fx.Node, fusion: Fusion) -> None:
    """Turn an output into a view of its matrix, with the sizes of a view in the fusion."""
    view = next(
        node for node in fusion.nodes if is_view(node) and shape(node)[:-1] == shape(output)[:-1]
    )
    sizes: Any = view.args[1]
    replace_call(output, view.target, (flat, [*sizes[:-1], shape(output)[-1]]))


def call_operands(graph: fx.Graph, fusion: Fusion, matmul: fx.Node) -> FusedOperands[fx.Node]:
    """Return the operands of a fusion as the call takes them; `matmul` is its matmul node."""
    import torch

    operands = fusion.operands.map(lambda operand: _add_view(graph, operand))
    a = operands.a
    if len(shape(a)) != 2:
        value = as_matrix(a.meta["val"], matmul.meta["val"].shape[0])
        a = graph.call_function(torch.ops.aten.reshape.default, (a, [-1, fusion.problem.k]))
        a.meta = {"val": value}
    operands = dataclasses.replace(operands, a=a)
    return _split_packed(graph, operands, fusion) if fusion.halves else operands


def _split_packed(
    graph: fx.Graph, operands: FusedOperands[fx.Node], fusion: Fusion
) -> FusedOperands[fx.Node]:
    """Return operands with a packed weight and its vectors as those of the gate and of the up
    projection.
    """

    def halves(packed: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
        return tuple(
            _slice_columns(graph, node, begin, fusion.problem.parts[0])
            for node in packed
            for begin in fusion.halves or ()
        )

    return dataclasses.replace(
        operands,
        weights=halves(operands.weights),
        scales=halves(operands.scales),
        zero_points=halves(operands.zero_points),
        gate_biases=halves(operands.gate_biases),
    )


def _slice_columns(graph: fx.Graph, whole: fx.Node, begin: int, count: int) -> fx.Node:
    """Return a range of columns of a weight, scale or bias; a scalar is returned as it is."""
    import torch

    value = value_of(whole)
    if not value.dim():
        return whole
    axis = value.dim() - 1
    part = graph.call_function(torch.ops.aten.slice.Tensor, (whole, axis, begin, begin + count))
    offset = value.storage_offset() + begin * value.stride(axis)
    size = (*value.shape[:-1], count)
    part.meta = {"val": value.as_strided(size, value.stride(), offset)}
    return part


def _add_view(graph: fx.Graph, operand: ViewedNode) -> fx.Node:
    """Add the view of an operand to the graph."""
    import torch

    aten = torch.ops.aten
    node, view = operand.node, operand.view
    if view is None:
        return node
    value = value_of(node)
    if tuple(value.shape) != view.sizes:
        node = graph.call_function(aten.reshape.default, (node, list(view.sizes)))
        node.meta = {"val": value.view(view.sizes)}
    if view.transposed:
        node = graph.call_function(aten.permute.default, (node, [1, 0]))
        node.meta = {"val": view.of(value)}
    return node


def as_matrix(value: torch.Tensor, rows: Any) -> torch.Tensor:
    """Return a contiguous tensor as a matrix with `rows` rows."""
    columns = value.shape[-1]
    return value.as_strided((rows, columns), (columns, 1), value.storage_offset())


def replace_call(node: fx.Node, target: Any, arguments: tuple[Any, ...]) -> None:
    """Make a node call something else. Its users, name and metadata stay."""
    node.target = target
    node.args = arguments
    node.kwargs = {}


def hoist(anchor: fx.Node, inputs: Iterable[fx.Node]) -> None:
    """Move the nodes that compute the inputs before `anchor`, in their original order."""
    for node in sorted(computed_after(anchor, inputs)):
        anchor.prepend(node)


def computed_after(anchor: fx.Node, inputs: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes from `anchor` on that the inputs are computed from, including the inputs."""
    nodes: set[fx.Node] = set()
    pending = list(inputs)
    while pending:
        node = pending.pop()
        if node not in nodes and node >= anchor:
            nodes.add(node)
            pending.extend(node.all_input_nodes)
    return nodes
