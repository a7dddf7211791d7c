"""Compare two results of one suite: which rows have become worse than their spread explains.

A row with a value of Inductor (default) is judged by the ratio of the extension's value to it,
since the two are timed in alternation and slow down together on a busy machine. Other rows are
judged by the extension's value.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.harness.results import Document, Row, find_ratio

__all__ = ["Change", "find_changes", "render_changes", "tolerance"]

TIMES = ("s", "ms", "us")

SINGLE_TIME = 0.05
"""The change of a time that was measured once which is taken for noise, as a fraction."""

ROUNDING = 0.001
"""Likewise of other numbers, such as bytes."""


@dataclass(frozen=True)
class Change:
    """A row whose value changed by more than its tolerance, or that lost its value.

    `before` and `after` are ratios to Inductor (default) if `relative`; `after` is None if the
    extension has no value any more. `worse` is false for an improvement.
    """

    case: str
    metric: str
    unit: str
    before: float
    after: float | None
    tolerance: float
    relative: bool
    worse: bool


def tolerance(rows: Iterable[Row]) -> float:
    """Return the fraction by which the value of a row may differ between its measurements.

    It is the sum of the spreads. A measurement without one counts with `SINGLE_TIME` if it is a
    time, and with `ROUNDING` otherwise.
    """
    return sum(
        row["spread"]
        if row["spread"] is not None
        else (SINGLE_TIME if row["unit"] in TIMES else ROUNDING)
        for row in rows
    )


def find_changes(before: Document, after: Document) -> list[Change]:
    """Return the changes of the rows that both documents have, the largest first.

    Rows of one document alone are left out: a run may measure a part of the cases.

    Raises:
        ValueError: if the documents are of different suites or hardware, whose numbers are not
            comparable.
    """
    for name in ("suite", "hardware"):
        if before[name] != after[name]:
            raise ValueError(
                f"the results are of different {name}: {before[name]} and {after[name]}"
            )
    old = {(row["case"], row["metric"]): row for row in before["rows"]}
    pairs = [
        (old[key], row) for row in after["rows"] if (key := (row["case"], row["metric"])) in old
    ]
    changes = [change for pair in pairs if (change := _compare(*pair)) is not None]
    return sorted(changes, key=_size, reverse=True)


def _compare(before: Row, after: Row) -> Change | None:
    relative = bool(before["stock"] and after["stock"])
    old = _value(before, relative)
    if old is None:
        return None
    new = _value(after, relative)
    allowed = tolerance((before, after))
    if new is not None and abs(new - old) <= allowed * abs(old):
        return None
    worse = new is None or (new > old) == (after["better"] == "lower")
    return Change(after["case"], after["metric"], after["unit"], old, new, allowed, relative, worse)


def _value(row: Row, relative: bool) -> float | None:
    return find_ratio(row) if relative else row["ours"]


def _size(change: Change) -> float:
    if change.after is None:
        return float("inf")
    if not change.before or not change.after:
        return float("inf") if change.before != change.after else 0.0
    return max(change.after / change.before, change.before / change.after)


def render_changes(changes: Sequence[Change]) -> str:
    """Return one line for each change, regressions first."""
    lines = []
    for change in sorted(changes, key=lambda change: not change.worse):
        unit = "of Inductor" if change.relative else change.unit
        after = "no value" if change.after is None else f"{change.after:.4g}"
        lines.append(
            f"{'worse ' if change.worse else 'better'}  {change.case}, {change.metric}: "
            f"{change.before:.4g} -> {after} {unit} (tolerance {change.tolerance:.1%})"
        )
    return "\n".join(lines)
