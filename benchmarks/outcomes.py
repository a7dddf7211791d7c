"""A pytest plugin that writes down what became of each test as soon as that is known.

    python -m pytest -p benchmarks.outcomes --outcomes FILE

FILE gets a line of JSON for each test, or two where it failed after it had passed: so what is known
outlives a pytest that is killed. `read` makes of it one outcome for each test. With `--passed FILE`
the tests that passed in such a file are left out.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

__all__ = [
    "Outcome",
    "passed",
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "read",
    "write",
]

Outcome = Literal["passed", "skipped", "failed"]

_GRAVITY: dict[Outcome, int] = {"passed": 0, "skipped": 1, "failed": 2}


def read(file: Path) -> dict[str, Outcome]:
    """The outcome of each test, by its node id (to which xdist adds `@` and the test's group, if it
    has one); the gravest of several. What is expected to fail, and does, is skipped; a file that
    cannot be collected is a test that failed.
    """
    found: dict[str, Outcome] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        told = json.loads(line)
        before = found.get(told["test"], told["outcome"])
        found[told["test"]] = max(before, told["outcome"], key=lambda each: _GRAVITY[each])
    return found


def write(file: Path, found: Mapping[str, Outcome]) -> None:
    """Make a file that has these outcomes, wholly or not at all."""
    # Not where pytest loads this plugin, which is before anything of the project.
    from inductor_ext.storage import artifact_store

    text = "".join(_line(test, what) for test, what in found.items())
    with artifact_store.publish(file) as temporary:
        Path(temporary).write_text(text, encoding="utf-8")


def _line(test: str, outcome: str) -> str:
    return json.dumps({"test": test, "outcome": outcome}) + "\n"


def passed(file: Path) -> dict[str, Outcome]:
    """Of the outcomes in a file those of tests that passed."""
    return {test: what for test, what in read(file).items() if what == "passed"}


def pytest_addoption(parser: Any) -> None:
    """See pytest."""
    parser.addoption("--outcomes", metavar="FILE", help="what became of each test, as JSON lines")
    parser.addoption("--passed", metavar="FILE", help="outcomes; what passed there is left out")


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """See pytest; each of xdist's workers leaves out the same."""
    if config.getoption("--passed"):
        known = {_without_group(test) for test in passed(Path(config.getoption("--passed")))}
        left_out = [item for item in items if _without_group(item.nodeid) in known]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def _without_group(test: str) -> str:
    """A node id as it is without xdist, whose groups are no parameters."""
    return test if test.endswith("]") else test.rpartition("@")[0] or test


def pytest_configure(config: Any) -> None:
    """See pytest."""
    file = config.getoption("--outcomes")
    # xdist's workers tell the process that started them.
    if file and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Writer(Path(file)))
        # Shells have what they start in the background ignore what ends a run.
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _Writer:
    def __init__(self, file: Path) -> None:
        self.file = file

    def _write(self, test: str, outcome: str) -> None:
        with self.file.open("a", encoding="utf-8") as file:
            file.write(_line(test, outcome))

    def pytest_runtest_logreport(self, report: Any) -> None:
        """See pytest; that it could be set up and torn down is nothing to tell."""
        if report.outcome != "passed" or report.when == "call":
            self._write(report.nodeid, report.outcome)

    def pytest_collectreport(self, report: Any) -> None:
        """See pytest."""
        if report.outcome == "failed":
            self._write(report.nodeid, report.outcome)
