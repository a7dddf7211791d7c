"""Resumable benchmarks, for runs longer than a reservation: results are stored case by case.

A ledger rewrites its document after every case, so that an interrupted run loses at most the case
in progress. A later run can continue the same file, if it runs the same code on the same hardware.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from benchmarks.harness import results
from inductor_ext.exc import InductorExtError

__all__ = ["CaseResult", "Ledger", "OtherRunError", "add_arguments", "take_within"]

Item = TypeVar("Item")


class OtherRunError(InductorExtError):
    """Results that this run cannot continue."""

    template = "{path} was made with {field} {stored}; this run has {current}."
    remedy = "Leave out --resume, or give another file."


@dataclasses.dataclass(frozen=True)
class CaseResult:
    """The result of one case."""

    rows: list[results.Row]
    text: str
    """Text to print as progress."""
    failed: bool


class Ledger:
    """The results of a benchmark so far, stored after every case.

    Args:
        header: header of this run.
        folder: folder for the document; None to write nothing.
        resume: a document to continue, if there is one.

    Raises:
        OtherRunError: the document was made with other hardware, versions or another commit.
        results.InvalidResultError: the file is not a valid document.
    """

    def __init__(
        self, header: results.Header, folder: Path | None, resume: Path | None = None
    ) -> None:
        self.document: results.Document = {**header, "rows": []}
        self._folder = folder
        if resume is not None and resume.exists():
            document = results.read(resume)
            for field, stored, current in (
                ("suite", document["suite"], header["suite"]),
                ("hardware", document["hardware"], header["hardware"]),
                ("versions", document["versions"], header["versions"]),
                ("commit", document["commit"], header["commit"]),
            ):
                if stored != current:
                    raise OtherRunError(
                        path=resume.name, field=field, stored=stored, current=current
                    )
            self.document = document

    @property
    def cases(self) -> frozenset[str]:
        """The cases that have rows."""
        return frozenset(row["case"] for row in self.document["rows"])

    def add(self, rows: Iterable[results.Row]) -> None:
        """Add a case's rows and write the document."""
        self.document["rows"] += rows
        if self._folder is not None and self.document["rows"]:
            results.write(self._folder, self.document)

    def add_all(self, case_results: Iterable[CaseResult]) -> tuple[int, bool]:
        """Add and print results as they come; return their number, and whether one has failed."""
        count, failed = 0, False
        for result in case_results:
            count += 1
            failed |= result.failed
            self.add(result.rows)
            print(result.text, flush=True)
        return count, failed


def take_within(
    items: Sequence[Item], seconds: float | None, clock: Callable[[], float] = time.monotonic
) -> Iterator[Item]:
    """Yield items while the next one fits, assuming that it takes as long as the longest so far.

    Args:
        items: work items that are processed one after the other.
        seconds: time limit for all items; None for no limit.
        clock: returns seconds since an arbitrary point in time.
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
    """Add the arguments that these benchmarks have in common."""
    parser.add_argument(
        "--budget-seconds", type=float, metavar="S", help="start no case that would not fit"
    )
    parser.add_argument("--json-out", metavar="DIR", type=Path, help="folder of the results")
    parser.add_argument(
        "--resume",
        metavar="FILE",
        type=Path,
        help="continue the results in this file, which need not exist yet",
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="processes that compile at the same time; compile times are not measured then",
    )
    parser.add_argument("--commit", help="commit of the source tree if it is not a git checkout")
