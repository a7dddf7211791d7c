"""The sums of sizes among which the peak of a schedule is, for sizes without values (pure).

At each step of a schedule the memory in use is a sum of sizes. With symbolic sizes the peak is the
maximum of these sums. Few of them matter: a sum whose terms are all in another sum is never above
it, and most schedules have only few distinct sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Sum = Mapping[Any, int]
"""How often each size, a hashable value, occurs."""


def find_largest_sums(spans: Iterable[tuple[int, int, Any, int]]) -> list[Sum]:
    """Return the sums of which one is the peak, whatever non-negative values the sizes have.

    Args:
        spans: (start, end, size, count) of the memory that is in use in [start, end): a size, and
            how many of them. One with an empty range is never in use.
    """
    changes: dict[int, list[tuple[Any, int]]] = {}
    for start, end, size, count in spans:
        if start < end:
            changes.setdefault(start, []).append((size, count))
            changes.setdefault(end, []).append((size, -count))
    live: dict[Any, int] = {}
    largest: list[Sum] = []
    for step in sorted(changes):
        for size, count in changes[step]:
            live[size] = live.get(size, 0) + count
        if any(count > 0 for _, count in changes[step]):
            candidate = {size: count for size, count in live.items() if count}
            if not any(_covers(other, candidate) for other in largest):
                largest = [other for other in largest if not _covers(candidate, other)]
                largest.append(candidate)
    return largest


def _covers(larger: Sum, smaller: Sum) -> bool:
    return all(larger.get(size, 0) >= count for size, count in smaller.items())
