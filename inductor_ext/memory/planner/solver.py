"""The solver: a verified plan for a list of intervals, within a budget of work.

Buffers of the same lifetime and alignment are stacked into one, and the schedule is split where
nothing is live; every part starts at offset 0. For each part a portfolio of greedy placements is
tried, cheapest first, then the search of `search`, until the part's peak is no higher than the
highest load of the whole problem, which no plan can beat, or the budget is spent.

The plan depends on the multiset of intervals, the budget and the seed alone: not on the order in
which intervals of different times and sizes are given, on names, on time or on the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from inductor_ext.memory.planner import greedy
from inductor_ext.memory.planner.greedy import Part
from inductor_ext.memory.planner.interval import Interval, Placement, lower_bound, verify
from inductor_ext.memory.planner.local_search import SCAN, Ejection, canonical

__all__ = ["DEFAULT_ITERATIONS", "solve"]

DEFAULT_ITERATIONS = 120
"""Some 0.1 ms of one core for each buffer, where the plan stays above the lower bound."""

_EXACT = 8
"""Parts of up to so many buffers are solved exactly, whatever the budget."""

_ENUMERABLE = 1000
"""Buffers up to which a canonical enumeration is worth a try: each step costs in proportion."""

_ALWAYS = 3
"""Placements of the portfolio that are tried whatever the budget."""


def solve(
    intervals: Sequence[Interval], *, iterations: int = DEFAULT_ITERATIONS, seed: int = 0
) -> Placement:
    """Plan a problem.

    Args:
        intervals: the storages; those of no size or no lifetime are put at offset 0.
        iterations: the budget. In one iteration the solver looks at as many neighbours of buffers
            (others that are live at the same time) as the part of the problem at hand has buffers,
            so that with a constant budget the time grows in proportion to the number of buffers,
            however many of them are live at once. The first placements are tried with any budget.
        seed: of the search; plans of different seeds are equally good on average.

    Returns:
        A plan that has been verified.
    """
    bound = lower_bound(intervals)
    indices = [
        index
        for index, interval in enumerate(intervals)
        if interval.size and interval.start < interval.end
    ]
    # In one order for all orders of the input, so that these cannot tell in the result.
    indices.sort(key=lambda i: _key(intervals[i]))
    offsets = [0] * len(intervals)
    parts = [_PartSolver([intervals[i] for i in part], part) for part in _split(intervals, indices)]
    parts.sort(key=lambda part: -part.bound)
    peak, work, method = bound, 0, "empty"
    for part in parts:
        # What is below the peak of another part need not be lowered further.
        part.solve(peak, iterations, seed)
        work += -(-part.work // part.count)
        if part.peak > peak or method == "empty":
            peak, method = part.peak, part.method
        for index, offset in zip(part.indices, part.offsets, strict=True):
            offsets[index] = offset
    verify(intervals, offsets, peak)
    return Placement(tuple(offsets), peak, bound, method, work)


def _key(interval: Interval) -> tuple[int, int, int, int]:
    # Within one lifetime by falling alignment, so that equal ones are neighbours.
    return interval.start, interval.end, -interval.alignment, -interval.size


def _split(intervals: Sequence[Interval], indices: Sequence[int]) -> Iterator[list[int]]:
    """Groups of sorted intervals between which nothing is live."""
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
    """Stack sorted intervals of equal lifetime and alignment.

    Returns:
        The blocks; and for each interval its block and its offset in it.
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


class _PartSolver:
    """One part: the best plan so far and what it has cost."""

    def __init__(self, intervals: list[Interval], indices: list[int]) -> None:
        self.indices = indices
        self.count = len(intervals)
        self.bound = lower_bound(intervals)
        self.work = 0
        self._intervals = intervals
        # One above the other by falling alignment, so that no padding comes between: the plan that
        # every other must beat, and the only one without padding where alignments are mixed.
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
        self._place(Part(blocks), homes, goal, iterations * self.count // 2)
        if self.peak <= goal:
            return
        part = Part(self._intervals)
        if part.count <= _EXACT:
            self._enumerate(part, goal, None)
        else:
            self._search(part, goal, iterations * self.count, seed)

    def _place(self, part: Part, homes: Sequence[tuple[int, int]], goal: int, budget: int) -> None:
        """Try the portfolio on the merged part."""
        for number, (method, place) in enumerate(_portfolio(part, goal)):
            if number >= _ALWAYS and self.work >= budget:
                return
            found = place(self.peak - 1)
            self.work = part.looked // SCAN
            if found is not None:
                self.offsets = [found[block] + offset for block, offset in homes]
                self.peak = part.peak(found)
                self.method = method
                if self.peak <= goal:
                    return

    def _enumerate(self, part: Part, goal: int, budget: int | None) -> None:
        """Lower the peak by canonical plans, to the optimum if there is no budget."""
        contention = part.contention()
        areas = [size * span for size, span in zip(part.size, part.span, strict=True)]
        orders = [
            sorted(range(part.count), key=lambda i: (-contention[i], -part.span[i], -areas[i])),
            sorted(range(part.count), key=lambda i: (-part.span[i], -contention[i], -areas[i])),
        ]
        if budget is None:
            del orders[1:]
        for order in orders:
            while self.peak > goal:
                gap = self.peak - goal
                target = self.peak - (1 if budget is None else max(1, gap // 8))
                share = None if budget is None else budget // 4
                found, spent = canonical(part, order, target, share)
                self.work += spent
                if found is None:
                    break
                self.offsets = found
                self.peak = part.peak(found)
                self.method = "canonical"

    def _search(self, part: Part, goal: int, budget: int, seed: int) -> None:
        # Short attempts first, though long enough to place a hundred buffers, and then longer ones:
        # each begins at the best plan with all weights forgotten.
        length = 16 * part.count + 256 * part.pairs // part.count
        attempt = 0
        while self.work < budget and self.peak > goal:
            left = budget - self.work
            if part.count <= _ENUMERABLE:
                self._enumerate(part, goal, min(length, left) // 4)
            ejection = Ejection(part, self.offsets, seed * 1_000_003 + attempt)
            ejection.run(goal, min(length, left))
            self.work += ejection.work
            if ejection.peak < self.peak:
                self.offsets, self.peak, self.method = ejection.offsets, ejection.peak, "ejection"
            attempt += 1
            length *= 2


_Place = Callable[[int], "list[int] | None"]


def _portfolio(part: Part, goal: int) -> Iterator[tuple[str, _Place]]:
    """Name and function of each placement; the function takes the highest peak of use."""
    contention = part.contention()
    size, span = part.size, part.span
    area = [bytes_ * steps for bytes_, steps in zip(size, span, strict=True)]
    everything = range(part.count)
    orders = {
        "contention": sorted(everything, key=lambda i: (-contention[i], -span[i], -size[i])),
        "size": sorted(everything, key=lambda i: (-size[i], -span[i])),
        "lifetime": sorted(everything, key=lambda i: (-span[i], -size[i])),
        "area": sorted(everything, key=lambda i: (-area[i], -size[i])),
        "start": list(everything),
    }

    def ordered(
        place: Callable[[Part, Sequence[int], int], list[int] | None], order: str
    ) -> _Place:
        return lambda limit: place(part, orders[order], limit)

    def two_ended(longest_on_top: int) -> _Place:
        # Its gap lies in the middle, so that it is of use at the goal alone.
        return lambda limit: greedy.in_time_order(part, goal, longest_on_top)

    yield "skyline by lifetime", ordered(greedy.skyline, "lifetime")
    yield "first fit by contention", ordered(greedy.first_fit, "contention")
    if part.crowded:
        yield "in time order", lambda limit: greedy.in_time_order(part, limit, 0)
    yield "first fit by size", ordered(greedy.first_fit, "size")
    for longest_on_top in dict.fromkeys(
        [sorted(span)[part.count * share // 100] for share in (50, 75, 90)]
    ):
        yield "two-ended in time order", two_ended(longest_on_top)
    yield "first fit by lifetime", ordered(greedy.first_fit, "lifetime")
    if part.crowded:
        return
    yield "best fit by start", ordered(greedy.best_fit, "start")
    yield "first fit by area", ordered(greedy.first_fit, "area")
    for order in ("contention", "size", "lifetime", "area"):
        yield f"best fit by {order}", ordered(greedy.best_fit, order)
    yield "first fit by start", ordered(greedy.first_fit, "start")
