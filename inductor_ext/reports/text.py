"""Text of reports: names of compiled callables, counts, tables, files."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Sequence
from typing import Any

from inductor_ext import exc
from inductor_ext.storage.atomic import atomic_write


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


def write_file(path: str | os.PathLike[str], text: str) -> None:
    """Write a text to a file, which appears complete or not at all.

    Raises:
        exc.BadReportFileError: the file cannot be written.
    """
    try:
        with atomic_write(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise exc.BadReportFileError.not_writable(os.fspath(path), error.strerror) from None


def check_writable(path: str) -> None:
    """Raise an error if a report cannot be written to `path`, before it is made.

    Raises:
        exc.BadReportFileError: it is a folder, or in a folder that is absent or not writable.
    """
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path):
        raise exc.BadReportFileError.not_writable(path, "it is a folder")
    if not os.path.isdir(folder):
        raise exc.BadReportFileError.not_writable(path, f"the folder {folder} does not exist")
    if not os.access(folder, os.W_OK):
        raise exc.BadReportFileError.not_writable(path, f"the folder {folder} is not writable")
