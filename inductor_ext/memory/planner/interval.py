"""What a static memory plan is: intervals in, offsets out, and what makes offsets right.

The problem is dynamic storage allocation with all lifetimes known: every interval is a rectangle
of fixed position in time and fixed height in bytes, to be moved along the bytes so that no two
rectangles overlap and the highest end, the peak, is low. It is NP-hard (Garey and Johnson, 1979,
problem SR2), so a plan comes with the lower bound that tells how far from the best it can be.

Everywhere in the planner an interval's size is rounded up to its alignment, for the load as well
as for its place, so that the next buffer of the same alignment can follow without a gap.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from inductor_ext import exc

__all__ = ["Interval", "Placement", "lower_bound", "round_up", "verify"]


def round_up(size: int, alignment: int) -> int:
    """The smallest multiple of `alignment`, a power of two, that is not below `size`."""
    return (size + alignment - 1) & -alignment


@dataclass(frozen=True, slots=True)
class Interval:
    """One storage and its lifetime.

    It is live in `[start, end)`, in steps of the schedule, so that an interval that ends where
    another starts may give it its place. An interval of no size or no lifetime conflicts with
    nothing; one of no lifetime need not fit into the arena either, since nobody looks at it.

    Raises:
        exc.BadIntervalError: negative size, end before start, alignment not a power of two.
    """

    start: int
    end: int
    size: int
    """Bytes, before rounding."""
    alignment: int = 1
    """Bytes; the offset is a multiple of it."""
    name: str = ""
    """For messages only: it has no influence on the plan."""

    def __post_init__(self) -> None:
        if self.size < 0:
            raise self._bad("size", self.size, "0 or more")
        if self.end < self.start:
            raise self._bad("end", self.end, f"its start, {self.start}, or more")
        if self.alignment < 1 or self.alignment & (self.alignment - 1):
            raise self._bad("alignment", self.alignment, "a power of two")

    def _bad(self, field: str, value: int, allowed: str) -> exc.BadIntervalError:
        return exc.BadIntervalError(
            name=self.name or "without a name", field=field, value=value, allowed=allowed
        )

    @property
    def rounded_size(self) -> int:
        """The bytes it takes in an arena: its size rounded up to its alignment."""
        return round_up(self.size, self.alignment)


@dataclass(frozen=True, slots=True)
class Placement:
    """A verified plan; `offsets[i]` belongs to the i-th interval of the problem."""

    offsets: tuple[int, ...]
    """Bytes from the start of the arena."""
    peak: int
    """Bytes that the arena needs."""
    lower_bound: int
    """Bytes below which no plan can be; see `lower_bound`."""
    method: str
    """What found the plan."""
    iterations: int
    """What was spent of the budget, in the unit of `solver.solve`."""

    @property
    def ratio(self) -> float:
        """Peak over lower bound; 1.0 for an empty problem."""
        return self.peak / self.lower_bound if self.lower_bound else 1.0


def lower_bound(intervals: Sequence[Interval]) -> int:
    """The maximum load: over all times, the most bytes of intervals live at once."""
    changes: dict[int, int] = {}
    for interval in intervals:
        size = interval.rounded_size
        if size and interval.start < interval.end:
            changes[interval.start] = changes.get(interval.start, 0) + size
            changes[interval.end] = changes.get(interval.end, 0) - size
    load = highest = 0
    for time in sorted(changes):
        load += changes[time]
        highest = max(highest, load)
    return highest


def _label(intervals: Sequence[Interval], index: int) -> str:
    interval = intervals[index]
    name = f" {interval.name!r}" if interval.name else ""
    return f"buffer {index}{name} (live [{interval.start}, {interval.end}), {interval.size} bytes)"


def verify(
    intervals: Sequence[Interval], offsets: Sequence[int], arena_size: int | None = None
) -> None:
    """Check that a plan is right, by a sweep over time that keeps the live buffers by offset.

    Args:
        intervals: the problem.
        offsets: bytes, one for each interval.
        arena_size: bytes; None for an arena without an end.

    Raises:
        exc.PlanError: the number of offsets is wrong; an offset is negative or misaligned; a buffer
            reaches beyond the arena; two buffers that are live at once share bytes.
    """
    if len(offsets) != len(intervals):
        raise exc.PlanError(why=f"{len(offsets)} offsets are given for {len(intervals)} buffers")
    events: list[tuple[int, int, int]] = []
    for index, (interval, offset) in enumerate(zip(intervals, offsets, strict=True)):
        size = interval.rounded_size
        why = ""
        if offset < 0:
            why = "negative"
        elif offset & (interval.alignment - 1):
            why = f"no multiple of its alignment, {interval.alignment}"
        elif (
            arena_size is not None and interval.start < interval.end and offset + size > arena_size
        ):
            why = f"beyond what fits: its end is {offset + size} and the arena has {arena_size}"
        if why:
            raise exc.PlanError(why=f"the offset {offset} of {_label(intervals, index)} is {why}")
        if size and interval.start < interval.end:
            # At the same time, ends come before starts.
            events.append((interval.end, 0, index))
            events.append((interval.start, 1, index))
    events.sort()
    starts: list[int] = []
    live: list[int] = []
    for _, begins, index in events:
        offset = offsets[index]
        place = bisect.bisect_left(starts, offset)
        if not begins:
            del starts[place], live[place]
            continue
        for other in live[max(place - 1, 0) : place + 1]:
            low, high = sorted((index, other), key=lambda i: offsets[i])
            end = offsets[low] + intervals[low].rounded_size
            if end > offsets[high]:
                raise exc.PlanError(
                    why=f"{_label(intervals, low)} at [{offsets[low]}, {end}) and "
                    f"{_label(intervals, high)} at offset {offsets[high]} are live at once and "
                    f"overlap"
                )
        starts.insert(place, offset)
        live.insert(place, index)
