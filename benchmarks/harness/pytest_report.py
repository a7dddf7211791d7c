"""Stores the test results of a pytest run in the format of the benchmark results.

    python -m benchmarks.harness.pytest_report gpu-tests -- -m gpu test

For tests that CI cannot run: those marked `gpu`, and the whole suite on another machine. The exit
code is pytest's. On a machine that is reserved for a limited time, `--budget-seconds` makes pytest
stop in time and report failures so far; every row then has a note. The remaining tests of the same
source tree can be run later if `--keep` names a file of test results: a run that finds the file
skips the tests that passed, and reports all of them.

    python -m benchmarks.harness.pytest_report gpu-tests --budget-seconds 400 --keep outcomes \
        -- -m gpu test
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from benchmarks.harness import pytest_results, results

OUTCOMES: dict[str, Literal["lower", "higher"]] = {
    "passed": "higher",
    "failed": "lower",
    "skipped": "lower",
}
"""Test outcomes, with the direction that is an improvement."""


def rows(
    found: Mapping[str, pytest_results.Outcome], note: str | None = None
) -> Iterator[results.Row]:
    """Return, per test file, the number of tests with each outcome, and the names of failed tests.

    Args:
        found: the outcome of every test, by node id.
        note: a note for all rows.
    """
    files: dict[str, dict[str, list[str]]] = {}
    for test, what in found.items():
        file, _, name = test.partition("::")
        files.setdefault(file, {item: [] for item in OUTCOMES})[what].append(name)
    for file, tests in sorted(files.items()):
        for name, better in OUTCOMES.items():
            failed = ", ".join(tests[name]) if name == "failed" else None
            yield {
                "case": file,
                "metric": name,
                "unit": "tests",
                "better": better,
                "ours": len(tests[name]),
                "stock": None,
                "eager": None,
                "floor": None,
                "spread": None,
                "note": "; ".join(filter(None, (note, failed))) or None,
            }


_GRACE = 60.0
"""Seconds in which an interrupted pytest reports."""


def _ended(process: subprocess.Popen[bytes], seconds: float | None) -> bool:
    """Wait for a process, and interrupt it after `seconds`; return whether it ended by itself."""
    try:
        process.wait(seconds)
        return True
    except subprocess.TimeoutExpired:
        pass
    while True:
        # Like Ctrl-C: pytest reports what it has done so far. An interrupt that arrives just before
        # a blocking system call has no effect until the call returns.
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
            return False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run pytest and write the results; return pytest's exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.harness.pytest_report",
        usage="%(prog)s SUITE [--commit REV] [--budget-seconds SECONDS] [--json-out DIR] "
        "[--keep FILE] [-- PYTEST_ARGUMENTS]",
    )
    parser.add_argument("suite", help="name of the result, a slug")
    parser.add_argument("--commit", help="of the tree, where it is no checkout")
    parser.add_argument("--budget-seconds", type=float, help="after which pytest is to end")
    parser.add_argument("--json-out", default="benchmarks/results", help="folder of the result")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="outcomes to go on from")
    own = list(sys.argv[1:] if arguments is None else arguments)
    # Python versions differ in how argparse handles "--" after options.
    own, pytest = (own[: own.index("--")], own[own.index("--") + 1 :]) if "--" in own else (own, [])
    given = parser.parse_args(own)
    command = f"python -m benchmarks.harness.pytest_report {given.suite} -- {shlex.join(pytest)}"
    header = results.collect_header(given.suite, command, commit=given.commit)
    with tempfile.TemporaryDirectory() as folder:
        told, known = given.keep or Path(folder) / "outcomes", Path(folder) / "known"
        before = pytest_results.passed(told)
        # All workers of xdist must see the same file during the whole run.
        for file in (told, known):
            pytest_results.write(file, before)
        plugin = ["-p", pytest_results.__name__, "--outcomes", str(told), "--passed", str(known)]
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *plugin, *pytest],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        whole = _ended(process, given.budget_seconds)
        note = None if whole else f"ended after {given.budget_seconds:g} s, with tests left"
        document: results.Document = {
            **header,
            "rows": list(rows(pytest_results.read(told), note)),
        }
    print(results.write(given.json_out, document))
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
