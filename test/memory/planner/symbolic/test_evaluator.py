"""Evaluation of expressions for sizes that are known."""

from __future__ import annotations

import pytest
import sympy

from inductor_ext.memory.planner.symbolic.evaluator import ExpressionEvaluator
from test.support.planner_expressions import Align

S, T, U = (sympy.Symbol(name, integer=True, positive=True) for name in "stu")


class Half(sympy.Function):  # type: ignore[misc]
    """A function that sympy does not define, like those of Inductor."""

    @classmethod
    def eval(cls, value: sympy.Expr) -> sympy.Expr | None:
        return value // 2 if value.is_Integer else None


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        (S, 7),
        (sympy.Integer(5), 5),
        (5, 5),
        (4 * S * T + 1, 85),
        (S**2 / 7, 7),
        (S * (S + 1) / 2, 28),
        (sympy.floor(S / 2) * 8, 24),
        (sympy.ceiling(S / 2) * 8, 32),
        (sympy.Mod(S, 4), 3),
        (sympy.Max(S, T, 4), 7),
        (sympy.Min(S, T), 3),
        (Align(S * T, 64), 64),
        (Half(S), 3),
        (sympy.Piecewise((S, S < T), (T, True)), 3),
    ],
)
def test_evaluation_equals_sympy(expression: sympy.Expr, value: int) -> None:
    assert ExpressionEvaluator([expression])({S: 7, T: 3}) == [value]


def test_definitions_are_evaluated_first() -> None:
    a, b = sympy.symbols("a b", integer=True)
    program = ExpressionEvaluator([a + b], [(a, 2 * S), (b, a * T)])
    assert set(program.symbols) == {S, T}
    assert program({S: 7, T: 3}) == [14 + 42]


@pytest.mark.parametrize(
    ("expression", "values"), [(S / 2, {S: 7}), (S / T, {S: 7, T: 0}), (S, {}), (1 / S, {S: 0})]
)
def test_results_that_are_no_integer_are_errors(
    expression: sympy.Expr, values: dict[sympy.Symbol, int]
) -> None:
    with pytest.raises(ValueError, match="no integer value"):
        ExpressionEvaluator([expression])(values)
