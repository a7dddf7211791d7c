"""Matching of RMSNorm and LayerNorm in an FX graph, independent of how the model writes them.

`norm_of` reads a node as a formula (`FormulaReader`) and compares it with the definitions of both
norms. It returns None for anything else. The fusion is governed by `gemm_fuse_norm`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sympy  # type: ignore[import-untyped]

from inductor_ext.lowerings.graph.formula import FormulaReader, mean, symbol_of
from inductor_ext.lowerings.graph.fx_nodes import Unreadable, is_cast, is_view, shape, size_2d
from inductor_ext.lowerings.graph.matmul_nodes import value_of
from inductor_ext.templates.fused_ops import NormKind

if TYPE_CHECKING:
    from torch import fx

MOST_NODES = 40
"""Limit on the nodes searched for the mean of a norm."""

X = sympy.Dummy("x", real=True)
"""The input of the norm."""


@dataclass(frozen=True)
class Norm:
    """An RMSNorm or a LayerNorm over rows."""

    kind: NormKind
    x: fx.Node
    """The input."""
    vectors: tuple[fx.Node, ...]
    """Empty, a weight, or a weight and a bias."""
    epsilon: float
    """Added to the mean of squares, or to the variance."""
    nodes: tuple[fx.Node, ...]
    """All nodes that compute the norm from `x` and `vectors`."""


def norm_of(root: fx.Node, k: int) -> Norm | None:
    """Return the norm over rows that a node computes; None if it computes something else.

    An RMSNorm (Zhang and Sennrich 2019) is x / sqrt(mean(x^2) + epsilon) over the last dimension,
    of k elements, optionally times a weight [k]. A LayerNorm (Ba, Kiros, Hinton 2016) is (x -
    mean(x)) / sqrt(variance(x) + epsilon), optionally times a weight, or times a weight plus a
    bias.

    Args:
        root: the node.
        k: the required number of elements of a row.
    """
    vectors: dict[sympy.Symbol, fx.Node] = {}

    def leaf(node: fx.Node) -> sympy.Expr | None:
        if node is norm_input:
            return X
        if _is_vector(node, k) and (len(shape(node)) == 1 or size_2d(root)[0] != 1):
            vectors[symbol_of(node)] = node
            return symbol_of(node)
        return None

    try:
        norm_input = _mean_input(root)
        if (
            norm_input is None
            or size_2d(norm_input) != size_2d(root)
            or size_2d(norm_input)[1] != k
        ):
            return None
        reader = FormulaReader(root, leaf)
        formula = reader.read(root)
    except Unreadable:
        return None
    # Replace what is constant along a row by symbols.
    center, squares = sympy.Dummy("center", real=True), sympy.Dummy("squares", positive=True)
    formula = formula.xreplace({mean(X): center, mean(X**2): squares})
    scale = sympy.diff(formula, X)
    centered = formula.has(center)
    spread = squares - center**2 if centered else squares
    bias = sympy.expand(formula - scale * (X - center if centered else X))
    weight = next((vector for vector in vectors if scale.has(vector)), None)
    scale = scale if weight is None else scale / weight
    symbols = [] if weight is None else [weight]
    if bias != 0:
        if bias not in vectors or not centered or weight is None:
            return None
        symbols.append(bias)
    if not scale.is_Pow or scale.exp != -sympy.Rational(1, 2):
        return None
    epsilon = sympy.expand(scale.base - spread)
    if not epsilon.is_number or epsilon < 0:
        return None
    operands = [_skip_casts(vectors[item]) for item in symbols]
    if any(value_of(item).stride(-1) != 1 for item in operands):
        return None
    kind: NormKind = "layer" if centered else "rms"
    return Norm(kind, norm_input, tuple(operands), float(epsilon), tuple(reader.inner))


def _skip_casts(node: fx.Node) -> fx.Node:
    """Return the node behind all casts."""
    while is_cast(node):
        node = node.all_input_nodes[0]
    return node


def _is_vector(node: fx.Node, k: int) -> bool:
    """Whether a node is one row of k elements."""
    try:
        return size_2d(node) == (1, k)
    except Unreadable:
        return False


def _mean_input(root: fx.Node) -> fx.Node | None:
    """Return the input, before any cast, of the mean or variance that a node is computed from. The
    mean may be of the input itself, of its square, or of the square of the input minus its mean.
    """
    import torch

    aten = torch.ops.aten
    dtype = root.meta["val"].dtype
    means = (aten.mean.dim, aten.var.correction, aten.var_mean.correction)
    pending, num_visited = [root], 0
    while pending and num_visited < MOST_NODES:
        node, num_visited = pending.pop(), num_visited + 1
        if node.target not in means:
            pending.extend(node.all_input_nodes)
            continue
        source: Any = node.args[0]
        if source.target in (aten.pow.Tensor_Scalar, aten.mul.Tensor, aten.square.default):
            source = source.all_input_nodes[0]
            left, right = (*source.all_input_nodes, None, None)[:2]
            # If an operand is a scalar, no mean is subtracted.
            if (
                source.target is aten.sub.Tensor
                and right
                and _skip_casts(right).target is aten.mean.dim
            ):
                source = left
        while source.meta["val"].dtype != dtype and (is_cast(source) or is_view(source)):
            source = source.all_input_nodes[0]
        return source  # type: ignore[no-any-return]
    return None
