"""Matching of matmuls with a B that is dequantized in the graph (weight-only quantization).

`find_dequantized_matmuls` describes each for one kernel (`gemm_fuse_dequantize`). It covers what
torchao 0.18 and others compile weight-only models to:

- bytes: mm(a, w.to(a.dtype)) with columnwise scales after the matmul, which are fused like any
  epilogue (torchao's int8 weights with scales per row of the weight), or with columnwise or
  tensorwise scales before the matmul (float8 weights);
- bytes in groups along K: (w - zero) * scale, in A's dtype or in float32 (torchao's int8 weights
  with groups, and its intx weights of up to 8 bits, which it stores in bytes);
- two 4-bit values, adjacent along K, per byte, in either order, signed or not, unpacked by masks
  and shifts and joined by `stack` or `cat`, with scales and zero points as above.

Not covered are calls whose own kernel unpacks (aten._weight_int4pack_mm and the kernels of fbgemm
and mslk, which torchao's other 4-bit weights use), pairs that are not adjacent along K (HQQ,
quanto), and 32-bit words (GPTQ, AWQ). int8 by int8 matmuls (`_int_mm`, torchao's dynamic
activations) are ordinary matmuls whose scales are fused as an epilogue.

Views are not matched but tracked by strides: see `strided_views`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from inductor_ext import numerics
from inductor_ext.lowerings.graph.cleanup import clean_graph
from inductor_ext.lowerings.graph.dequant_reader import MOST_NODES, DequantReader, dtype_name
from inductor_ext.lowerings.graph.fusion import Fusion, View, ViewedNode, is_closed
from inductor_ext.lowerings.graph.fx_nodes import (
    Unreadable,
    is_cast,
    is_contiguous,
    is_view,
    shape,
    skip_views_and_casts,
)
from inductor_ext.lowerings.graph.matmul_nodes import (
    NotCovered,
    broadcast_kind,
    concrete_sizes,
    problem_of,
    value_of,
)
from inductor_ext.lowerings.graph.strided_views import Atom, require, static_shape
from inductor_ext.settings import Settings
from inductor_ext.templates.fused_ops import Dequant, Epilogue, Prologue
from inductor_ext.templates.tensors import HALF, EpilogueInput

if TYPE_CHECKING:
    from torch import fx


def find_dequantized_matmuls(graph: fx.Graph, settings: Settings) -> list[Fusion]:
    """Return the matmuls of a graph whose B can be dequantized in the prologue.

    No two of them share a node. Nothing is returned if anything else uses the dequantized tensor,
    or if Inductor is set to round as eager mode does (`emulate_precision_casts`).
    """
    import torch

    if not settings.gemm_fuse_dequantize or numerics.has_exact_pointwise():
        return []
    clean_graph(graph)
    fusions = []
    for node in graph.nodes:
        if node.target not in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            continue
        try:
            fusion = _match_matmul(node)
        except NotCovered:
            continue
        if is_closed(fusion.nodes, fusion.outputs, fusion.inputs):
            fusions.append(dataclasses.replace(fusion, nodes=tuple(sorted({*fusion.nodes}))))
    return fusions


def _match_matmul(node: fx.Node) -> Fusion:
    """Return the fusion of a matmul, with its nodes in any order.

    Raises:
        NotCovered: there is no fusion, for the reason given.
    """
    problem = problem_of(node)
    biased = len(node.args) == 3
    if problem is None or (biased and (node.kwargs or problem.epilogue.pointwise != 1)):
        raise NotCovered("not a matmul, or one that scales its bias")
    *bias, a, b = node.args
    require(problem.a.dtype in HALF, f"operands of {problem.a.dtype}")
    static_shape(b)  # type: ignore[arg-type]
    reader = DequantReader(problem)
    reader.read_weight(b, ((Atom(problem.k, "k", 1),), (Atom(problem.n, "n", 1),)))
    dequant = reader.dequant()
    mixed = dataclasses.replace(
        problem,
        operation="mixed",
        b=reader.operand(),
        prologue=Prologue(dequant=dequant),
        epilogue=problem.epilogue if biased else Epilogue(),
    )
    operands = dataclasses.replace(reader.operands(a, dequant), biases=tuple(map(ViewedNode, bias)))  # type: ignore[arg-type]
    return Fusion(mixed, (node, *reader.nodes), (node,), operands, reader.constants(dequant))


def add_scales(fusion: Fusion) -> Fusion:
    """Return a fusion extended by the scales and the bias that follow it.

    An unfused matmul has them in its epilogue. In a kernel of several matmuls each has its own.

    Args:
        fusion: one from `find_dequantized_matmuls`.
    """
    result, dtype = fusion, dtype_name(fusion.outputs[0])
    node = fusion.outputs[0]
    following: list[fx.Node] = []
    while len(node.users) == 1 and len(following) < MOST_NODES:
        (user,) = node.users
        following.append(user)
        if is_cast(user):
            if result is not fusion and dtype_name(user) == dtype != result.problem.out:
                result = _extend_to(user, result, following)
        elif not is_view(user):
            extended = _add_operand(result, user, node)
            if extended is None:
                break
            result = _extend_to(user, extended, following)
        elif shape(user)[-1] != result.problem.n:
            break
        node = user
    return result


def _extend_to(output: fx.Node, fusion: Fusion, following: Sequence[fx.Node]) -> Fusion:
    """Return a fusion extended by the nodes after it up to its new output."""
    problem = dataclasses.replace(fusion.problem, out=dtype_name(output))
    nodes = tuple(dict.fromkeys((*fusion.nodes, *following)))
    return dataclasses.replace(fusion, problem=problem, nodes=nodes, outputs=(output,))


def _add_operand(fusion: Fusion, node: fx.Node, matmul: fx.Node) -> Fusion | None:
    """Return a fusion extended by the scale or bias of a node that reads its output.

    Returns:
        None if the node does anything else, for example add dimensions. Scales come first, then one
        bias.
    """
    import torch

    aten = torch.ops.aten
    others = [other for other in node.all_input_nodes if other is not matmul]
    problem, dequant = fusion.problem, fusion.problem.dequant
    assert dequant is not None
    if len(others) != 1 or node.kwargs or problem.epilogue.inputs:
        return None
    (source,) = others
    try:
        if shape(node) != shape(matmul):
            return None
        output = concrete_sizes(value_of(node).shape)
        kind = broadcast_kind(value_of(source), output)
        source = skip_views_and_casts(source)
        if not is_contiguous(source) or dtype_name(source) not in ("float32", problem.a.dtype):
            return None
    except (NotCovered, Unreadable):
        return None
    if node.target is aten.mul.Tensor and dequant.scales == "none" and kind in ("row", "scalar"):
        scales: Literal["column", "tensor"] = "column" if kind == "row" else "tensor"
        view = View((problem.n,) if kind == "row" else ())
        dequant = Dequant(scales, scale_dtype=dtype_name(source))
        return dataclasses.replace(
            fusion,
            problem=dataclasses.replace(problem, prologue=Prologue(dequant=dequant)),
            operands=dataclasses.replace(fusion.operands, scales=(ViewedNode(source, view),)),
        )
    if node.target is aten.add.Tensor and shape(source) == (problem.n,) and kind == "row":
        epilogue = Epilogue((EpilogueInput(dtype_name(source), "row"),), 1)
        problem = dataclasses.replace(problem, epilogue=epilogue)
        operands = dataclasses.replace(fusion.operands, biases=(ViewedNode(source),))
        return dataclasses.replace(fusion, problem=problem, operands=operands)
    return None
