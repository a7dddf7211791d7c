"""Places in a graph that a CUTLASS kernel can take: a product with pointwise nodes behind it.

`readings` gives what such a kernel could do there, all that can be fused first and the product by
itself last; `apply` replaces the nodes of one of them by one call. Sizes but for the number of rows
have to be known, as what a kernel takes for granted (alignment) is to hold for all sizes.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inductor_ext.lowerings.graph import cutlass_epilogue, epilogue_region, matmul_nodes
from inductor_ext.lowerings.graph.cutlass_epilogue import Fused
from inductor_ext.lowerings.graph.formula import is_view, shape
from inductor_ext.lowerings.graph.fusion import (
    Fusion,
    as_matrix,
    become,
    call_inputs,
    hoist,
    is_written_between,
)
from inductor_ext.templates.cutlass.evt import NotExpressible, obstacle
from inductor_ext.templates.problem import Epilogue, GemmProblem

if TYPE_CHECKING:
    import torch
    from torch import fx

__all__ = ["Reading", "apply", "readings"]


@dataclass(frozen=True)
class Reading:
    """What one CUTLASS kernel can do at a place."""

    nodes: tuple[fx.Node, ...]
    """The product, or what a fusion gives, and the pointwise nodes behind it, in order."""
    outputs: tuple[fx.Node, ...]
    """Those that are used outside; the kernel's own output first."""
    fused: Fused
    fusion: Fusion | None
    """Of a b that is dequantised."""
    own: bool
    """Whether nothing is fused, and what follows is left to other kernels."""

    @property
    def replaced(self) -> tuple[fx.Node, ...]:
        """All nodes that the kernel takes the place of."""
        inside = self.fusion.nodes if self.fusion is not None else ()
        return tuple(dict.fromkeys((*inside, *self.nodes)))

    @property
    def epilogue_nodes(self) -> int:
        """Tensors that are stored, and are computed from the product."""
        return sum(_is_computed(each, self.nodes[0]) for each in self.outputs)

    def told(self, problem: GemmProblem) -> GemmProblem:
        """A problem of the place as that of a kernel with this tree.

        Args:
            problem: with all of the epilogue.
        """
        tree = self.fused.epilogue
        if self.own:
            epilogue = dataclasses.replace(problem.epilogue, tree=tree.text)
            return dataclasses.replace(problem, epilogue=epilogue)
        inputs = {
            given: behind
            for given, each in zip(self.fused.inputs, tree.inputs, strict=True)
            if (behind := each.behind) is not None
        }
        operations = tree.operations
        if problem.prologue is not None and problem.prologue.scales_product:
            # They belong to the prologue.
            assert self.fusion is not None
            del inputs[self.fusion.inputs[2]]
            operations -= 1
        out = tree.outputs[0][0]
        epilogue = Epilogue(
            tuple(inputs.values()), operations, out if out != problem.out else None, tree=tree.text
        )
        return dataclasses.replace(problem, epilogue=epilogue)


def _is_computed(node: fx.Node, product: fx.Node) -> bool:
    while is_view(node) and node is not product:
        node = node.all_input_nodes[0]
    return node is not product


def readings(
    node: fx.Node, problem: GemmProblem, fusion: Fusion | None = None, *, fuses: bool = True
) -> Iterator[Reading]:
    """What CUTLASS kernels could do at a place, most of it first.

    Args:
        node: a product, or the only output of a fusion.
        problem: of the node, with all of the epilogue or without.
        fusion: where b is dequantised.
        fuses: whether anything but the product itself is asked for.
    """
    if problem.parts or (fusion is not None and problem.operation != "mixed"):
        return
    whole = epilogue_region.spread(node) if fuses else [node]
    needed = set(_used_outside(whole))
    for end in range(len(whole), 0, -1):
        nodes = whole[:end]
        if fusion is not None and is_written_between((*fusion.nodes, *nodes)):
            continue
        outputs = _used_outside(nodes)
        if len(outputs) > 1 and not needed.issuperset(outputs):
            # What is only on the way to something else is not stored besides.
            continue
        try:
            fused = cutlass_epilogue.read(nodes, outputs, None, fusion)
        except NotExpressible:
            continue
        grouped = problem.operation == "grouped"
        if obstacle(fused.epilogue, problem.accumulator, grouped) is None:
            yield Reading(tuple(nodes), fused.outputs, fused, fusion, len(nodes) == 1)


def _used_outside(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    inside = set(nodes)
    return [each for each in nodes if not set(each.users) <= inside]


def apply(
    graph: fx.Graph, reading: Reading, target: Callable[..., Any]
) -> tuple[fx.Node, dict[str, Any]]:
    """Replace the nodes of a place by one call.

    The call gets a, b, where the groups of a grouped product end, what the epilogue reads, and the
    numbers of it that only a call knows. Its value is what it stores, several as a tuple; of a
    product of two dimensions each is [M, N]. The outputs stay the nodes that they are, with their
    metadata.

    Args:
        graph: the one that was read.
        reading: one of `readings`, of the graph as it is.
        target: a function for Inductor, with the attribute `_inductor_lowering_function`.

    Returns:
        The call, and what it has to be told besides: `epilogue`; how many `inputs` there are;
        `ends`, whether there are groups; and `scalars`, with None for those that are arguments.
    """
    import torch

    product, fused = reading.nodes[0], reading.fused
    order = {node: index for index, node in enumerate(graph.nodes)}
    anchor = min(reading.outputs, key=order.__getitem__)
    numbers = [each for each in fused.scalars if hasattr(each, "meta")]
    factors = _factors(product)
    if reading.fusion is not None:
        hoist(anchor, (*reading.fusion.inputs, *fused.inputs, *numbers), order)  # type: ignore[arg-type]
    else:
        hoist(anchor, (*factors, *fused.inputs, *numbers), order)  # type: ignore[arg-type]
    flat = [_flat(each, product) for each in reading.outputs]
    views = {each: _sizes(each, reading) for each in reading.outputs}
    with graph.inserting_before(anchor):
        if reading.fusion is not None:
            factors = list(call_inputs(graph, reading.fusion, product)[:2])
        inputs = [_shaped(graph, each, reading) for each in fused.inputs]
        arguments = (*factors, *inputs, *numbers)
        if len(flat) == 1 and views[anchor] is None:
            call = anchor
            become(call, target, arguments)
        else:
            call = graph.call_function(target, arguments)
            call.meta = dict(product.meta)
    call.meta["val"] = flat[0] if len(flat) == 1 else tuple(flat)
    call.meta.pop("eager_input_vals", None)
    for index, (output, value) in enumerate(zip(reading.outputs, flat, strict=True)):
        part = call
        if len(flat) > 1:
            with graph.inserting_before(output):
                part = graph.call_function(operator.getitem, (call, index))
            part.meta = {**output.meta, "val": value}
        sizes = views[output]
        if sizes is not None:
            output.meta["val"] = value.new_empty(output.meta["val"].shape)
            become(output, torch.ops.aten.reshape.default, (part, sizes))
        elif len(flat) > 1:
            output.meta["val"] = value
            become(output, operator.getitem, part.args)
            graph.erase_node(part)
    for node in reversed(reading.replaced):
        if node not in reading.outputs:
            graph.erase_node(node)
    options = {
        "epilogue": fused.epilogue,
        "inputs": len(inputs),
        "ends": len(factors) == 3,
        "scalars": tuple(None if each in numbers else each for each in fused.scalars),
    }
    return call, options


def _factors(product: fx.Node) -> list[Any]:
    """a and b of a product, and where its groups end."""
    given = matmul_nodes.call_arguments(product)
    for names in (("mat1", "mat2"), ("batch1", "batch2"), ("self", "mat2")):
        if all(name in given for name in names):
            break
    ends = [given["offs"]] if given.get("offs") is not None else []
    return [*(given[name] for name in names), *ends]


def _flat(output: fx.Node, product: fx.Node) -> torch.Tensor:
    """What an output is in the sizes, and with the strides, of its product."""
    like: torch.Tensor = product.meta["val"]
    found: torch.Tensor = output.meta["val"]
    return like.new_empty_strided(like.shape, like.stride(), dtype=found.dtype)


def _sizes(output: fx.Node, reading: Reading) -> list[Any] | None:
    """The sizes that an output has as a view of its matrix; None where it is the matrix."""
    product = reading.nodes[0]
    if shape(output) == shape(product):
        return None
    view: Any = next(
        node for node in reading.nodes if is_view(node) and shape(node)[:-1] == shape(output)[:-1]
    )
    return [*view.args[1][:-1], shape(output)[-1]]


def _shaped(graph: fx.Graph, given: fx.Node, reading: Reading) -> fx.Node:
    """An input of the epilogue in the sizes that it has beside the product."""
    import torch

    view = reading.fused.views.get(given)
    value: torch.Tensor = matmul_nodes.value_of(given)
    if view is not None:
        sizes: Sequence[Any] = view.sizes
        value = view.of(value)
    elif reading.nodes[0].meta["val"].dim() == 2 and value.dim() > 2:
        sizes = (-1, value.shape[-1])
        value = as_matrix(value, value.numel() // value.shape[-1])
    else:
        return given
    found = graph.call_function(torch.ops.aten.reshape.default, (given, list(sizes)))
    found.meta = {"val": value}
    return found
