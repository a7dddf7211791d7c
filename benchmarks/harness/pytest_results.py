"""A pytest plugin that writes the outcome of every test to a file as soon as the test ends.

    python -m pytest -p benchmarks.harness.pytest_results --test-results FILE

FILE gets one JSON line per test, or two if the test failed after it had passed, so the outcomes
survive if pytest is killed. `read` reduces them to one outcome per test. With `--skip-passed FILE`,
the tests that passed according to such a file are deselected.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

__all__ = [
    "Outcome",
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "read",
    "read_passed",
    "write",
]

Outcome = Literal["passed", "skipped", "failed"]

_SEVERITY: dict[Outcome, int] = {"passed": 0, "skipped": 1, "failed": 2}


def read(file: Path) -> dict[str, Outcome]:
    """Return the outcome of every test by node id; the worst one if there are several.

    xdist appends `@` and the test's group, if it has one, to the node id. An expected failure
    counts as skipped; a file that cannot be collected counts as a failed test.
    """
    outcomes: dict[str, Outcome] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        entry = json.loads(line)
        before = outcomes.get(entry["test"], entry["outcome"])
        outcomes[entry["test"]] = max(before, entry["outcome"], key=lambda x: _SEVERITY[x])
    return outcomes


def write(file: Path, outcomes: Mapping[str, Outcome]) -> None:
    """Write a file with these outcomes, atomically."""
    # Imported here: pytest loads this plugin before anything of the project.
    from inductor_ext.storage.atomic import atomic_write

    text = "".join(_format_line(test, outcome) for test, outcome in outcomes.items())
    with atomic_write(file) as temporary:
        Path(temporary).write_text(text, encoding="utf-8")


def _format_line(test: str, outcome: str) -> str:
    return json.dumps({"test": test, "outcome": outcome}) + "\n"


def read_passed(file: Path) -> dict[str, Outcome]:
    """Return the tests in a file that passed, with their outcome."""
    return {test: outcome for test, outcome in read(file).items() if outcome == "passed"}


def pytest_addoption(parser: Any) -> None:
    """Implement the pytest hook."""
    parser.addoption("--test-results", metavar="FILE", help="outcome of each test, as JSON lines")
    parser.addoption("--skip-passed", metavar="FILE", help="test results; skip what passed there")


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Implement the pytest hook; all workers of xdist deselect the same tests."""
    file = config.getoption("--skip-passed")
    if file:
        passed = {_remove_group(test) for test in read_passed(Path(file))}
        deselected = [item for item in items if _remove_group(item.nodeid) in passed]
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if item not in deselected]


def _remove_group(test: str) -> str:
    """Return a node id without xdist's group suffix; a parametrized id has none."""
    return test if test.endswith("]") else test.rpartition("@")[0] or test


def pytest_configure(config: Any) -> None:
    """Implement the pytest hook."""
    file = config.getoption("--test-results")
    # xdist's workers report to the process that started them.
    if file and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Writer(Path(file)))
        # Shells start background processes with SIGINT ignored; restore it, so that the run can be
        # interrupted.
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _Writer:
    def __init__(self, file: Path) -> None:
        self.file = file

    def _write(self, test: str, outcome: str) -> None:
        with self.file.open("a", encoding="utf-8") as file:
            file.write(_format_line(test, outcome))

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Implement the pytest hook; passed setups and teardowns are not written."""
        if report.outcome != "passed" or report.when == "call":
            self._write(report.nodeid, report.outcome)

    def pytest_collectreport(self, report: Any) -> None:
        """Implement the pytest hook."""
        if report.outcome == "failed":
            self._write(report.nodeid, report.outcome)
