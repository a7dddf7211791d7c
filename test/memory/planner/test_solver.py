"""The static planner: known optima, invariants on random problems, and public instances.

`PLANNER_EXAMPLES=100000 python -m pytest test/memory/planner -k random` is the long run: each test
with that word in its name draws that many problems instead of its default.
"""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inductor_ext import exc
from inductor_ext.memory.planner import greedy
from inductor_ext.memory.planner.interval import Interval, Placement, lower_bound
from inductor_ext.memory.planner.solver import DEFAULT_ITERATIONS, solve
from test.support import hash_seeds
from test.support.planner_examples import unchecked_examples
from test.support.planner_problems import conflicts, dense, intervals, load, optimum


class TestSolve:
    def test_empty(self) -> None:
        plan = solve([])
        assert plan == Placement((), 0, 0, plan.method, 0)
        assert plan.ratio == 1.0

    def test_buffers_without_size_or_lifetime_have_offset_zero(self) -> None:
        plan = solve([Interval(0, 9, 0, 64), Interval(2, 2, 100), Interval(0, 3, 8)])
        assert plan.offsets == (0, 0, 0)
        assert plan.peak == plan.lower_bound == 8

    def test_buffers_of_one_lifetime_are_stacked(self) -> None:
        plan = solve([Interval(0, 4, 10), Interval(0, 4, 20), Interval(0, 4, 30)])
        assert plan.peak == 60
        assert sorted(plan.offsets) == [0, 30, 50]

    def test_buffers_live_one_after_another_share_memory(self) -> None:
        plan = solve([Interval(k, k + 1, 10 + k) for k in range(50)])
        assert plan.offsets == (0,) * 50
        assert plan.peak == 59

    def test_the_schedule_is_split_where_nothing_is_live(self) -> None:
        busy = [Interval(0, 2, 100), Interval(1, 3, 100)]
        plan = solve([*busy, Interval(3, 5, 40), Interval(4, 6, 60), Interval(9, 11, 5)])
        assert plan.peak == 200
        assert plan.offsets[4] == 0
        assert 0 in plan.offsets[2:4]

    def test_alignment_holds_for_offsets_and_sizes(self) -> None:
        plan = solve([Interval(0, 2, 1, 64), Interval(1, 3, 65, 64), Interval(2, 4, 1, 64)])
        assert plan.peak == plan.lower_bound == 192
        assert all(offset % 64 == 0 for offset in plan.offsets)

    def test_mixed_alignments_need_no_padding_between(self) -> None:
        problem = [Interval(0, 2, 1), Interval(0, 2, 64, 64), Interval(0, 2, 8, 8)]
        assert solve(problem).peak == 73

    def test_the_optimum_can_exceed_the_lower_bound(self) -> None:
        # A ring of buffers of which at most two at a time fit into the lower bound.
        problem = [Interval(0, 2, 2), Interval(1, 4, 1), Interval(3, 6, 2), Interval(5, 7, 1)]
        problem += [Interval(0, 1, 1), Interval(6, 7, 2), Interval(2, 3, 2), Interval(4, 5, 1)]
        assert solve(problem).peak == optimum(problem)

    @given(intervals(6, times=8, sizes=9))
    @unchecked_examples(200)
    def test_random_problems_of_six_buffers_are_solved_exactly(
        self, problem: list[Interval]
    ) -> None:
        plan = solve(problem, iterations=0)
        assert plan.peak == optimum(problem)
        assert not conflicts(problem, plan.offsets)

    @given(intervals(40), st.integers(0, 3))
    @unchecked_examples(150)
    def test_random_plans_are_valid_and_within_bounds(
        self, problem: list[Interval], seed: int
    ) -> None:
        plan = solve(problem, iterations=20, seed=seed)
        assert not conflicts(problem, plan.offsets)
        ends = [o + i.rounded_size for i, o in zip(problem, plan.offsets, strict=True)]
        used = [end for i, end in zip(problem, ends, strict=True) if i.start < i.end]
        assert plan.peak == max(used, default=0)
        assert plan.lower_bound == lower_bound(problem)
        assert plan.lower_bound <= plan.peak <= sum(i.rounded_size for i in problem)

    @given(intervals(30), st.randoms(use_true_random=False))
    @unchecked_examples(60)
    def test_random_orders_and_names_do_not_change_the_peak(
        self, problem: list[Interval], draw: random.Random
    ) -> None:
        other = [Interval(i.start, i.end, i.size, i.alignment, str(draw.random())) for i in problem]
        draw.shuffle(other)
        assert solve(other, iterations=20).peak == solve(problem, iterations=20).peak

    @given(intervals(30, alignments=(4,)), st.integers(1, 50), st.integers(-100, 100))
    @unchecked_examples(40)
    def test_shifts_and_stretches_in_time_keep_the_lower_bound(
        self, problem: list[Interval], stretch: int, shift: int
    ) -> None:
        moved = [
            Interval(shift + stretch * i.start, shift + stretch * i.end, i.size, i.alignment)
            for i in problem
        ]
        assert lower_bound(moved) == lower_bound(problem)
        plan = solve(moved, iterations=5)
        assert not conflicts(problem, plan.offsets)

    def test_results_are_the_same_in_every_process(self) -> None:
        code = (
            "import json; from test.support.planner_problems import dense; "
            "from inductor_ext.memory.planner.solver import solve; "
            "print(json.dumps(solve(dense(70), seed=3).offsets))"
        )
        expected = list(solve(dense(70), seed=3).offsets)
        for output in hash_seeds.outputs(code, ("0", "1", "4242")):
            assert json.loads(output) == expected

    def test_a_larger_budget_is_no_worse_and_a_budget_is_kept(self) -> None:
        problem = dense(150)
        plans = [solve(problem, iterations=n) for n in (0, 50, DEFAULT_ITERATIONS, 1000)]
        peaks = [plan.peak for plan in plans]
        assert peaks == sorted(peaks, reverse=True)
        assert peaks[-1] < peaks[0]
        for plan, budget in zip(plans[1:], (50, DEFAULT_ITERATIONS, 1000), strict=True):
            assert plan.iterations <= budget * 1.1 + 10

    def test_default_work_grows_in_proportion_to_the_buffers(self) -> None:
        # Work is measured instead of time, which `benchmarks.memory.planner` measures. Beyond the
        # budget there are only the three placements that are always tried.
        for count in (200, 800):
            plan = solve(dense(count))
            assert plan.ratio > 1
            assert plan.iterations <= DEFAULT_ITERATIONS * 1.1 + 10

    def test_a_plan_that_fails_the_verifier_is_never_returned(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            greedy,
            "skyline",
            lambda component, order, limit: [0] * component.count if limit > 1 else None,
        )
        with pytest.raises(exc.PlanError):
            solve(dense(30))


class TestPublicInstances:
    """Ratios that a small budget reaches; `benchmarks.memory.planner` has those of a large one."""

    @pytest.mark.parametrize(
        ("name", "iterations", "ratio"),
        [
            ("minimalloc-example", 0, 1.0),
            ("minimalloc-A", 3000, 1.15),
            ("minimalloc-B", 3000, 1.15),
            ("minimalloc-C", 3000, 1.15),
            ("minimalloc-D", 3000, 1.15),
            ("minimalloc-E", 3000, 1.15),
            ("minimalloc-F", 3000, 1.15),
            ("iopddl-G_1", 200, 1.0),
            ("somas-resnet50", 500, 1.002),
        ],
    )
    def test_ratio(self, name: str, iterations: int, ratio: float) -> None:
        plan = solve(load(name), iterations=iterations)
        assert plan.ratio <= ratio

    @pytest.mark.slow
    @pytest.mark.parametrize("letter", "ABCDEF")
    def test_a_large_budget_comes_within_a_tenth(self, letter: str) -> None:
        assert solve(load(f"minimalloc-{letter}"), iterations=40_000).ratio <= 1.10
