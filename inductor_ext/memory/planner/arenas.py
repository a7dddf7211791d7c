"""Plans arenas from requests: which storages share an allocation, and at which offsets.

This is the planner's interface for adapters. Requests with the same key (device, stream, pinned or
not) share an arena, which exists from the start of its first member to the end of its last. Where
nothing is live in between, one arena ends and another begins, so the memory is free meanwhile. A
request whose size depends on a symbol that has no value yet when the arena would be created is
placed in another arena.

Integer sizes are a problem for `solver`. If a size is an expression, `symbolic` finds offsets that
hold for every size. Every result is verified; a wrong plan raises exc.PlanError. Integers are
checked by `interval.verify`. Expressions are checked by structure (for any two buffers that are
live at the same time, a chain of neighbours keeps one above the other, for all sizes) and by values
at the hint, the scaled hints and a few odd values.

Pure: it uses sympy, but neither torch nor Inductor.
"""

from __future__ import annotations

import graphlib
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy  # type: ignore[import-untyped]

from inductor_ext import exc
from inductor_ext.memory.planner import interval, solver, symbolic
from inductor_ext.memory.planner.interval import Interval
from inductor_ext.memory.planner.symbolic import (
    Algebra,
    ExpressionEvaluator,
    MakeAlign,
    MakeMax,
    Replanner,
    Stacking,
    make_align,
    make_max,
)

__all__ = ["Arena", "Member", "Request", "plan_arenas", "replanner", "verify_arenas"]


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
    def ratio(self) -> float:
        """Size divided by the lower bound at the hint; 1.0 for an empty arena."""
        return self.peak_hint / self.lower_bound if self.lower_bound else 1.0

    @property
    def is_static(self) -> bool:
        """Whether the size and all offsets are integers."""
        return all(isinstance(value, int) for value in [self.size, *self._offsets])

    @property
    def _offsets(self) -> list[int | sympy.Expr]:
        return [member.offset for member in self.members]


@dataclass(frozen=True)
class _Planner:
    """The settings that all arenas of one plan share."""

    hints: Mapping[sympy.Symbol, int]
    iterations: int
    seed: int
    make_max: MakeMax
    make_align: MakeAlign
    prefix: str
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def plan(self, requests: Sequence[Request], split: bool) -> list[Arena]:
        """Return the arenas for all requests of one key, ordered by start."""
        arenas: list[Arena] = []
        for part in _split(requests) if split else [list(requests)]:
            options: list[list[Arena]] = [
                [
                    self._one(piece)
                    for group in groups
                    for piece in (_split(group) if split else [group])
                ]
                for groups in _groupings(part)
            ]
            best: list[Arena] = min(options, key=_cost)
            arenas += best
        return sorted(arenas, key=lambda arena: (arena.start, arena.end))

    def _one(self, requests: Sequence[Request]) -> Arena:
        if any(request.constant is None for request in requests):
            return self.dynamic(requests)
        return self.static(requests)

    def static(self, requests: Sequence[Request]) -> Arena:
        intervals = [request.interval(request.constant or 0) for request in requests]
        placement = solver.solve(intervals, iterations=self.iterations, seed=self.seed)
        ratio = placement.ratio
        return _arena(
            requests,
            placement.offsets,
            size=placement.peak,
            lower_bound=placement.lower_bound,
            peak_hint=placement.peak,
            worst_ratio=ratio,
        )

    def dynamic(self, requests: Sequence[Request]) -> Arena:
        # Zero-size requests cannot overlap anything: stack only the others.
        stacked = [r for r in requests if r.constant != 0]
        lifetimes = [request.lifetime for request in stacked]
        alignments = [request.alignment for request in stacked]
        samples = symbolic.scaled_samples(_by_weight(stacked, self.hints))
        columns = _columns(stacked, samples)
        choice = symbolic.choose_stacking(
            lifetimes, columns, alignments, iterations=self.iterations, seed=self.seed
        )
        algebra = Algebra(
            [request.size for request in stacked],
            self.make_max,
            self.make_align,
            f"{self.prefix}{next(self.numbers)}",
        )
        starts, height = algebra.stack(
            choice.stacking, [request.size for request in stacked], alignments
        )
        used = set(algebra.used_definitions([height, *starts]))
        counter = itertools.count()
        indices = [None if r.constant == 0 else next(counter) for r in requests]
        position = {index: new for new, index in enumerate(indices) if index is not None}
        below = choice.stacking.below
        return _arena(
            requests,
            [0 if i is None else _plain(starts[i]) for i in indices],
            size=_plain(height),
            lower_bound=choice.lower_bounds[0],
            peak_hint=choice.peaks[0],
            worst_ratio=choice.worst_ratio,
            definitions=tuple((s, part) for s, part in algebra.definitions if s in used),
            below=tuple(
                () if i is None else tuple(position[lower] for lower in below[i]) for i in indices
            ),
        )


def _arena(
    requests: Sequence[Request], offsets: Sequence[int | sympy.Expr], **fields: Any
) -> Arena:
    return Arena(
        key=requests[0].key,
        start=min(request.lifetime[0] for request in requests),
        end=max(request.lifetime[1] for request in requests),
        members=tuple(map(Member, requests, offsets)),
        **fields,
    )


def _plain(expression: sympy.Expr) -> int | sympy.Expr:
    return int(expression) if expression.is_Integer else expression


def _split(requests: Sequence[Request]) -> list[list[Request]]:
    """Split the requests where nothing is live, in their given order within each part."""
    part_of: dict[int, int] = {}
    end = part = -1
    for index in sorted(range(len(requests)), key=lambda i: requests[i].lifetime):
        start, stop = requests[index].lifetime
        if part < 0 or start >= end:
            part += 1
            end = stop
        end = max(end, stop)
        part_of[index] = part
    parts: list[list[Request]] = [[] for _ in range(part + 1)]
    for index, request in enumerate(requests):
        parts[part_of[index]].append(request)
    return parts


def _groupings(requests: Sequence[Request]) -> list[list[list[Request]]]:
    """Return ways to divide requests so that each group's sizes are known when its first one
    starts.

    If this holds for all requests together, there is one way. Otherwise there are two. In the
    first, only the requests whose size is known too late leave the arena, and share another one as
    far as possible. In the second, every request that starts at or after the first of these leaves,
    so that the first arena ends sooner.
    """
    late = _late(requests)
    if not late:
        return [[list(requests)]]
    too_late = {id(request) for request in late}
    apart = [[request for request in requests if id(request) not in too_late]]
    while late:
        first = min(late, key=lambda request: request.start).start
        apart.append([r for r in late if not r.is_unknown_at(first)])
        late = [r for r in late if r.is_unknown_at(first)]
    after = []
    left = list(requests)
    while left:
        late = _late(left)
        until = min((r.start for r in late), default=None)
        after.append([r for r in left if until is None or r.start < until])
        left = [r for r in left if until is not None and r.start >= until]
    return [apart, after]


def _late(requests: Sequence[Request]) -> list[Request]:
    """Return the requests whose size is not known when the first one starts."""
    first = min(request.start for request in requests)
    return [request for request in requests if request.is_unknown_at(first)]


def _cost(arenas: Sequence[Arena]) -> tuple[int, int, int]:
    """Return the sort key of a list of arenas: maximum bytes allocated at the same time, at the
    hint; bytes times steps, because memory that is not allocated is available to others; number of
    arenas."""
    held = interval.lower_bound([Interval(a.start, a.end, a.peak_hint) for a in arenas])
    return held, sum(a.peak_hint * (a.end - a.start) for a in arenas), len(arenas)


def _by_weight(
    requests: Sequence[Request], hints: Mapping[sympy.Symbol, int]
) -> dict[sympy.Symbol, int]:
    """Return the hints of the requests' symbols, ordered by how many requests depend on them."""
    uses: dict[sympy.Symbol, int] = {}
    for request in requests:
        for symbol in request.symbols:
            uses[symbol] = uses.get(symbol, 0) + 1
    return {s: hints[s] for s in sorted(uses, key=lambda s: (-uses[s], str(s)))}


def _columns(
    requests: Sequence[Request], samples: Sequence[Mapping[sympy.Symbol, int]]
) -> list[list[int]]:
    """Return the rounded sizes at each sample where all are valid; the first sample is the hint.

    Raises:
        exc.BadIntervalError: a size is negative at the hint, or not an integer.
    """
    program = ExpressionEvaluator([request.size for request in requests])
    columns = []
    for number, sample in enumerate(samples):
        try:
            sizes = program(sample)
        except ValueError:
            sizes = [-1]
        if min(sizes, default=0) >= 0:
            columns.append(
                [interval.round_up(s, r.alignment) for s, r in zip(sizes, requests, strict=True)]
            )
        elif number == 0:
            _name_the_bad_one(requests, sample)
    return columns


def _name_the_bad_one(requests: Sequence[Request], hints: Mapping[sympy.Symbol, int]) -> None:
    for request in requests:
        try:
            size: object = ExpressionEvaluator([request.size])(hints)[0]
        except ValueError:
            size = "no integer"
        if not isinstance(size, int) or size < 0:
            raise exc.BadIntervalError(
                name=request.name,
                field="size at the hint",
                value=f"{size} ({request.size})",
                allowed="an integer, 0 or more",
            )


_ODD = (0, 1, 3, 1009)
"""Values that all symbols are set to, one value at a time, when a plan is verified, in addition to
the hints and their scalings. Samples at which a size is invalid are skipped."""


def plan_arenas(
    requests: Sequence[Request],
    *,
    hint: Callable[[sympy.Expr], int],
    iterations: int = solver.DEFAULT_ITERATIONS,
    seed: int = 0,
    make_max: MakeMax = make_max,
    make_align: MakeAlign = make_align,
    split: bool = True,
    prefix: str = "arena",
) -> tuple[Arena, ...]:
    """Place all requests in arenas.

    Args:
        requests: in any order; each becomes a member of exactly one arena.
        hint: returns the size hint of a symbol; called with symbols only.
        iterations: iterations of the solver.
        seed: seed of the searches; the same input and seed give the same plan on every machine.
        make_max: builds the maximum of expressions.
        make_align: builds an expression rounded up to an alignment.
        split: whether an arena ends where nothing is live.
        prefix: prefix of the names in `Arena.definitions`.

    Returns:
        The arenas, grouped by key in the order of the keys' first requests, and by start within a
        key.

    Raises:
        exc.BadIntervalError: a size is negative at the hint, or not an integer.
        exc.PlanError: the plan is wrong, which only verification can find.
    """
    symbols = sorted({s for request in requests for s in request.symbols}, key=str)
    hints = {symbol: int(hint(symbol)) for symbol in symbols}
    planner = _Planner(hints, iterations, seed, make_max, make_align, prefix)
    by_key: dict[Hashable, list[Request]] = {}
    for request in requests:
        by_key.setdefault(request.key, []).append(request)
    arenas = tuple(arena for group in by_key.values() for arena in planner.plan(group, split))
    odd = [dict.fromkeys(symbols, value) for value in _ODD]
    verify_arenas(arenas, symbolic.scaled_samples(hints) + odd)
    return arenas


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
            why = f"has a size known from step {request.known_from}, its arena is of {arena.start}"
        if why:
            raise exc.PlanError(why=f"the buffer {request.name!r} {why}")


def _verify_stacking(arena: Arena) -> None:
    if len(arena.below) != len(arena.members):
        raise exc.PlanError(why="a symbolic arena does not say what its members rest on")
    stacked = [i for i, m in enumerate(arena.members) if m.request.constant != 0]
    place = {index: position for position, index in enumerate(stacked)}
    try:
        below = tuple(tuple(place[lower] for lower in arena.below[i]) for i in stacked)
        order = tuple(graphlib.TopologicalSorter(dict(enumerate(below))).static_order())
    except (KeyError, graphlib.CycleError) as error:
        raise exc.PlanError(why=f"what rests on what is no order: {error}") from error
    lifetimes = [arena.members[index].request.lifetime for index in stacked]
    loose = Stacking(order, below).unordered(lifetimes)
    if loose is not None:
        a, b = (arena.members[stacked[index]].request.name for index in loose)
        raise exc.PlanError(why=f"{a!r} and {b!r} are live at once and neither rests on the other")


def _verify_at(arena: Arena, samples: Sequence[Mapping[sympy.Symbol, int]]) -> None:
    requests = [member.request for member in arena.members]
    sizes_at = ExpressionEvaluator([request.size for request in requests])
    places_at = ExpressionEvaluator(
        [arena.size, *(m.offset for m in arena.members)], arena.definitions
    )
    unknown = places_at.symbols.keys() - sizes_at.symbols.keys()
    unknown |= {s for sample in samples for s in sizes_at.symbols.keys() - sample.keys()}
    if unknown:
        raise exc.PlanError(why=f"{min(map(str, unknown))} is no symbol of a size, or has no value")
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
                        f"which it rests, at {dict(sample)}"
                    )


def replanner(
    arena: Arena, iterations: int = solver.DEFAULT_ITERATIONS
) -> tuple[Replanner, tuple[Any, ...]]:
    """Return a planner for run time, and the distinct sizes to call it with.

    The planner returns the arena's size and the members' offsets in their order.

    Args:
        arena: an arena with members of symbolic size.
        iterations: iterations of the solver, per plan.
    """
    requests = [member.request for member in arena.members]
    sizes = tuple(dict.fromkeys(request.size for request in requests))
    place = {size: index for index, size in enumerate(sizes)}
    planner = Replanner(
        starts=tuple(request.lifetime[0] for request in requests),
        ends=tuple(request.lifetime[1] for request in requests),
        alignments=tuple(request.alignment for request in requests),
        which=tuple(place[request.size] for request in requests),
        order=tuple(graphlib.TopologicalSorter(dict(enumerate(arena.below))).static_order()),
        iterations=iterations,
    )
    return planner, sizes
