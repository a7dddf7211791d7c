"""Sympy formulas of the pointwise nodes of an FX graph.

Models write the same function in many ways: silu(x) arrives as x * sigmoid(x) or as x / (1 +
exp(-x)), in one dtype or via float32. Read as formulas, without casts and reshapes, they compare
equal, so that a pattern is one formula instead of a list of graphs.

Casts are ignored because Inductor's kernels ignore them: they compute in float32. Do not use this
module if the user wants the rounding of casts (`emulate_precision_casts`). A node that has no
formula raises `Unreadable`.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import sympy  # type: ignore[import-untyped]

from inductor_ext.lowerings.graph.fx_nodes import Unreadable, is_cast, is_view, shape, size_2d

if TYPE_CHECKING:
    from torch import fx

MOST_NODES = 40
"""Limit on the nodes of one formula."""

mean = sympy.Function("mean")
"""The mean over the last dimension; its argument is a product of terms that vary along it: see
`mean_of`."""

relu = sympy.Function("relu")


@functools.cache
def _operators() -> Mapping[Any, Callable[..., Any]]:
    """Return ATen operators as functions of formulas and scalars."""
    import torch

    aten = torch.ops.aten

    def add(a: Any, b: Any, *, alpha: Any = 1) -> Any:
        return a + alpha * b

    def subtract(a: Any, b: Any, *, alpha: Any = 1) -> Any:
        return a - alpha * b

    def sigmoid(a: Any) -> Any:
        return 1 / (1 + sympy.exp(-a))

    def power(a: Any, exponent: Any) -> Any:
        if not math.isfinite(exponent) or 2 * exponent != int(2 * exponent):
            raise Unreadable
        return a ** (sympy.Integer(int(2 * exponent)) / 2)

    def at_least(a: Any, least: Any) -> Any:
        if least != 0:
            raise Unreadable
        return relu(a)

    operators: dict[Any, Callable[..., Any]] = {
        aten.relu.default: relu,
        aten.clamp_min.default: at_least,
        aten.neg.default: operator.neg,
        aten.exp.default: sympy.exp,
        aten.erf.default: sympy.erf,
        aten.tanh.default: sympy.tanh,
        aten.sigmoid.default: sigmoid,
        aten.silu.default: lambda a: a * sigmoid(a),
        aten.reciprocal.default: lambda a: 1 / a,
        aten.sqrt.default: sympy.sqrt,
        aten.rsqrt.default: lambda a: 1 / sympy.sqrt(a),
        aten.square.default: lambda a: a**2,
        aten.pow.Tensor_Scalar: power,
    }
    for name, function in (
        ("add", add),
        ("sub", subtract),
        ("mul", operator.mul),
        ("div", operator.truediv),
    ):
        packet = getattr(aten, name)
        operators[packet.Tensor] = operators[packet.Scalar] = function
    return operators


def symbol_of(node: fx.Node) -> sympy.Symbol:
    """Return the symbol of a node in formulas."""
    return sympy.Symbol(node.name, real=True)


class FormulaReader:
    """Reader of one formula that records the nodes that it consists of.

    Args:
        like: a node with the numbers of rows and columns that every matrix of the formula has.
        leaf: returns the symbol of a node at which to stop; None to read on.
    """

    def __init__(self, like: fx.Node, leaf: Callable[[fx.Node], sympy.Expr | None]) -> None:
        self.rows, self.columns = size_2d(like)
        self.leaf = leaf
        self.inner: dict[fx.Node, sympy.Expr] = {}
        """The formulas of the nodes that were read, without the leaves."""

    def read(self, node: fx.Node) -> sympy.Expr:
        """Return the formula of one element of a node's tensor.

        Raises:
            Unreadable: the formula contains an operator that this module does not know.
        """
        if node in self.inner:
            return self.inner[node]
        formula = self.leaf(node)
        if formula is not None:
            return formula
        if node.op != "call_function" or len(self.inner) >= MOST_NODES:
            raise Unreadable
        self._check_shape(node)
        moments = _moments(node)
        if is_view(node) or is_cast(node):
            formula = self.read(node.all_input_nodes[0])
        elif moments is not None:
            source, call, is_mean = moments
            formula = mean_of(self.read(source))
            if not is_mean:
                formula = mean_of((self.read(source) - formula) ** 2)
            self.inner[call] = formula
        else:
            formula = self._compute(node)
        self.inner[node] = formula
        return formula

    def _check_shape(self, node: fx.Node) -> None:
        """Require that elements of all matrices correspond in order; a column has one element per
        row.
        """
        rows, columns = size_2d(node)
        if rows != self.rows or columns not in (self.columns, 1):
            raise Unreadable

    def _compute(self, node: fx.Node) -> sympy.Expr:
        function = _operators().get(node.target)
        if function is None:
            raise Unreadable
        output_sizes = shape(node)
        for source in node.all_input_nodes:
            # With broadcast rows, elements do not correspond in order.
            sizes = shape(source)
            if sizes[:-1] != output_sizes[:-1] and any(size != 1 for size in sizes[:-1]):
                raise Unreadable
        arguments = [self._argument(arg) for arg in node.args]
        options = {name: self._argument(kwarg) for name, kwarg in node.kwargs.items()}
        try:
            return sympy.sympify(function(*arguments, **options))
        except TypeError:
            raise Unreadable from None

    def _argument(self, argument: Any) -> Any:
        if isinstance(argument, (int, float)):
            return argument
        if not hasattr(argument, "all_input_nodes"):
            raise Unreadable
        return self.read(argument)


def _moments(node: fx.Node) -> tuple[fx.Node, fx.Node, bool] | None:
    """Match a mean or variance over the last dimension with keepdim.

    Returns:
        The input; the call of the operator, which may return both moments; whether the node is the
        mean. None if the node is neither.
    """
    import torch

    aten = torch.ops.aten
    call: Any = node.args[0] if node.target is operator.getitem else node
    options: dict[str, Any] = dict(call.kwargs)
    if call.target is aten.mean.dim and len(call.args) >= 3:
        source, axes, keeps, *_ = call.args
        is_mean = True
    elif call.target in (aten.var.correction, aten.var_mean.correction) and len(call.args) == 2:
        source, axes = call.args
        keeps = options.get("keepdim", False) and options.get("correction") == 0
        is_mean = node is not call and bool(node.args[1] == 1)
    else:
        return None
    last = len(shape(node)) - 1
    return (source, call, is_mean) if keeps and axes in ([-1], [last]) else None


def mean_of(formula: sympy.Expr) -> sympy.Expr:
    """Return the mean of a formula over the last dimension.

    The mean of a sum is the sum of the means, and terms that are constant along a row, such as
    means, are moved out of the mean. The variance is thus the mean of squares minus the square of
    the mean, however it is written.
    """
    rows = {atom: sympy.Dummy(real=True) for atom in formula.atoms(mean)}
    constant = {symbol: key for key, symbol in rows.items()}
    total = sympy.Integer(0)
    for term in sympy.Add.make_args(canonicalize(formula.xreplace(rows))):
        along = term.free_symbols - constant.keys()
        factor, rest = term.as_independent(*along) if along else (term, sympy.Integer(1))
        total += factor * (mean(rest) if along else 1)
    return sympy.expand(total.xreplace(constant))


def canonicalize(formula: sympy.Expr) -> sympy.Expr:
    """Return the canonical form of a formula, with constants rounded to six digits. Equal formulas
    are identical.
    """
    expanded = sympy.expand(formula)
    numbers = {
        atom: sympy.Rational(f"{float(atom):.5e}")
        for atom in expanded.atoms(sympy.Float, sympy.Rational)
        if not atom.is_Integer
    }
    return sympy.expand(expanded.xreplace(numbers))
