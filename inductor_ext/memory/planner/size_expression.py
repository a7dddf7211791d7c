"""Evaluates size expressions that a plan stores as text (pure).

The text is what Inductor's Python printer writes: integers, names, arithmetic, comparisons,
conditional expressions, and the functions below. It is parsed and not executed, because it may come
from a file. Divisions are exact.
"""

from __future__ import annotations

import ast
import functools
import math
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

_MAX_BITS = 128
"""Values with more bits are not sizes."""


def _divide(a: Any, b: Any) -> Any:
    return Fraction(a) / Fraction(b)


def _raise_power(base: Any, exponent: Any) -> Any:
    if not 0 <= exponent <= _MAX_BITS:
        raise ValueError(f"the exponent {exponent} is out of range")
    return base**exponent


def _align(value: Any) -> Any:
    return -(-value // 64) * 64


def _select(condition: Any, then: Any, otherwise: Any) -> Any:
    return then if condition else otherwise


_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _raise_power,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "align": _align,
    "max": max,
    "min": min,
    "math.ceil": math.ceil,
    "math.floor": math.floor,
    "math.trunc": math.trunc,
    "Where": _select,
}


@functools.lru_cache(maxsize=4096)
def _parse(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError, ValueError):
        raise ValueError(f"{text!r} is not an expression") from None


def evaluate(text: str, values: Mapping[str, int]) -> int:
    """Return the value of an expression.

    Args:
        text: the expression.
        values: the values of its names.

    Raises:
        ValueError: the text is not an expression of this kind, a name has no value, or the result
            is not an integer.
    """
    try:
        result = _evaluate(_parse(text), values)
    except (ArithmeticError, TypeError, RecursionError) as error:
        raise ValueError(f"{text!r} has no value: {error}") from None
    if isinstance(result, Fraction) and result.denominator == 1:
        result = int(result)
    if type(result) is not int:
        raise ValueError(f"{text!r} is not an integer")
    return result


def _evaluate(node: ast.expr, values: Mapping[str, int]) -> Any:
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.Name(id=name) if name in values:
            return values[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            function = _OPERATORS[type(op)]
            result = function(_evaluate(left, values), _evaluate(right, values))
            if abs(result) >> _MAX_BITS if isinstance(result, int) else False:
                raise ValueError("a value is too large")
            return result
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluate(operand, values))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluate(left, values), _evaluate(right, values))
        case ast.BoolOp(op=ast.And(), values=parts):
            return all(_evaluate(part, values) for part in parts)
        case ast.BoolOp(op=ast.Or(), values=parts):
            return any(_evaluate(part, values) for part in parts)
        case ast.IfExp(test=test, body=body, orelse=otherwise):
            return _evaluate(body if _evaluate(test, values) else otherwise, values)
        case ast.Call(func=func, args=arguments, keywords=[]) if ast.unparse(func) in _FUNCTIONS:
            return _FUNCTIONS[ast.unparse(func)](*(_evaluate(a, values) for a in arguments))
    raise ValueError(f"{ast.unparse(node)!r} has no value")
