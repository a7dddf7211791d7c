"""Reads and writes planning problems as CSV files, in the format of the public benchmark sets.

A file has a header with the columns `id`, `lower`, `upper` and `size` in any order: a buffer of
`size` bytes is live in [lower, upper). Other columns are preserved. A plan is the same table with
an additional last column `offset`; if the table already has that column, its values are replaced.

Reading checks everything before it returns. Writing is atomic. Errors raise
`exc.BadProblemFileError`, which names the file, line, column and value.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from inductor_ext import exc
from inductor_ext.memory.planner.interval import Interval
from inductor_ext.storage.atomic import atomic_write

_COLUMNS = ("id", "lower", "upper", "size")
_OFFSET = "offset"
_INTEGER = re.compile(r"\s*[+-]?[0-9]{1,1000}\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class CsvProblem:
    """A table and the intervals that its rows describe."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    intervals: tuple[Interval, ...]
    """One per row, named by its id."""


def _fail(
    path: str | os.PathLike[str],
    why: str,
    fix: str,
    line: int | None = None,
    column: str | None = None,
) -> NoReturn:
    where = f", line {line}" if line is not None else ""
    where += f", column {column!r}" if column is not None else ""
    raise exc.BadProblemFileError(file=os.fspath(path), where=where, why=why, fix=fix)


def read(path: str | os.PathLike[str], alignment: int = 1) -> CsvProblem:
    """Read a problem.

    Args:
        path: a CSV file in UTF-8.
        alignment: bytes, for every buffer; a power of two.

    Raises:
        exc.BadProblemFileError: the file cannot be read, is not CSV, lacks a column, or has a value
            that is invalid for a buffer.
        exc.BadIntervalError: the alignment is not a power of two.
    """
    (line, first), *body = _read_lines(path)
    header = tuple(name.strip() for name in first)
    _check_header(path, line, header)
    at = {name: header.index(name) for name in _COLUMNS}
    intervals = []
    line_of: dict[str, int] = {}
    for line, fields in body:
        if len(fields) != len(header):
            _fail(
                path,
                f"has {len(fields)} fields where the header has {len(header)}",
                "Every line needs a value for every column; quote values that contain commas",
                line,
            )
        name = fields[at["id"]]
        if name in line_of:
            why = f"the id {name!r} is already used in line {line_of[name]}"
            _fail(path, why, "Every buffer needs a unique id", line, "id")
        line_of[name] = line
        lower, upper, size = (
            _integer(path, line, column, fields[at[column]]) for column in _COLUMNS[1:]
        )
        if upper < lower:
            fix = "upper is the first step at which the buffer is no longer live"
            _fail(path, f"upper is {upper}, less than lower, which is {lower}", fix, line, "upper")
        if size < 0:
            _fail(path, f"{size} is negative", "size is a number of bytes, 0 or more", line, "size")
        intervals.append(Interval(lower, upper, size, alignment, name))
    return CsvProblem(header, tuple(tuple(fields) for _, fields in body), tuple(intervals))


def _read_lines(path: str | os.PathLike[str]) -> list[tuple[int, list[str]]]:
    """Return the number and the fields of every line that is not empty."""
    lines: list[tuple[int, list[str]]] = []
    number = 0
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            for fields in reader:
                number = reader.line_num
                if fields:
                    lines.append((number, fields))
    except OSError as error:
        _fail(path, f"cannot be read ({error.strerror})", "Pass a readable CSV file")
    except UnicodeDecodeError:
        _fail(path, "is not text in UTF-8", "Save it as CSV in UTF-8", number + 1)
    except csv.Error as error:
        _fail(path, f"is not CSV ({error})", "Correct the line", number + 1)
    if not lines:
        _fail(path, "is empty", f"The first line must be {','.join(_COLUMNS)!r}")
    return lines


def _check_header(path: str | os.PathLike[str], line: int, header: tuple[str, ...]) -> None:
    for name in _COLUMNS:
        if header.count(name) != 1:
            many = "lacks the column" if name not in header else "has more than one column"
            _fail(
                path,
                f"the header, {','.join(header)!r}, {many} {name!r}",
                f"The header must have the columns {', '.join(_COLUMNS)}, once each, in any order",
                line,
            )
    if header.count(_OFFSET) > 1:
        _fail(path, f"the header has more than one column {_OFFSET!r}", "Remove the others", line)


def _integer(path: str | os.PathLike[str], line: int, column: str, text: str) -> int:
    if not _INTEGER.fullmatch(text):
        excerpt = text if len(text) <= 40 else text[:40] + "..."
        _fail(path, f"{excerpt!r} is not an integer", "Use an integer", line, column)
    return int(text)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Check that `write` can write to a path, before there is anything to write.

    Raises:
        exc.BadProblemFileError: the path is a folder, or its parent folder is missing or not
            writable.
    """
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path):
        why = "it is a folder"
    elif not os.path.isdir(folder):
        why = "its folder does not exist"
    elif not os.access(folder, os.W_OK | os.X_OK):
        why = "its folder is not writable"
    else:
        return
    _fail(
        path, f"cannot be written: {why}", "Pass the path of a file in an existing, writable folder"
    )


def write(path: str | os.PathLike[str], problem: CsvProblem, offsets: Sequence[int]) -> None:
    """Write a plan: the problem's table with the column `offset`.

    Args:
        path: path of the file, which is replaced if it exists.
        problem: the problem as read.
        offsets: bytes, one per row.

    Raises:
        exc.BadProblemFileError: the path cannot be written; an existing file is kept.
    """
    check_writable(path)
    place = problem.header.index(_OFFSET) if _OFFSET in problem.header else len(problem.header)
    try:
        with (
            atomic_write(path) as temporary,
            open(temporary, "w", encoding="utf-8", newline="") as file,
        ):
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow([*problem.header[:place], _OFFSET, *problem.header[place + 1 :]])
            for row, offset in zip(problem.rows, offsets, strict=True):
                writer.writerow([*row[:place], offset, *row[place + 1 :]])
    except OSError as error:
        _fail(
            path, f"cannot be written ({error.strerror})", "Pass another path, or free disk space"
        )
