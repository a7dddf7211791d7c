"""The static planner: known optima, invariants on random problems, and public instances.

`PLANNER_EXAMPLES=100000 python -m pytest test/memory/planner/test_solver.py -k random` is the long
run: each test named so draws that many problems instead of its default.
"""

from __future__ import annotations

import functools
import itertools
import json
import pickle
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from inductor_ext import exc
from inductor_ext.memory.planner import csv_io, greedy
from inductor_ext.memory.planner.greedy import Component
from inductor_ext.memory.planner.interval import Interval, Placement, lower_bound, round_up, verify
from inductor_ext.memory.planner.local_search import EjectionSearch, search_canonical
from inductor_ext.memory.planner.solver import DEFAULT_ITERATIONS, solve
from test.support import hash_seeds, planner_examples

CHECKOUT = Path(__file__).parents[3]
INSTANCES = CHECKOUT / "benchmarks" / "memory" / "instances"

ALIGNMENTS = (1, 4, 64)


examples = functools.partial(planner_examples.examples, suppress=tuple(HealthCheck))


def intervals(
    most: int,
    *,
    times: int = 20,
    sizes: int = 40,
    alignments: Sequence[int] = ALIGNMENTS,
    least: int = 0,
) -> st.SearchStrategy[list[Interval]]:
    """Lists of up to `most` intervals; `least` is that of lifetimes and sizes."""
    one = st.builds(
        lambda start, length, size, alignment: Interval(start, start + length, size, alignment),
        st.integers(0, times),
        st.integers(least, times // 2),
        st.integers(least, sizes),
        st.sampled_from(alignments),
    )
    return st.lists(one, min_size=least, max_size=most)


def conflicts(problem: Sequence[Interval], offsets: Sequence[int]) -> bool:
    """Whether a plan is wrong, by looking at all pairs."""
    placed = list(zip(problem, offsets, strict=True))
    return any(offset < 0 or offset % i.alignment for i, offset in placed) or any(
        max(a.start, b.start) < min(a.end, b.end)
        and a.size
        and b.size
        and x < y + b.rounded_size
        and y < x + a.rounded_size
        for (a, x), (b, y) in itertools.combinations(placed, 2)
    )


def optimum(problem: Sequence[Interval]) -> int:
    """The lowest peak, by stacking in every order.

    Some order stacks the buffers of a plan from the lowest to the highest, and none then ends above
    its place in that plan.
    """
    best = sum(interval.rounded_size for interval in problem) + 1000
    chosen: list[tuple[Interval, int]] = []

    def extend(left: tuple[Interval, ...], peak: int) -> None:
        nonlocal best
        if peak >= best:
            return
        if not left:
            best = peak
            return
        for k, interval in enumerate(left):
            ground = max(
                (
                    top
                    for other, top in chosen
                    if interval.start < other.end and other.start < interval.end
                ),
                default=0,
            )
            top = round_up(ground, interval.alignment) + interval.rounded_size
            chosen.append((interval, top))
            extend(left[:k] + left[k + 1 :], max(peak, top))
            chosen.pop()

    extend(tuple(i for i in problem if i.size and i.start < i.end), 0)
    return best


def dense(count: int, seed: int = 0) -> list[Interval]:
    """A problem that no plan is likely to solve at its lower bound: random, and mostly full."""
    draw = random.Random(seed)
    problem = []
    for index in range(count):
        start = draw.randrange(count // 2)
        length = draw.choice((1, 2, 3, 5, 8, count // 4))
        problem.append(Interval(start, start + length, draw.randrange(1, 1000), name=f"b{index}"))
    return problem


def stepped(problem: Sequence[Interval]) -> Component:
    """One part of intervals that overlap from the first to the last."""
    return Component(sorted(problem, key=lambda i: (i.start, i.end, -i.size)))


def load(name: str) -> tuple[Interval, ...]:
    return csv_io.read(INSTANCES / f"{name}.csv").intervals


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
    def test_what_no_plan_could_be_right_for_is_refused(
        self, arguments: tuple[int, ...], field: str
    ) -> None:
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

    def test_accepts_a_right_plan(self) -> None:
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
    def test_names_what_is_wrong(
        self, offsets: tuple[int, ...], arena: int | None, words: list[str]
    ) -> None:
        with pytest.raises(exc.PlanError) as caught:
            verify(self.problem, offsets, arena)
        for word in words:
            assert word in str(caught.value)
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)

    @given(intervals(7, times=6, sizes=5, alignments=(1, 2)), st.data())
    @examples(300)
    def test_random_plans_are_judged_as_by_looking_at_all_pairs(
        self, problem: list[Interval], data: st.DataObject
    ) -> None:
        offsets = [data.draw(st.integers(-1, 14)) for _ in problem]
        try:
            verify(problem, offsets)
        except exc.PlanError:
            assert conflicts(problem, offsets)
        else:
            assert not conflicts(problem, offsets)

    def test_finds_every_single_overlap_put_into_a_good_plan(self) -> None:
        problem = dense(60)
        plan = solve(problem, iterations=0)
        found = 0
        for index in range(len(problem)):
            for delta in (-1, 1):
                offsets = list(plan.offsets)
                offsets[index] += delta
                if conflicts(problem, offsets):
                    found += 1
                    with pytest.raises(exc.PlanError):
                        verify(problem, offsets)
        assert found > 60


class TestPlacing:
    @given(intervals(25, least=1))
    @examples(150)
    def test_random_placements_are_right(self, problem: list[Interval]) -> None:
        component = stepped(problem)
        ordered = sorted(problem, key=lambda i: (i.start, i.end, -i.size))
        order = sorted(range(component.count), key=lambda i: -component.size[i])
        unlimited = 1 << 60
        for place in (greedy.first_fit, greedy.best_fit, greedy.skyline):
            offsets = place(component, order, unlimited)
            assert offsets is not None
            peak = component.peak(offsets)
            verify(ordered, offsets, peak)
            assert peak >= component.bound
            assert place(component, order, peak) == offsets
            assert place(component, order, peak - 1) is None
        assert greedy._first_fit_by_tree(component, order, unlimited) == greedy.first_fit(
            component, order, unlimited
        )

    @given(intervals(25, least=1), st.integers(0, 10))
    @examples(150)
    def test_random_allocation_in_time_order_is_right(
        self, problem: list[Interval], longest_on_top: int
    ) -> None:
        component = stepped(problem)
        ordered = sorted(problem, key=lambda i: (i.start, i.end, -i.size))
        everything = range(component.count)
        first = greedy.first_fit(component, everything, 1 << 60)
        assert greedy.in_time_order(component, 1 << 60, 0) == first
        limit = 2 * sum(i.rounded_size for i in problem)
        offsets = greedy.in_time_order(component, limit, longest_on_top)
        if offsets is not None:
            verify(ordered, offsets, limit)

    @given(intervals(25, least=1))
    @examples(100)
    def test_random_parts_know_their_neighbours(self, problem: list[Interval]) -> None:
        component = stepped(problem)
        ordered = sorted(problem, key=lambda i: (i.start, i.end, -i.size))
        total = 0
        contention = component.contention()
        for index, one in enumerate(ordered):
            found = {
                j
                for j, other in enumerate(ordered)
                if j != index and one.start < other.end and other.start < one.end
            }
            assert sorted(component.neighbours(index)) == sorted(found)
            total += len(found)
            assert contention[index] == lower_bound(
                [
                    Interval(max(i.start, one.start), min(i.end, one.end), i.size, i.alignment)
                    for i in ordered
                    if max(i.start, one.start) < min(i.end, one.end)
                ]
            )
        assert total == 2 * component.pairs

    def test_skyline_is_exact_for_nested_lifetimes(self) -> None:
        nested = [Interval(k, 200 - k, 7 * k + 1) for k in range(100)]
        component = stepped(nested)
        order = sorted(range(component.count), key=lambda i: -component.span[i])
        assert greedy.skyline(component, order, component.bound) is not None

    def test_best_fit_prefers_the_tight_gap(self) -> None:
        # Gaps of 30 and 10 bytes at time 1 between what lasts; the last buffer takes the second.
        problem = [
            Interval(0, 1, 30),
            Interval(0, 2, 5),
            Interval(0, 1, 10),
            Interval(0, 2, 5),
            Interval(1, 2, 10),
        ]
        component = Component(problem)
        assert greedy.first_fit(component, range(5), 100) == [0, 30, 35, 45, 0]
        assert greedy.best_fit(component, range(5), 100) == [0, 30, 35, 45, 35]


class TestSearch:
    @given(intervals(6, times=8, sizes=9, least=1))
    @examples(100)
    def test_random_enumeration_finds_the_optimum_or_proves_it(
        self, problem: list[Interval]
    ) -> None:
        component = stepped(problem)
        best = optimum(problem)
        found, _ = search_canonical(component, range(component.count), best, None)
        assert found is not None
        assert component.peak(found) == best
        assert search_canonical(component, range(component.count), best - 1, None)[0] is None

    def test_enumeration_stops_when_its_work_is_spent(self) -> None:
        component = stepped(dense(80))
        found, spent = search_canonical(component, range(component.count), component.bound, 1000)
        assert found is None
        assert 1000 <= spent < 2000

    def test_ejection_improves_on_a_greedy_placement_and_stays_right(self) -> None:
        problem = sorted(load("minimalloc-E"), key=lambda i: (i.start, i.end, -i.size))
        component = Component(problem)
        order = sorted(range(component.count), key=lambda i: (-component.size[i], i))
        start = greedy.first_fit(component, order, 1 << 60)
        assert start is not None
        search = EjectionSearch(component, start, 0)
        begin = search.peak
        search.run(component.bound, 100_000)
        assert search.peak < 0.9 * begin
        assert search.work <= 101_000
        assert component.peak(search.offsets) == search.peak
        verify(problem, search.offsets, search.peak)


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
        # Five steps, three buffers that each leave room for no more than two at a time, in a ring.
        problem = [Interval(0, 2, 2), Interval(1, 4, 1), Interval(3, 6, 2), Interval(5, 7, 1)]
        problem += [Interval(0, 1, 1), Interval(6, 7, 2), Interval(2, 3, 2), Interval(4, 5, 1)]
        assert solve(problem).peak == optimum(problem)

    @given(intervals(6, times=8, sizes=9))
    @examples(200)
    def test_random_problems_of_six_buffers_are_solved_exactly(
        self, problem: list[Interval]
    ) -> None:
        plan = solve(problem, iterations=0)
        assert plan.peak == optimum(problem)
        assert not conflicts(problem, plan.offsets)

    @given(intervals(40), st.integers(0, 3))
    @examples(150)
    def test_random_plans_are_right_and_between_the_bounds(
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
    @examples(60)
    def test_random_orders_and_names_do_not_change_the_peak(
        self, problem: list[Interval], draw: random.Random
    ) -> None:
        other = [Interval(i.start, i.end, i.size, i.alignment, str(draw.random())) for i in problem]
        draw.shuffle(other)
        assert solve(other, iterations=20).peak == solve(problem, iterations=20).peak

    @given(intervals(30, alignments=(4,)), st.integers(1, 50), st.integers(-100, 100))
    @examples(40)
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

    def test_the_same_in_every_process(self) -> None:
        code = (
            "import json; from test.memory.planner.test_solver import dense; "
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
        # Work stands for time, which no test should depend on: `benchmarks.memory.planner`
        # measures it. Beyond the budget only the three placements that are always tried count.
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
