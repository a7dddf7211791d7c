"""Dispatch over M buckets for a matmul with dynamic M.

The matmul, with what is fused into it, moves into branches of nested `torch.cond`s on M, one branch
for each range of M that has its own kernel. The generated code (Python, C++ and AOT packages)
compares M before each launch. The values of M come from `gemm_rows`.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

from inductor_ext.lowerings.graph.rewrite import hoist, replace_call

MSource = tuple[fx.Node, tuple[int, ...]]
"""A tensor, and its axes whose sizes multiply to M."""

Range = tuple[int, Callable[[fx.GraphModule], None]]
"""The largest M of a range, ignored for the last range, and a function that is called with the
range's branch."""


def dispatch_on_m(
    gm: fx.GraphModule,
    region: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    m_source: MSource,
    ranges: Sequence[Range],
) -> None:
    """Replace nodes by a dispatch to copies of them.

    Args:
        gm: the graph; it is not recompiled.
        region: the matmul and what is fused with it, in graph order.
        outputs: the nodes of the region that are used outside.
        m_source: what M is computed from.
        ranges: two or more, ascending.
    """
    inside = set(region)
    inputs = dict.fromkeys(source for node in region for source in node.all_input_nodes)
    outer = {inp: inp for inp in inputs if inp not in inside}
    outer |= {symbol: symbol for symbol in _find_symbols(gm.graph, region, outer)}
    anchor = min(outputs)
    hoist(anchor, outer)
    with gm.graph.inserting_before(anchor):
        outer = {source: _freeze_strides(gm.graph, source) for source in outer}
        results = _dispatch(gm, gm.graph, outer, region, outputs, m_source, ranges)
    for output, result in zip(outputs, results, strict=True):
        # Keep the node itself, which may be an input of another fusion.
        replace_call(output, result.target, result.args)
        gm.graph.erase_node(result)
    for node in reversed(region):
        if node not in outputs:
            gm.graph.erase_node(node)


def _freeze_strides(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Add a call that fixes the strides of a branch's input if the graph computes that input."""
    if node.op != "call_function" or not isinstance(node.meta["val"], torch.Tensor):
        return node
    frozen = graph.call_function(in_strides, (node,))
    frozen.meta["val"] = node.meta["val"]
    return frozen


def in_strides(value: Any) -> Any:
    """Lower a call that freezes a tensor to the strides of the graph.

    Inductor decides strides as late as possible, and a concatenation may turn the buffers of its
    inputs into slices of its own. The strides of a branch's inputs must be decided before the
    branch is lowered.
    """
    from torch._inductor.ir import ExternKernel
    from torch._inductor.virtualized import V

    return ExternKernel.require_exact_strides(value, V.current_node.meta["val"].stride())


in_strides._inductor_lowering_function = True  # type: ignore[attr-defined]


def _find_symbols(
    graph: fx.Graph, region: Sequence[fx.Node], inputs: Iterable[fx.Node]
) -> list[fx.Node]:
    """Return nodes for the symbols, in a region's sizes and scalars, that a branch could not get
    from its inputs.

    A branch knows a symbol that is the size of an input, but not one that only occurs in an
    expression.
    """
    from torch.fx.experimental.symbolic_shapes import free_symbols

    nodes = list(inputs)
    symbols = free_symbols([node.meta["val"] for node in (*nodes, *region)])
    symbols -= {size for node in nodes for size in _sizes(node)}
    nodes_of: dict[sympy.Symbol, fx.Node] = {}
    placeholders = graph.find_nodes(op="placeholder")
    # The first node with the symbol is an input, or defines the symbol.
    for node in [node for node in graph.nodes if node not in region]:
        value = node.meta.get("val")
        for axis, symbol in enumerate(_sizes(node)):
            if symbol not in symbols or symbol in nodes_of:
                continue
            nodes_of[symbol] = node
            if isinstance(value, torch.Tensor):
                last = placeholders[-1] if node.op == "placeholder" else node
                with graph.inserting_after(last):
                    nodes_of[symbol] = graph.call_function(
                        torch.ops.aten.sym_size.int, (node, axis)
                    )
                size: Any = value.shape[axis]
                shape_env = size.node.shape_env
                nodes_of[symbol].meta["val"] = shape_env.create_symintnode(
                    symbol, hint=size.node.hint
                )
    return list(nodes_of.values())


def _sizes(node: fx.Node) -> list[sympy.Expr]:
    """Return the sizes of a tensor, or a symbolic scalar, as sympy expressions; empty for anything
    else.
    """
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return [sympy.sympify(size) for size in value.shape]
    if not isinstance(value, (torch.SymInt, torch.SymFloat)):
        return []
    # An input keeps its original symbol even if it was later found equal to another one.
    return [value.node._expr if node.op == "placeholder" else value.node.expr]


Inputs = Mapping[fx.Node, fx.Node]
"""The nodes that a region reads, and the node for each in the current graph."""


def _dispatch(
    gm: fx.GraphModule,
    graph: fx.Graph,
    inputs: Inputs,
    region: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    m_source: MSource,
    ranges: Sequence[Range],
) -> list[fx.Node]:
    """Add the choice between the first range and the others to a graph; return the outputs."""
    size = _add_m(graph, inputs, m_source)
    condition = graph.call_function(operator.le, (size, ranges[0][0]))
    condition.meta["val"] = size.meta["val"] <= ranges[0][0]
    branches = []
    for part in (ranges[:1], ranges[1:]):
        name = _free_name(gm)
        setattr(gm, name, _branch(inputs, region, outputs, m_source, part))
        branches.append(graph.get_attr(name))
    operands = tuple(inputs.values())
    choice = graph.call_function(torch.ops.higher_order.cond, (condition, *branches, operands))
    choice.meta["val"] = tuple(output.meta["val"] for output in outputs)
    results = []
    for index, output in enumerate(outputs):
        result = graph.call_function(operator.getitem, (choice, index))
        result.meta["val"] = output.meta["val"]
        results.append(result)
    return results


def _add_m(graph: fx.Graph, inputs: Inputs, m_source: MSource) -> fx.Node:
    """Add M to a graph."""
    a, axes = m_source
    sizes: list[fx.Node] = []
    for axis in axes:
        sizes.append(graph.call_function(torch.ops.aten.sym_size.int, (inputs[a], axis)))
        sizes[-1].meta["val"] = a.meta["val"].shape[axis]
    while len(sizes) > 1:
        pair = sizes.pop(), sizes.pop()
        sizes.append(graph.call_function(operator.mul, pair))
        sizes[-1].meta["val"] = pair[0].meta["val"] * pair[1].meta["val"]
    return sizes[0]


def _free_name(gm: fx.GraphModule) -> str:
    names = (f"inductor_ext_rows_{number}" for number in itertools.count())
    return next(name for name in names if not hasattr(gm, name))


def _branch(
    inputs: Inputs,
    region: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    m_source: MSource,
    ranges: Sequence[Range],
) -> fx.GraphModule:
    """Return the graph of one range, or of the remaining ranges."""
    graph = fx.Graph()
    branch = fx.GraphModule({}, graph)
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        # A symbol that a node defines outside is an input of the branch.
        copies[node].meta = {
            name: value for name, value in node.meta.items() if name != "unbacked_bindings"
        }
    if len(ranges) > 1:
        results = _dispatch(branch, graph, copies, region, outputs, m_source, ranges)
        graph.output(tuple(results))
    else:
        for node in region:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[output] for output in outputs))
        ranges[0][1](branch)
    branch.recompile()
    return branch
