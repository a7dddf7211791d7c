"""Several nodes of an FX graph that one kernel can take the place of, and the replacement."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from inductor_ext.lowerings.expressions import is_view, shape
from inductor_ext.lowerings.problems import value_of
from inductor_ext.templates.problem import GemmProblem

if TYPE_CHECKING:
    import torch
    from torch import fx

__all__ = ["Fusion", "View", "apply", "as_matrix", "become", "hoist", "later"]


@dataclass(frozen=True)
class View:
    """How a kernel sees a tensor of the graph."""

    sizes: tuple[int, ...]
    """Two, or fewer for a vector and a number."""
    transposed: bool = False
    """Whether it sees the transpose of the matrix of these sizes."""

    def of(self, value: torch.Tensor) -> torch.Tensor:
        """The view of a tensor.

        Raises:
            RuntimeError: it cannot be had without a copy.
        """
        found = value.view(self.sizes)
        return found.t() if self.transposed else found


@dataclass(frozen=True)
class Fusion:
    """A product with what is fused into it, as it stands in a graph."""

    problem: GemmProblem
    """At the sizes that the graph's examples had."""
    nodes: tuple[fx.Node, ...]
    """All that the kernel replaces, in the graph's order. Nothing else uses them but `outputs`."""
    outputs: tuple[fx.Node, ...]
    """Those of the nodes whose values are used outside, in the order of the kernel's results."""
    inputs: tuple[fx.Node, ...]
    """a; the factors b, one for each part; what the prologue reads; one bias for each part or none.

    What is normalised may have other dimensions than the product's rows; its last one is K.
    """
    options: Mapping[str, Any] = field(default_factory=dict)
    """Constants of the kernel that the problem does not tell: `ACTIVATION`, quoted, of what gates;
    `EPSILON` of a normalisation; and `operands`, the number of the call's inputs before biases."""
    halves: tuple[int, int] | None = None
    """Where the parts are halves of one factor: the first columns of the gate and of the other."""
    views: tuple[View, ...] = ()
    """How inputs from b on are seen, as far as there are any; the others are seen as they are."""


def apply(graph: fx.Graph, fusion: Fusion, target: Callable[..., Any]) -> fx.Node:
    """Replace the nodes of a fusion by one call.

    The call gets the fusion's inputs, a as [M, K], and halves of a factor as two factors (views).
    The outputs stay the nodes that they are, with their metadata: they now are what the call
    returns, or elements of it if they are several, in the shape that they had. So fusions of one
    graph that have no node in common can be applied one after the other, in any order.

    Args:
        graph: the one in which the fusion was found.
        fusion: one of `patterns.find`.
        target: a function of the inputs, for Inductor with the attribute
            `_inductor_lowering_function`. It returns [M, columns], or a tuple of one [M, columns]
            for each part.

    Returns:
        The call, on which metadata may be left.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    anchor = min(fusion.outputs, key=order.__getitem__)
    hoist(anchor, fusion.inputs, order)
    product = next(node for node in fusion.nodes if "mm" in str(node.target))
    with graph.inserting_before(anchor):
        arguments = _arguments(graph, fusion, product)
        (first, *others) = fusion.outputs
        if others:
            call = graph.call_function(target, arguments)
            call.meta = {**anchor.meta, "val": tuple(each.meta["val"] for each in fusion.outputs)}
            for index, output in enumerate(fusion.outputs):
                become(output, operator.getitem, (call, index))
        elif len(shape(first)) == 2:
            call = first
            become(first, target, arguments)
        else:
            call = graph.call_function(target, arguments)
            value = first.meta["val"]
            rows = product.meta["val"].shape[0]
            columns = fusion.problem.columns
            flat = value.new_empty((rows, columns))
            call.meta = {**first.meta, "val": flat}
            view = next(
                node
                for node in fusion.nodes
                if is_view(node) and shape(node)[:-1] == shape(first)[:-1]
            )
            sizes: Any = view.args[1]
            become(first, view.target, (call, [*sizes[:-1], columns]))
    call.meta.pop("eager_input_vals", None)
    for node in reversed(fusion.nodes):
        if node not in fusion.outputs:
            graph.erase_node(node)
    return call


def _arguments(graph: fx.Graph, fusion: Fusion, product: fx.Node) -> tuple[fx.Node, ...]:
    """The inputs as the call takes them."""
    import torch

    aten = torch.ops.aten
    a, b, *rest = fusion.inputs
    for index, view in enumerate(fusion.views):
        seen = _seen(graph, fusion.inputs[1 + index], view)
        if index:
            rest[index - 1] = seen
        else:
            b = seen
    if len(shape(a)) != 2:
        value = as_matrix(a.meta["val"], product.meta["val"].shape[0])
        a = graph.call_function(aten.reshape.default, (a, [-1, fusion.problem.k]))
        a.meta = {"val": value}
    factors = [b]
    if fusion.halves:
        whole, half = value_of(b), fusion.problem.parts[0]
        factors = []
        for begin in fusion.halves:
            part = graph.call_function(aten.slice.Tensor, (b, 1, begin, begin + half))
            offset = whole.storage_offset() + begin * whole.stride(1)
            size = (whole.shape[0], half)
            part.meta = {"val": whole.as_strided(size, whole.stride(), offset)}
            factors.append(part)
    return (a, *factors, *rest)


def _seen(graph: fx.Graph, node: fx.Node, view: View) -> fx.Node:
    """A view of a node, in the graph."""
    import torch

    aten = torch.ops.aten
    value = value_of(node)
    if tuple(value.shape) != view.sizes:
        node = graph.call_function(aten.reshape.default, (node, list(view.sizes)))
        node.meta = {"val": value.view(view.sizes)}
    if view.transposed:
        node = graph.call_function(aten.permute.default, (node, [1, 0]))
        node.meta = {"val": view.of(value)}
    return node


def as_matrix(value: torch.Tensor, rows: Any) -> torch.Tensor:
    """A contiguous tensor as `rows` rows."""
    columns = value.shape[-1]
    return value.as_strided((rows, columns), (columns, 1), value.storage_offset())


def become(node: fx.Node, target: Any, arguments: tuple[Any, ...]) -> None:
    """Let a node call something else. Its users, name and metadata stay."""
    node.target = target
    node.args = arguments
    node.kwargs = {}


def hoist(anchor: fx.Node, inputs: Iterable[fx.Node], order: Mapping[fx.Node, int]) -> None:
    """Move what inputs are computed from before a node, in the order that they have."""
    for node in sorted(later(anchor, inputs, order), key=order.__getitem__):
        anchor.prepend(node)


def later(anchor: fx.Node, inputs: Iterable[fx.Node], order: Mapping[fx.Node, int]) -> set[fx.Node]:
    """The nodes from `anchor` on that inputs are computed from, themselves included."""
    found: set[fx.Node] = set()
    pending = list(inputs)
    while pending:
        node = pending.pop()
        if node not in found and order[node] >= order[anchor]:
            found.add(node)
            pending.extend(node.all_input_nodes)
    return found
