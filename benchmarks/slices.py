"""Benchmarks that take longer than a machine is lent: results kept case by case, and gone on with.

A ledger writes its document anew after every case, so that a run that is stopped loses at most the
case at which it was. A later run goes on in the same file, if it runs the same code on the same
hardware.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from benchmarks import results
from inductor_ext.exc import InductorExtError

__all__ = ["Ledger", "OtherRunError", "Outcome", "add_arguments", "within"]

Item = TypeVar("Item")


class OtherRunError(InductorExtError):
    """Results that cannot be gone on with."""

    template = "{path} was made with {field} {found}, and this is {here}."
    remedy = "Leave out --resume, or give another file."


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of one case."""

    rows: list[results.Row]
    text: str
    """For who watches."""
    failed: bool


class Ledger:
    """The results of a benchmark, as they come in.

    Args:
        header: of this run.
        folder: where the document is written; None for nowhere.
        resume: a document to go on with, if there is one.

    Raises:
        OtherRunError: it is of other hardware, versions or another commit.
        results.InvalidResultError: it is no document.
    """

    def __init__(
        self, header: results.Header, folder: Path | None, resume: Path | None = None
    ) -> None:
        self.document: results.Document = {**header, "rows": []}
        self._folder = folder
        if resume is not None and resume.exists():
            found = results.read(resume)
            for field, there, here in (
                ("suite", found["suite"], header["suite"]),
                ("hardware", found["hardware"], header["hardware"]),
                ("versions", found["versions"], header["versions"]),
                ("commit", found["commit"], header["commit"]),
            ):
                if there != here:
                    raise OtherRunError(path=resume.name, field=field, found=there, here=here)
            self.document = found

    @property
    def done(self) -> frozenset[str]:
        """The cases that have rows."""
        return frozenset(row["case"] for row in self.document["rows"])

    def add(self, rows: Iterable[results.Row]) -> None:
        """Add a case's rows and write the document."""
        self.document["rows"] += rows
        if self._folder is not None and self.document["rows"]:
            results.write(self._folder, self.document)

    def take(self, outcomes: Iterable[Outcome]) -> tuple[int, bool]:
        """Add and print outcomes as they come; their number, and whether one has failed."""
        count, failed = 0, False
        for outcome in outcomes:
            count += 1
            failed |= outcome.failed
            self.add(outcome.rows)
            print(outcome.text, flush=True)
        return count, failed


def within(
    items: Sequence[Item], seconds: float | None, clock: Callable[[], float] = time.monotonic
) -> Iterator[Item]:
    """The items, as long as the next one fits if it takes as long as the longest so far.

    Args:
        items: what is measured one after the other.
        seconds: for all; None for no limit.
        clock: seconds from some moment on.
    """
    start = clock()
    longest = 0.0
    for item in items:
        begin = clock()
        if seconds is not None and begin - start + longest > seconds:
            return
        yield item
        longest = max(longest, clock() - begin)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what these benchmarks have in common."""
    parser.add_argument(
        "--budget-seconds", type=float, metavar="S", help="begin no case that would not fit"
    )
    parser.add_argument("--json-out", metavar="DIR", type=Path, help="keep the results there")
    parser.add_argument(
        "--resume",
        metavar="FILE",
        type=Path,
        help="go on with the results in this file, which need not be there yet",
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="that compile at the same time; how long compiles take is not measured then",
    )
    parser.add_argument("--commit", help="of the tree, where it is no checkout")
