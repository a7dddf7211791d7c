"""Text of reports: counts of things, tables."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 model" or "2 models"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def align_columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return rows of cells as lines with aligned columns; missing cells are empty.

    Args:
        rows: the cells of each line.
        right: indices of the columns that are right-aligned, for numbers.
    """
    columns = []
    for index, column in enumerate(itertools.zip_longest(*rows, fillvalue="")):
        width = max(map(len, column))
        columns.append(
            [cell.rjust(width) if index in right else cell.ljust(width) for cell in column]
        )
    return ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]
