"""Expressions for the planner's tests: sympy's maximum, and a rounded-up value that prints short.

In a compile, `memory.planner_input` supplies functions whose results Inductor can print.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import sympy  # type: ignore[import-untyped]

from inductor_ext.memory.planner import arenas
from inductor_ext.memory.planner.interval import round_up
from inductor_ext.memory.planner.symbolic.algebra import Algebra


class Align(sympy.Function):  # type: ignore[misc]
    """`Align(value, alignment)`: value rounded up to a multiple of alignment, a power of two."""

    nargs = (2,)
    is_integer = True

    @classmethod
    def eval(cls, value: sympy.Expr, alignment: sympy.Expr) -> sympy.Expr | None:
        if value.is_Integer:
            return sympy.Integer(round_up(int(value), int(alignment)))
        return None


def _make_max(arguments: Sequence[sympy.Expr]) -> sympy.Expr:
    """Return an unevaluated sympy.Max: `Algebra` has already dropped redundant arguments."""
    return sympy.Max(*arguments, evaluate=False)


plan_arenas = functools.partial(
    arenas.plan_arenas, make_max=_make_max, make_align=Align, prefix="arena"
)

make_algebra = functools.partial(Algebra, make_max=_make_max, make_align=Align, prefix="arena")
