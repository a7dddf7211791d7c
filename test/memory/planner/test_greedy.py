"""Greedy placement: valid for random problems, and exact where it can be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inductor_ext.memory.planner import greedy
from inductor_ext.memory.planner.greedy import Component
from inductor_ext.memory.planner.interval import Interval, lower_bound, verify
from test.support.planner_examples import unchecked_examples
from test.support.planner_problems import intervals, stepped


class TestPlacing:
    @given(intervals(25, least=1))
    @unchecked_examples(150)
    def test_random_placements_are_valid(self, problem: list[Interval]) -> None:
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
        assert greedy.first_fit_by_tree(component, order, unlimited) == greedy.first_fit(
            component, order, unlimited
        )

    @given(intervals(25, least=1), st.integers(0, 10))
    @unchecked_examples(150)
    def test_random_allocation_in_time_order_is_valid(
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
    @unchecked_examples(100)
    def test_random_parts_find_overlapping_buffers(self, problem: list[Interval]) -> None:
        component = stepped(problem)
        ordered = sorted(problem, key=lambda i: (i.start, i.end, -i.size))
        total = 0
        contention = component.contention()
        for index, one in enumerate(ordered):
            results = {
                j
                for j, other in enumerate(ordered)
                if j != index and one.start < other.end and other.start < one.end
            }
            assert sorted(component.find_overlapping(index)) == sorted(results)
            total += len(results)
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
        # At time 1 there are gaps of 30 and 10 bytes; the last buffer takes the second.
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
