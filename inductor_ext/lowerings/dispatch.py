"""Several kernels for one product whose number of rows is known only at run time.

The product, with what is fused into it, moves into the branches of `torch.cond`s on that number:
one branch for each range of sizes that has a kernel of its own. The generated code then compares
before each launch, in Python, in C++ and in artifacts.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import fx

__all__ = ["Range", "by_rows"]

Range = tuple[int, Callable[[fx.Node], None]]
"""The largest number of rows, which the last range has no use for; and what is to be done to the
product's node in the range's branch."""


def by_rows(
    gm: fx.GraphModule, region: Sequence[fx.Node], a: fx.Node, ranges: Sequence[Range]
) -> None:
    """Replace nodes by a dispatch to copies of them.

    Args:
        gm: the graph; it is not recompiled.
        region: the product and then what is fused into it, in the graph's order; only the last of
            them is used outside.
        a: the product's first factor, [rows, K].
        ranges: two or more, ascending.
    """
    inside, last = set(region), region[-1]
    inputs = dict.fromkeys(each for node in region for each in node.all_input_nodes)
    outer = {each: each for each in inputs if each not in inside}
    with gm.graph.inserting_before(last):
        result = _dispatch(gm, gm.graph, outer, region, a, ranges)
    result.meta = {**last.meta}
    last.replace_all_uses_with(result)
    for node in reversed(region):
        gm.graph.erase_node(node)


Inputs = Mapping[fx.Node, fx.Node]
"""The nodes that a region reads, and what stands for each in the graph at hand."""


def _dispatch(
    gm: fx.GraphModule,
    graph: fx.Graph,
    inputs: Inputs,
    region: Sequence[fx.Node],
    a: fx.Node,
    ranges: Sequence[Range],
) -> fx.Node:
    """Add to a graph the choice between the first range and the others; returns the output."""
    rows = graph.call_function(torch.ops.aten.sym_size.int, (inputs[a], 0))
    rows.meta["val"] = a.meta["val"].shape[0]
    few = graph.call_function(operator.le, (rows, ranges[0][0]))
    few.meta["val"] = rows.meta["val"] <= ranges[0][0]
    branches = []
    for part in (ranges[:1], ranges[1:]):
        name = _free_name(gm)
        setattr(gm, name, _branch(inputs, region, a, part))
        branches.append(graph.get_attr(name))
    operands = tuple(inputs.values())
    choice = graph.call_function(torch.ops.higher_order.cond, (few, *branches, operands))
    choice.meta["val"] = (region[-1].meta["val"],)
    result = graph.call_function(operator.getitem, (choice, 0))
    result.meta["val"] = region[-1].meta["val"]
    return result


def _free_name(gm: fx.GraphModule) -> str:
    names = (f"inductor_ext_rows_{number}" for number in itertools.count())
    return next(name for name in names if not hasattr(gm, name))


def _branch(
    inputs: Inputs, region: Sequence[fx.Node], a: fx.Node, ranges: Sequence[Range]
) -> fx.GraphModule:
    """The graph of one range, or of what is left of them."""
    graph = fx.Graph()
    branch = fx.GraphModule({}, graph)
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = {**node.meta}
    if len(ranges) > 1:
        result = _dispatch(branch, graph, copies, region, a, ranges)
    else:
        for node in region:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        ranges[0][1](copies[region[0]])
        result = copies[region[-1]]
    graph.output((result,))
    branch.recompile()
    return branch
