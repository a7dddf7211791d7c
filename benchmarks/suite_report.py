"""Keeps the outcome of a pytest run in the format of the results.

    python -m benchmarks.suite_report gpu-tests -- -m gpu test

For the tests that CI cannot run: those marked `gpu`, and the whole suite on another machine. The
exit code is pytest's. On a machine that is lent for a time `--budget-seconds` has pytest end before
that is over, and say what has failed; each row notes it then.
"""

from __future__ import annotations

import argparse
import collections
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

from benchmarks import results

OUTCOMES: dict[str, Literal["lower", "higher"]] = {
    "passed": "higher",
    "failed": "lower",
    "skipped": "lower",
}
"""Each with the direction that is an improvement."""


def outcome(case: ElementTree.Element) -> str:
    """What became of one `testcase` of a JUnit report."""
    tags = {child.tag for child in case}
    if tags & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in tags else "passed"


def rows(report: ElementTree.Element, note: str | None = None) -> Iterator[results.Row]:
    """The rows of a JUnit report: for each test file how many tests ended in each way."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for case in report.iter("testcase"):
        # The class name is the dotted path of the file, followed by classes within it; and by the
        # test, where xdist has appended the name of a group.
        name, group, _ = case.get("classname", "").partition("@")
        parts = name.split(".")[: -1 if group else None]
        modules = (part for part in parts if part.islower())
        counts["/".join(modules) + ".py"][outcome(case)] += 1
    for file, count in sorted(counts.items()):
        for name, better in OUTCOMES.items():
            yield {
                "case": file,
                "metric": name,
                "unit": "tests",
                "better": better,
                "ours": count[name],
                "stock": None,
                "eager": None,
                "floor": None,
                "spread": None,
                "note": note,
            }


def _ended(process: subprocess.Popen[bytes], seconds: float | None) -> bool:
    """Wait for a process; whether it has ended by itself."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        # As Ctrl-C: pytest reports what it has done.
        process.send_signal(signal.SIGINT)
        process.wait()
        return False
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Run pytest and write its outcome; returns pytest's exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.suite_report",
        usage="%(prog)s SUITE [--commit REV] [--budget-seconds SECONDS] [--json-out DIR] "
        "[-- PYTEST_ARGUMENTS]",
    )
    parser.add_argument("suite", help="name of the result, a slug")
    parser.add_argument("--commit", help="of the tree, where it is no checkout")
    parser.add_argument("--budget-seconds", type=float, help="after which pytest is to end")
    parser.add_argument("--json-out", default="benchmarks/results", help="folder of the result")
    own = list(sys.argv[1:] if arguments is None else arguments)
    # argparse's own reading of "--" differs between Python versions when options precede it.
    own, pytest = (own[: own.index("--")], own[own.index("--") + 1 :]) if "--" in own else (own, [])
    given = parser.parse_args(own)
    command = f"python -m benchmarks.suite_report {given.suite} -- {shlex.join(pytest)}"
    header = results.collect_header(given.suite, command, commit=given.commit)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", f"--junitxml={report}", *pytest]
        )
        whole = _ended(process, given.budget_seconds)
        note = None if whole else f"ended after {given.budget_seconds:g} s, with tests left"
        document: results.Document = {
            **header,
            "rows": list(rows(ElementTree.parse(report).getroot(), note)),
        }
    print(results.write(given.json_out, document))
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
