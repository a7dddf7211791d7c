"""Which values of an FX graph are an RMSNorm or a LayerNorm, however a model writes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import sympy  # type: ignore[import-untyped]

from inductor_ext.lowerings.graph import matmul_nodes
from inductor_ext.lowerings.graph.formula import (
    Reader,
    Unreadable,
    flat,
    is_cast,
    is_view,
    mean,
    shape,
    symbol,
)

if TYPE_CHECKING:
    from torch import fx

__all__ = ["Norm", "norm_of"]

MOST_NODES = 40
"""Of those that a norm is looked for in."""

X = sympy.Dummy("x", real=True)
"""What is normalised."""


@dataclass(frozen=True)
class Norm:
    """An RMSNorm (`normalize`) or a LayerNorm (`standardize`) of rows."""

    kind: Literal["normalize", "standardize"]
    x: fx.Node
    """What is normalised."""
    vectors: tuple[fx.Node, ...]
    """None, a weight, or a weight and a bias."""
    epsilon: float
    """Added to the mean of squares, or to the variance."""
    nodes: tuple[fx.Node, ...]
    """All that compute it from `x` and `vectors`."""


def norm_of(root: fx.Node, k: int) -> Norm | None:
    """The norm of rows that a node is, if it is one.

    An RMSNorm (Zhang and Sennrich 2019) is x / sqrt(mean(x^2) + epsilon) over the last dimension,
    of k elements, times a weight for each of them, or none. A LayerNorm (Ba, Kiros, Hinton 2016) is
    (x - mean(x)) / sqrt(variance(x) + epsilon), times a weight, plus a bias, or with neither.

    Args:
        root: the node.
        k: how many elements a row has to have.
    """
    vectors: dict[sympy.Symbol, fx.Node] = {}

    def leaf(node: fx.Node) -> sympy.Expr | None:
        if node is x:
            return X
        if _is_vector(node, k) and (len(shape(node)) == 1 or flat(root)[0] != 1):
            vectors[symbol(node)] = node
            return symbol(node)
        return None

    try:
        x = _averaged(root)
        if x is None or flat(x) != flat(root) or flat(x)[1] != k:
            return None
        reader = Reader(root, leaf)
        formula = reader.read(root)
    except Unreadable:
        return None
    # What is the same along a row, as symbols of its own.
    center, squares = sympy.Dummy("center", real=True), sympy.Dummy("squares", positive=True)
    formula = formula.xreplace({mean(X): center, mean(X**2): squares})
    scale = sympy.diff(formula, X)
    centered = formula.has(center)
    spread = squares - center**2 if centered else squares
    bias = sympy.expand(formula - scale * (X - center if centered else X))
    weight = next((each for each in vectors if scale.has(each)), None)
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
    found = [_uncast(vectors[each]) for each in symbols]
    if any(matmul_nodes.value_of(each).stride(-1) != 1 for each in found):
        return None
    kind: Literal["normalize", "standardize"] = "standardize" if centered else "normalize"
    return Norm(kind, x, tuple(found), float(epsilon), tuple(reader.inner))


def _uncast(node: fx.Node) -> fx.Node:
    """What a node is a cast of."""
    while is_cast(node):
        node = node.all_input_nodes[0]
    return node


def _is_vector(node: fx.Node, k: int) -> bool:
    """Whether a node is one row of k elements."""
    try:
        return flat(node) == (1, k)
    except Unreadable:
        return False


def _averaged(root: fx.Node) -> fx.Node | None:
    """What the mean that a node is computed from is one of, before any cast: as it is, squared, or
    squared after its own mean is subtracted.
    """
    import torch

    aten = torch.ops.aten
    dtype = root.meta["val"].dtype
    means = (aten.mean.dim, aten.var.correction, aten.var_mean.correction)
    pending, seen = [root], 0
    while pending and seen < MOST_NODES:
        node, seen = pending.pop(), seen + 1
        if node.target not in means:
            pending.extend(node.all_input_nodes)
            continue
        x: Any = node.args[0]
        if x.target in (aten.pow.Tensor_Scalar, aten.mul.Tensor, aten.square.default):
            x = x.all_input_nodes[0]
            left, right = (*x.all_input_nodes, None, None)[:2]
            # With a number on either side it is no mean that is subtracted.
            if x.target is aten.sub.Tensor and right and _uncast(right).target is aten.mean.dim:
                x = left
        while x.meta["val"].dtype != dtype and (is_cast(x) or is_view(x)):
            x = x.all_input_nodes[0]
        return x  # type: ignore[no-any-return]
    return None
