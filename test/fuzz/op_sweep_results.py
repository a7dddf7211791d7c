"""The operator sweep's journal, and its results in the benchmarks' schema."""

from __future__ import annotations

import collections
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.harness import results as results_format
from benchmarks.harness.results import Row, make_row
from test.fuzz import workers
from test.fuzz.op_sweep_cases import Case
from test.fuzz.op_sweep_judge import Result, Verdict
from test.fuzz.op_sweep_ways import Status

TOTAL = "all"
"""The case of the rows that add up all groups."""

_AGREES = "agrees with eager"


class Journal:
    """The results so far, so that an interrupted sweep can go on.

    A journal holds for one torch, one source state of inductor_ext, one number of samples, and with
    or without Inductor (default) on every case; any other journal at its path is overwritten.
    """

    def __init__(self, path: Path, samples: int, *, always_stock: bool, restart: bool) -> None:
        from inductor_ext.storage import digest

        header = (torch.__version__, digest.source_key(), samples, always_stock)
        self._journal = workers.Journal(path, header, restart=restart)
        earlier = map(Result.from_json, self._journal.earlier)
        self.results: dict[Case, Result] = {result.case: result for result in earlier}

    def add(self, results: Sequence[Result]) -> None:
        """Keep results, in memory and on disk."""
        self.results.update((result.case, result) for result in results)
        self._journal.write(result.to_json() for result in results)


def make_rows(
    results: Sequence[Result], chosen: Sequence[Case] = (), commit: str | None = None
) -> list[Row]:
    """The rows of results: for each group the number of cases with each verdict, then exceptions.

    An exception is a case whose verdict is not "agree": 1 where a backend agrees with eager mode,
    0 where it does not, null where it did not run. Eager mode agrees with itself unless it fails.

    Args:
        results: the judged cases.
        chosen: all cases of the sweep; a note tells how many of a group are judged.
        commit: of the sweep, for the notes: a file has the results of several sweeps.
    """
    extents = collections.Counter(case.group for case in chosen)
    groups: dict[str, list[Result]] = collections.defaultdict(list)
    for result in results:
        groups[result.case.group].append(result)
    rows = []
    for group, members in groups.items():
        stock = sum(result.stock is not None for result in members)
        note = f"commit {commit}; Inductor (default) ran on {stock} of {len(members)} cases"
        if len(members) < extents[group]:
            note += f"; {extents[group] - len(members)} more were not judged"
        counts = collections.Counter(result.verdict for result in members)
        rows += [_count_row(group, verdict, counts[verdict], note) for verdict in Verdict]
    rows += [_exception_row(result) for result in results if result.verdict is not Verdict.AGREE]
    return rows


def _count_row(case: str, verdict: Verdict, count: float, note: str | None) -> Row:
    higher = verdict in (Verdict.AGREE, Verdict.ABOVE_STOCK)
    better = "higher" if higher else "lower"
    return make_row(case, verdict.value, "cases", better=better, ours=count, note=note)


def _exception_row(result: Result) -> Row:
    agrees = {
        backend: None if status is None else int(status is Status.AGREES)
        for backend, status in (("ours", result.ours), ("stock", result.stock))
    }
    eager = int(result.verdict is not Verdict.EAGER_FAILS)
    note = f"{result.verdict.value}: {result.why}"
    return make_row(
        str(result.case), _AGREES, "bool", better="higher", eager=eager, note=note, **agrees
    )


def merge_rows(earlier: Sequence[Row], rows: Sequence[Row]) -> list[Row]:
    """The rows of a sweep with those of earlier sweeps of other groups, and the totals first."""
    groups = {_group_of(row) for row in rows}
    kept = [row for row in earlier if row["case"] != TOTAL and _group_of(row) not in groups]
    parts = [*kept, *rows]
    counts = [row for row in parts if row["unit"] == "cases"]
    totals = []
    for verdict in Verdict:
        total = sum(row["ours"] or 0 for row in counts if row["metric"] == verdict.value)
        totals.append(_count_row(TOTAL, verdict, total, None))
    return [*totals, *counts, *(row for row in parts if row["unit"] != "cases")]


def _group_of(row: Row) -> str:
    exception = re.fullmatch(r".*\[(.+)\]", row["case"])
    return exception[1] if exception else row["case"]


def write(folder: Path, header: results_format.Header, rows: Sequence[Row]) -> Path:
    """Write rows along with what the file has of groups that were not swept; return its path."""
    path = folder / header["suite"] / f"{header['hardware']}.json"
    earlier = results_format.read(path)["rows"] if path.exists() else []
    document: results_format.Document = {**header, "rows": merge_rows(earlier, rows)}
    return results_format.write(folder, document)
