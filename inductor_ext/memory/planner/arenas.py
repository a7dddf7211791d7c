"""Plans arenas from requests: which storages share an allocation, and at which offsets.

This is the planner's interface for adapters. Requests with the same key (device, stream, pinned or
not) share an arena, which exists from the start of its first member to the end of its last. Where
nothing is live in between, one arena ends and another begins, so the memory is free meanwhile. A
request whose size depends on a symbol that has no value yet when the arena would be created is
placed in another arena.

Integer sizes are a problem for `solver`. If a size is an expression, `symbolic` finds offsets that
hold for every size. Every result is verified (`arena_plan`), at the hints, the scaled hints and a
few extreme values.
"""

from __future__ import annotations

import graphlib
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy  # type: ignore[import-untyped]

from inductor_ext import exc
from inductor_ext.memory.planner import interval, solver
from inductor_ext.memory.planner.arena_plan import Arena, Member, Request, verify_arenas
from inductor_ext.memory.planner.interval import Interval
from inductor_ext.memory.planner.symbolic.algebra import Algebra, MakeAlign, MakeMax
from inductor_ext.memory.planner.symbolic.evaluator import ExpressionEvaluator
from inductor_ext.memory.planner.symbolic.runtime_replanner import Replanner
from inductor_ext.memory.planner.symbolic.stacking import choose_stacking, scaled_samples

_EXTRA_VALUES = (0, 1, 3, 1009)
"""Values that all symbols are set to, one value at a time, when a plan is verified, in addition to
the hints and their scalings. Samples at which a size is invalid are skipped."""


def plan_arenas(
    requests: Sequence[Request],
    *,
    hint: Callable[[sympy.Expr], int],
    make_max: MakeMax,
    make_align: MakeAlign,
    prefix: str,
) -> tuple[Arena, ...]:
    """Place all requests in arenas.

    Args:
        requests: in any order; each becomes a member of exactly one arena.
        hint: returns the size hint of a symbol; called with symbols only.
        make_max: builds the maximum of expressions.
        make_align: builds an expression rounded up to an alignment.
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
    builder = _ArenaBuilder(hints, make_max, make_align, prefix)
    by_key: dict[Hashable, list[Request]] = {}
    for request in requests:
        by_key.setdefault(request.key, []).append(request)
    arenas = tuple(arena for group in by_key.values() for arena in builder.build(group))
    extremes = [dict.fromkeys(symbols, value) for value in _EXTRA_VALUES]
    verify_arenas(arenas, scaled_samples(hints) + extremes)
    return arenas


def make_replanner(arena: Arena) -> tuple[Replanner, tuple[Any, ...]]:
    """Return a planner for run time, and the distinct sizes to call it with.

    The planner returns the arena's size and the members' offsets in their order.

    Args:
        arena: an arena with members of symbolic size.
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
    )
    return planner, sizes


@dataclass(frozen=True)
class _ArenaBuilder:
    """Builds arenas; its fields are what all arenas of one plan share."""

    hints: Mapping[sympy.Symbol, int]
    make_max: MakeMax
    make_align: MakeAlign
    prefix: str
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def build(self, requests: Sequence[Request]) -> list[Arena]:
        """Return the arenas for all requests of one key, ordered by start."""
        arenas: list[Arena] = []
        for part in _split_at_gaps(requests):
            options: list[list[Arena]] = [
                [self._build_arena(piece) for group in groups for piece in _split_at_gaps(group)]
                for groups in _groupings(part)
            ]
            best: list[Arena] = min(options, key=_memory_cost)
            arenas += best
        return sorted(arenas, key=lambda arena: (arena.start, arena.end))

    def _build_arena(self, requests: Sequence[Request]) -> Arena:
        if any(request.constant is None for request in requests):
            return self._build_symbolic(requests)
        return self._build_static(requests)

    def _build_static(self, requests: Sequence[Request]) -> Arena:
        intervals = [request.interval(request.constant or 0) for request in requests]
        placement = solver.solve(intervals)
        return make_arena(
            requests,
            placement.offsets,
            size=placement.peak,
            lower_bound=placement.lower_bound,
            peak_hint=placement.peak,
            worst_ratio=placement.ratio,
        )

    def _build_symbolic(self, requests: Sequence[Request]) -> Arena:
        # Zero-size requests cannot overlap anything: stack only the others.
        stacked = [r for r in requests if r.constant != 0]
        lifetimes = [request.lifetime for request in stacked]
        alignments = [request.alignment for request in stacked]
        samples = scaled_samples(_hints_by_use(stacked, self.hints))
        columns = _sizes_at(stacked, samples)
        choice = choose_stacking(lifetimes, columns, alignments)
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
        return make_arena(
            requests,
            [0 if i is None else _as_int(starts[i]) for i in indices],
            size=_as_int(height),
            lower_bound=choice.lower_bounds[0],
            peak_hint=choice.peaks[0],
            worst_ratio=choice.worst_ratio,
            definitions=tuple((s, part) for s, part in algebra.definitions if s in used),
            below=tuple(
                () if i is None else tuple(position[lower] for lower in below[i]) for i in indices
            ),
        )


def make_arena(
    requests: Sequence[Request], offsets: Sequence[int | sympy.Expr], **fields: Any
) -> Arena:
    return Arena(
        key=requests[0].key,
        start=min(request.lifetime[0] for request in requests),
        end=max(request.lifetime[1] for request in requests),
        members=tuple(map(Member, requests, offsets)),
        **fields,
    )


def _as_int(expression: sympy.Expr) -> int | sympy.Expr:
    return int(expression) if expression.is_Integer else expression


def _split_at_gaps(requests: Sequence[Request]) -> list[list[Request]]:
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
    late = _find_late(requests)
    if not late:
        return [[list(requests)]]
    too_late = {id(request) for request in late}
    apart = [[request for request in requests if id(request) not in too_late]]
    while late:
        first = min(late, key=lambda request: request.start).start
        apart.append([r for r in late if not r.is_unknown_at(first)])
        late = [r for r in late if r.is_unknown_at(first)]
    after = []
    rest = list(requests)
    while rest:
        late = _find_late(rest)
        until = min((r.start for r in late), default=None)
        after.append([r for r in rest if until is None or r.start < until])
        rest = [r for r in rest if until is not None and r.start >= until]
    return [apart, after]


def _find_late(requests: Sequence[Request]) -> list[Request]:
    """Return the requests whose size is not known when the first one starts."""
    first = min(request.start for request in requests)
    return [request for request in requests if request.is_unknown_at(first)]


def _memory_cost(arenas: Sequence[Arena]) -> tuple[int, int, int]:
    """Return the sort key of a list of arenas: maximum bytes allocated at the same time, at the
    hint; bytes times steps, because memory that is not allocated is available to others; number of
    arenas."""
    peak = interval.lower_bound([Interval(a.start, a.end, a.peak_hint) for a in arenas])
    return peak, sum(a.peak_hint * (a.end - a.start) for a in arenas), len(arenas)


def _hints_by_use(
    requests: Sequence[Request], hints: Mapping[sympy.Symbol, int]
) -> dict[sympy.Symbol, int]:
    """Return the hints of the requests' symbols, ordered by how many requests depend on them."""
    uses: dict[sympy.Symbol, int] = {}
    for request in requests:
        for symbol in request.symbols:
            uses[symbol] = uses.get(symbol, 0) + 1
    return {s: hints[s] for s in sorted(uses, key=lambda s: (-uses[s], str(s)))}


def _sizes_at(
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
            _raise_invalid_size(requests, sample)
    return columns


def _raise_invalid_size(requests: Sequence[Request], hints: Mapping[sympy.Symbol, int]) -> None:
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
