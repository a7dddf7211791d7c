"""Text of reports: names of compiled callables, counts, tables."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any


def qualified_name(target: Any) -> str:
    """Return the name of a function or of a module's class, also after torch.compile."""
    inner = getattr(target, "_orig_mod", None) or getattr(
        target, "_torchdynamo_orig_callable", target
    )
    name = getattr(inner, "__qualname__", None)
    return name if isinstance(name, str) else type(inner).__qualname__


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
