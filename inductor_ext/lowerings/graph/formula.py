"""What pointwise nodes of an FX graph compute, as a formula.

Models write the same function in many ways: silu(x) arrives as x * sigmoid(x) or as
x / (1 + exp(-x)), in one dtype or through float32 and back. Read as formulas (sympy), without casts
and reshapes, they compare equal, so that a pattern is one formula and no list of graphs.

Casts are left out since Inductor's own kernels leave them out: within a kernel it computes in
float32. Where the user wants them (`emulate_precision_casts`), nothing may be read by this module.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import sympy  # type: ignore[import-untyped]

if TYPE_CHECKING:
    import torch
    from torch import fx

__all__ = [
    "Reader",
    "Unreadable",
    "call",
    "canonical",
    "flat",
    "is_cast",
    "is_computed_in_float32",
    "is_read_by_strides",
    "is_returned",
    "is_view",
    "mean",
    "mean_of",
    "relu",
    "shape",
    "symbol",
]

MOST_NODES = 40
"""Beyond this many nodes there is no pattern to be found."""

mean = sympy.Function("mean")
"""The mean over the last dimension, of a product of what differs along it: see `mean_of`."""

relu = sympy.Function("relu")


class Unreadable(Exception):
    """A node that is no part of any formula."""


@functools.cache
def _operators() -> Mapping[Any, Callable[..., Any]]:
    """ATen's operators as functions of formulas and numbers."""
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

    found: dict[Any, Callable[..., Any]] = {
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
        found[packet.Tensor] = found[packet.Scalar] = function
    return found


def is_view(node: fx.Node) -> bool:
    """Whether a node gives its input other sizes and changes nothing else."""
    import torch

    aten = torch.ops.aten
    return node.target in (aten.reshape.default, aten.view.default, aten._unsafe_view.default)


def is_returned(node: fx.Node) -> bool:
    """Whether the graph returns a node's result, or a view of it."""
    return any(
        user.op == "output" or (_is_part_or_view(user) and is_returned(user)) for user in node.users
    )


def is_read_by_strides(node: fx.Node) -> bool:
    """Whether elements of a node, or of a view of it, are read by their places in its memory
    (`as_strided`), where it has to lie as the graph says.
    """
    import torch

    return any(
        user.target is torch.ops.aten.as_strided.default
        or (_is_part_or_view(user) and is_read_by_strides(user))
        for user in node.users
    )


def _is_part_or_view(node: fx.Node) -> bool:
    part = node.target is operator.getitem or getattr(node.target, "is_view", False)
    return part or is_view(node)


def is_cast(node: fx.Node) -> bool:
    """Whether a node gives its input another dtype of those that kernels compute in float32."""
    import torch

    if node.target is not torch.ops.prims.convert_element_type.default:
        return False
    return all(is_computed_in_float32(each.meta["val"]) for each in (node, *node.all_input_nodes))


def is_computed_in_float32(value: torch.Tensor) -> bool:
    """Whether a tensor has one of the dtypes that kernels compute in float32."""
    import torch

    return value.dtype in (torch.float32, torch.bfloat16, torch.float16)


def call(graph: fx.Graph, like: fx.Node, target: Any, *args: Any) -> fx.Node:
    """Add a call of an operator, with its value and what else is known of the node `like`."""
    from torch import fx

    made = graph.call_function(target, args)
    values: Any = fx.node.map_arg(args, lambda each: each.meta["val"])
    made.meta = {**like.meta, "val": target(*values)}
    return made


def symbol(node: fx.Node) -> sympy.Symbol:
    """What stands for a node in formulas."""
    return sympy.Symbol(node.name, real=True)


def shape(node: fx.Node) -> tuple[Any, ...]:
    """The sizes of a node's tensor: numbers, and formulas where they are symbols.

    Raises:
        Unreadable: it is no tensor.
    """
    value: Any = node.meta.get("val")
    if not hasattr(value, "shape"):
        raise Unreadable
    return tuple(each if isinstance(each, int) else each.node.expr for each in value.shape)


class Reader:
    """Reads one formula, and notes the nodes that it consists of.

    Args:
        like: a node with the rows and the columns that every matrix of the formula has.
        leaf: the symbol of a node at which reading stops; None where it does not stop.
    """

    def __init__(self, like: fx.Node, leaf: Callable[[fx.Node], sympy.Expr | None]) -> None:
        self.rows, self.columns = flat(like)
        self.leaf = leaf
        self.inner: dict[fx.Node, sympy.Expr] = {}
        """What was read, without the leaves."""

    def read(self, node: fx.Node) -> sympy.Expr:
        """The formula of one element of a node's tensor.

        Raises:
            Unreadable: something is in it that this module does not know.
        """
        if node in self.inner:
            return self.inner[node]
        found = self.leaf(node)
        if found is not None:
            return found
        if node.op != "call_function" or len(self.inner) >= MOST_NODES:
            raise Unreadable
        self._check_shape(node)
        moments = _moments(node)
        if is_view(node) or is_cast(node):
            found = self.read(node.all_input_nodes[0])
        elif moments is not None:
            given, call, is_mean = moments
            found = mean_of(self.read(given))
            if not is_mean:
                found = mean_of((self.read(given) - found) ** 2)
            self.inner[call] = found
        else:
            found = self._computed(node)
        self.inner[node] = found
        return found

    def _check_shape(self, node: fx.Node) -> None:
        """Elements of all matrices correspond in their order, and one number goes with a row."""
        rows, columns = flat(node)
        if rows != self.rows or columns not in (self.columns, 1):
            raise Unreadable

    def _computed(self, node: fx.Node) -> sympy.Expr:
        function = _operators().get(node.target)
        if function is None:
            raise Unreadable
        own = shape(node)
        for each in node.all_input_nodes:
            # Where rows are broadcast, they do not correspond in their order.
            given = shape(each)
            if given[:-1] != own[:-1] and any(size != 1 for size in given[:-1]):
                raise Unreadable
        arguments = [self._argument(each) for each in node.args]
        options = {name: self._argument(each) for name, each in node.kwargs.items()}
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
    """What a node is the mean or the variance of over the last dimension, which it keeps.

    Returns:
        What it is of; the call of the operator, which may have both results; whether it is the
        mean.
    """
    import torch

    aten = torch.ops.aten
    call: Any = node.args[0] if node.target is operator.getitem else node
    options: dict[str, Any] = dict(call.kwargs)
    if call.target is aten.mean.dim and len(call.args) >= 3:
        given, axes, keeps, *_ = call.args
        is_mean = True
    elif call.target in (aten.var.correction, aten.var_mean.correction) and len(call.args) == 2:
        given, axes = call.args
        keeps = options.get("keepdim", False) and options.get("correction") == 0
        is_mean = node is not call and bool(node.args[1] == 1)
    else:
        return None
    last = len(shape(node)) - 1
    return (given, call, is_mean) if keeps and axes in ([-1], [last]) else None


def mean_of(formula: sympy.Expr) -> sympy.Expr:
    """The mean of a formula over the last dimension.

    Of a sum it is the sum of the means, and what is the same along a row, as means are, is a
    factor: so the variance is the mean of squares less the square of the mean, however written.
    """
    rows = {each: sympy.Dummy(real=True) for each in formula.atoms(mean)}
    constant = {symbol: each for each, symbol in rows.items()}
    total = sympy.Integer(0)
    for term in sympy.Add.make_args(canonical(formula.xreplace(rows))):
        along = term.free_symbols - constant.keys()
        factor, rest = term.as_independent(*along) if along else (term, sympy.Integer(1))
        total += factor * (mean(rest) if along else 1)
    return sympy.expand(total.xreplace(constant))


def canonical(formula: sympy.Expr) -> sympy.Expr:
    """A formula in the form in which equal ones are identical, with constants of six digits."""
    expanded = sympy.expand(formula)
    numbers = {
        each: sympy.Rational(f"{float(each):.5e}")
        for each in expanded.atoms(sympy.Float, sympy.Rational)
        if not each.is_Integer
    }
    return sympy.expand(expanded.xreplace(numbers))


def flat(node: fx.Node) -> tuple[Any, Any]:
    """Rows and columns of a node's tensor, all dimensions but the last taken for one.

    Raises:
        Unreadable: it is no tensor.
    """
    *rows, columns = shape(node) or (1,)
    return sympy.expand(sympy.prod(rows)), columns


def is_contiguous(node: fx.Node) -> bool:
    """Whether a node's tensor has its elements in order and without gaps, whatever its sizes."""
    expected = sympy.Integer(1)
    sizes = shape(node)
    strides = [
        each if isinstance(each, int) else each.node.expr for each in node.meta["val"].stride()
    ]
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1 and sympy.expand(stride - expected) != 0:
            return False
        expected *= size
    return True
