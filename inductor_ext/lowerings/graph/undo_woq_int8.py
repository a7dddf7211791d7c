"""Products with int8 weights that stock has replaced, given back as the products that they were.

Stock's passes know a product of bfloat16 with converted int8 weights, scaled by columns, as torchao
emits it, and make it `aten._weight_int8pack_mm`: good on CPUs, but on CUDA one thread for each
element of the output, which reads the weights unaligned with its neighbours. Converting the weights
in a kernel of its own and multiplying by the library is faster, and a kernel of ours can do both.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from inductor_ext import numerics
from inductor_ext.lowerings.graph.formula import call

__all__ = ["restore"]

aten = torch.ops.aten


def restore(graph: fx.Graph) -> None:
    """Write out every replaced product on a CUDA device: convert, multiply, scale.

    Args:
        graph: after stock's last passes. It stays as it is under `numerics.has_exact_pointwise`: a
            kernel of ours would not round the product before it scales it.
    """
    if numerics.has_exact_pointwise():
        return
    for node in list(graph.nodes):
        if _replaced(node):
            _restore(graph, node)


def _replaced(node: fx.Node) -> bool:
    # Stock leaves the lowering itself in the place of an operator, bound to what it has matched.
    target: Any = node.target
    if node.op != "call_function" or not isinstance(target, functools.partial):
        return False
    if getattr(target.func, "__name__", "") != "woq_int8":
        return False
    if not {"x", "weight", "scales"} <= node.kwargs.keys():
        return False
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.device.type == "cuda"


def _restore(graph: fx.Graph, node: fx.Node) -> None:
    x, weight, scales = (node.kwargs[name] for name in ("x", "weight", "scales"))
    assert isinstance(x, fx.Node)
    assert isinstance(weight, fx.Node)
    given: torch.Tensor = x.meta["val"]
    columns, depth = weight.meta["val"].shape

    make = functools.partial(call, graph, node)
    with graph.inserting_before(node):
        flat = x if given.dim() == 2 else make(aten.reshape.default, x, [-1, depth])
        wide = make(torch.ops.prims.convert_element_type.default, weight, given.dtype)
        product = make(aten.mm.default, flat, make(aten.permute.default, wide, [1, 0]))
        result = make(aten.mul.Tensor, product, scales)
        if node.meta["val"].dim() != 2:
            result = make(aten.reshape.default, result, _shape(node, columns))
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _shape(node: fx.Node, columns: int) -> Any:
    """The sizes of a result of more than two dimensions: numbers and nodes.

    Of what stock has matched, the constants are left as arguments. They begin with x's own sizes
    where the product was a batch of them, and end with the result's where it was one.
    """
    first: Any = node.args[0]
    if isinstance(first, (list, tuple)) and len(first) == 3:
        return [*first[:-1], columns]
    return node.args[-1]
