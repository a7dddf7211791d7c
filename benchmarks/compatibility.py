"""The tables of docs/user/compatibility.md, from the committed results of tests.

`python -m benchmarks.doc_tables` writes them. Every file of a suite is in its table.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from benchmarks.harness import results
from benchmarks.harness.markdown import format_table, link_result
from benchmarks.reliability import model_sweep

__all__ = ["RELIABILITY", "TABLES"]

_OUTCOMES = ("agree", "above_stock", "below_stock", "both_fail", "eager_fails", "not_captured")
"""Metrics of `op-sweep`."""

_JUDGEMENTS = ("right", "wrong", "crash", "error", "refused")
"""Metrics of `graphs` that exist with the extension and with Inductor (default)."""

RELIABILITY = ("faults", "threads", "compile-growth", "service")
"""Suites of `benchmarks.reliability`."""

_BOTH = ("stock_wrong_too", "stock_crash_too", "stock_error_too")
"""Metrics of `graphs` that count what fails with Inductor (default) too."""


def _read_all(pattern: str) -> list[results.Document]:
    """Read the committed files of suites, ordered by torch, suite and hardware."""
    documents = [results.read(path) for path in results.RESULTS.glob(f"{pattern}/*.json")]
    return sorted(
        documents,
        key=lambda d: (list(map(int, _torch(d).split("."))), d["suite"], d["hardware"]),
    )


def _torch(document: results.Document) -> str:
    return document["versions"]["torch"].partition("+")[0]


def _source(document: results.Document) -> Sequence[str]:
    commit, _, changed = (document["commit"] or "-").partition("-")
    changes = " with changes" if changed else ""
    return (link_result(document), f"{commit[:12]}{changes}", document["date"][:10])


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _make_tests() -> str:
    rows = []
    for document in _read_all("*-tests*"):
        totals = dict.fromkeys(("passed", "failed", "skipped"), 0.0)
        for row in document["rows"]:
            totals[row["metric"]] += row["ours"] or 0
        notes = {f"`{row['note']}`" for row in document["rows"] if row["note"]}
        rows.append(
            (
                _torch(document),
                document["hardware"],
                document["versions"]["python"],
                document["versions"].get("triton", "-"),
                *map(_count, totals.values()),
                ", ".join(sorted(notes)) or "complete",
                *_source(document),
            )
        )
    head = ("torch", "device", "Python", "Triton", "passed", "failed", "skipped", "run")
    return format_table((*head, "result file", "commit", "date"), rows)


def _iterate_cases(
    document: results.Document,
) -> Iterator[tuple[str, Mapping[str, results.Row]]]:
    """Yield the cases that count others, with their rows by metric."""
    cases: dict[str, dict[str, results.Row]] = {}
    for row in document["rows"]:
        cases.setdefault(row["case"], {})[row["metric"]] = row
    for case, rows in cases.items():
        if len(rows) >= len(_JUDGEMENTS):
            yield case, rows


def _make_operators() -> str:
    rows = []
    for document in _read_all("op-sweep"):
        for case, metrics in _iterate_cases(document):
            counts = (_count(metrics[name]["ours"]) for name in _OUTCOMES)
            rows.append((_torch(document), document["hardware"], case, *counts))
    head = ("torch", "device", "list, dtype, way, direction", "agree", "only the extension agrees")
    tail = ("only Inductor agrees", "both fail", "eager mode fails", "not captured")
    return format_table((*head, *tail), rows)


def _make_operator_sources() -> str:
    rows = [_source(document) for document in _read_all("op-sweep")]
    return format_table(("result file", "commit", "date"), rows)


def _make_programs() -> str:
    rows = []
    for document in _read_all("graphs"):
        for case, metrics in _iterate_cases(document):
            way, _, mode = case.partition(", ")
            column: Literal["stock", "ours"] = "stock" if way == "stock" else "ours"
            label = "`torch.compile`, Inductor (default)" if way == "stock" else way
            counts = [metrics[name][column] for name in _JUDGEMENTS]
            also = [metrics[name][column] or 0 for name in _BOTH if name in metrics]
            rows.append(
                (
                    _torch(document),
                    label,
                    mode,
                    *map(_count, counts),
                    _count(sum(also)) if also else "-",
                    *_source(document),
                )
            )
    head = ("torch", "way", "mode", *_JUDGEMENTS, "Inductor fails too")
    return format_table((*head, "result file", "commit", "date"), rows)


def _make_models() -> str:
    rows = []
    for document in _read_all("model-sweep*"):
        ways: dict[str, list[results.Row]] = {}
        for row in document["rows"]:
            ways.setdefault(model_sweep.judge(row)[0], []).append(row)
        for way, found in ways.items():
            judged = Counter(model_sweep.judge(row)[1] for row in found)
            ratios = [row["ours"] / row["eager"] for row in found if row["ours"] and row["eager"]]
            rows.append(
                (
                    _torch(document),
                    way,
                    str(len(found)),
                    *(str(judged[outcome]) for outcome in ("right", "wrong", "fails", "both fail")),
                    f"{statistics.geometric_mean(ratios):.2f}" if ratios else "-",
                    *_source(document),
                )
            )
    head = (
        *("torch", "way", "models", "right", "wrong", "only the extension fails", "both fail"),
        *("error over eager mode's", "result file", "commit", "date"),
    )
    return format_table(head, rows)


def _make_releases() -> str:
    rows = []
    for document in _read_all("across-torch"):
        pairs: dict[str, dict[str, float | None]] = {}
        for row in document["rows"]:
            pairs.setdefault(row["case"], {})[row["metric"]] = row["ours"]
        for case, counts in pairs.items():
            compiled, loaded = case.removeprefix("compiled with ").split(", loaded with ")
            numbers = (_count(counts[name]) for name in ("run", "refused by name", "wrong"))
            rows.append((compiled, loaded, *numbers, *_source(document)))
    head = ("compiled with", "loaded with", "run", "refused", "wrong")
    return format_table((*head, "result file", "commit", "date"), rows)


def _make_reliability() -> str:
    rows = [
        (
            row["case"],
            row["metric"],
            row["unit"],
            *map(results.format_number, (row["stock"], row["ours"])),
            *_source(document),
        )
        for suite in RELIABILITY
        for document in _read_all(suite)
        for row in document["rows"]
    ]
    head = ("case", "what", "unit", "Inductor", "extension", "result file", "commit", "date")
    return format_table(head, rows)


TABLES: Mapping[str, Callable[[], str]] = {
    "tests": _make_tests,
    "operator sources": _make_operator_sources,
    "operators": _make_operators,
    "programs": _make_programs,
    "model sweep": _make_models,
    "reliability": _make_reliability,
    "releases": _make_releases,
}
"""Functions that make the tables, by name."""
