"""What Inductor will fuse behind a product, as far as it tells in the choice of a kernel.

The scheduler fuses pointwise code that reads a template's output into the template, with the
tensors that it reads besides, as long as sizes agree. `with_epilogue` counts it in advance, and
stops early rather than late: at a value that several readers outside need, at whatever is not
pointwise and at views that move elements.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any

from inductor_ext.lowerings.graph import matmul_nodes
from inductor_ext.lowerings.graph.formula import (
    Unreadable,
    flat,
    is_cast,
    is_contiguous,
    is_view,
    shape,
)
from inductor_ext.lowerings.graph.fusion import as_matrix, become, is_written_between
from inductor_ext.templates.problem import EpilogueInput, GemmProblem

if TYPE_CHECKING:
    from torch import fx

__all__ = [
    "as_rows",
    "counted",
    "flatten",
    "is_computed",
    "is_read_by_inductor",
    "region",
    "spread",
    "with_epilogue",
]

MOST_NODES = 64
"""Of one epilogue."""


def with_epilogue(
    node: fx.Node, problem: GemmProblem, hints: matmul_nodes.Hints | None = None
) -> GemmProblem:
    """A problem with the pointwise operations that follow it in the graph, if those would be a
    kernel.

    They would not where a kernel of Inductor's reads them, as a norm does behind a residual: that
    computes them on the way, whatever the product is computed by, and the product alone is what is
    compared.

    Args:
        node: a product, or the only output of a fusion.
        problem: of the node.
        hints: as of `problems.problem_of`.
    """
    nodes = region(node)
    if is_read_by_inductor(nodes[-1]):
        return problem
    return counted(nodes, problem, hints) or problem


def is_computed(node: fx.Node) -> bool:
    """Whether a value comes from pointwise operations, which whatever reads it could compute."""
    import torch

    while is_view(node):
        node = node.all_input_nodes[0]
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def is_read_by_inductor(node: fx.Node, without: Container[fx.Node] = ()) -> bool:
    """Whether a kernel that Inductor makes reads a value or a view of it.

    Args:
        node: the value.
        without: nodes of another kernel.
    """
    import torch

    made = {torch.Tag.pointwise, torch.Tag.reduction}
    return any(
        is_read_by_inductor(user, without)
        if getattr(user.target, "is_view", False)
        else not made.isdisjoint(getattr(user.target, "tags", ()))
        for user in node.users
        if user not in without
    )


def counted(
    nodes: Sequence[fx.Node], problem: GemmProblem, hints: matmul_nodes.Hints | None = None
) -> GemmProblem | None:
    """A problem with the pointwise operations of a region; None where no problem describes them.

    Args:
        nodes: a product, or the only output of a fusion, and what follows it.
        problem: of the first node.
        hints: as of `problems.problem_of`.
    """
    if len(nodes) == 1:
        return problem
    epilogue = problem.epilogue
    try:
        inputs = _inputs(nodes, hints)
        out = matmul_nodes.dtype_of(matmul_nodes.value_of(nodes[-1]))
    except matmul_nodes.NotCovered:
        return None
    operations = sum(_cost(each) for each in nodes[1:])
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
    """Cheap operations that a pointwise node takes as long as."""
    if is_view(node) or is_cast(node) or _widens_sums(node):
        return 0
    target: Any = node.target
    return _COSTS.get(getattr(target, "overloadpacket", target).__name__, 1)


def _widens_sums(node: fx.Node) -> bool:
    """Whether a node is the cast of sums of integers, written by some and left out by others who
    multiply these by floats.
    """
    import torch

    if node.target is not torch.ops.prims.convert_element_type.default:
        return False
    (given,) = node.all_input_nodes
    return given.target is torch.ops.aten._int_mm.default


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
"""By the name of an operator: instructions of what CUDA's library makes of it, about."""


def region(
    node: fx.Node, without: Container[fx.Node] = (), own: Sequence[fx.Node] = ()
) -> list[fx.Node]:
    """A node and the longest run of pointwise ones behind it of which only the last is used, and
    which can be computed in the place of the last.

    Args:
        node: a product, or the only output of a fusion.
        without: what does not belong to it.
        own: what the node is computed by, if that is to be computed in the same place.
    """
    size = flat(node)
    nodes, found = [node], 1
    while len(nodes) < MOST_NODES:
        users = {user for each in nodes for user in each.users} - set(nodes)
        # The first of them is computed from nothing else that comes from the region.
        following = min(users, default=None)
        if following is None or following in without or not _is_fused(following, size, nodes):
            break
        if is_written_between((*own, *nodes, following)):
            break
        nodes.append(following)
        if all(set(each.users) <= set(nodes) for each in nodes[:-1]):
            found = len(nodes)
    return nodes[:found]


def spread(node: fx.Node) -> list[fx.Node]:
    """A node and all pointwise ones behind it that can be computed with it, whoever uses them.

    Nothing outside of them that they read is computed from them.

    Args:
        node: a product, or the only output of a fusion.
    """
    size = flat(node)
    nodes, found, behind = [node], {node}, set[Any]()
    each = node.next
    while each.op != "output" and len(nodes) < MOST_NODES:
        inputs = set(each.all_input_nodes)
        if inputs & (found | behind):
            if (
                inputs.isdisjoint(behind)
                and _is_fused(each, size, found)
                and not is_written_between((*nodes, each))
            ):
                nodes.append(each)
                found.add(each)
            else:
                behind.add(each)
        each = each.next
    return nodes


def _is_fused(node: fx.Node, size: tuple[Any, Any], before: Container[fx.Node]) -> bool:
    import torch

    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    try:
        return (pointwise or is_view(node)) and flat(node) == size and _flattens(node, before)
    except Unreadable:
        return False


def _flattens(node: fx.Node, before: Container[fx.Node]) -> bool:
    """Whether a node could be computed on [rows, columns]."""
    return is_view(node) or all(
        shape(each) == shape(node) if each in before else _sizes_as_rows(each, node) is not None
        for each in node.all_input_nodes
    )


def _sizes_as_rows(given: fx.Node, node: fx.Node) -> Sequence[Any] | None:
    """The sizes of an input of a node for when the node is computed on [rows, columns].

    Returns:
        None if it has no such form; its own sizes if it may stay as it is.
    """
    import torch

    if not isinstance(given.meta.get("val"), torch.Tensor):
        return ()
    own, size = shape(node), shape(given)
    if len(own) <= 2 or len(size) <= 1:
        return size
    if math.prod(size[:-1]) == 1:
        return 1, size[-1]
    dense = size[:-1] == own[:-1] and is_contiguous(given)
    return (-1, size[-1]) if dense else None


def flatten(graph: fx.Graph, node: fx.Node) -> None:
    """Compute what follows a product on [rows, columns], as the product is.

    For [batch, sequence, columns] the scheduler of torch 2.11 fuses nothing into a template that
    writes [batch * sequence, columns].

    Args:
        graph: the node's.
        node: a product, or the only output of a fusion, of two dimensions.
    """
    nodes = region(node)
    last = nodes[-1]
    if all(is_view(each) or len(shape(each)) == 2 for each in nodes):
        return
    copies = {node: node}
    with graph.inserting_before(last):
        for each in nodes[1:]:
            if is_view(each):
                copies[each] = copies[each.all_input_nodes[0]]
                continue
            for given in each.all_input_nodes:
                if given not in copies:
                    copies[given] = as_rows(graph, given, each)
            copies[each] = graph.node_copy(each, copies.__getitem__)
            value = each.meta["val"].new_empty(node.meta["val"].shape)
            copies[each].meta = {**each.meta, "val": value}
    # The node stays, which others may know.
    view = (
        last if is_view(last) else next(n for n in nodes if is_view(n) and shape(n) == shape(last))
    )
    become(last, view.target, (copies[last], view.args[1]))
    for each in reversed(nodes[1:-1]):
        graph.erase_node(each)


def as_rows(graph: fx.Graph, given: fx.Node, node: fx.Node) -> fx.Node:
    """An input of a node of a region, in the sizes that it has where the node is computed on
    [rows, columns].
    """
    import torch

    sizes = _sizes_as_rows(given, node)
    if not sizes or len(sizes) == len(given.meta["val"].shape):
        return given
    value = given.meta["val"]
    rows = 1 if sizes[0] == 1 else math.prod(value.shape[:-1])
    found = graph.call_function(torch.ops.aten.reshape.default, (given, list(sizes)))
    found.meta["val"] = as_matrix(value, rows)
    return found


def _inputs(
    region: Sequence[fx.Node], hints: matmul_nodes.Hints | None
) -> tuple[EpilogueInput, ...]:
    """What the nodes of a region read besides its first, each tensor once."""
    import torch

    found: dict[fx.Node, EpilogueInput] = {}
    for node in region[1:]:
        output = matmul_nodes.sizes(matmul_nodes.value_of(node).shape, hints)
        for given in node.all_input_nodes:
            if given in region or not isinstance(given.meta.get("val"), torch.Tensor):
                continue
            kind = matmul_nodes.broadcast(matmul_nodes.value_of(given), output, hints)
            while is_view(given) or is_cast(given):
                # Casts are computed where they are read.
                given = given.all_input_nodes[0]
            found.setdefault(given, EpilogueInput(matmul_nodes.dtype_of(given.meta["val"]), kind))
    return tuple(found.values())
