"""The static memory planning problem: intervals, offsets, and the check that offsets are valid.

The problem is dynamic storage allocation with all live ranges known in advance. Each interval is a
rectangle with a fixed position in time and a fixed height in bytes. The planner chooses the offset
of each rectangle so that no two overlap and the highest end, the peak, is low. The problem is
NP-hard (Garey and Johnson, 1979, problem SR2), so each plan comes with a lower bound that limits
how far it can be from the optimum.

The whole planner rounds an interval's size up to its alignment, both for the live bytes and for the
offsets. The next buffer with the same alignment can then follow without a gap.

Invalid intervals and invalid plans raise errors of `inductor_ext.exc`.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from inductor_ext import exc


def round_up(size: int, alignment: int) -> int:
    """Return the smallest multiple of `alignment`, a power of two, that is at least `size`."""
    return (size + alignment - 1) & -alignment


@dataclass(frozen=True, slots=True)
class Interval:
    """One storage and its live range.

    It is live in `[start, end)`, in steps of the schedule, so an interval that starts where another
    ends may reuse its memory. An interval with zero size or an empty live range conflicts with
    nothing. One with an empty live range need not fit into the arena either, because nothing
    accesses it.

    Raises:
        exc.BadIntervalError: negative size, end before start, alignment not a power of two.
    """

    start: int
    end: int
    size: int
    """Bytes, before rounding."""
    alignment: int = 1
    """Bytes. The offset is a multiple of it."""
    name: str = ""
    """Used in messages only. It does not affect the plan."""

    def __post_init__(self) -> None:
        if self.size < 0:
            raise self._bad("size", self.size, "0 or more")
        if self.end < self.start:
            raise self._bad("end", self.end, f"its start, {self.start}, or more")
        if self.alignment < 1 or self.alignment & (self.alignment - 1):
            raise self._bad("alignment", self.alignment, "a power of two")

    def _bad(self, field: str, value: int, allowed: str) -> exc.BadIntervalError:
        return exc.BadIntervalError(
            name=self.name or "(unnamed)", field=field, value=value, allowed=allowed
        )

    @property
    def rounded_size(self) -> int:
        """Bytes used in an arena: the size rounded up to the alignment."""
        return round_up(self.size, self.alignment)


@dataclass(frozen=True, slots=True)
class Placement:
    """A verified plan. `offsets[i]` belongs to the i-th interval of the problem."""

    offsets: tuple[int, ...]
    """Bytes from the start of the arena."""
    peak: int
    """Size of the arena in bytes."""
    lower_bound: int
    """Bytes. No plan has a lower peak; see `lower_bound`."""
    method: str
    """The algorithm that found the plan."""
    iterations: int
    """Part of the budget that was used, in the unit of `solver.solve`."""

    @property
    def ratio(self) -> float:
        """Peak divided by the lower bound; 1.0 for an empty problem."""
        return self.peak / self.lower_bound if self.lower_bound else 1.0


def live_bytes(spans: Iterable[tuple[int, int, int]], steps: int) -> list[int]:
    """Return the number of bytes that are live at each step.

    Args:
        spans: (start, end, bytes) of each storage; start is 0 or more, and end at most `steps`. A
            storage with an empty live range is never live.
        steps: number of steps of the schedule.
    """
    change = [0] * (steps + 1)
    for start, end, size in spans:
        if start < end:
            change[start] += size
            change[end] -= size
    return list(accumulate(change[:-1]))


def lower_bound(intervals: Sequence[Interval]) -> int:
    """Return the maximum number of bytes that are live at the same time."""
    times = sorted({time for interval in intervals for time in (interval.start, interval.end)})
    section = {time: index for index, time in enumerate(times)}
    spans = ((section[i.start], section[i.end], i.rounded_size) for i in intervals)
    return max(live_bytes(spans, len(times)), default=0)


def _label(intervals: Sequence[Interval], index: int) -> str:
    interval = intervals[index]
    name = f" {interval.name!r}" if interval.name else ""
    return f"buffer {index}{name} (live [{interval.start}, {interval.end}), {interval.size} bytes)"


def verify(
    intervals: Sequence[Interval], offsets: Sequence[int], arena_size: int | None = None
) -> None:
    """Check that a plan is valid, by sweeping over time with the live buffers sorted by offset.

    Args:
        intervals: the problem.
        offsets: bytes, one per interval.
        arena_size: bytes; None for an unlimited arena.

    Raises:
        exc.PlanError: the number of offsets is wrong; an offset is negative or misaligned; a buffer
            extends beyond the arena; two buffers that are live at the same time overlap.
    """
    if len(offsets) != len(intervals):
        raise exc.PlanError(why=f"there are {len(offsets)} offsets for {len(intervals)} buffers")
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
            why = f"too large: the buffer ends at {offset + size}, the arena at {arena_size}"
        if why:
            raise exc.PlanError(why=f"the offset {offset} of {_label(intervals, index)} is {why}")
        if size and interval.start < interval.end:
            # At the same time, ends sort before starts.
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
                    f"{_label(intervals, high)} at offset {offsets[high]} are live at the "
                    f"same time and overlap"
                )
        starts.insert(place, offset)
        live.insert(place, index)
