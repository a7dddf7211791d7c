"""Restoration of the matmuls that Inductor has replaced by `aten._weight_int8pack_mm`.

Inductor matches a bfloat16 matmul with converted int8 weights and columnwise scales, as torchao
emits it. The replacement is good on CPUs, but its CUDA kernel uses one thread per output element,
which reads the weights uncoalesced. Converting the weights in a separate kernel and calling cuBLAS
is faster with any number of rows, and an extension kernel can do both. So the matmuls are restored
without tuning too. Measured on an H200 for N = 14336 and K = 4096, in us: 283 (M = 1), 2137 (16)
and 260657 (2048) for the replacement, 191, 193 and 523 for eager mode, which converts and calls
cuBLAS (`benchmarks/results/gemm`, "int8 torchao").
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from inductor_ext import numerics
from inductor_ext.lowerings.graph.fx_nodes import add_call

aten = torch.ops.aten


def restore_matmuls(graph: fx.Graph) -> None:
    """Expand every replaced matmul on a CUDA device into convert, matmul and scale.

    Args:
        graph: after Inductor's post-grad passes. It is not changed under
            `numerics.has_exact_pointwise`, because an extension kernel would not round the matmul
            result before scaling it.
    """
    if numerics.has_exact_pointwise():
        return
    for node in list(graph.nodes):
        if _is_int8pack_mm(node):
            _restore_matmul(graph, node)


def _is_int8pack_mm(node: fx.Node) -> bool:
    # Inductor replaces the operator by the lowering itself, bound to the pattern match.
    target: Any = node.target
    if node.op != "call_function" or not isinstance(target, functools.partial):
        return False
    if getattr(target.func, "__name__", "") != "woq_int8":
        return False
    if not {"x", "weight", "scales"} <= node.kwargs.keys():
        return False
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.device.type == "cuda"


def _restore_matmul(graph: fx.Graph, node: fx.Node) -> None:
    x, weight, scales = (node.kwargs[name] for name in ("x", "weight", "scales"))
    assert isinstance(x, fx.Node)
    assert isinstance(weight, fx.Node)
    value: torch.Tensor = x.meta["val"]
    n, k = weight.meta["val"].shape

    make = functools.partial(add_call, graph, node)
    with graph.inserting_before(node):
        flat = x if value.dim() == 2 else make(aten.reshape.default, x, [-1, k])
        wide = make(torch.ops.prims.convert_element_type.default, weight, value.dtype)
        matmul = make(aten.mm.default, flat, make(aten.permute.default, wide, [1, 0]))
        result = make(aten.mul.Tensor, matmul, scales)
        if node.meta["val"].dim() != 2:
            result = make(aten.reshape.default, result, _shape(node, n))
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _shape(node: fx.Node, n: int) -> Any:
    """Return the sizes of a result with more than two dimensions: ints and nodes.

    Inductor's pattern match leaves the constants as arguments. They begin with x's own sizes if the
    matmul was a bmm, and end with the sizes of the result if it was an mm.
    """
    first: Any = node.args[0]
    if isinstance(first, (list, tuple)) and len(first) == 3:
        return [*first[:-1], n]
    return node.args[-1]
