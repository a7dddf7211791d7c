"""Stacking orders: which are complete, and how one is chosen for several sizes.

`PLANNER_EXAMPLES=100000 python -m pytest test/memory/planner/symbolic -k "left_out or stacking"` is
the long run.
"""

from __future__ import annotations

import random

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from inductor_ext.memory.planner import interval as problem
from inductor_ext.memory.planner.interval import Interval
from inductor_ext.memory.planner.symbolic import stacking
from inductor_ext.memory.planner.symbolic.stacking import (
    Stacking,
    choose_stacking,
    scaled_samples,
    stack_in_order,
)
from test.support.planner_examples import examples

S, T, U = (sympy.Symbol(name, integer=True, positive=True) for name in "stu")

LIFETIMES = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 6)).map(lambda pair: (pair[0], sum(pair))),
    max_size=14,
)


def live_together(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return max(a[0], b[0]) < min(a[1], b[1])


def test_only_buffers_directly_below_are_listed() -> None:
    # All three are live at once: only the middle one is directly below the topmost.
    assert stack_in_order([(0, 3)] * 3, [2, 0, 1]).below == ((2,), (0,), ())
    # The first and the last are never live at once, so that the middle one is above or below both.
    assert stack_in_order([(0, 2), (0, 4), (2, 4)], [0, 2, 1]).below == ((), (2, 0), ())


@examples(100)
@given(LIFETIMES, st.randoms(use_true_random=False))
def test_a_stacking_orders_exactly_what_is_live_at_once(
    lifetimes: list[tuple[int, int]], generator: random.Random
) -> None:
    order = list(range(len(lifetimes)))
    generator.shuffle(order)
    result = stack_in_order(lifetimes, order)
    assert result.unordered(lifetimes) is None
    for index, lower in enumerate(result.below):
        assert all(live_together(lifetimes[index], lifetimes[other]) for other in lower)
        # Reduced: without any one of them the order is not complete.
        for missing in lower:
            fewer = list(result.below)
            fewer[index] = tuple(other for other in lower if other != missing)
            assert Stacking(result.order, tuple(fewer)).unordered(lifetimes) is not None
    sizes = [generator.randrange(100) for _ in lifetimes]
    offsets, peak = result.offsets(sizes, [1] * len(sizes))
    intervals = [Interval(*life, size) for life, size in zip(lifetimes, sizes, strict=True)]
    problem.verify(intervals, offsets, peak)


def test_reducing_a_large_order_does_not_visit_all_pairs() -> None:
    # All 2 million pairs are live at once, and one buffer below each is enough.
    result = stack_in_order([(0, 1)] * 2000, range(2000))
    assert result.below == ((), *((index,) for index in range(1999)))


def test_samples_scale_all_symbols_together_and_each_alone() -> None:
    assert [tuple(sample.values()) for sample in scaled_samples({S: 100, T: 3})] == [
        (100, 3),
        (25, 1),
        (400, 12),
        (10, 1),
        (1600, 48),
        (25, 3),
        (400, 3),
        (100, 1),
        (100, 12),
    ]
    many = {sympy.Symbol(f"x{i}"): 64 for i in range(50)}
    assert len(scaled_samples(many)) == 17
    assert scaled_samples({}) == [{}]


def test_the_order_is_chosen_by_the_worst_sample() -> None:
    # At the hint all orders are equal; at the other sample only some are good.
    generator = random.Random(5)
    lifetimes = [(i, i + generator.choice([2, 3, 5])) for i in range(24)]
    columns = [[64] * 24, [generator.choice([64, 128, 640, 6400]) for _ in range(24)]]
    choice = choose_stacking(lifetimes, columns, [64] * 24)
    assert choice.worst_ratio == 1.0
    assert choice.lower_bounds == tuple(
        problem.lower_bound(
            [Interval(*life, size) for life, size in zip(lifetimes, column, strict=True)]
        )
        for column in columns
    )
    for column, peak in zip(columns, choice.peaks, strict=True):
        offsets, height = choice.stacking.offsets(column, [64] * 24)
        intervals = [
            Interval(*life, size, 64) for life, size in zip(lifetimes, column, strict=True)
        ]
        problem.verify(intervals, offsets, height)
        assert height == peak


def test_a_joint_search_beats_the_best_of_each_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = random.Random(2)
    lifetimes = [(i, i + generator.choice([2, 3, 5, 20])) for i in range(40)]
    columns = [[generator.choice([1, 3, 17, 100]) * 64 for _ in range(40)] for _ in range(4)]
    result = choose_stacking(lifetimes, columns, [64] * 40)
    monkeypatch.setattr(stacking, "MAX_FIT_WORK", 0)
    without = choose_stacking(lifetimes, columns, [64] * 40)
    assert result.worst_ratio < without.worst_ratio


def test_buffers_that_are_empty_at_the_hint_have_a_place() -> None:
    choice = choose_stacking([(0, 2)] * 3, [[0, 0, 0], [64, 128, 64]], [64] * 3)
    assert choice.stacking.unordered([(0, 2)] * 3) is None
    assert choice.peaks == (0, 256)
