"""Concatenation of the frozen weights of matmuls with the same input.

With Inductor's `freezing` weights are constants of the graph. The weights of Q, K and V, or of a
gate and up projection, are concatenated once at compile time, and one matmul with all their columns
replaces the separate ones, whose results become slices. Each small matmul leaves part of the GPU
idle at its end; one large matmul does so once. The fused kernel of `match_shared_input` does the
same for weights that may change, but each tile has to look up its weight.

torch 2.13 itself concatenates two or three weights with equal K, torch 2.11 only weights of equal
sizes. This pass handles the rest, after freezing and before Inductor looks up the graph in its
cache, whose key contains the names and sizes of frozen constants. Settings: `gemm_templates` and
`gemm_fuse_shared_input`.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import fx

from inductor_ext import numerics
from inductor_ext.lowerings.graph.fx_nodes import add_call, is_read_by_strides, is_returned
from inductor_ext.lowerings.graph.matmul_nodes import matmul_operands
from inductor_ext.settings import Settings

aten = torch.ops.aten


def is_covered(value: torch.Tensor) -> bool:
    """Whether matmuls with results like `value` are concatenated: those on a GPU."""
    return value.device.type == "cuda"


def concat_frozen_weights(gm: fx.GraphModule, settings: Settings) -> None:
    """Concatenate the weights of a frozen graph, just before `inner_compile` gets it.

    The concatenated weight is a new constant of `gm`. The separate weights are no longer constants
    and are freed with the model's parameters if nothing else references them (Inductor's
    `freezing_discard_parameters`).
    """
    from torch._inductor import config, freezing_utils
    from torch._inductor.constant_folding import constant_fold

    if not (config.freezing and freezing_utils.has_frozen_params(gm)):
        return
    if numerics.gemm_obstacle() is not None:
        return
    if settings.gemm_templates and settings.gemm_fuse_shared_input and concat_matmuls(gm.graph):
        with freezing_utils.enter_freezing():
            constant_fold(gm)


def concat_matmuls(graph: fx.Graph) -> int:
    """Replace each group of matmuls of one input by constants with one matmul and its slices.

    The concatenated weights and biases are written as operators on constants, for `constant_fold`.
    Matmuls whose results are returned are kept: a result must be contiguous, and a slice of columns
    would have to be copied. So are matmuls whose results are read by memory offset.

    Args:
        graph: before lowering, with values in the metadata. Constants are `get_attr`.

    Returns:
        The number of matmuls that were replaced.
    """
    groups: dict[Hashable, list[fx.Node]] = {}
    for node in graph.nodes:
        is_exposed = is_returned(node) or is_read_by_strides(node)
        if _is_joinable(node) and not is_exposed:
            groups.setdefault(_group_key(node), []).append(node)
    joined = [group for group in groups.values() if len(group) > 1]
    for group in joined:
        _concat_group(graph, group)
    return sum(map(len, joined))


def _is_joinable(node: fx.Node) -> bool:
    if node.target not in (aten.mm.default, aten.addmm.default) or node.kwargs:
        return False
    a, b, *biases = matmul_operands(node)
    has_values = all("val" in bias.meta for bias in (node, a, b, *biases))
    if not has_values or a.op == "get_attr" or not is_covered(node.meta["val"]):
        return False
    columns = node.meta["val"].shape[1:]
    # A constant with other users would stay in memory in addition.
    constant = all(bias.op == "get_attr" and len(bias.users) == 1 for bias in (b, *biases))
    return constant and all(bias.meta["val"].shape == columns for bias in biases)


def _group_key(node: fx.Node) -> Hashable:
    """Return what matmuls that can be concatenated must have in common."""
    a, b, *_ = matmul_operands(node)
    weight = b.meta["val"]
    return node.target, a, weight.dtype, weight.stride(0) == 1


def _concat_group(graph: fx.Graph, matmuls: Sequence[fx.Node]) -> None:
    first = matmuls[0]
    a, b, *_ = matmul_operands(first)
    weights, *biases = zip(*(matmul_operands(matmul)[1:] for matmul in matmuls), strict=True)
    with graph.inserting_before(first):
        for constant in itertools.chain(weights, *biases):
            first.prepend(constant)
        if b.meta["val"].stride(0) == 1:
            # The weight is stored by rows, [N, K], as that of a linear layer; concatenate along N.
            rows = [
                add_call(graph, first, aten.permute.default, weight, [1, 0]) for weight in weights
            ]
            whole = add_call(graph, first, aten.cat.default, rows)
            whole = add_call(graph, first, aten.permute.default, whole, [1, 0])
        else:
            whole = add_call(graph, first, aten.cat.default, list(weights), 1)
        added = [add_call(graph, first, aten.cat.default, list(bias), -1) for bias in biases]
        matmul = add_call(graph, first, first.target, *added, a, whole)
        for part, (begin, end) in zip(matmuls, _column_ranges(matmuls), strict=True):
            columns = add_call(graph, part, aten.slice.Tensor, matmul, 1, begin, end)
            part.replace_all_uses_with(columns)
    for part in matmuls:
        graph.erase_node(part)


def _column_ranges(matmuls: Sequence[fx.Node]) -> Iterator[tuple[int, int]]:
    """Yield for each matmul its first column in the concatenation and the one after its last."""
    ends = list(itertools.accumulate(matmul.meta["val"].shape[1] for matmul in matmuls))
    return itertools.pairwise([0, *ends])
