"""Conversion between torch's symbolic expressions and the expressions of a signature."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import sympy  # type: ignore[import-untyped]
from torch.utils._sympy import functions

from inductor_ext.cpp_wrapper.signature.expression import Apply, Node

_RELATIONS: dict[type, str] = {
    sympy.Eq: "==",
    sympy.Ne: "!=",
    sympy.Lt: "<",
    sympy.Le: "<=",
    sympy.Gt: ">",
    sympy.Ge: ">=",
}

_OPERATORS: dict[str, str] = {
    "FloorDiv": "//",
    "CleanDiv": "//",
    "Mod": "%",
    "PythonMod": "%",
    "PowByNatural": "**",
    "LShift": "<<",
    "RShift": ">>",
    "BitwiseFn_bitwise_and": "&",
    "BitwiseFn_bitwise_or": "|",
    "BitwiseFn_bitwise_xor": "^",
    "Max": "max",
    "Min": "min",
    "And": "and",
    "Or": "or",
}
"""The sympy and torch functions that map to operators of `expression`, by class name."""


def to_node(expr: sympy.Basic) -> Node:
    """Convert a symbolic expression of torch to an expression of a signature.

    Raises:
        ValueError: it contains a function that is no integer operation; the message names it.
    """
    if expr in (sympy.true, sympy.false):
        return int(expr == sympy.true)
    if isinstance(expr, sympy.Integer):
        return int(expr)
    if isinstance(expr, sympy.Symbol):
        return str(expr.name)
    if isinstance(expr, sympy.Add):
        return _convert_sum(expr)
    if isinstance(expr, sympy.Mul):
        if expr.args[0] == -1:
            return Apply("neg", (to_node(-expr),))
        return _fold("*", expr.as_ordered_factors())
    if isinstance(expr, sympy.Pow) and expr.exp.is_Integer and expr.exp > 0:
        return Apply("**", (to_node(expr.base), int(expr.exp)))
    if type(expr) in _RELATIONS:
        return Apply(_RELATIONS[type(expr)], (to_node(expr.lhs), to_node(expr.rhs)))
    if isinstance(expr, sympy.Not):
        return Apply("not", (to_node(expr.args[0]),))
    if isinstance(expr, sympy.Abs):
        return Apply("abs", (to_node(expr.args[0]),))
    name = type(expr).__name__
    if name in _OPERATORS:
        return _fold(_OPERATORS[name], expr.args)
    if name == "Identity":
        return to_node(expr.args[0])
    if name == "Where":
        return Apply("if", tuple(to_node(part) for part in expr.args))
    if name == "ModularIndexing":
        base, divisor, modulus = map(to_node, expr.args)
        return Apply("%", (Apply("//", (base, divisor)), modulus))
    if name in ("FloorToInt", "CeilToInt") and type(expr.args[0]).__name__ == "IntTrueDiv":
        above, below = map(to_node, expr.args[0].args)
        if name == "FloorToInt":
            return Apply("//", (above, below))
        return Apply("neg", (Apply("//", (Apply("neg", (above,)), below)),))
    raise ValueError(f"{name} is not an integer operation")


def _convert_sum(expr: sympy.Add) -> Node:
    positive: list[Node] = []
    negative: list[Node] = []
    for term in expr.as_ordered_terms():
        if term.could_extract_minus_sign() and term.as_coeff_Mul()[0].is_negative:
            negative.append(to_node(-term))
        else:
            positive.append(to_node(term))
    result: Node = positive[0] if positive else Apply("neg", (negative.pop(0),))
    for part in positive[1:]:
        result = Apply("+", (result, part))
    for part in negative:
        result = Apply("-", (result, part))
    return result


def _fold(sign: str, arguments: Iterable[sympy.Basic]) -> Node:
    first, *rest = map(to_node, arguments)
    for part in rest:
        first = Apply(sign, (first, part))
    return first


_SYMPY_FUNCTIONS: dict[str, Callable[..., sympy.Basic]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "**": lambda a, b: a**b,
    "//": functions.FloorDiv,
    "%": functions.Mod,
    "max": functions.Max,
    "min": functions.Min,
    "neg": lambda a: -a,
    "abs": sympy.Abs,
    "not": sympy.Not,
    "and": sympy.And,
    "or": sympy.Or,
    **{sign: relation for relation, sign in _RELATIONS.items()},
}


def to_sympy(node: Node) -> sympy.Basic:
    """Convert back from `to_node`, so that the same guard from two sources compares equal.

    Raises:
        ValueError: an operator that torch.export's guard text does not use.
    """
    if isinstance(node, int):
        return sympy.Integer(node)
    if isinstance(node, str):
        return sympy.Symbol(node, integer=True)
    if node.operator not in _SYMPY_FUNCTIONS:
        raise ValueError(node.operator)
    return _SYMPY_FUNCTIONS[node.operator](*map(to_sympy, node.arguments))
