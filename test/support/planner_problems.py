"""Problems of the static planner: random ones, difficult ones, public instances, and optima."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

from hypothesis import strategies as st

from inductor_ext.memory.planner import csv_io
from inductor_ext.memory.planner.greedy import Component
from inductor_ext.memory.planner.interval import Interval, round_up

INSTANCES = Path(__file__).parents[2] / "benchmarks" / "memory" / "instances"

ALIGNMENTS = (1, 4, 64)


def intervals(
    most: int,
    *,
    times: int = 20,
    sizes: int = 40,
    alignments: Sequence[int] = ALIGNMENTS,
    least: int = 0,
) -> st.SearchStrategy[list[Interval]]:
    """Lists of up to `most` intervals; `least` is that of lifetimes and sizes."""
    one = st.builds(
        lambda start, length, size, alignment: Interval(start, start + length, size, alignment),
        st.integers(0, times),
        st.integers(least, times // 2),
        st.integers(least, sizes),
        st.sampled_from(alignments),
    )
    return st.lists(one, min_size=least, max_size=most)


def conflicts(problem: Sequence[Interval], offsets: Sequence[int]) -> bool:
    """Whether a plan is wrong, by looking at all pairs."""
    placed = list(zip(problem, offsets, strict=True))
    return any(offset < 0 or offset % i.alignment for i, offset in placed) or any(
        max(a.start, b.start) < min(a.end, b.end)
        and a.size
        and b.size
        and x < y + b.rounded_size
        and y < x + a.rounded_size
        for (a, x), (b, y) in itertools.combinations(placed, 2)
    )


def optimum(problem: Sequence[Interval]) -> int:
    """The lowest peak, by stacking in every order.

    Some order stacks the buffers of a plan from the lowest to the highest, and none then ends above
    its place in that plan.
    """
    best = sum(interval.rounded_size for interval in problem) + 1000
    chosen: list[tuple[Interval, int]] = []

    def extend(left: tuple[Interval, ...], peak: int) -> None:
        nonlocal best
        if peak >= best:
            return
        if not left:
            best = peak
            return
        for k, interval in enumerate(left):
            ground = max(
                (
                    top
                    for other, top in chosen
                    if interval.start < other.end and other.start < interval.end
                ),
                default=0,
            )
            top = round_up(ground, interval.alignment) + interval.rounded_size
            chosen.append((interval, top))
            extend(left[:k] + left[k + 1 :], max(peak, top))
            chosen.pop()

    extend(tuple(i for i in problem if i.size and i.start < i.end), 0)
    return best


def dense(count: int, seed: int = 0) -> list[Interval]:
    """A problem that no plan is likely to solve at its lower bound: random, and mostly full."""
    draw = random.Random(seed)
    problem = []
    for index in range(count):
        start = draw.randrange(count // 2)
        length = draw.choice((1, 2, 3, 5, 8, count // 4))
        problem.append(Interval(start, start + length, draw.randrange(1, 1000), name=f"b{index}"))
    return problem


def stepped(problem: Sequence[Interval]) -> Component:
    """One part of intervals that overlap from the first to the last."""
    return Component(sorted(problem, key=lambda i: (i.start, i.end, -i.size)))


def load(name: str) -> tuple[Interval, ...]:
    return csv_io.read(INSTANCES / f"{name}.csv").intervals
