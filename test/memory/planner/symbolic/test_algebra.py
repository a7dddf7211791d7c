"""Sizes as expressions: maxima, rounding, and names for long maxima."""

from __future__ import annotations

import random

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from inductor_ext.memory.planner import interval as problem
from inductor_ext.memory.planner.symbolic.evaluator import ExpressionEvaluator
from inductor_ext.memory.planner.symbolic.stacking import stack_in_order
from test.support.planner_examples import examples
from test.support.planner_expressions import make_algebra

S, T, U = (sympy.Symbol(name, integer=True, positive=True) for name in "stu")
UNKNOWN = sympy.Symbol("i0", integer=True)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([64 * S, 128 * S], "128*s"),
        ([64 * S, 64 * S + 64], "64*s + 64"),
        ([64 * S, 64 * T], "Max(64*s, 64*t)"),
        ([64 * S, 64 * T, 64 * T * (S + 1)], "Max(64*s, 64*s*t + 64*t)"),
        ([64 * S + 64 * U, 128 * U], "64*u + Max(64*s, 64*u)"),
        ([4 * S, 8 * S], "Align(8*s, 64)"),
        ([4 * S, 4 * S + 100], "Align(4*s + 100, 64)"),
        ([100, 64 * S], "Max(128, 64*s)"),
        ([100, 200], "256"),
        ([64 * UNKNOWN, 128 * UNKNOWN], "128*i0"),
        ([64 * UNKNOWN, 64 * UNKNOWN + 64 * S], "64*i0 + 64*s"),
        ([64 * UNKNOWN + 64, 64 * UNKNOWN + 128], "Max(64*i0 + 64, 64*i0 + 128)"),
        ([64 * S - 64, 64 * S], "Max(64*s, 64*s - 64)"),
    ],
)
def test_a_maximum_drops_dominated_arguments(values: list[object], text: str) -> None:
    algebra = make_algebra(values)
    result = algebra.maximum([algebra.size(value, 64) for value in values])
    assert str(algebra.expression(result)) == text


def test_a_maximum_of_maxima_is_one() -> None:
    algebra = make_algebra([64 * S, 64 * T, 64 * U])
    s, t, u = (algebra.size(64 * symbol, 64) for symbol in (S, T, U))
    inner = algebra.maximum([s, t])
    assert str(algebra.expression(algebra.maximum([inner, u]))) == "Max(64*s, 64*t, 64*u)"
    for again in ([inner, s], [t, s], [inner, inner]):
        assert algebra.expression(algebra.maximum(again)) is algebra.expression(inner)


def test_a_visible_multiple_is_not_rounded() -> None:
    algebra = make_algebra([4 * S])
    rounded = algebra.size(4 * S, 64)
    assert str(algebra.expression(rounded)) == "Align(4*s, 64)"
    assert algebra.align(rounded, 64) is rounded
    assert algebra.align(rounded, 16) is rounded
    assert str(algebra.expression(algebra.align(rounded, 256))) == "Align(Align(4*s, 64), 256)"
    assert str(algebra.expression(algebra.size(4 * S * T + 256 * T, 64))) == (
        "256*t + Align(4*s*t, 64)"
    )


def test_sizes_are_rounded_where_they_are_stacked() -> None:
    # An unaligned member is above an aligned one, and an aligned one above both.
    algebra = make_algebra([4 * S])
    offsets, size = algebra.stack(stack_in_order([(0, 1)] * 3, range(3)), [4 * S] * 3, [64, 1, 64])
    assert [str(offset) for offset in offsets] == ["0", "Align(4*s, 64)", "2*Align(4*s, 64)"]
    assert str(size) == "3*Align(4*s, 64)"


FACTORS = st.sampled_from([0, 0, 0, 0, 1, 3, 4, 64, 100, 256])
POLYNOMIALS = st.builds(
    lambda a, b, c, d, e: a * S + b * T + c * S * T + d * U + e, *([FACTORS] * 5)
)
NUMBERS = st.sampled_from([0, 1, 2, 17, 63, 64, 1009, 2**40 + 1])


@examples(100)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 8),
            st.integers(1, 6),
            POLYNOMIALS,
            st.sampled_from([1, 16, 64, 64, 64, 256]),
        ),
        max_size=16,
    ),
    st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
def test_terms_left_out_of_an_expression_never_matter(
    buffers: list[tuple[int, int, sympy.Expr, int]],
    points: list[tuple[int, int, int]],
    generator: random.Random,
) -> None:
    lifetimes = [(start, start + length) for start, length, _, _ in buffers]
    sizes = [size for _, _, size, _ in buffers]
    alignments = [alignment for _, _, _, alignment in buffers]
    order = list(range(len(buffers)))
    generator.shuffle(order)
    stack = stack_in_order(lifetimes, order)
    algebra = make_algebra(sizes)
    offsets, height = algebra.stack(stack, sizes, alignments)
    program = ExpressionEvaluator([height, *offsets], algebra.definitions)
    for point in points:
        values = dict(zip((S, T, U), point, strict=True))
        rounded = map(problem.round_up, ExpressionEvaluator(sizes)(values), alignments)
        expected_offsets, expected_height = stack.offsets(list(rounded), alignments)
        assert program(values) == [expected_height, *expected_offsets]


def test_a_long_maximum_becomes_a_definition() -> None:
    names = [sympy.Symbol(f"x{i}", integer=True, positive=True) for i in range(30)]
    algebra = make_algebra([4 * name for name in names], prefix="arena3")
    top = algebra.maximum([algebra.size(4 * name, 64) for name in names])
    assert str(algebra.expression(top)) == "arena3_part0"
    ((symbol, part),) = algebra.definitions
    assert (str(symbol), symbol.is_integer, len(part.args)) == ("arena3_part0", True, 30)
    assert algebra.used_definitions([algebra.expression(top) + 1]) == [symbol]
    assert algebra.used_definitions([names[0]]) == []
