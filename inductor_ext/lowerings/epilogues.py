"""What Inductor will fuse behind a product, as far as it tells in the choice of a kernel.

The scheduler fuses pointwise code that reads a template's output into the template, with the
tensors that it reads besides, as long as sizes agree. `with_epilogue` counts it in advance, and
stops early rather than late: at a value that several readers outside need, at whatever is not
pointwise and at views that move elements.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from inductor_ext.lowerings import problems
from inductor_ext.lowerings.expressions import Unreadable, flat, is_cast, is_view
from inductor_ext.templates.problem import EpilogueInput, GemmProblem

if TYPE_CHECKING:
    from torch import fx

__all__ = ["region", "with_epilogue"]

MOST_NODES = 64
"""Of one epilogue."""


def with_epilogue(
    node: fx.Node, problem: GemmProblem, hints: problems.Hints | None = None
) -> GemmProblem:
    """A problem with the pointwise operations that follow it in the graph.

    Args:
        node: a product, or the only output of a fusion.
        problem: of the node.
        hints: as of `problems.problem_of`.
    """
    nodes = region(node)
    if len(nodes) == 1:
        return problem
    epilogue = problem.epilogue
    try:
        inputs = _inputs(nodes, hints)
        out = problems.dtype_of(problems.value_of(nodes[-1]))
    except problems.NotCovered:
        return problem
    operations = sum(not (is_view(each) or is_cast(each)) for each in nodes[1:])
    return dataclasses.replace(
        problem,
        epilogue=dataclasses.replace(
            epilogue,
            inputs=(*epilogue.inputs, *inputs),
            pointwise=epilogue.pointwise + operations,
            out=out if out != problem.out else epilogue.out,
        ),
    )


def region(node: fx.Node) -> list[fx.Node]:
    """A node and the longest run of pointwise ones behind it of which only the last is used."""
    size = flat(node)
    nodes, found = [node], 1
    while len(nodes) < MOST_NODES:
        users = {user for each in nodes for user in each.users} - set(nodes)
        # The first of them is computed from nothing else that comes from the region.
        following = min(users, default=None)
        if following is None or not _is_fused(following, size):
            break
        nodes.append(following)
        if all(set(each.users) <= set(nodes) for each in nodes[:-1]):
            found = len(nodes)
    return nodes[:found]


def _is_fused(node: fx.Node, size: tuple[Any, Any]) -> bool:
    import torch

    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    try:
        return (pointwise or is_view(node)) and flat(node) == size
    except Unreadable:
        return False


def _inputs(region: list[fx.Node], hints: problems.Hints | None) -> tuple[EpilogueInput, ...]:
    """What the nodes of a region read besides its first, each tensor once."""
    import torch

    found: dict[fx.Node, EpilogueInput] = {}
    for node in region[1:]:
        output = problems.sizes(problems.value_of(node).shape, hints)
        for given in node.all_input_nodes:
            if given in region or not isinstance(given.meta.get("val"), torch.Tensor):
                continue
            kind = problems.broadcast(problems.value_of(given), output, hints)
            while is_view(given) or is_cast(given):
                # Casts are computed where they are read.
                given = given.all_input_nodes[0]
            found.setdefault(given, EpilogueInput(problems.dtype_of(given.meta["val"]), kind))
    return tuple(found.values())
