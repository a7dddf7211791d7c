"""Stores the masks of attention once, and no dimension along which they repeat.

A mask to which a model adds a bias has one matrix per sequence and head, also if all sequences have
the same. Attention reads a dimension of size 1 with stride 0.

A model passes one mask to all layers, but AOTAutograd decomposes each call on its own: the
conversion of a boolean mask, the addition of a bias and the padding of rows are in the graph once
per layer. Inductor computes these equal values in one kernel, so that all of them are live until
the last layer has read its own. In training, AOTAutograd merges equal operators itself.

Only masks are merged. To merge other values may keep them live for longer than a second
computation takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inductor_ext.lowerings.graph.cleanup import erase_unused, is_pure
from inductor_ext.lowerings.graph.fx_nodes import (
    add_call,
    is_read_by_strides,
    is_returned,
    is_view_operator,
    shape,
)
from inductor_ext.lowerings.graph.matmul_nodes import call_arguments
from inductor_ext.lowerings.graph.repeated_values import add_without_repeats, find_repeated_dims

if TYPE_CHECKING:
    import torch
    from torch import fx


def share_masks(graph: fx.Graph) -> None:
    """Let calls of attention whose masks are equal read one mask, without repeated dimensions.

    Args:
        graph: a graph of ATen operators, before any of them is made in-place: a mask that is
            overwritten later would not be equal to the others.
    """
    masks = _find_masks(graph)
    if not masks:
        return
    _store_repeated_dims_once(graph, masks)
    masks = _find_masks(graph)
    if len(masks) < 2:
        return
    first = _number_values(graph)
    for call, mask in masks.items():
        shared = first.get(mask, mask)
        if shared is not mask:
            call.replace_input_with(mask, shared)
            erase_unused(mask)
            _realize(shared)


def _find_masks(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return the mask of each call of attention that has one."""
    return {node: mask for node in graph.nodes if (mask := _find_mask(node)) is not None}


def _find_mask(node: fx.Node) -> fx.Node | None:
    """Return the mask that a call of attention adds to its scores."""
    import torch

    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return None
    if "scaled_dot_product" not in target._schema.name:
        return None
    arguments = call_arguments(node)
    mask: fx.Node | None = arguments.get("attn_mask") or arguments.get("attn_bias")
    return mask


def _store_repeated_dims_once(graph: fx.Graph, masks: dict[fx.Node, fx.Node]) -> None:
    """Store size 1 of a mask along dimensions of sequences and heads in which its values repeat.

    Only for the operator whose mask Inductor passes with strides of 0: for the others, it would
    copy the mask. Rows and columns are stored as they are: the kernel loads several values of a row
    at once.
    """
    import torch

    aten = torch.ops.aten
    repeated = find_repeated_dims(graph)
    for call, mask in masks.items():
        if call.target is not aten._scaled_dot_product_efficient_attention.default:
            continue
        ndim = len(shape(mask))
        dims = {dim for dim in repeated.get(mask, ()) if dim < ndim - 2}
        # A view that repeats a smaller tensor needs no other.
        is_stored = _skip_view_operators(mask) in repeated
        if not (dims and is_stored) or is_returned(mask):
            continue
        with graph.inserting_before(call):
            compact = add_without_repeats(graph, mask, frozenset(dim - ndim for dim in dims))
            sizes = [_add_size(graph, mask, dim) if dim in dims else -1 for dim in range(ndim)]
            expanded = add_call(graph, mask, aten.expand.default, compact, sizes)
        call.replace_input_with(mask, expanded)
        _realize(expanded)


def _add_size(graph: fx.Graph, node: fx.Node, dim: int) -> int | fx.Node:
    import torch

    size = node.meta["val"].shape[dim]
    if isinstance(size, int):
        return size
    return add_call(graph, node, torch.ops.aten.sym_size.int, node, dim)


def _number_values(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return for every call without side effects the first call that computes the same value."""
    import torch

    first: dict[fx.Node, fx.Node] = {}
    by_key: dict[object, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if is_pure(node):
            first[node] = by_key.setdefault(_make_key(node, first), node)
        elif not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
            # What is read from here on may have other values than before.
            by_key.clear()
    return first


def _make_key(node: fx.Node, first: dict[fx.Node, fx.Node]) -> object:
    """Return a key that is equal for calls of one operator with equal arguments.

    A node's "custom" metadata names its stream: a value must not be read on another stream.
    """
    from torch import fx
    from torch.utils._pytree import tree_flatten

    leaves, structure = tree_flatten((node.args, node.kwargs))
    arguments = tuple(
        first.get(leaf, leaf) if isinstance(leaf, fx.Node) else (type(leaf), repr(leaf))
        for leaf in leaves
    )
    return node.target, arguments, str(structure), repr(node.meta.get("custom"))


def _realize(mask: fx.Node) -> None:
    """Make Inductor store a mask once, in a layout that attention reads without a copy.

    Inductor would otherwise copy it for each call, which requires a dense last dimension: a
    permuted bias gives the mask its strides.
    """
    import torch

    stored = _skip_view_operators(mask)
    value: Any = stored.meta.get("val")
    if stored.op != "call_function" or not isinstance(value, torch.Tensor):
        return
    if not (is_returned(stored) or is_read_by_strides(stored)):
        contiguous = torch.empty_like(value, memory_format=torch.contiguous_format)
        _set_value(stored, contiguous)
    stored.meta["inductor_realize_to_strides"] = True


def _skip_view_operators(node: fx.Node) -> fx.Node:
    while is_view_operator(node):
        node = node.all_input_nodes[0]
    return node


def _set_value(node: fx.Node, value: torch.Tensor) -> None:
    """Set the value of a node, with other strides than before, and the values of its views."""
    from torch import fx

    node.meta["val"] = value
    for user in filter(is_view_operator, node.users):
        view: Any = user.target
        args, kwargs = fx.node.map_arg((user.args, user.kwargs), lambda n: n.meta["val"])
        _set_value(user, view(*args, **kwargs))
