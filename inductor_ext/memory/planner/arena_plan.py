"""The values of an arena plan (requests, members, arenas), and the check that a plan is valid.

Integer offsets are checked by `interval.verify`. Expressions are checked by structure (for any two
buffers that are live at the same time, a chain of `below` keeps one above the other, for all
sizes) and by values at samples of their symbols. A wrong plan raises exc.PlanError.
"""

from __future__ import annotations

import graphlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import sympy  # type: ignore[import-untyped]

from inductor_ext import exc
from inductor_ext.memory.planner import interval
from inductor_ext.memory.planner.interval import Interval
from inductor_ext.memory.planner.symbolic.evaluator import ExpressionEvaluator
from inductor_ext.memory.planner.symbolic.stacking import Stacking


@dataclass(frozen=True, slots=True)
class Request:
    """A request for memory for one storage.

    Raises:
        exc.BadIntervalError: negative size, end before start, alignment not a power of two, or a
            size that is not known when the storage becomes live.
    """

    name: str
    start: int
    end: int
    """The storage is live in `[start, end)`, in steps of the schedule. An empty live range is
    extended to the step at which it starts, because the storage is written there all the same."""
    size: int | sympy.Expr
    """Bytes, before rounding; never negative, for any values of its symbols."""
    alignment: int = 64
    """Bytes. The offset is a multiple of it, and the size is rounded up to a multiple of it."""
    key: Hashable = None
    """Only requests with equal keys share an arena."""
    known_from: int | None = None
    """The first step at which every symbol of the size has a value; None for the beginning."""

    def __post_init__(self) -> None:
        # Apply the checks of Interval.
        Interval(self.start, self.end, self.constant or 0, self.alignment, self.name)
        if self.is_unknown_at(self.start):
            raise exc.BadIntervalError(
                name=self.name,
                field="known_from",
                value=self.known_from,
                allowed=f"its start, {self.start}, or less",
            )

    @property
    def constant(self) -> int | None:
        """The size if it is an integer, else None."""
        return int(self.size) if isinstance(self.size, (int, sympy.Integer)) else None

    def is_unknown_at(self, step: int) -> bool:
        """Whether the size has no value yet at a step of the schedule."""
        return self.constant is None and self.known_from is not None and self.known_from > step

    @property
    def lifetime(self) -> tuple[int, int]:
        """The live range `[start, end)`, at least one step long."""
        return self.start, max(self.end, self.start + 1)

    @property
    def symbols(self) -> set[sympy.Symbol]:
        """The symbols that the size depends on."""
        return set() if isinstance(self.size, int) else self.size.free_symbols

    def interval(self, size: int) -> Interval:
        """Return the interval, with a size in bytes in place of an expression."""
        return Interval(*self.lifetime, size, self.alignment, self.name)


@dataclass(frozen=True, slots=True)
class Member:
    """A request and its offset in its arena."""

    request: Request
    offset: int | sympy.Expr
    """Bytes from the start of the arena."""


@dataclass(frozen=True)
class Arena:
    """One allocation that several storages share."""

    key: Hashable
    start: int
    """The step before which it must exist: the start of its first member."""
    end: int
    """The step at which it can be freed: the end of its last member."""
    size: int | sympy.Expr
    """Bytes."""
    members: tuple[Member, ...]
    """In the order of their requests."""
    lower_bound: int
    """Maximum live bytes of the members at the hint. No arena for them can be smaller."""
    peak_hint: int
    """The size at the hint, in bytes."""
    worst_ratio: float = 1.0
    """The highest ratio of size to lower bound, over the hint and the scaled hints."""
    definitions: tuple[tuple[sympy.Symbol, sympy.Expr], ...] = ()
    """Named subexpressions of the offsets and the size, to be assigned in this order. They keep the
    other expressions short."""
    below: tuple[tuple[int, ...], ...] = ()
    """For each member, the members directly below it; empty if all sizes are integers."""

    @property
    def is_static(self) -> bool:
        """Whether the size and all offsets are integers."""
        offsets = (member.offset for member in self.members)
        return all(isinstance(value, int) for value in (self.size, *offsets))


def verify_arenas(arenas: Sequence[Arena], samples: Sequence[Mapping[sympy.Symbol, int]]) -> None:
    """Check that a plan is valid.

    Every member is live within its arena's life and has its key. The arena's size and offsets only
    use symbols that the members' sizes use and that are known when the arena is created. For any
    two members of a symbolic arena that are live at the same time, a chain of `below` keeps one
    above the other. At every sample, all members are inside the arena, aligned and disjoint, and
    each is above those in its `below`.

    Args:
        arenas: the plan.
        samples: values for all symbols; a sample at which a size is negative or not an integer is
            skipped.

    Raises:
        exc.PlanError: one of these conditions is violated.
    """
    for arena in arenas:
        _verify_life(arena)
        if arena.is_static and all(m.request.constant is not None for m in arena.members):
            interval.verify(
                [m.request.interval(m.request.constant or 0) for m in arena.members],
                [int(m.offset) for m in arena.members],
                int(arena.size),
            )
        else:
            _verify_stacking(arena)
            _verify_at(arena, samples)


def _verify_life(arena: Arena) -> None:
    for member in arena.members:
        request = member.request
        start, end = request.lifetime
        why = ""
        if request.key != arena.key:
            why = f"has the key {request.key!r}, its arena {arena.key!r}"
        elif start < arena.start or end > arena.end:
            why = f"is live in [{start}, {end}), its arena in [{arena.start}, {arena.end})"
        elif request.is_unknown_at(arena.start):
            why = f"has a size known from step {request.known_from}, its arena starts before"
        if why:
            raise exc.PlanError(why=f"the buffer {request.name!r} {why}")


def _verify_stacking(arena: Arena) -> None:
    if len(arena.below) != len(arena.members):
        raise exc.PlanError(why="a symbolic arena has no stacking order")
    stacked = [i for i, m in enumerate(arena.members) if m.request.constant != 0]
    place = {index: position for position, index in enumerate(stacked)}
    try:
        below = tuple(tuple(place[lower] for lower in arena.below[i]) for i in stacked)
        order = tuple(graphlib.TopologicalSorter(dict(enumerate(below))).static_order())
    except (KeyError, graphlib.CycleError) as error:
        raise exc.PlanError(why=f"the stacking order has a cycle: {error}") from error
    lifetimes = [arena.members[index].request.lifetime for index in stacked]
    unordered = Stacking(order, below).unordered(lifetimes)
    if unordered is not None:
        a, b = (arena.members[stacked[index]].request.name for index in unordered)
        raise exc.PlanError(
            why=f"{a!r} and {b!r} overlap in time, and neither is stacked on the other"
        )


def _verify_at(arena: Arena, samples: Sequence[Mapping[sympy.Symbol, int]]) -> None:
    requests = [member.request for member in arena.members]
    sizes_at = ExpressionEvaluator([request.size for request in requests])
    places_at = ExpressionEvaluator(
        [arena.size, *(m.offset for m in arena.members)], arena.definitions
    )
    unknown = places_at.symbols.keys() - sizes_at.symbols.keys()
    unknown |= {s for sample in samples for s in sizes_at.symbols.keys() - sample.keys()}
    if unknown:
        raise exc.PlanError(why=f"{min(map(str, unknown))} is not a size symbol, or has no value")
    for sample in samples:
        try:
            sizes = sizes_at(sample)
        except ValueError:
            continue
        if min(sizes) < 0:
            continue
        try:
            arena_size, *offsets = places_at(sample)
        except ValueError as error:
            raise exc.PlanError(why=f"an offset at {dict(sample)} has {error}") from error
        intervals = [r.interval(size) for r, size in zip(requests, sizes, strict=True)]
        interval.verify(intervals, offsets, arena_size)
        for index, lower in enumerate(arena.below):
            for other in lower:
                if offsets[other] + intervals[other].rounded_size > offsets[index]:
                    raise exc.PlanError(
                        why=f"{requests[index].name!r} is not above {requests[other].name!r}, on "
                        f"which it is stacked, at {dict(sample)}"
                    )
