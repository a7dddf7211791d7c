"""Keeps the outcome of a pytest run in the format of the results.

    python -m benchmarks.suite_report gpu-tests -- -m gpu test

For the tests that CI cannot run: those marked `gpu`, and the whole suite on another machine. The
exit code is pytest's. On a machine that is lent for a time `--budget-seconds` has pytest end before
that is over, and say what has failed; each row notes it then. What is left of the same tree can be
run later if `--keep` names a file of outcomes: a run that finds it leaves out what passed, and
reports all of it.

    python -m benchmarks.suite_report gpu-tests --budget-seconds 400 --keep outcomes -- -m gpu test
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

from benchmarks import outcomes, results

OUTCOMES: dict[str, Literal["lower", "higher"]] = {
    "passed": "higher",
    "failed": "lower",
    "skipped": "lower",
}
"""Each with the direction that is an improvement."""


def rows(found: Mapping[str, outcomes.Outcome], note: str | None = None) -> Iterator[results.Row]:
    """For each test file how many tests ended in each way, and the names of those that failed.

    Args:
        found: the outcome of each test, by its node id.
        note: to be said of all.
    """
    files: dict[str, dict[str, list[str]]] = {}
    for test, what in found.items():
        file, _, name = test.partition("::")
        files.setdefault(file, {each: [] for each in OUTCOMES})[what].append(name)
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
        # As Ctrl-C: pytest reports what it has done. Python drops an interrupt that it handles
        # while an object is finalised.
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
            return False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run pytest and write its outcome; returns pytest's exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.suite_report",
        usage="%(prog)s SUITE [--commit REV] [--budget-seconds SECONDS] [--json-out DIR] "
        "[--keep FILE] [-- PYTEST_ARGUMENTS]",
    )
    parser.add_argument("suite", help="name of the result, a slug")
    parser.add_argument("--commit", help="of the tree, where it is no checkout")
    parser.add_argument("--budget-seconds", type=float, help="after which pytest is to end")
    parser.add_argument("--json-out", default="benchmarks/results", help="folder of the result")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="outcomes to go on from")
    own = list(sys.argv[1:] if arguments is None else arguments)
    # argparse's own reading of "--" differs between Python versions when options precede it.
    own, pytest = (own[: own.index("--")], own[own.index("--") + 1 :]) if "--" in own else (own, [])
    given = parser.parse_args(own)
    command = f"python -m benchmarks.suite_report {given.suite} -- {shlex.join(pytest)}"
    header = results.collect_header(given.suite, command, commit=given.commit)
    with tempfile.TemporaryDirectory() as folder:
        told, known = given.keep or Path(folder) / "outcomes", Path(folder) / "known"
        before = outcomes.passed(told)
        # xdist's workers have to see the same all the time.
        for file in (told, known):
            outcomes.write(file, before)
        plugin = ["-p", outcomes.__name__, "--outcomes", str(told), "--passed", str(known)]
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *plugin, *pytest],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        whole = _ended(process, given.budget_seconds)
        note = None if whole else f"ended after {given.budget_seconds:g} s, with tests left"
        document: results.Document = {
            **header,
            "rows": list(rows(outcomes.read(told), note)),
        }
    print(results.write(given.json_out, document))
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
