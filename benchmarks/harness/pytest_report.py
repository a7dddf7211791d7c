"""Stores the test results of a pytest run in the format of the benchmark results.

    python -m benchmarks.harness.pytest_report gpu-tests -- -m gpu test

For tests that CI cannot run: those marked `gpu`, and the whole suite on another machine. The exit
code is pytest's. A run that ends before any test has finished writes no result. On a machine that
is reserved for a limited time, `--budget-seconds` makes pytest stop in time and report failures so
far; every row then has a note. The remaining tests of the same source tree can be run later if
`--keep` names a file of test results: a run that finds the file skips the tests that passed, and
reports all of them.

    python -m benchmarks.harness.pytest_report gpu-tests --budget-seconds 400 --keep test_results \
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

OUTCOMES: dict[pytest_results.Outcome, Literal["lower", "higher"]] = {
    "passed": "higher",
    "failed": "lower",
    "skipped": "lower",
}
"""Test outcomes, with the direction that is an improvement."""


def count_outcomes(
    outcomes: Mapping[str, pytest_results.Outcome], note: str | None = None
) -> Iterator[results.Row]:
    """Yield, per test file, the number of tests with each outcome, and the names of failed tests.

    Args:
        outcomes: the outcome of every test, by node id.
        note: a note for all rows.
    """
    files: dict[str, dict[pytest_results.Outcome, list[str]]] = {}
    for test, outcome in outcomes.items():
        file, _, name = test.partition("::")
        files.setdefault(file, {item: [] for item in OUTCOMES})[outcome].append(name)
    for file, tests in sorted(files.items()):
        for outcome, better in OUTCOMES.items():
            failures = ", ".join(tests[outcome]) if outcome == "failed" else None
            yield results.make_row(
                file,
                outcome,
                "tests",
                better=better,
                ours=len(tests[outcome]),
                note="; ".join(filter(None, (note, failures))) or None,
            )


_GRACE = 60.0
"""Seconds in which an interrupted pytest reports."""


def _wait_or_interrupt(process: subprocess.Popen[bytes], seconds: float | None) -> bool:
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
    parser.add_argument("--commit", help="commit of the source tree if it is not a git checkout")
    parser.add_argument(
        "--budget-seconds", type=float, help="seconds after which pytest is interrupted"
    )
    parser.add_argument("--json-out", default="benchmarks/results", help="folder of the result")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="test results of an earlier run")
    own = list(sys.argv[1:] if arguments is None else arguments)
    # Python versions differ in how argparse handles "--" after options.
    own, pytest = (own[: own.index("--")], own[own.index("--") + 1 :]) if "--" in own else (own, [])
    options = parser.parse_args(own)
    command = f"python -m benchmarks.harness.pytest_report {options.suite} -- {shlex.join(pytest)}"
    header = results.collect_header(options.suite, command, commit=options.commit)
    with tempfile.TemporaryDirectory() as folder:
        file, skipped = options.keep or Path(folder) / "test_results", Path(folder) / "skipped"
        passed = pytest_results.read_passed(file)
        # All workers of xdist must see the same tests to skip during the whole run.
        for path in (file, skipped):
            pytest_results.write(path, passed)
        plugin = ["-p", pytest_results.__name__, "--test-results", str(file)]
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *plugin, "--skip-passed", str(skipped), *pytest],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        is_complete = _wait_or_interrupt(process, options.budget_seconds)
        outcomes = pytest_results.read(file)
    code = process.returncode
    if not outcomes:
        print(
            f"pytest ended with exit code {code} before any test finished; "
            f"no result of {options.suite} is written.",
            file=sys.stderr,
        )
        return code if code > 0 else 1
    note = None if is_complete else f"ended after {options.budget_seconds:g} s, with tests left"
    document: results.Document = {**header, "rows": list(count_outcomes(outcomes, note))}
    print(results.write(options.json_out, document))
    return code


if __name__ == "__main__":
    sys.exit(main())
