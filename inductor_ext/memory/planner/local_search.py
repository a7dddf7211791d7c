"""Searches for a plan with a lower peak than the best known one: by ejection and by enumeration.

`EjectionSearch` aims at a target peak. Buffers of the current plan that end above it are removed
and placed again, one at a time, at the offset where the conflicting buffers have the lowest weight;
these are then removed. A buffer's weight grows each time it conflicts, so that the search does not
cycle (the breakout method of Morris, AAAI 1993; for packing, the guided local search of Faroe,
Pisinger and Zachariasen, INFORMS J. Computing 2003). Once every buffer is placed, the target is
lowered.

`search_canonical` enumerates canonical plans, in which every buffer is at offset 0 or rests on
another buffer, by ascending offset. It skips what a bound or dominance excludes (Moffitt,
"MiniMalloc", ASPLOS 2023).

Both budgets count work, never time, and the random generator is private: the same problem, seed and
budget give the same plan on every machine.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import isqrt

from inductor_ext.memory.planner.greedy import Component, first_fit

SCAN = 6
"""Buffers that a placement visits in the time in which a search visits one."""

_MOVE = 24
"""Work of a move in addition to the buffers that it visits, in visited buffers."""

_HEAVIEST = 1 << 20
"""Initial weight of the buffer with the largest area."""

_PLACED = 1 << 100
"""An offset above all others."""


class EjectionSearch:
    """A search that improves one plan of a component as far as its budget allows.

    Attributes:
        offsets: the best plan so far.
        peak: its peak, in bytes.
        work: number of buffers visited so far, plus a constant per move.
    """

    def __init__(self, component: Component, offsets: list[int], seed: int) -> None:
        self.component = component
        self.offsets = offsets
        self.peak = component.peak(offsets)
        self.work = 0
        self._random = (2 * seed + 1) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        areas = [size * span for size, span in zip(component.size, component.span, strict=True)]
        largest = max(areas)
        # The difficulty of placing a buffer again is between a constant and its area. Of the powers
        # of the area, the fourth root works best on the public instances.
        self._base = [1 + isqrt(isqrt(_HEAVIEST**4 * area // largest)) for area in areas]
        self._weight = self._base[:]

    def _random_below(self, bound: int) -> int:
        """Return a number in [0, bound) from Knuth's MMIX generator, whose high bits are good."""
        self._random = (self._random * 6364136223846793005 + 1442695040888963407) & (2**64 - 1)
        return (self._random >> 33) * bound >> 31

    def run(self, goal: int, work: int) -> None:
        """Lower the peak to `goal` bytes, or until `work` is spent."""
        end = self.work + work
        while self.peak > goal and self.work < end:
            target = self._target(goal)
            if not self._reach(target, end):
                return

    def _target(self, goal: int) -> int:
        return max(goal, self.peak - max(1, (self.peak - goal) // 8))

    def _reach(self, target: int, end: int) -> bool:
        component, weights, base = self.component, self._weight, self._base
        sizes = component.size
        places = self.offsets[:]
        tops = list(map(int.__add__, places, sizes))
        out = [index for index, top in enumerate(tops) if top > target]
        for index in out:
            places[index] = -1
        while out:
            if self.work >= end:
                return False
            pick = self._random_below(len(out))
            out[pick], out[-1] = out[-1], out[pick]
            index = out.pop()
            overlapping = component.find_overlapping(index)
            self.work += _MOVE + len(overlapping)
            near = [j for j in overlapping if places[j] >= 0]
            near.sort(key=places.__getitem__)
            starts = [places[j] for j in near]
            best, least = self._lightest_places(index, near, starts, tops, target)
            place = best[self._random_below(len(best))] if len(best) > 1 else best[0]
            top = place + sizes[index]
            places[index] = place
            tops[index] = top
            if least:
                weights[index] += base[index] // 10
                for j in near[: bisect_left(starts, top)]:
                    if tops[j] > place:
                        places[j] = -1
                        out.append(j)
                        weights[j] += base[j] // 5
        self.offsets = places
        if not component.crowded:
            # Compact all buffers downwards, which often lowers the peak further.
            order = sorted(range(component.count), key=places.__getitem__)
            self.offsets = first_fit(component, order, target) or places
            self.work += 2 * component.pairs // SCAN
        self.peak = component.peak(self.offsets)
        return True

    def _lightest_places(
        self, index: int, near: list[int], starts: list[int], tops: list[int], target: int
    ) -> tuple[list[int], int]:
        """Return the offsets at which the buffers in conflict have the lowest weight, and it.

        Args:
            index: the buffer to place.
            near: the placed buffers that are live at the same time, sorted by offset.
            starts: their offsets.
            tops: the end of each buffer.
            target: the maximum end.
        """
        size, alignment, weights = (
            self.component.size[index],
            self.component.alignment[index],
            self._weight,
        )
        mask = -alignment
        highest = (target - size) & mask
        start_weights = list(accumulate([weights[j] for j in near], initial=0))
        by_top = sorted(near, key=tops.__getitem__)
        ends = [tops[j] for j in by_top]
        end_weights = list(accumulate([weights[j] for j in by_top], initial=0))
        candidates = {0, highest}
        if alignment == 1:
            candidates.update(ends)
            candidates.update([start - size for start in starts])
        else:
            candidates.update([(top + alignment - 1) & mask for top in ends])
            candidates.update([(start - size) & mask for start in starts])
        least = -1
        best: list[int] = []
        for place in sorted(candidates):
            if place < 0:
                continue
            if place > highest:
                break
            weight = (
                start_weights[bisect_left(starts, place + size)]
                - end_weights[bisect_right(ends, place)]
            )
            if weight < least or least < 0:
                least = weight
                best = [place]
                if not weight:
                    break
            elif weight == least:
                best.append(place)
        return best, least


def search_canonical(
    component: Component, order: Sequence[int], target: int, work: int | None
) -> tuple[list[int] | None, int]:
    """Search depth-first for a plan with a peak of at most `target`.

    Args:
        order: all buffers; among those that would get the same offset, the first is tried first.
        target: bytes.
        work: maximum work before giving up; None to search until none is proven to exist.

    Returns:
        The offsets in bytes, or None; and the work done, in the unit of `EjectionSearch`.
    """
    count, sizes = component.count, component.size
    rank = [0] * count
    for position, index in enumerate(order):
        rank[index] = position
    cost = 8 + count // 24
    spent = 0
    offsets = [0] * count
    path: list[int] = []

    def candidates(lows: list[int], last: int) -> Iterator[int]:
        # A buffer is dominated if another unplaced one could already end at or below its start: the
        # other one would drop below it.
        lowest_end = min(map(int.__add__, lows, sizes))
        indices = [index for index in order if last <= lows[index] < lowest_end]
        indices.sort(key=lows.__getitem__)
        return iter(indices)

    # Per depth: the `_Node`, the candidates, the last offset.
    lows, skyline, outside = [0] * count, [0] * component.sections, component.load
    stack = [(lows, skyline, outside, candidates(lows, 0), 0)]
    while stack:
        lows, skyline, outside, untried, last = stack[-1]
        for index in untried:
            spent += cost
            offset = lows[index]
            if path and offset == last and rank[index] < rank[path[-1]]:
                continue  # the same plan as with the two in the other order
            child = _place(component, index, (lows, skyline, outside), last, target)
            if child is None:
                continue
            offsets[index] = offset
            path.append(index)
            if len(path) == count:
                return offsets, spent
            stack.append((*child, candidates(child[0], offset), offset))
            break
        else:
            stack.pop()
            if path:
                path.pop()
        if work is not None and spent >= work:
            break
    return None, spent


_Node = tuple[list[int], list[int], list[int]]
"""The lowest possible offset of each unplaced buffer (`_PLACED` for placed ones), the skyline, the
unplaced bytes in each section."""


def _place(component: Component, index: int, node: _Node, last: int, target: int) -> _Node | None:
    """Place a buffer at its lowest offset; return None if the others no longer fit."""
    lows, skyline, outside = node
    start, end, size, offset = (
        component.start[index],
        component.end[index],
        component.size[index],
        lows[index],
    )
    loads = outside[start:end]
    if offset + max(loads) > target:
        return None
    top = offset + size
    lows = lows[:]
    lows[index] = _PLACED
    if not _raise(component, index, lows, top, target):
        return None
    outside = outside[:]
    outside[start:end] = [load - size for load in loads]
    skyline = skyline[:]
    skyline[start:end] = [top] * (end - start)
    # Unplaced buffers go above the skyline, and not below the last offset.
    if offset > last and any(
        load and load + (height if height > offset else offset) > target
        for height, load in zip(skyline, outside, strict=True)
    ):
        return None
    return lows, skyline, outside


def _raise(component: Component, index: int, lows: list[int], top: int, target: int) -> bool:
    """Raise what overlaps a buffer in time to its top; return False if something no longer fits."""
    sizes, alignments = component.size, component.alignment
    for j in component.find_overlapping(index):
        if lows[j] < top:
            low = (top + alignments[j] - 1) & -alignments[j]
            if low + sizes[j] > target:
                return False
            lows[j] = low
    return True
