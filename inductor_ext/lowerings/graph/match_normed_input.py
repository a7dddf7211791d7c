"""Matching of an RMSNorm or LayerNorm of operand A for a kernel's prologue (`gemm_fuse_norm`).

The norm is fused if nothing else reads the normalized value; `match_norm` recognizes it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from inductor_ext.lowerings.graph.fusible_matmuls import (
    FusibleMatmuls,
    is_biased_by_row,
    views_of,
)
from inductor_ext.lowerings.graph.fusion import Fusion, ViewedNode, is_closed
from inductor_ext.lowerings.graph.fx_nodes import is_cast, is_contiguous, skip_views
from inductor_ext.lowerings.graph.match_norm import Norm, norm_of
from inductor_ext.lowerings.graph.matmul_nodes import dtype_of, operand_of, value_of
from inductor_ext.lowerings.graph.rewrite import as_matrix
from inductor_ext.templates.fused_ops import Prologue, RowNorm
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import DTYPE_BITS

if TYPE_CHECKING:
    from torch import fx


def add_norm(matmuls: FusibleMatmuls, fusion: Fusion) -> Fusion | None:
    """Return a fusion extended by the norm of the rows of A, if there is one.

    Args:
        matmuls: of the graph.
        fusion: a gate, matmuls with a shared input, or a single matmul.
    """
    import torch

    problem = fusion.problem
    if any(map(_has_unsupported_epilogue, _matmuls_of(matmuls, fusion))):
        return None
    a = fusion.operands.a.node
    normalized = skip_views(a)
    norm = norm_of(normalized, problem.k)
    if norm is None:
        return None
    value = norm.x.meta["val"]
    # Under autocast a float32 LayerNorm is rounded to the dtype of the matmul.
    dtypes = {value_of(normalized).dtype}
    dtypes |= {torch.float32} if norm.kind == "layer" else set()
    if value.dtype not in dtypes or not is_contiguous(norm.x):
        return None
    prologue = _prologue(norm, problem, fusion.constants.zero or 0)
    if prologue is None:
        return None
    rows = value_of(a).shape[0]
    fusion = dataclasses.replace(
        fusion,
        problem=dataclasses.replace(
            problem,
            a=operand_of(as_matrix(value, rows)),
            prologue=prologue,
            details=dataclasses.replace(problem.details, epsilon=norm.epsilon),
        ),
        nodes=_nodes(matmuls, fusion, norm),
        operands=dataclasses.replace(
            fusion.operands, a=ViewedNode(norm.x), norm_vectors=tuple(map(ViewedNode, norm.vectors))
        ),
        constants=dataclasses.replace(fusion.constants, epsilon=norm.epsilon),
    )
    return fusion if is_closed(fusion.nodes, fusion.outputs, fusion.inputs) else None


def _matmuls_of(matmuls: FusibleMatmuls, fusion: Fusion) -> list[Fusion]:
    return [matmuls.by_output[node] for node in fusion.nodes if node in matmuls.by_output]


def _has_unsupported_epilogue(matmul: Fusion) -> bool:
    """Whether a matmul applies anything but a bias vector to its accumulators."""
    applies = matmul.problem.operation == "addmm" or bool(matmul.operands.epilogue_operands)
    return applies and not is_biased_by_row(matmul)


def _nodes(matmuls: FusibleMatmuls, fusion: Fusion, norm: Norm) -> tuple[fx.Node, ...]:
    """Return the nodes of a fusion, of the norm, and the views in between."""
    inputs = (matmul.operands.a.node for matmul in _matmuls_of(matmuls, fusion))
    views = {view for node in inputs for view in views_of(node)}
    inner_nodes = {*fusion.nodes, *views, *norm.nodes}
    # Keep a cast of the input that others read in float32; the kernel has its own.
    inner_nodes -= {
        node for node in norm.nodes if is_cast(node) and not set(node.users) <= inner_nodes
    }
    return tuple(sorted(inner_nodes))


def _prologue(norm: Norm, problem: GemmProblem, zero: int) -> Prologue | None:
    """Return the prologue of a problem with a norm; None if a kernel cannot apply it."""
    dtype = RowNorm.dtype
    if problem.dequant is not None:
        if not _can_dequantize_with(norm, problem, zero):
            return None
    elif norm.vectors:
        dtype = dtype_of(value_of(norm.vectors[0]))
    return Prologue(RowNorm(norm.kind, len(norm.vectors), dtype), problem.dequant)


def _can_dequantize_with(norm: Norm, problem: GemmProblem, zero: int) -> bool:
    """Whether a kernel that dequantizes B can also apply a norm.

    It can apply an RMSNorm with a weight in A's dtype. For 4-bit B it reads that weight in words of
    two elements, which must be aligned. For 8-bit B there must be no constant zero point: the
    kernel pads K with it, in A too, and the padding would count among the squares.
    """
    by_words = DTYPE_BITS[problem.b.dtype] == 4
    if norm.kind != "rms" or (zero and not by_words):
        return False
    for value in map(value_of, norm.vectors):
        offset = value.storage_offset()
        if dtype_of(value) != problem.a.dtype:
            return False
        if by_words and (not isinstance(offset, int) or offset % 2):
            return False
    return True
