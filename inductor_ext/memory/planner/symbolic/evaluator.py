"""Evaluates sympy expressions at many integer values of their symbols."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import sympy  # type: ignore[import-untyped]


class ExpressionEvaluator:
    """Evaluates expressions at integer values of their symbols; common subexpressions only once.

    Args:
        expressions: the expressions or integers to evaluate.
        definitions: symbols that stand for expressions, each in terms of earlier ones.
    """

    def __init__(
        self,
        expressions: Iterable[sympy.Expr | int],
        definitions: Iterable[tuple[sympy.Symbol, sympy.Expr]] = (),
    ) -> None:
        self.symbols: dict[sympy.Symbol, int] = {}
        """The symbols that need a value, and the index at which it is stored."""
        self._places: dict[sympy.Basic, int] = {}
        self._constants: list[Any] = []
        self._steps: list[tuple[int, Callable[..., Any], tuple[int, ...]]] = []
        for symbol, expression in definitions:
            self._places[symbol] = self._compile(expression)
        self._results = [self._compile(sympy.sympify(e)) for e in expressions]

    def __call__(self, values: Mapping[sympy.Symbol, int]) -> list[int]:
        """Return the values of the expressions.

        Raises:
            ValueError: an expression has no integer value: a division by zero or with a remainder,
                or a symbol without a value.
        """
        store = list(self._constants)
        try:
            for symbol, place in self.symbols.items():
                store[place] = values[symbol]
            for place, function, arguments in self._steps:
                store[place] = function(*[store[argument] for argument in arguments])
        except (KeyError, TypeError, ZeroDivisionError) as error:
            raise ValueError(f"no integer value: {error!r}") from error
        results = [store[place] for place in self._results]
        for result in results:
            if type(result) is not int:
                raise ValueError(f"no integer value: {result}")
        return results

    def _compile(self, expression: sympy.Basic) -> int:
        place = self._places.get(expression)
        if place is not None:
            return place
        function: Callable[..., Any] | None = None
        arguments: tuple[int, ...] = ()
        constant: Any = None
        if expression.is_Integer:
            constant = int(expression)
        elif expression.is_Rational:
            constant = Fraction(int(expression.p), int(expression.q))
        elif not expression.is_Symbol:
            function = self._function(expression)
            if function is not None:
                arguments = tuple(self._compile(argument) for argument in expression.args)
            else:
                # Conditions and the like are not numeric: substitute into the whole expression.
                symbols = sorted(expression.free_symbols, key=str)
                function = functools.partial(_replace, expression, symbols)
                arguments = tuple(self._compile(symbol) for symbol in symbols)
        place = self._places[expression] = len(self._constants)
        self._constants.append(constant)
        if expression.is_Symbol:
            self.symbols[expression] = place
        elif function is not None:
            self._steps.append((place, function, arguments))
        return place

    @staticmethod
    def _function(expression: sympy.Basic) -> Callable[..., Any] | None:
        if expression.is_Add:
            return _add
        if expression.is_Mul:
            return _multiply
        if expression.is_Pow and expression.exp.is_Integer and expression.exp >= 0:
            return _power
        if isinstance(expression, sympy.Max):
            return max
        if all(isinstance(argument, sympy.Expr) for argument in expression.args):
            return functools.partial(_call, expression.func)
        return None


def _add(*values: Any) -> Any:
    return _to_integer(sum(values))


def _multiply(*values: Any) -> Any:
    result = values[0]
    for value in values[1:]:
        result *= value
    return _to_integer(result)


def _power(base: Any, exponent: int) -> Any:
    return _to_integer(base**exponent)


def _to_integer(value: Any) -> Any:
    return int(value) if type(value) is Fraction and value.denominator == 1 else value


def _to_number(value: sympy.Basic) -> Any:
    if value.is_Integer:
        return int(value)
    if value.is_Rational:
        return Fraction(int(value.p), int(value.q))
    raise TypeError(f"{value} is not a number")


def _call(function: Callable[..., sympy.Expr], *values: Any) -> Any:
    return _to_number(function(*map(sympy.sympify, values)))


def _replace(expression: sympy.Basic, symbols: Sequence[sympy.Symbol], *values: Any) -> Any:
    return _to_number(
        expression.xreplace(dict(zip(symbols, map(sympy.sympify, values), strict=True)))
    )
