"""Products of one input by frozen weights, as one product by all of the weights side by side.

Under Inductor's `freezing` weights are constants of the graph. Those of Q, K and V, or of a gate
and what it gates, are then joined once, while compiling, and one product with as many columns as
all of them takes the place of theirs, whose results are its columns. Many small products leave a
GPU idle at the end of each, a large one once; the kernel of several weights (`patterns`) does the
same for weights that may change, but has to look up whose tile it computes.

torch 2.13 joins two or three weights of equal K itself, torch 2.11 only those of equal sizes: what
is left is joined here, when freezing has ended and Inductor has not yet looked for the graph in its
cache, to which frozen constants are known by their names and sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import fx

from inductor_ext import numerics
from inductor_ext.lowerings.graph.formula import call, is_read_by_strides, is_returned
from inductor_ext.lowerings.graph.matmul_nodes import inputs
from inductor_ext.settings import Settings

__all__ = ["is_covered", "join", "run"]

aten = torch.ops.aten


def is_covered(value: torch.Tensor) -> bool:
    """Whether products with results like `value` are joined: those on a GPU."""
    return value.device.type == "cuda"


def run(gm: fx.GraphModule, settings: Settings) -> None:
    """Join the weights of a frozen graph, which `inner_compile` is about to be given.

    What is joined is a new constant of `gm`; the parts are none any more, and are freed with the
    model's parameters if nothing else holds them (Inductor's `freezing_discard_parameters`).
    """
    from torch._inductor import config, freezing_utils
    from torch._inductor.constant_folding import constant_fold

    if not (config.freezing and freezing_utils.has_frozen_params(gm)):
        return
    if numerics.gemm_obstacle() is not None:
        return
    if settings.gemm_templates and settings.gemm_fuse_shared_input and join(gm.graph):
        with freezing_utils.enter_freezing():
            constant_fold(gm)


def join(graph: fx.Graph) -> int:
    """Replace products of one input by constants, in groups, each by one product and its slices.

    The factors and biases that are then needed are written as operators on constants, for
    `constant_fold`. Products whose results are returned stay: what is returned has to be
    contiguous, and columns of a larger result would have to be copied. So do those whose results
    are read by their places in memory.

    Args:
        graph: of operators before lowering, with values in their metadata. Constants are
            `get_attr`.

    Returns:
        How many products have been replaced.
    """
    groups: dict[Hashable, list[fx.Node]] = {}
    for node in graph.nodes:
        kept = is_returned(node) or is_read_by_strides(node)
        if _is_joinable(node) and not kept:
            groups.setdefault(_kind(node), []).append(node)
    joined = [group for group in groups.values() if len(group) > 1]
    for group in joined:
        _join(graph, group)
    return sum(map(len, joined))


def _is_joinable(node: fx.Node) -> bool:
    if node.target not in (aten.mm.default, aten.addmm.default) or node.kwargs:
        return False
    a, b, *biases = inputs(node)
    known = all("val" in each.meta for each in (node, a, b, *biases))
    if not known or a.op == "get_attr" or not is_covered(node.meta["val"]):
        return False
    columns = node.meta["val"].shape[1:]
    # A constant with other users would be held besides.
    constant = all(each.op == "get_attr" and len(each.users) == 1 for each in (b, *biases))
    return constant and all(each.meta["val"].shape == columns for each in biases)


def _kind(node: fx.Node) -> Hashable:
    """What products have in common that can be one."""
    a, b, *_ = inputs(node)
    weight = b.meta["val"]
    return node.target, a, weight.dtype, weight.stride(0) == 1


def _join(graph: fx.Graph, products: Sequence[fx.Node]) -> None:
    first = products[0]
    a, b, *_ = inputs(first)
    weights, *biases = zip(*(inputs(each)[1:] for each in products), strict=True)
    with graph.inserting_before(first):
        for constant in itertools.chain(weights, *biases):
            first.prepend(constant)
        if b.meta["val"].stride(0) == 1:
            # Rows in memory, as a linear layer's are: columns of the factor.
            rows = [call(graph, first, aten.permute.default, each, [1, 0]) for each in weights]
            whole = call(graph, first, aten.cat.default, rows)
            whole = call(graph, first, aten.permute.default, whole, [1, 0])
        else:
            whole = call(graph, first, aten.cat.default, list(weights), 1)
        added = [call(graph, first, aten.cat.default, list(each), -1) for each in biases]
        product = call(graph, first, first.target, *added, a, whole)
        for part, (begin, end) in zip(products, _spans(products), strict=True):
            columns = call(graph, part, aten.slice.Tensor, product, 1, begin, end)
            part.replace_all_uses_with(columns)
    for part in products:
        graph.erase_node(part)


def _spans(products: Sequence[fx.Node]) -> Iterator[tuple[int, int]]:
    """Of each product, its first column of the whole and the one behind its last."""
    ends = list(itertools.accumulate(each.meta["val"].shape[1] for each in products))
    return itertools.pairwise([0, *ends])
