"""Chooses the order in which the buffers of an arena are stacked, for all sizes at once."""

from __future__ import annotations

import bisect
import operator
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import sympy  # type: ignore[import-untyped]

from inductor_ext.memory.planner import solver
from inductor_ext.memory.planner.interval import Interval, lower_bound


@dataclass(frozen=True)
class Stacking:
    """The order in which all buffers of one arena are stacked.

    Of two buffers that are live at the same time, the one that comes first in `order` is below the
    other, directly or through a chain of `below`.
    """

    order: tuple[int, ...]
    """The buffers from bottom to top."""
    below: tuple[tuple[int, ...], ...]
    """The buffers directly below each buffer: those live at the same time and not already below
    another one of them."""

    def offsets(self, sizes: Sequence[int], alignments: Sequence[int]) -> tuple[list[int], int]:
        """Return the offsets and the arena's size, in bytes.

        Args:
            sizes: bytes, rounded up to `alignments`.
            alignments: bytes, powers of two.
        """
        offsets = [0] * len(self.order)
        ends = [0] * len(self.order)
        for index in self.order:
            offset = 0
            for lower in self.below[index]:
                if ends[lower] > offset:
                    offset = ends[lower]
            alignment = alignments[index]
            offsets[index] = offset = (offset + alignment - 1) & -alignment
            ends[index] = offset + sizes[index]
        return offsets, max(ends, default=0)

    def unordered(self, lifetimes: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
        """Return two buffers that are live at the same time and not ordered by a chain of `below`.

        None, if there are none, proves that no two buffers overlap for any sizes.
        """
        live = live_at_once(lifetimes)
        reach = [0] * len(lifetimes)
        below_index = 0
        for index in self.order:
            for lower in self.below[index]:
                reach[index] |= reach[lower] | 1 << lower
            unordered = live[index] & below_index & ~reach[index]
            if unordered:
                return unordered.bit_length() - 1, index
            below_index |= 1 << index
        return None


@dataclass(frozen=True)
class Choice:
    """An order, with its peak and lower bound at each sample used to choose it."""

    stacking: Stacking
    peaks: tuple[int, ...]
    """Bytes."""
    lower_bounds: tuple[int, ...]
    """Bytes."""

    @property
    def worst_ratio(self) -> float:
        """The highest ratio of peak to lower bound."""
        return max(
            (p / b for p, b in zip(self.peaks, self.lower_bounds, strict=True) if b), default=1.0
        )


_MAX_SOLVED = 9
"""Maximum number of samples at which the solver is called."""

_MAX_SOLVED_BUFFERS = 2000
"""Maximum number of buffers the solver gets at all samples together, not counting the first three
samples: large problems are solved at these only."""

_GOOD_RATIO = 1.005
"""Worst ratio at which the search ends, if the ratio at the hint is 1."""

_MAX_FITS = 200
"""Maximum number of first fits at all samples at once."""

MAX_FIT_WORK = 1_000_000
"""Maximum cost of them together, in buffers squared: about half a second."""


def choose_stacking(
    lifetimes: Sequence[tuple[int, int]],
    columns: Sequence[Sequence[int]],
    alignments: Sequence[int],
) -> Choice:
    """Choose the order of buffers with the lowest worst-case ratio over several samples of their
    sizes.

    Candidates are the solver's placements at single samples and a first fit at all samples at once,
    in several sequences; then a search moves critical buffers in the sequence. Everything ends as
    soon as an order reaches the lower bound at every sample; the search already ends close to it.
    Its budget is counted, never timed.

    Args:
        lifetimes: `[start, end)` of each buffer.
        columns: for each sample, the size of each buffer in bytes, rounded up to its alignment; the
            first sample is the hint.
        alignments: bytes, powers of two.
    """
    search = _OrderSearch(lifetimes, columns, alignments)
    count = len(lifetimes)
    solved = min(_MAX_SOLVED, max(len(_SCALES), _MAX_SOLVED_BUFFERS // max(count, 1)))
    for number in range(min(solved, len(columns))):
        intervals = [
            Interval(*life, needs[number], alignment)
            for life, needs, alignment in zip(lifetimes, search.sizes_of, alignments, strict=True)
        ]
        placement = solver.solve(intervals)
        best = search.evaluate(search.order_of(placement.offsets))
        if search.is_optimal:
            return best[1]
    return _refine(search)


def _refine(search: _OrderSearch) -> Choice:
    """Search among first fits at all samples at once, with sequences derived from the best one."""
    assert search.best is not None
    generator = random.Random(0)
    count = len(search.lifetimes)
    fits = min(_MAX_FITS, MAX_FIT_WORK // count**2)
    shares = [
        max(
            size / bound if bound else 0.0
            for size, bound in zip(needs, search.lower_bounds, strict=True)
        )
        for needs in search.sizes_of
    ]
    lengths = [end - start for start, end in search.lifetimes]
    starts = [start for start, _ in search.lifetimes]
    sequences = [
        list(search.best[1].stacking.order),
        sorted(range(count), key=lambda i: (-shares[i], -lengths[i])),
        sorted(range(count), key=lambda i: -shares[i] * lengths[i]),
        sorted(range(count), key=lambda i: (-lengths[i], -shares[i])),
        sorted(range(count), key=lambda i: (starts[i], -shares[i])),
    ][:fits]
    candidates = [
        (*search.evaluate(search.first_fit(sequence)), sequence) for sequence in sequences
    ]
    for _ in range(fits - len(sequences)):
        if search.is_good:
            break
        value, choice, sequence = min(candidates, key=operator.itemgetter(0))
        candidate = list(sequence)
        place = candidate.index(generator.choice(search.critical_chain(choice)))
        if generator.random() < 0.5:
            candidate.insert(generator.randrange(place + 1), candidate.pop(place))
        else:
            other = generator.randrange(count)
            candidate[place], candidate[other] = candidate[other], candidate[place]
        new_value, choice = search.evaluate(search.first_fit(candidate))
        if new_value <= value:
            candidates = [(new_value, choice, candidate)]
    return search.best[1]


class _OrderSearch:
    """Evaluates orders and keeps the best one; see `choose_stacking`."""

    def __init__(
        self,
        lifetimes: Sequence[tuple[int, int]],
        columns: Sequence[Sequence[int]],
        alignments: Sequence[int],
    ) -> None:
        self.lifetimes = lifetimes
        self.columns = columns
        self.alignments = alignments
        self.lower_bounds = tuple(
            lower_bound(
                [Interval(*life, size) for life, size in zip(lifetimes, column, strict=True)]
            )
            for column in columns
        )
        self.live = live_at_once(lifetimes)
        # A buffer that is empty at a sample still needs a position in the order.
        self.sizes_of = [
            [max(column[index], alignment) for column in columns]
            for index, alignment in enumerate(alignments)
        ]
        self.best: tuple[tuple[float, int, int], Choice] | None = None

    def evaluate(self, order: Sequence[int]) -> tuple[tuple[float, int, int], Choice]:
        """Evaluate an order (lower is better); keep it if it is the best so far."""
        stacking = stack_in_order(self.lifetimes, order)
        peaks = tuple(stacking.offsets(column, self.alignments)[1] for column in self.columns)
        choice = Choice(stacking, peaks, self.lower_bounds)
        # Ignore negligible differences of the ratio; then compare the peak at the hint, then the
        # length.
        value = (round(choice.worst_ratio, 4), peaks[0], sum(map(len, stacking.below)))
        if self.best is None or value < self.best[0]:
            self.best = value, choice
        return value, choice

    @property
    def is_optimal(self) -> bool:
        return self.best is not None and self.best[1].peaks == self.lower_bounds

    @property
    def is_good(self) -> bool:
        """Whether the possible gain does not justify the time of a further search."""
        if self.best is None:
            return False
        (ratio, peak, _), _ = self.best
        return ratio <= _GOOD_RATIO and peak == self.lower_bounds[0]

    def order_of(self, offsets: Sequence[int]) -> list[int]:
        """Return the order of a placement of nonzero sizes. Of several equivalent orders, it is the
        one sorted by start."""
        return sorted(range(len(offsets)), key=lambda i: (offsets[i], self.lifetimes[i], i))

    def first_fit(self, sequence: Sequence[int]) -> list[int]:
        """Run first fit at all samples at once.

        In the given sequence, each buffer is placed in the lowest gap between buffers live at the
        same time that is wide enough at every sample.
        """
        zeros = [0] * len(self.columns)
        offsets = [zeros] * len(self.lifetimes)
        ends = [zeros] * len(self.lifetimes)
        placements: list[tuple[int, int]] = []
        for index in sequence:
            live = self.live[index]
            mask = -self.alignments[index]
            needs = self.sizes_of[index]
            near = [other for _, other in placements if live >> other & 1]
            ceilings: list[list[int]] = []
            for other in reversed(near):
                above = offsets[other]
                ceilings.append(list(map(min, above, ceilings[-1])) if ceilings else above)
            low = zeros
            for other in near:
                tops = map(operator.add, low, needs)
                if all(map(operator.le, tops, ceilings.pop())):
                    break
                low = [(end - mask - 1) & mask for end in map(max, low, ends[other])]
            offsets[index] = low
            ends[index] = list(map(operator.add, low, needs))
            bisect.insort(placements, (low[0], index))
        return self.order_of([offset[0] for offset in offsets])

    def critical_chain(self, choice: Choice) -> list[int]:
        """Return the buffers of a chain that determines an order's peak at its worst sample."""
        ratios = [p / b if b else 1.0 for p, b in zip(choice.peaks, self.lower_bounds, strict=True)]
        column = self.columns[ratios.index(max(ratios))]
        offsets, _ = choice.stacking.offsets(column, self.alignments)
        ends = [offset + size for offset, size in zip(offsets, column, strict=True)]
        chain = [ends.index(max(ends))]
        while choice.stacking.below[chain[-1]]:
            chain.append(max(choice.stacking.below[chain[-1]], key=ends.__getitem__))
        return chain


def stack_in_order(lifetimes: Sequence[tuple[int, int]], order: Sequence[int]) -> Stacking:
    """Compute `Stacking.below` for an order from bottom to top.

    Args:
        lifetimes: `[start, end)` of each buffer.
        order: all buffers.
    """
    # Bits by rank, so that the highest bit of a set is the topmost buffer in it.
    live = live_at_once([lifetimes[index] for index in order])
    reach: list[int] = []
    below: list[tuple[int, ...]] = [()] * len(order)
    for rank, index in enumerate(order):
        rest = live[rank] & ((1 << rank) - 1)
        reached = 0
        lower = []
        while rest:
            top = rest.bit_length() - 1
            lower.append(order[top])
            reached |= reach[top] | 1 << top
            rest &= ~reached
        reach.append(reached)
        below[index] = tuple(lower)
    return Stacking(tuple(order), tuple(below))


def live_at_once(lifetimes: Sequence[tuple[int, int]]) -> list[int]:
    """Return, for each live range, the set (as bits) of the others that overlap it."""
    started: dict[int, int] = {}
    ended: dict[int, int] = {}
    for index, (start, end) in enumerate(lifetimes):
        if start < end:
            started[start] = started.get(start, 0) | 1 << index
            ended[end] = ended.get(end, 0) | 1 << index
    started_before: dict[int, int] = {}
    ended_by: dict[int, int] = {}
    before = by = 0
    for time in sorted(started.keys() | ended.keys()):
        started_before[time] = before
        before |= started.get(time, 0)
        by |= ended.get(time, 0)
        ended_by[time] = by
    return [
        started_before[end] & ~ended_by[start] & ~(1 << index) if start < end else 0
        for index, (start, end) in enumerate(lifetimes)
    ]


_SCALES = (Fraction(1), Fraction(1, 4), Fraction(4))
"""Scalings of the hints at which an order is evaluated: of all hints together and of each alone."""

_JOINT_SCALES = (Fraction(1, 10), Fraction(16))
"""Further scalings, of all hints together only."""

_MAX_SCALED_ALONE = 6
"""Number of symbols that are scaled alone, those first that most buffers depend on. With the joint
scalings, an order is evaluated at no more than 5 + 2 * 6 samples."""


def scaled_samples(hints: Mapping[sympy.Symbol, int]) -> list[dict[sympy.Symbol, int]]:
    """Return the values of the symbols at which an order is evaluated: the hints, then all hints
    scaled, then one hint scaled at a time.

    Args:
        hints: values, most important symbols first.
    """

    def scaled(value: int, scale: Fraction) -> int:
        return max(1, int(value * scale)) if scale != 1 else value

    together = [*_SCALES, *_JOINT_SCALES]
    samples = [
        {symbol: scaled(hint, scale) for symbol, hint in hints.items()} for scale in together
    ]
    for symbol in list(hints)[:_MAX_SCALED_ALONE]:
        samples += [{**hints, symbol: scaled(hints[symbol], scale)} for scale in _SCALES[1:]]
    return [sample for position, sample in enumerate(samples) if sample not in samples[:position]]
