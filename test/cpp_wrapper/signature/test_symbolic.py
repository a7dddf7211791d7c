"""Conversion of torch's symbolic expressions."""

from __future__ import annotations

import pytest
import sympy
from torch.utils._sympy import functions

from inductor_ext.cpp_wrapper.signature import expression, symbolic

S, T = sympy.Symbol("s", integer=True, positive=True), sympy.Symbol("t", integer=True)


@pytest.mark.parametrize(
    ("expr", "text"),
    [
        (2 * S + 1, "2*s + 1"),
        (S - T - 3, "s - t - 3"),
        (-S, "-s"),
        (S * T * 4, "4*s*t"),
        (functions.FloorDiv(S, 4), "s // 4"),
        (functions.Mod(S + 1, 4), "(s + 1) % 4"),
        (functions.PythonMod(T, 4), "t % 4"),
        (functions.ModularIndexing(S, 4, 3), "s // 4 % 3"),
        (functions.Max(T, 1), "max(1, t)"),
        (S**2, "s**2"),
        (sympy.Eq(functions.Mod(S, 4), 0), "s % 4 == 0"),
        (sympy.And(S < T, sympy.Ne(T, 3)), "s < t and t != 3"),
        (sympy.Not(sympy.Or(S > 3, T > 3)), None),
        (functions.CeilToInt(functions.IntTrueDiv(S, T)), "-(-s // t)"),
        (functions.FloorToInt(functions.IntTrueDiv(S, T)), "s // t"),
    ],
)
def test_expressions_of_torch_have_the_same_value(expr: sympy.Basic, text: str | None) -> None:
    node = symbolic.to_node(expr)
    if text is not None:
        assert expression.show(node) == text
    for s in range(1, 30, 3):
        for t in (1, 3, 4, 8):
            value = expr.subs({S: s, T: t})
            expected = int(bool(value)) if value.is_Boolean else int(value)
            assert expression.evaluate(node, {"s": s, "t": t}) == expected


@pytest.mark.parametrize("expr", [functions.FloatTrueDiv(S, T), S / 2, sympy.sqrt(S), sympy.pi])
def test_non_integer_operations_are_rejected(expr: sympy.Basic) -> None:
    with pytest.raises(ValueError, match="not an integer operation"):
        symbolic.to_node(expr)
