"""Intervals: valid arguments, the lower bound, and the verification of a plan."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inductor_ext import exc
from inductor_ext.memory.planner.interval import Interval, lower_bound, verify
from inductor_ext.memory.planner.solver import solve
from test.support.planner_examples import unchecked_examples
from test.support.planner_problems import conflicts, dense, intervals


class TestInterval:
    @pytest.mark.parametrize(
        ("arguments", "field"),
        [
            ((0, 1, -1), "size"),
            ((5, 4, 1), "end"),
            ((0, 1, 1, 0), "alignment"),
            ((0, 1, 1, 12), "alignment"),
            ((0, 1, 1, -4), "alignment"),
        ],
    )
    def test_invalid_intervals_are_refused(self, arguments: tuple[int, ...], field: str) -> None:
        with pytest.raises(exc.BadIntervalError) as caught:
            Interval(*arguments, name="arg0")
        assert caught.value.fields["field"] == field
        assert "arg0" in str(caught.value)

    def test_size_is_rounded_up_to_the_alignment(self) -> None:
        assert [Interval(0, 1, size, 64).rounded_size for size in (0, 1, 64, 65)] == [
            0,
            64,
            64,
            128,
        ]


class TestLowerBound:
    def test_is_the_highest_load(self) -> None:
        problem = [Interval(0, 4, 10), Interval(2, 6, 5), Interval(4, 8, 7), Interval(9, 10, 13)]
        assert lower_bound(problem) == 15

    def test_counts_rounded_sizes(self) -> None:
        assert lower_bound([Interval(0, 2, 1, 64), Interval(0, 2, 1, 64)]) == 128

    def test_ends_before_what_starts_at_the_same_time(self) -> None:
        assert lower_bound([Interval(0, 2, 10), Interval(2, 4, 10)]) == 10

    def test_of_nothing_is_zero(self) -> None:
        assert lower_bound([]) == 0
        assert lower_bound([Interval(3, 3, 100), Interval(0, 9, 0)]) == 0


class TestVerify:
    problem = (
        Interval(0, 5, 10, name="a"),
        Interval(3, 7, 5, name="b"),
        Interval(5, 9, 16, 8, name="c"),
    )
    right = (0, 16, 0)

    def test_a_valid_plan_is_accepted(self) -> None:
        verify(self.problem, self.right, 21)

    @pytest.mark.parametrize(
        ("offsets", "arena", "words"),
        [
            ((0, 9, 16), None, ["'a'", "'b'", "overlap"]),
            ((0, 15, 8), None, ["'b'", "'c'", "overlap"]),
            ((0, 16, 4), None, ["'c'", "alignment, 8"]),
            ((0, -1, 0), None, ["'b'", "negative"]),
            ((0, 16, 0), 20, ["'b'", "21", "the arena at 20"]),
            ((0, 16), None, ["2 offsets", "3 buffers"]),
        ],
    )
    def test_errors_name_the_buffers(
        self, offsets: tuple[int, ...], arena: int | None, words: list[str]
    ) -> None:
        with pytest.raises(exc.PlanError) as caught:
            verify(self.problem, offsets, arena)
        for word in words:
            assert word in str(caught.value)
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)

    @given(intervals(7, times=6, sizes=5, alignments=(1, 2)), st.data())
    @unchecked_examples(300)
    def test_random_plans_are_verified_as_by_all_pairs(
        self, problem: list[Interval], data: st.DataObject
    ) -> None:
        offsets = [data.draw(st.integers(-1, 14)) for _ in problem]
        try:
            verify(problem, offsets)
        except exc.PlanError:
            assert conflicts(problem, offsets)
        else:
            assert not conflicts(problem, offsets)

    def test_every_overlap_in_a_valid_plan_is_found(self) -> None:
        problem = dense(60)
        plan = solve(problem, iterations=0)
        result = 0
        for index in range(len(problem)):
            for delta in (-1, 1):
                offsets = list(plan.offsets)
                offsets[index] += delta
                if conflicts(problem, offsets):
                    result += 1
                    with pytest.raises(exc.PlanError):
                        verify(problem, offsets)
        assert result > 60
