"""The sums among which a schedule's peak is."""

from __future__ import annotations

import random

from inductor_ext.memory.planner.interval import live_bytes
from inductor_ext.memory.planner.live_sums import find_largest_sums


def test_only_sums_that_may_be_the_peak_remain() -> None:
    spans = [(0, 4, "a", 1), (1, 3, "b", 1), (2, 3, "a", 1), (4, 5, "c", 1), (5, 5, "d", 1)]
    assert find_largest_sums(spans) == [{"a": 2, "b": 1}, {"c": 1}]
    assert find_largest_sums([]) == []


def test_their_maximum_is_the_peak() -> None:
    random_ = random.Random(5)
    for _ in range(300):
        starts = [random_.randrange(12) for _ in range(random_.randrange(1, 14))]
        spans = [
            (start, start + random_.randrange(6), random_.choice("abcd"), random_.randrange(1, 3))
            for start in starts
        ]
        sums = find_largest_sums(spans)
        for _ in range(4):
            values = {size: random_.randrange(50) for size in "abcd"}
            peak = max(live_bytes(((s, e, values[x] * n) for s, e, x, n in spans), 20))
            assert peak == max(
                (sum(values[size] * count for size, count in terms.items()) for terms in sums),
                default=0,
            )
