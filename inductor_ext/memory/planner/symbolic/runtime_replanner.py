"""Plans an arena at run time, where no order of its buffers is good for all sizes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from inductor_ext.memory.planner import solver
from inductor_ext.memory.planner.interval import Interval, verify
from inductor_ext.memory.planner.symbolic.stacking import stack_in_order

MAX_CACHED = 256
"""Number of tuples of sizes whose plans a `Replanner` caches."""


@dataclass(frozen=True)
class Replanner:
    """Plans an arena at run time, once per tuple of sizes.

    Its `repr` is an expression that recreates it, so that generated code can contain it. It is
    thread-safe. A cached plan costs one look-up; the least recently used plans are evicted.

    Args:
        starts: the first step of each buffer's live range.
        ends: the first step after it.
        alignments: bytes, a power of two for each buffer.
        which: for each buffer, the index of its size in the tuple that `plan` is called with, so
            that the caller evaluates each distinct size only once.
        order: the buffers from bottom to top of a stack that suits most sizes, if one is known: no
            plan needs more memory than this order.
        iterations: iterations of the solver.
    """

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    alignments: tuple[int, ...]
    which: tuple[int, ...]
    order: tuple[int, ...] = ()
    iterations: int = solver.DEFAULT_ITERATIONS
    plan: Callable[[tuple[int, ...]], tuple[int, tuple[int, ...]]] = field(
        init=False, repr=False, compare=False
    )
    """Returns the arena's size and each buffer's offset for a tuple of sizes, all in bytes. Plans
    are verified; a negative size raises exc.BadIntervalError."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "plan", functools.lru_cache(MAX_CACHED)(self._solve))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, f.name) for f in fields(self) if f.init)

    def _solve(self, sizes: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        intervals = [
            Interval(start, end, sizes[place], alignment)
            for start, end, alignment, place in zip(
                self.starts, self.ends, self.alignments, self.which, strict=True
            )
        ]
        placement = solver.solve(intervals, iterations=self.iterations)
        if self.order and placement.peak > placement.lower_bound:
            lifetimes = list(zip(self.starts, self.ends, strict=True))
            rounded = [interval.rounded_size for interval in intervals]
            offsets, peak = stack_in_order(lifetimes, self.order).offsets(rounded, self.alignments)
            if peak < placement.peak:
                verify(intervals, offsets, peak)
                return peak, tuple(offsets)
        return placement.peak, placement.offsets
