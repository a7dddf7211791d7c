"""Finds dimensions along which all values of a tensor are equal, from the operators of a graph.

A broadcast addition of a bias to a mask has the size of both, but repeats along each dimension that
neither of them has. Such a tensor can be stored with size 1 there, and read with stride 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inductor_ext.lowerings.graph.cleanup import is_pure
from inductor_ext.lowerings.graph.fx_nodes import Unreadable, add_call, shape
from inductor_ext.lowerings.graph.matmul_nodes import call_arguments
from inductor_ext.lowerings.graph.operator_kinds import is_pointwise

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import fx


def find_repeated_dims(graph: fx.Graph) -> dict[fx.Node, frozenset[int]]:
    """Return for each tensor the dimensions along which it repeats; tensors without are left out.

    Dimensions count from 0, and their sizes are not 1. A dimension that is left out may repeat all
    the same: few operators are known.
    """
    repeated: dict[fx.Node, frozenset[int]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and is_pure(node):
            try:
                sizes = shape(node)
                found = _repeated_of(node, sizes, repeated)
            except Unreadable:
                continue
            if dims := frozenset(dim for dim in found if sizes[dim] != 1):
                repeated[node] = dims
    return repeated


def add_without_repeats(graph: fx.Graph, node: fx.Node, dims: frozenset[int]) -> fx.Node:
    """Add what computes a tensor with size 1 along dimensions in which it repeats.

    The operators are applied to operands of size 1, as far as they are known, so that the tensor
    of the full size need not be computed.

    Args:
        graph: its insertion point is behind the node.
        node: a tensor.
        dims: dimensions along which the tensor repeats, counted from the last (-1). Those that it
            does not have count as size 1.
    """
    import torch
    from torch import fx

    sizes = shape(node)
    dims = frozenset(dim for dim in dims if dim >= -len(sizes) and sizes[dim] != 1)
    if not dims:
        return node
    aten = torch.ops.aten
    target: Any = node.target
    args: Any
    kwargs: Any
    if is_pointwise(node):
        args, kwargs = fx.node.map_arg(
            (node.args, node.kwargs),
            lambda operand: (
                add_without_repeats(graph, operand, dims) if _is_tensor(operand) else operand
            ),
        )
        return add_call(graph, node, target, *args, **kwargs)
    arguments = call_arguments(node)
    if target is aten.expand.default:
        lengths = enumerate(arguments["size"], start=-len(sizes))
        args = (node.args[0], [1 if dim in dims else length for dim, length in lengths])
    elif target is aten.constant_pad_nd.default or (
        target is aten.slice.Tensor and arguments["dim"] % len(sizes) - len(sizes) not in dims
    ):
        args = node.args
    else:
        for dim in dims:
            node = add_call(graph, node, aten.slice.Tensor, node, dim, 0, 1)
        return node
    operand, *rest = args
    operand = add_without_repeats(graph, operand, dims)
    return add_call(graph, node, target, operand, *rest, **node.kwargs)


def _repeated_of(
    node: fx.Node, sizes: tuple[Any, ...], repeated: dict[fx.Node, frozenset[int]]
) -> Iterator[int]:
    """Yield the dimensions along which a node repeats, dimensions of size 1 among them."""
    import torch

    aten = torch.ops.aten
    operator = node.target
    if not isinstance(operator, torch._ops.OpOverload):
        return
    if operator in (aten.full.default, aten.full_like.default, aten.scalar_tensor.default):
        yield from range(len(sizes))
    elif operator is aten.expand.default or is_pointwise(node):
        operands = [operand for operand in node.all_input_nodes if _is_tensor(operand)]
        yield from (
            dim
            for dim in range(len(sizes))
            if all(_repeats(operand, dim - len(sizes), repeated) for operand in operands)
        )
    elif (origins := _origins(node, len(sizes))) is not None:
        (operand,) = filter(_is_tensor, node.all_input_nodes)
        yield from (
            dim
            for dim, origin in enumerate(origins)
            if origin is not None and _repeats(operand, origin, repeated)
        )


def _origins(node: fx.Node, ndim: int) -> list[int | None] | None:
    """Return for each dimension of the result the dimension of the operand that it is, counted from
    the last (-1), and None for one that differs; None for an operator that is not known.
    """
    import torch

    aten = torch.ops.aten
    arguments = call_arguments(node)
    same: list[int | None] = list(range(-ndim, 0))
    if node.target is aten.slice.Tensor:
        return same
    if node.target is aten.permute.default:
        return [dim % ndim - ndim for dim in arguments["dims"]]
    if node.target is aten.unsqueeze.default:
        dim = arguments["dim"] % ndim
        return [*range(1 - ndim, dim + 1 - ndim), None, *same[dim + 1 :]]
    if node.target is aten.select.int:
        dim = arguments["dim"] % (ndim + 1)
        return [*range(-ndim - 1, dim - ndim - 1), *same[dim:]]
    if node.target is aten.constant_pad_nd.default:
        pad = arguments["pad"]
        padded = {-1 - index // 2 for index, amount in enumerate(pad) if amount != 0}
        return [None if dim in padded else dim for dim in same]
    return None


def _is_tensor(node: fx.Node) -> bool:
    import torch

    return isinstance(node.meta.get("val"), torch.Tensor)


def _repeats(operand: fx.Node, dim: int, repeated: dict[fx.Node, frozenset[int]]) -> bool:
    """Whether an operand repeats along a dimension of the result that it is broadcast to.

    Args:
        operand: a tensor.
        dim: the dimension, counted from the last (-1).
        repeated: see `find_repeated_dims`.
    """
    sizes = shape(operand)
    position = dim + len(sizes)
    return position < 0 or sizes[position] == 1 or position in repeated.get(operand, ())
