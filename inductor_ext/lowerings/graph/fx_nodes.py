"""Properties of FX nodes: views, casts, shapes, and how results are read."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import sympy  # type: ignore[import-untyped]

if TYPE_CHECKING:
    import torch
    from torch import fx


class Unreadable(Exception):
    """A node that cannot be part of a formula."""


def is_view(node: fx.Node) -> bool:
    """Whether a node is a reshape and nothing else."""
    import torch

    aten = torch.ops.aten
    return node.target in (aten.reshape.default, aten.view.default, aten._unsafe_view.default)


def skip_views(node: fx.Node) -> fx.Node:
    """Return the node behind all views."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def skip_views_and_casts(node: fx.Node) -> fx.Node:
    """Return the node behind all views and casts."""
    while is_view(node) or is_cast(node):
        node = node.all_input_nodes[0]
    return node


def is_returned(node: fx.Node) -> bool:
    """Whether the graph returns a node's result, or a view of it."""
    return any(
        user.op == "output" or (_is_part_or_view(user) and is_returned(user)) for user in node.users
    )


def is_read_by_strides(node: fx.Node) -> bool:
    """Whether a node, or a view of it, is read by memory offset (`as_strided`), which requires the
    layout that the graph states.
    """
    import torch

    return any(
        user.target is torch.ops.aten.as_strided.default
        or (_is_part_or_view(user) and is_read_by_strides(user))
        for user in node.users
    )


def is_view_operator(node: fx.Node) -> bool:
    """Whether a node's operator returns a view of its operand, by its schema."""
    return getattr(node.target, "is_view", False)


def _is_part_or_view(node: fx.Node) -> bool:
    part = node.target is operator.getitem or is_view_operator(node)
    return part or is_view(node)


def is_cast(node: fx.Node) -> bool:
    """Whether a node casts between dtypes that kernels compute in float32."""
    import torch

    if node.target is not torch.ops.prims.convert_element_type.default:
        return False
    return all(
        is_computed_in_float32(operand.meta["val"]) for operand in (node, *node.all_input_nodes)
    )


def is_computed_in_float32(value: torch.Tensor) -> bool:
    """Whether a tensor has one of the dtypes that kernels compute in float32."""
    import torch

    return value.dtype in (torch.float32, torch.bfloat16, torch.float16)


def shape(node: fx.Node) -> tuple[Any, ...]:
    """Return the sizes of a node's tensor: ints, and sympy expressions for symbolic sizes.

    Raises:
        Unreadable: the node is not a tensor.
    """
    value: Any = node.meta.get("val")
    if not hasattr(value, "shape"):
        raise Unreadable
    return tuple(map(size_expr, value.shape))


def size_expr(size: Any) -> Any:
    """Return a size, stride or offset as an int, or as a sympy expression if it is symbolic."""
    return size if isinstance(size, int) else size.node.expr


def size_2d(node: fx.Node) -> tuple[Any, Any]:
    """Return the numbers of rows and columns of a node's tensor; all dimensions but the last are
    rows.

    Raises:
        Unreadable: the node is not a tensor.
    """
    *rows, columns = shape(node) or (1,)
    return sympy.expand(sympy.prod(rows)), columns


def is_contiguous(node: fx.Node) -> bool:
    """Whether a node's tensor is contiguous for all values of its symbolic sizes."""
    expected = sympy.Integer(1)
    sizes = shape(node)
    strides = map(size_expr, reversed(node.meta["val"].stride()))
    for size, stride in zip(reversed(sizes), strides, strict=True):
        if size != 1 and sympy.expand(stride - expected) != 0:
            return False
        expected *= size
    return True


def add_call(graph: fx.Graph, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Add a call of an operator, with its value and the other metadata of the node `like`."""
    from torch import fx

    added = graph.call_function(target, args, kwargs)
    values: Any = fx.node.map_arg((args, kwargs), lambda node: node.meta["val"])
    added.meta = {**like.meta, "val": target(*values[0], **values[1])}
    return added
