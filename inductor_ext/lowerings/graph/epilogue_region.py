"""Prediction of the epilogue that Inductor will fuse into a matmul, for the choice of a kernel.

The scheduler fuses pointwise nodes that read a template's output into the template, with the other
tensors that they read, if sizes agree. `add_epilogue` adds them to the problem in advance. It is
conservative and stops at a value with several outside readers, at any non-pointwise node, and at
views that move elements.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any

from inductor_ext.lowerings.graph.fusion import is_written_between
from inductor_ext.lowerings.graph.fx_nodes import (
    Unreadable,
    is_cast,
    is_contiguous,
    is_view,
    shape,
    size_2d,
    skip_views,
    skip_views_and_casts,
)
from inductor_ext.lowerings.graph.matmul_nodes import (
    Hints,
    NotCovered,
    broadcast_kind,
    concrete_sizes,
    dtype_of,
    value_of,
)
from inductor_ext.lowerings.graph.rewrite import as_matrix, replace_call
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import EpilogueInput

if TYPE_CHECKING:
    from torch import fx

MOST_NODES = 64
"""Limit on the nodes of one epilogue."""


def add_epilogue(node: fx.Node, problem: GemmProblem, hints: Hints | None = None) -> GemmProblem:
    """Return a problem with the pointwise operations that follow it in the graph, if they would
    form a kernel.

    They would not if an Inductor kernel reads them, as a norm reads a residual: that kernel
    computes them in its prologue whichever kernel computes the matmul, so only the matmul is
    compared.

    Args:
        node: a matmul, or the only output of a fusion.
        problem: of the node.
        hints: as in `matmul_nodes.problem_of`.
    """
    nodes = find_region(node)
    if is_read_by_inductor(nodes[-1]):
        return problem
    return count_epilogue_ops(nodes, problem, hints) or problem


def is_computed(node: fx.Node) -> bool:
    """Whether a value is pointwise, so that any reader could compute it in its prologue."""
    import torch

    return torch.Tag.pointwise in getattr(skip_views(node).target, "tags", ())


def is_read_by_inductor(node: fx.Node, without: Container[fx.Node] = ()) -> bool:
    """Whether a kernel that Inductor generates reads a value or a view of it.

    Args:
        node: the value.
        without: readers to ignore, which belong to another kernel.
    """
    import torch

    generated = {torch.Tag.pointwise, torch.Tag.reduction}
    return any(
        is_read_by_inductor(user, without)
        if getattr(user.target, "is_view", False)
        else not generated.isdisjoint(getattr(user.target, "tags", ()))
        for user in node.users
        if user not in without
    )


def count_epilogue_ops(
    nodes: Sequence[fx.Node], problem: GemmProblem, hints: Hints | None = None
) -> GemmProblem | None:
    """Return a problem with the pointwise operations of a region; None if no problem describes
    them.

    Args:
        nodes: a matmul, or the only output of a fusion, and its epilogue.
        problem: of the first node.
        hints: as in `matmul_nodes.problem_of`.
    """
    if len(nodes) == 1:
        return problem
    epilogue = problem.epilogue
    try:
        inputs = _region_inputs(nodes, hints)
        out = dtype_of(value_of(nodes[-1]))
    except NotCovered:
        return None
    operations = sum(_cost(node) for node in nodes[1:])
    return dataclasses.replace(
        problem,
        epilogue=dataclasses.replace(
            epilogue,
            inputs=(*epilogue.inputs, *inputs),
            pointwise=epilogue.pointwise + operations,
            out=out if out != problem.out else epilogue.out,
        ),
    )


def _cost(node: fx.Node) -> int:
    """Return the cost of a pointwise node, in cheap operations."""
    if is_view(node) or is_cast(node) or _widens_sums(node):
        return 0
    target: Any = node.target
    return _COSTS.get(getattr(target, "overloadpacket", target).__name__, 1)


def _widens_sums(node: fx.Node) -> bool:
    """Whether a node casts the int32 result of an int8 matmul. Some models write this cast, others
    leave it out when they multiply the result by floats.
    """
    import torch

    if node.target is not torch.ops.prims.convert_element_type.default:
        return False
    (source,) = node.all_input_nodes
    return source.target is torch.ops.aten._int_mm.default


_COSTS = {
    "div": 4,
    "erf": 20,
    "exp": 6,
    "gelu": 24,
    "log": 6,
    "reciprocal": 4,
    "rsqrt": 4,
    "sigmoid": 8,
    "silu": 9,
    "sqrt": 4,
    "tanh": 16,
}
"""Approximate number of instructions of CUDA's implementation, by operator name."""


def find_region(
    node: fx.Node, without: Container[fx.Node] = (), producers: Sequence[fx.Node] = ()
) -> list[fx.Node]:
    """Return a node and the longest run of pointwise nodes after it of which only the last has
    outside users, and which can be computed at the position of the last.

    Args:
        node: a matmul, or the only output of a fusion.
        without: nodes that do not belong to the region.
        producers: the nodes that compute `node`, if they are to be computed at the same position.
    """
    size = size_2d(node)
    nodes, end = [node], 1
    while len(nodes) < MOST_NODES:
        users = {user for node in nodes for user in node.users} - set(nodes)
        # The first user depends on no other node after the region.
        following = min(users, default=None)
        if following is None or following in without or not _is_fused(following, size, nodes):
            break
        if is_written_between((*producers, *nodes, following)):
            break
        nodes.append(following)
        if all(set(node.users) <= set(nodes) for node in nodes[:-1]):
            end = len(nodes)
    return nodes[:end]


def reachable_pointwise(node: fx.Node) -> list[fx.Node]:
    """Return a node and all pointwise nodes after it that can be computed with it, whatever their
    users.

    No outside value that they read is computed from them.

    Args:
        node: a matmul, or the only output of a fusion.
    """
    size = size_2d(node)
    nodes, reached, blocked = [node], {node}, set[Any]()
    current = node.next
    while current.op != "output" and len(nodes) < MOST_NODES:
        inputs = set(current.all_input_nodes)
        if inputs & (reached | blocked):
            if (
                inputs.isdisjoint(blocked)
                and _is_fused(current, size, reached)
                and not is_written_between((*nodes, current))
            ):
                nodes.append(current)
                reached.add(current)
            else:
                blocked.add(current)
        current = current.next
    return nodes


def _is_fused(node: fx.Node, size: tuple[Any, Any], before: Container[fx.Node]) -> bool:
    import torch

    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    try:
        return (
            (pointwise or is_view(node)) and size_2d(node) == size and _has_row_views(node, before)
        )
    except Unreadable:
        return False


def _has_row_views(node: fx.Node, before: Container[fx.Node]) -> bool:
    """Whether a node could be computed on [rows, columns]."""
    return is_view(node) or all(
        shape(source) == shape(node)
        if source in before
        else _sizes_as_rows(source, node) is not None
        for source in node.all_input_nodes
    )


def _sizes_as_rows(source: fx.Node, node: fx.Node) -> Sequence[Any] | None:
    """Return the sizes of an input of a node for computing the node on [rows, columns].

    Returns:
        None if the input has no such view; its own sizes if it can stay as it is.
    """
    import torch

    if not isinstance(source.meta.get("val"), torch.Tensor):
        return ()
    output_sizes, size = shape(node), shape(source)
    if len(output_sizes) <= 2 or len(size) <= 1:
        return size
    if math.prod(size[:-1]) == 1:
        return 1, size[-1]
    dense = size[:-1] == output_sizes[:-1] and is_contiguous(source)
    return (-1, size[-1]) if dense else None


def flatten_epilogue(graph: fx.Graph, node: fx.Node) -> None:
    """Compute the epilogue of a matmul on [rows, columns], the shape of the matmul.

    The scheduler of torch 2.11 does not fuse nodes of [batch, sequence, columns] into a template
    that writes [batch * sequence, columns].

    Args:
        graph: of the node.
        node: a matmul, or the only output of a fusion, with two dimensions.
    """
    nodes = find_region(node)
    last = nodes[-1]
    if all(is_view(node) or len(shape(node)) == 2 for node in nodes):
        return
    copies = {node: node}
    with graph.inserting_before(last):
        for member in nodes[1:]:
            if is_view(member):
                copies[member] = copies[member.all_input_nodes[0]]
                continue
            for source in member.all_input_nodes:
                if source not in copies:
                    copies[source] = view_as_rows(graph, source, member)
            copies[member] = graph.node_copy(member, copies.__getitem__)
            value = member.meta["val"].new_empty(node.meta["val"].shape)
            copies[member].meta = {**member.meta, "val": value}
    # Keep the last node itself, which others may refer to.
    view = (
        last if is_view(last) else next(n for n in nodes if is_view(n) and shape(n) == shape(last))
    )
    replace_call(last, view.target, (copies[last], view.args[1]))
    for member in reversed(nodes[1:-1]):
        graph.erase_node(member)


def view_as_rows(graph: fx.Graph, source: fx.Node, node: fx.Node) -> fx.Node:
    """Return an input of a region's node as a view for computing the node on [rows, columns]."""
    import torch

    sizes = _sizes_as_rows(source, node)
    if not sizes or len(sizes) == len(source.meta["val"].shape):
        return source
    value = source.meta["val"]
    rows = 1 if sizes[0] == 1 else math.prod(value.shape[:-1])
    view = graph.call_function(torch.ops.aten.reshape.default, (source, list(sizes)))
    view.meta["val"] = as_matrix(value, rows)
    return view


def _region_inputs(region: Sequence[fx.Node], hints: Hints | None) -> tuple[EpilogueInput, ...]:
    """Return the tensors that a region reads besides its first node, each once."""
    import torch

    inputs: dict[fx.Node, EpilogueInput] = {}
    for node in region[1:]:
        output = concrete_sizes(value_of(node).shape, hints)
        for source in node.all_input_nodes:
            if source in region or not isinstance(source.meta.get("val"), torch.Tensor):
                continue
            kind = broadcast_kind(value_of(source), output, hints)
            # Casts are computed by the reader.
            source = skip_views_and_casts(source)
            inputs.setdefault(source, EpilogueInput(dtype_of(source.meta["val"]), kind))
    return tuple(inputs.values())
