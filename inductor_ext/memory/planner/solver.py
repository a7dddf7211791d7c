"""The solver: finds a verified plan for a list of intervals within a work budget.

Buffers with the same live range and alignment are merged into one. The schedule is split where
nothing is live into components, which all start at offset 0. For each component the solver tries a
portfolio of greedy placements, cheapest first, and then the search of `local_search`. It stops when
the component's peak is at most the lower bound of the whole problem, which no plan can beat, or
when the budget is spent.

The plan depends only on the multiset of intervals, the budget and the seed. It does not depend on
the order in which intervals with different live ranges and sizes are given, on names, on time or on
the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from inductor_ext.memory.planner import greedy
from inductor_ext.memory.planner.greedy import Component
from inductor_ext.memory.planner.interval import Interval, Placement, lower_bound, verify
from inductor_ext.memory.planner.local_search import SCAN, EjectionSearch, search_canonical

DEFAULT_ITERATIONS = 120
"""About 0.1 ms of one core per buffer, if the plan does not reach the lower bound."""

_MAX_EXACT = 8
"""Parts with at most this many buffers are solved exactly, regardless of the budget."""

_MAX_ENUMERATED = 1000
"""Maximum number of buffers for canonical enumeration. The cost of a step is proportional to it."""

_MIN_PLACEMENTS = 3
"""Number of placements of the portfolio that are tried regardless of the budget."""


def solve(
    intervals: Sequence[Interval], *, iterations: int = DEFAULT_ITERATIONS, seed: int = 0
) -> Placement:
    """Solve a planning problem.

    Args:
        intervals: the storages. Those with zero size or an empty live range get offset 0.
        iterations: the budget. To place a buffer, the solver visits those that are live at the same
            time; in one iteration it visits as many as the current component has. With a constant
            budget the time is therefore proportional to the number of buffers, no matter how many
            of them are live at the same time. The first placements are tried with any budget.
        seed: seed of the search. On average, all seeds give equally good plans.

    Returns:
        A verified plan.
    """
    bound = lower_bound(intervals)
    indices = [
        index
        for index, interval in enumerate(intervals)
        if interval.size and interval.start < interval.end
    ]
    # Sort, so that the result does not depend on the order of the input.
    indices.sort(key=lambda i: _key(intervals[i]))
    offsets = [0] * len(intervals)
    components = [
        _ComponentSolver([intervals[i] for i in component], component)
        for component in _split(intervals, indices)
    ]
    components.sort(key=lambda component: -component.bound)
    peak, work, method = bound, 0, "empty"
    for component in components:
        # A component need not go below the peak of another one.
        component.solve(peak, iterations, seed)
        work += -(-component.work // component.count)
        if component.peak > peak or method == "empty":
            peak, method = component.peak, component.method
        for index, offset in zip(component.indices, component.offsets, strict=True):
            offsets[index] = offset
    verify(intervals, offsets, peak)
    return Placement(tuple(offsets), peak, bound, method, work)


def _key(interval: Interval) -> tuple[int, int, int, int]:
    # Within one live range by descending alignment, so that equal alignments are adjacent.
    return interval.start, interval.end, -interval.alignment, -interval.size


def _split(intervals: Sequence[Interval], indices: Sequence[int]) -> Iterator[list[int]]:
    """Yield groups of sorted intervals such that nothing is live between groups."""
    group: list[int] = []
    end = 0
    for index in indices:
        interval = intervals[index]
        if group and interval.start >= end:
            yield group
            group = []
        end = max(end, interval.end) if group else interval.end
        group.append(index)
    if group:
        yield group


def _merge(intervals: Sequence[Interval]) -> tuple[list[Interval], list[tuple[int, int]]]:
    """Merge sorted intervals with equal live range and alignment into blocks.

    Returns:
        The blocks, and for each interval its block and its offset in the block.
    """
    blocks: list[Interval] = []
    homes = []
    for interval in intervals:
        size = 0
        if blocks:
            last = blocks[-1]
            if (last.start, last.end, last.alignment) == (
                interval.start,
                interval.end,
                interval.alignment,
            ):
                size = blocks.pop().size
        homes.append((len(blocks), size))
        total = size + interval.rounded_size
        blocks.append(Interval(interval.start, interval.end, total, interval.alignment))
    return blocks, homes


class _ComponentSolver:
    """One component: the best plan so far and the work spent on it."""

    def __init__(self, intervals: list[Interval], indices: list[int]) -> None:
        self.indices = indices
        self.count = len(intervals)
        self.bound = lower_bound(intervals)
        self.work = 0
        self._intervals = intervals
        # Stack the buffers by descending alignment, so that no padding is needed between them. This
        # is the baseline plan, and the only one guaranteed to have no padding with mixed
        # alignments.
        self.method = "stack"
        self.peak = 0
        self.offsets = [0] * self.count
        for index in sorted(range(self.count), key=lambda i: -intervals[i].alignment):
            self.offsets[index] = self.peak
            self.peak += intervals[index].rounded_size

    def solve(self, goal: int, iterations: int, seed: int) -> None:
        """Lower the peak to `goal` bytes, or as far as the budget allows."""
        if self.peak <= goal:
            return
        blocks, homes = _merge(self._intervals)
        self._place(Component(blocks), homes, goal, iterations * self.count // 2)
        if self.peak <= goal:
            return
        component = Component(self._intervals)
        if component.count <= _MAX_EXACT:
            self._enumerate(component, goal, None)
        else:
            self._search(component, goal, iterations * self.count, seed)

    def _place(
        self, component: Component, homes: Sequence[tuple[int, int]], goal: int, budget: int
    ) -> None:
        """Try the portfolio on the component with merged buffers."""
        for number, (method, place) in enumerate(_portfolio(component, goal)):
            if number >= _MIN_PLACEMENTS and self.work >= budget:
                return
            offsets = place(self.peak - 1)
            self.work = component.visited // SCAN
            if offsets is not None:
                self.offsets = [offsets[block] + offset for block, offset in homes]
                self.peak = component.peak(offsets)
                self.method = method
                if self.peak <= goal:
                    return

    def _enumerate(self, component: Component, goal: int, budget: int | None) -> None:
        """Lower the peak by canonical plans; to the optimum if there is no budget."""
        contention = component.contention()
        areas = [size * span for size, span in zip(component.size, component.span, strict=True)]
        orders = [
            sorted(
                range(component.count),
                key=lambda i: (-contention[i], -component.span[i], -areas[i]),
            ),
            sorted(
                range(component.count),
                key=lambda i: (-component.span[i], -contention[i], -areas[i]),
            ),
        ]
        if budget is None:
            del orders[1:]
        for order in orders:
            while self.peak > goal:
                gap = self.peak - goal
                target = self.peak - (1 if budget is None else max(1, gap // 8))
                share = None if budget is None else budget // 4
                offsets, work = search_canonical(component, order, target, share)
                self.work += work
                if offsets is None:
                    break
                self.offsets = offsets
                self.peak = component.peak(offsets)
                self.method = "canonical"

    def _search(self, component: Component, goal: int, budget: int, seed: int) -> None:
        # Start with short attempts, long enough to place a hundred buffers, and double the length.
        # Each attempt starts from the best plan with all weights reset.
        length = 16 * component.count + 256 * component.pairs // component.count
        attempt = 0
        while self.work < budget and self.peak > goal:
            remaining = budget - self.work
            if component.count <= _MAX_ENUMERATED:
                self._enumerate(component, goal, min(length, remaining) // 4)
            ejection = EjectionSearch(component, self.offsets, seed * 1_000_003 + attempt)
            ejection.run(goal, min(length, remaining))
            self.work += ejection.work
            if ejection.peak < self.peak:
                self.offsets, self.peak, self.method = ejection.offsets, ejection.peak, "ejection"
            attempt += 1
            length *= 2


_Place = Callable[[int], "list[int] | None"]


def _portfolio(component: Component, goal: int) -> Iterator[tuple[str, _Place]]:
    """Yield name and function of each placement. The function takes the maximum allowed peak."""
    contention = component.contention()
    size, span = component.size, component.span
    area = [bytes_ * steps for bytes_, steps in zip(size, span, strict=True)]
    everything = range(component.count)
    orders = {
        "contention": sorted(everything, key=lambda i: (-contention[i], -span[i], -size[i])),
        "size": sorted(everything, key=lambda i: (-size[i], -span[i])),
        "lifetime": sorted(everything, key=lambda i: (-span[i], -size[i])),
        "area": sorted(everything, key=lambda i: (-area[i], -size[i])),
        "start": list(everything),
    }

    def ordered(
        place: Callable[[Component, Sequence[int], int], list[int] | None], order: str
    ) -> _Place:
        return lambda limit: place(component, orders[order], limit)

    def two_ended(longest_on_top: int) -> _Place:
        # The gap of this placement is in the middle, so it is only useful if it reaches `goal`.
        return lambda limit: greedy.in_time_order(component, goal, longest_on_top)

    yield "skyline by lifetime", ordered(greedy.skyline, "lifetime")
    yield "first fit by contention", ordered(greedy.first_fit, "contention")
    if component.crowded:
        yield "in time order", lambda limit: greedy.in_time_order(component, limit, 0)
    yield "first fit by size", ordered(greedy.first_fit, "size")
    for longest_on_top in dict.fromkeys(
        [sorted(span)[component.count * share // 100] for share in (50, 75, 90)]
    ):
        yield "two-ended in time order", two_ended(longest_on_top)
    yield "first fit by lifetime", ordered(greedy.first_fit, "lifetime")
    if component.crowded:
        return
    yield "best fit by start", ordered(greedy.best_fit, "start")
    yield "first fit by area", ordered(greedy.first_fit, "area")
    for order in ("contention", "size", "lifetime", "area"):
        yield f"best fit by {order}", ordered(greedy.best_fit, order)
    yield "first fit by start", ordered(greedy.first_fit, "start")
