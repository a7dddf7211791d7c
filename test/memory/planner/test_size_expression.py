"""Size expressions as text: values, and texts that are rejected without being executed."""

from __future__ import annotations

import pytest
import sympy  # type: ignore[import-untyped]

from inductor_ext.memory.planner.size_expression import evaluate


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4", 4),
        ("s0", 6),
        ("64*s0 + 4*s1", 412),
        ("-s1 + s0", -1),
        ("(s0 + 3) // 2 % 3", 1),
        ("(1/2)*s0", 3),
        ("s0**3", 216),
        ("align(12*s0)", 128),
        ("512*((511 + 2*s0*s1) // 512)", 512),
        ("max(s0, s1, 3)", 7),
        ("min(s0, s1)", 6),
        ("(s0 if s0 > 6 else s1)", 7),
        ("Where(s0 == 6 and not s1 < 7, 1, 2)", 1),
        ("(1 if s0 > 9 or s1 >= 7 else 0)", 1),
        ("math.trunc((1/4)*s0)", 1),
        ("math.ceil(s0 / 4)", 2),
        ("abs(s0 - s1)", 1),
    ],
)
def test_values(text: str, expected: int) -> None:
    assert evaluate(text, {"s0": 6, "s1": 7}) == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "'' is not an expression"),
        ("s0 +", "is not an expression"),
        ("s9", "'s9' has no value"),
        ("s0 / 4", "is not an integer"),
        ("s0 > 3", "is not an integer"),
        ("True", "is not an integer"),
        ("s0 // 0", "has no value"),
        ("2.5", "'2.5' has no value"),
        ("'a' * s0", "has no value"),
        ("9**9**9**9", "out of range"),
        ("9**100*9**100", "too large"),
        ("s0 << 60", "has no value"),
        ("s0.real", "has no value"),
        ("__import__('os')", "has no value"),
        ("max(s0, key=s0)", "has no value"),
        ("(lambda: 1)()", "has no value"),
        ("[1][0]", "has no value"),
        ("1 < s0 < 9", "has no value"),
        pytest.param("(" * 500 + "1" + ")" * 500, "", id="nested"),
    ],
)
def test_other_texts(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why.replace("**", r"\*\*")):
        evaluate(text, {"s0": 6})


def test_expressions_that_the_printer_writes() -> None:
    from torch._inductor.codegen.wrapper import pexpr
    from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod, ModularIndexing

    n, m = sympy.symbols("s0 s1", integer=True, positive=True)
    for expression in (
        Max(n * m, 3 * n) + Min(n, m),
        FloorDiv(n * m + 5, 4),
        ModularIndexing(n * m, 3, 5),
        Mod(n, 4) * (n + m) ** 2,
        n / 2 + m / 2,
    ):
        for values in ({n: 6, m: 8}, {n: 5, m: 17}):
            expected = int(expression.xreplace(values))
            assert evaluate(pexpr(expression), {"s0": values[n], "s1": values[m]}) == expected
