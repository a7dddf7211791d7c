"""Greedy placements: from an order of buffers to offsets. The solver chooses among them.

A `Component` is a stretch of the schedule during which something is always live. Its time is
reduced to sections, one per distinct start. That is enough, because two intervals are live at the
same time exactly if they both are at the later of the two starts. Every placement takes a limit for
its peak, and returns None as soon as a buffer would exceed it.

`first_fit` and `best_fit` look for a gap among the buffers already placed (Pisarchyk and Lee,
"Efficient Memory Management for Deep Neural Net Inference", 2020, order by size or by breadth).
`skyline` never looks below the buffers already placed. `in_time_order` allocates like a run-time
allocator that knows all live ranges.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from inductor_ext.memory.planner.interval import Interval, live_bytes

_CROWDED = 512
"""Average number of overlapping live ranges per buffer above which a tree finds gaps faster than a
scan."""

_MAX_PROBES = 200
"""Maximum number of stretches per buffer that the tree visits before it gives up. Many visits are
needed if live ranges are neither short nor nested, because the occupied stretches do not coalesce.
"""

_PROBE = 3
"""Number of buffers that a scan visits in the time in which the tree visits one stretch."""

_MAX_CACHED = 8_000_000
"""Maximum length of all cached lists of overlapping buffers together, at 8 bytes per entry; others
are recomputed."""


class Component:
    """The intervals of one connected stretch of time, sorted, each with a size and a live range.

    Attributes:
        size: bytes, rounded up to the alignment.
        start, end: the sections [start, end) in which the buffer is live.
        span: length of the live range in steps of the schedule.
        load: live bytes in each section.
        bound: the highest load.
        pairs: number of pairs of buffers that are live at the same time.
        visited: number of buffers that placements have visited so far, as a measure of their time.
    """

    def __init__(self, intervals: Sequence[Interval]) -> None:
        starts = sorted({interval.start for interval in intervals})
        section = {time: index for index, time in enumerate(starts)}
        self.count = len(intervals)
        self.sections = len(starts)
        self.size = [interval.rounded_size for interval in intervals]
        self.alignment = [interval.alignment for interval in intervals]
        self.start = [section[interval.start] for interval in intervals]
        self.end = [bisect.bisect_left(starts, interval.end) for interval in intervals]
        self.span = [interval.end - interval.start for interval in intervals]
        self.load = live_bytes(zip(self.start, self.end, self.size, strict=True), self.sections)
        self.bound = max(self.load)
        self._snapshots: list[list[int]] = []
        self.pairs = self._sweep()
        self.visited = 0
        self._overlapping: list[list[int] | None] = [None] * self.count
        self._cached = 0

    def _sweep(self) -> int:
        """Store the buffers live before every `_stride`-th buffer; return the number of pairs."""
        # Buffers are sorted by start, so those that start during a live range are a slice.
        self._stride = max(1, int(self.count**0.5))
        live: list[int] = []
        pairs = 0
        num_started = 0
        self._first = [0] * (self.sections + 1)
        for index, start in enumerate(self.start):
            self._first[start + 1] = index + 1
        for index in range(self.count):
            if index % self._stride == 0:
                start = self.start[index]
                live = [j for j in live if self.end[j] > start]
                self._snapshots.append(live)
                live = live[:]
            live.append(index)
            num_started = self._first[self.end[index]]
            pairs += num_started - index - 1
        return pairs

    def find_overlapping(self, index: int) -> list[int]:
        """Return the other buffers whose live ranges overlap that of this one."""
        cached = self._overlapping[index]
        if cached is not None:
            return cached
        nearest = index // self._stride
        start, end = self.start[index], self.end
        overlapping = [j for j in self._snapshots[nearest] if end[j] > start]
        overlapping += [j for j in range(nearest * self._stride, index) if end[j] > start]
        overlapping += range(index + 1, self._first[end[index]])
        if self._cached + len(overlapping) <= _MAX_CACHED:
            self._overlapping[index] = overlapping
            self._cached += len(overlapping)
        return overlapping

    @property
    def crowded(self) -> bool:
        """Whether a placement should avoid a scan of the overlapping buffers of every buffer."""
        return 2 * self.pairs > _CROWDED * self.count

    def contention(self) -> list[int]:
        """Return the highest load during the live range of each buffer, in bytes."""
        # A sparse table: the maximum over any range is that of two overlapping powers of two.
        tables = [self.load]
        width = 1
        while 2 * width <= self.sections:
            last = tables[-1]
            tables.append(list(map(max, last, last[width:])))
            width *= 2
        highest = []
        for start, end in zip(self.start, self.end, strict=True):
            level = (end - start).bit_length() - 1
            table = tables[level]
            highest.append(max(table[start], table[end - (1 << level)]))
        return highest

    def peak(self, offsets: Sequence[int]) -> int:
        """Return the highest end of a buffer, in bytes."""
        return max(map(int.__add__, offsets, self.size))


def first_fit(component: Component, order: Sequence[int], limit: int) -> list[int] | None:
    """Place each buffer at the lowest offset that is free throughout its live range.

    Args:
        order: all buffers, in the order of placement.
        limit: maximum peak in bytes.

    Returns:
        The offsets in bytes. None if the limit would be exceeded, or if the placement would take
        very long, which is possible with many overlapping live ranges.
    """
    if component.crowded:
        return first_fit_by_tree(component, order, limit)
    component.visited += 2 * component.pairs + component.count
    find_overlapping = component.find_overlapping
    sizes, alignments = component.size, component.alignment
    offsets = [-1] * component.count
    tops = [0] * component.count
    for index in order:
        size, alignment = sizes[index], alignments[index]
        up, mask = alignment - 1, -alignment
        place = 0
        for offset, top in sorted(
            [(offsets[j], tops[j]) for j in find_overlapping(index) if offsets[j] >= 0]
        ):
            if offset - place >= size:
                break
            if top > place:
                place = (top + up) & mask
        top = place + size
        if top > limit:
            return None
        offsets[index] = place
        tops[index] = top
    return offsets


def best_fit(component: Component, order: Sequence[int], limit: int) -> list[int] | None:
    """Place each buffer in the smallest gap that fits, on top of the others if there is none.

    Arguments and result are those of `first_fit`.
    """
    component.visited += 2 * component.pairs + component.count
    find_overlapping = component.find_overlapping
    sizes, alignments = component.size, component.alignment
    offsets = [-1] * component.count
    tops = [0] * component.count
    for index in order:
        size, alignment = sizes[index], alignments[index]
        up, mask = alignment - 1, -alignment
        place = 0
        best, smallest = -1, limit + 1
        for offset, top in sorted(
            [(offsets[j], tops[j]) for j in find_overlapping(index) if offsets[j] >= 0]
        ):
            gap = offset - place
            if size <= gap < smallest:
                best, smallest = place, gap
                if gap == size:
                    break
            if top > place:
                place = (top + up) & mask
        if best < 0:
            best = place
        top = best + size
        if top > limit:
            return None
        offsets[index] = best
        tops[index] = top
    return offsets


def skyline(component: Component, order: Sequence[int], limit: int) -> list[int] | None:
    """Place each buffer on top of all placed buffers that it overlaps in time; ignore gaps below.

    Exact for nested live ranges, longest first, and the cheapest placement of long live ranges.
    Arguments and result are those of `first_fit`.
    """
    component.visited += 6 * component.count
    heights = [0] * component.sections
    starts, ends, sizes, alignments = (
        component.start,
        component.end,
        component.size,
        component.alignment,
    )
    offsets = [0] * component.count
    for index in order:
        start, end, alignment = starts[index], ends[index], alignments[index]
        offset = (max(heights[start:end]) + alignment - 1) & -alignment
        top = offset + sizes[index]
        if top > limit:
            return None
        offsets[index] = offset
        heights[start:end] = [top] * (end - start)
    return offsets


def in_time_order(component: Component, limit: int, longest_on_top: int) -> list[int] | None:
    """Allocate in order of starts and free at ends, from both ends of `limit` bytes.

    Buffers that live for at most `longest_on_top` steps go into the highest gap that fits, the
    others into the lowest, so that long-lived buffers do not leave gaps among short-lived ones.

    Args:
        limit: maximum peak in bytes.
        longest_on_top: steps of the schedule; 0 places every buffer in the lowest gap.

    Returns:
        The offsets in bytes, or None if a buffer fits into no gap.
    """
    component.visited += 48 * component.count
    offsets = [0] * component.count
    ending: list[list[int]] = [[] for _ in range(component.sections + 1)]
    # Bounds of the occupied stretches: [start, end, start, end, ...]; adjacent ones are coalesced.
    occupied: list[int] = []
    sizes, alignments = component.size, component.alignment
    section = 0
    for index, start in enumerate(component.start):
        while section <= start:
            for other in ending[section]:
                offset = offsets[other]
                _vacate(occupied, offset, offset + sizes[other])
            section += 1
        size, alignment = sizes[index], alignments[index]
        place = -1
        if component.span[index] <= longest_on_top:
            high = limit
            for k in range(len(occupied) - 2, -1, -2):
                candidate = (high - size) & -alignment
                if candidate >= occupied[k + 1]:
                    place = candidate
                    break
                high = occupied[k]
            else:
                place = (high - size) & -alignment
        else:
            low = 0
            for k in range(0, len(occupied), 2):
                if occupied[k] - low >= size:
                    break
                low = (occupied[k + 1] + alignment - 1) & -alignment
            place = low
        if place < 0 or place + size > limit:
            return None
        offsets[index] = place
        _occupy(occupied, place, place + size)
        ending[component.end[index]].append(index)
    return offsets


def _occupy(occupied: list[int], low: int, high: int) -> None:
    """Add [low, high) to coalesced stretches, whether or not it touches or overlaps any."""
    i, j = bisect.bisect_left(occupied, low), bisect.bisect_right(occupied, high)
    # An odd position is inside a stretch or at its end, which the new stretch then extends.
    occupied[i:j] = [low][i & 1 :] + [high][j & 1 :]


def _vacate(occupied: list[int], low: int, high: int) -> None:
    """Remove [low, high), which must be inside one stretch."""
    i = bisect.bisect_right(occupied, low)
    start, end = occupied[i - 1], occupied[i]
    occupied[i - 1 : i + 1] = ([start, low] if start < low else []) + (
        [high, end] if high < end else []
    )


def first_fit_by_tree(component: Component, order: Sequence[int], limit: int) -> list[int] | None:
    """Run `first_fit` with the occupied bytes in a segment tree over the sections.

    Each node stores two lists of coalesced stretches: bytes occupied throughout its sections, and
    bytes occupied in any of them. A buffer must avoid the first list in the ancestors of the nodes
    that make up its live range, and the second list in those nodes. The number of lists is
    logarithmic in the number of sections, and the lists are short because dense packing coalesces.
    """
    probes = 0
    width = 1
    while width < component.sections:
        width *= 2
    throughout: list[list[int]] = [[] for _ in range(2 * width)]
    anywhere: list[list[int]] = [[] for _ in range(2 * width)]
    bisect_right = bisect.bisect_right
    offsets = [0] * component.count
    for index in order:
        size, alignment = component.size[index], component.alignment[index]
        up, mask = alignment - 1, -alignment
        nodes, above = _tree_nodes(component.start[index] + width, component.end[index] + width)
        lists = [anywhere[node] for node in nodes if anywhere[node]]
        lists += [throughout[node] for node in above if throughout[node]]
        place, agreed, number = 0, 0, len(lists)
        at = 0
        probes += 16 + number
        if probes > _MAX_PROBES * component.count:
            component.visited += _PROBE * probes
            return None
        while agreed < number:
            occupied = lists[at]
            at = at + 1 if at + 1 < number else 0
            k = bisect_right(occupied, place)
            if not k & 1:
                if k == len(occupied) or occupied[k] - place >= size:
                    agreed += 1
                    continue
                k += 1
            place = (occupied[k] + up) & mask
            probes += 1 + agreed
            agreed = 0
        top = place + size
        if top > limit:
            component.visited += _PROBE * probes
            return None
        offsets[index] = place
        for node in nodes:
            _occupy(throughout[node], place, top)
            _occupy(anywhere[node], place, top)
        for node in above:
            _occupy(anywhere[node], place, top)
    component.visited += _PROBE * probes
    return offsets


def _tree_nodes(low: int, high: int) -> tuple[list[int], set[int]]:
    """Return the tree's nodes that make up the leaves [low, high), and their ancestors."""
    nodes = []
    while low < high:
        if low & 1:
            nodes.append(low)
            low += 1
        if high & 1:
            high -= 1
            nodes.append(high)
        low >>= 1
        high >>= 1
    above: set[int] = set()
    for node in nodes:
        node >>= 1
        while node and node not in above:
            above.add(node)
            node >>= 1
    return nodes, above
