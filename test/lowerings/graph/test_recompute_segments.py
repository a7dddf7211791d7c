"""Segments of a forward that the backward computes again."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from inductor_ext.lowerings.graph.recompute_segments import Value, choose_cuts


def find_cost(count: int, values: Sequence[Value], cuts: Sequence[int]) -> int:
    """Bytes that cross cuts, a value once for each cut, and bytes of the largest segment."""
    saved = sum(v.bytes for cut in cuts for v in values if v.start <= cut < v.end)
    bounds = [-1, *cuts, count - 1]
    sizes = [
        sum(v.bytes for v in values if start < v.start <= end)
        for start, end in itertools.pairwise(bounds)
    ]
    return saved + max(sizes)


def test_cuts_are_between_layers() -> None:
    layers, operators = 6, 5
    values = []
    for layer in range(layers):
        first = layer * operators
        # Wide values inside of a layer, and a narrow one that the next layer reads.
        values += [Value(first + i, first + i + 1, 100) for i in range(operators - 1)]
        values.append(Value(first + operators - 1, first + operators, 3))
    cuts = choose_cuts(layers * operators, values)
    assert cuts == [layer * operators - 1 for layer in range(1, layers)]


def test_there_are_no_cuts_without_a_gain() -> None:
    assert choose_cuts(0, []) == []
    assert choose_cuts(3, []) == []
    # Everything is live until the end of its half of the forward.
    assert choose_cuts(4, [Value(0, 2, 8), Value(1, 3, 8)]) == []


def test_a_value_that_most_of_the_forward_reads_does_not_prevent_cuts() -> None:
    values = [Value(0, 11, 1000), *(Value(i, i + 1, 10 if i % 4 else 1) for i in range(1, 12))]
    assert choose_cuts(12, values)


@given(st.data())
def test_no_cuts_are_better(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 8))
    starts = st.integers(0, count - 1)
    values = [
        Value(start, min(start + data.draw(st.integers(0, count // 2)), count - 1), size)
        for start, size in data.draw(
            st.lists(st.tuples(starts, st.integers(1, 20)), min_size=1, max_size=8)
        )
    ]
    cuts = choose_cuts(count, values)
    assert cuts == sorted(set(cuts))
    best = min(
        find_cost(count, values, choice)
        for size in range(count)
        for choice in itertools.combinations(range(count - 1), size)
    )
    assert find_cost(count, values, cuts) == best
