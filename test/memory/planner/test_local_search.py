"""Search for better placements: exact enumeration, and ejection within a budget."""

from __future__ import annotations

from hypothesis import given

from inductor_ext.memory.planner import greedy
from inductor_ext.memory.planner.greedy import Component
from inductor_ext.memory.planner.interval import Interval, verify
from inductor_ext.memory.planner.local_search import EjectionSearch, search_canonical
from test.support.planner_examples import unchecked_examples
from test.support.planner_problems import dense, intervals, load, optimum, stepped


class TestSearch:
    @given(intervals(6, times=8, sizes=9, least=1))
    @unchecked_examples(100)
    def test_random_enumeration_finds_the_optimum_or_proves_it(
        self, problem: list[Interval]
    ) -> None:
        component = stepped(problem)
        best = optimum(problem)
        result, _ = search_canonical(component, range(component.count), best, None)
        assert result is not None
        assert component.peak(result) == best
        assert search_canonical(component, range(component.count), best - 1, None)[0] is None

    def test_enumeration_stops_when_its_work_is_spent(self) -> None:
        component = stepped(dense(80))
        result, spent = search_canonical(component, range(component.count), component.bound, 1000)
        assert result is None
        assert 1000 <= spent < 2000

    def test_ejection_improves_a_greedy_placement(self) -> None:
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
