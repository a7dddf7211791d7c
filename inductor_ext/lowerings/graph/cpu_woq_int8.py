"""Matmuls with int8 weights and few rows on a CPU, in the form that Inductor replaces.

Inductor replaces a bfloat16 matmul with converted int8 weights and columnwise scales by
`aten._weight_int8pack_mm`, which reads the weights as int8. It finds the matmul if the weight is
transposed and then converted, but not in `F.linear(x, weight.to(x.dtype)) * scales` for an x with
two dimensions. There the weight is converted first, and each call writes it in bfloat16.

`transpose_before_conversion` exchanges the two operators, which changes neither a value nor a
stride of the converted weight. It runs before Inductor's patterns. With many rows a bfloat16 matmul
of oneDNN is faster, so that nothing is changed.
"""

from __future__ import annotations

import torch
from torch import fx

from inductor_ext import numerics
from inductor_ext.lowerings.graph.fx_nodes import add_call

aten = torch.ops.aten
_convert = torch.ops.prims.convert_element_type.default

MAX_ROWS = 16
"""Largest M that is changed [measured for N = K = 4096 on two cores with AVX512_BF16, in ms: 7.9
instead of 31.9 for 1 row, 12.0 instead of 25.3 for 16, and 32.0 instead of 29.0 for 128]."""


def transpose_before_conversion(graph: fx.Graph) -> None:
    """Let Inductor's pattern match matmuls of converted int8 weights.

    Args:
        graph: before Inductor's post-grad passes. It is not changed where extension kernels must
            not be used (`numerics.gemm_obstacle`), nor under `numerics.has_exact_pointwise`: the
            operator does not round the matmul's result before scaling it.
    """
    if numerics.gemm_obstacle() is not None or numerics.has_exact_pointwise():
        return
    for matmul in graph.find_nodes(op="call_function", target=aten.mm.default):
        if _is_candidate(matmul):
            _exchange(graph, matmul)


def _is_candidate(matmul: fx.Node) -> bool:
    x, transposed = matmul.args
    assert isinstance(x, fx.Node)
    assert isinstance(transposed, fx.Node)
    if transposed.target is not aten.permute.default or len(transposed.users) != 1:
        return False
    converted = transposed.args[0]
    assert isinstance(converted, fx.Node)
    if converted.target is not _convert or len(converted.users) != 1:
        return False
    weight = converted.args[0]
    assert isinstance(weight, fx.Node)
    value, columns = weight.meta["val"], matmul.meta["val"].shape[1]
    if value.dtype != torch.int8 or value.device.type != "cpu":
        return False
    rows = x.meta["val"].shape[0]
    is_bf16 = x.meta["val"].dtype == torch.bfloat16
    return is_bf16 and isinstance(rows, int) and rows <= MAX_ROWS and _is_scaled(matmul, columns)


def _is_scaled(matmul: fx.Node, columns: object) -> bool:
    """Whether a matmul's result is only multiplied by one bfloat16 scale for each column."""
    if len(matmul.users) != 1:
        return False
    (scaled,) = matmul.users
    if scaled.target is not aten.mul.Tensor or scaled.args[0] is not matmul:
        return False
    scales = scaled.args[1]
    if not isinstance(scales, fx.Node):
        return False
    value = scales.meta["val"]
    return value.dtype == torch.bfloat16 and bool(value.dim() == 1 and value.shape[0] == columns)


def _exchange(graph: fx.Graph, matmul: fx.Node) -> None:
    transposed = matmul.args[1]
    assert isinstance(transposed, fx.Node)
    converted = transposed.args[0]
    assert isinstance(converted, fx.Node)
    with graph.inserting_before(matmul):
        first = add_call(graph, transposed, aten.permute.default, converted.args[0], [1, 0])
        second = add_call(graph, converted, _convert, first, torch.bfloat16)
    matmul.replace_input_with(transposed, second)
    graph.erase_node(transposed)
    graph.erase_node(converted)
