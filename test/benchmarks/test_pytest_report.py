"""The outcome of a pytest run as a result."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.harness import pytest_report, pytest_results, results

FOUND: dict[str, pytest_results.Outcome] = {
    "test/test_a.py::one": "passed",
    "test/test_a.py::TestB::two": "failed",
    "test/test_a.py::three[x-y]": "failed",
    "test/test_c.py::four": "skipped",
    "test/test_c.py::TestD::five": "passed",
}


def test_counts_by_file() -> None:
    rows = list(pytest_report.rows(FOUND))
    counts = {(row["case"], row["metric"]): row["ours"] for row in rows}
    assert counts == {
        ("test/test_a.py", "passed"): 1,
        ("test/test_a.py", "failed"): 2,
        ("test/test_a.py", "skipped"): 0,
        ("test/test_c.py", "passed"): 1,
        ("test/test_c.py", "failed"): 0,
        ("test/test_c.py", "skipped"): 1,
    }
    assert [row["note"] for row in rows if row["note"]] == ["TestB::two, three[x-y]"]


def test_rows_are_valid_results() -> None:
    header = results.collect_header("gpu-tests", "python -m benchmarks.harness.pytest_report")
    document = {**header, "rows": list(pytest_report.rows(FOUND))}
    results.validate(document)


@pytest.fixture
def in_background() -> Iterator[None]:
    """Processes are started as a shell does it in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("in_background")
def test_a_run_that_is_ended_keeps_what_it_has_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = tmp_path / "begun"
    tests = tmp_path / "test_some.py"
    tests.write_text(
        "import pathlib, time\n"
        "def test_fails(): assert False\n"
        "def test_passes(): pass\n"
        f"def test_goes_on(): pathlib.Path({str(begun)!r}).touch(); time.sleep(600)\n"
    )

    class Process(subprocess.Popen[bytes]):
        interrupts = 0

        def wait(self, timeout: float | None = None) -> int:
            if timeout is None or self.interrupts == 2:
                return super().wait(timeout)
            while not begun.exists():
                time.sleep(0.01)
            raise subprocess.TimeoutExpired(self.args, timeout)

        def send_signal(self, number: int) -> None:
            self.interrupts += 1
            if self.interrupts == 2:  # The first one is lost.
                super().send_signal(number)

    monkeypatch.setattr(pytest_report.subprocess, "Popen", Process)
    (tmp_path / "pytest.ini").touch()
    monkeypatch.chdir(tmp_path)
    asked = ["gpu-tests", "--budget-seconds", "5", "--json-out", "."]
    assert pytest_report.main([*asked, "--", tests.name]) == pytest.ExitCode.INTERRUPTED
    (path,) = tmp_path.glob("gpu-tests/*.json")
    found = results.read(path)["rows"]
    assert {row["metric"]: row["ours"] for row in found}["failed"] == 1
    assert {row["metric"]: row["ours"] for row in found}["passed"] == 1
    ended = "ended after 5 s, with tests left"
    notes = {row["metric"]: row["note"] for row in found}
    assert notes == {"passed": ended, "skipped": ended, "failed": f"{ended}; test_fails"}


TESTS = """
import pytest

@pytest.fixture
def breaks():
    yield
    assert False

@pytest.mark.xdist_group("some")
def test_passes(): pass

def test_skips(): pytest.skip("why")

@pytest.mark.xfail
def test_is_expected_to_fail(): assert False

def test_breaks_at_the_end(breaks): pass

@pytest.mark.parametrize("x", ["a", "b"])
def test_fails(x): assert x == "a"
"""


@pytest.mark.parametrize("workers", [(), ("-n", "1", "--dist", "loadgroup")], ids=["", "xdist"])
def test_each_test_has_one_outcome(workers: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_other.py").write_text("import nothing_of_this_name\n")
    file = tmp_path / "outcomes"
    plugin = ("-p", "benchmarks.harness.pytest_results", "--outcomes", str(file))
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--continue-on-collection-errors",
            *plugin,
            *workers,
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.DEVNULL,
        check=False,
    )
    group = "@some" if workers else ""
    assert pytest_results.read(file) == {
        "test_other.py": "failed",
        f"test_some.py::test_passes{group}": "passed",
        "test_some.py::test_skips": "skipped",
        "test_some.py::test_is_expected_to_fail": "skipped",
        "test_some.py::test_breaks_at_the_end": "failed",
        "test_some.py::test_fails[a]": "passed",
        "test_some.py::test_fails[b]": "failed",
    }


def test_a_file_that_nobody_wrote_has_no_outcomes(tmp_path: Path) -> None:
    assert pytest_results.read(tmp_path / "none") == {}


@pytest.mark.parametrize("workers", [(), ("-n", "1", "--dist", "loadgroup")], ids=["", "xdist"])
def test_a_run_goes_on_where_another_has_ended(
    workers: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pytest.ini").touch()
    ran = tmp_path / "ran"
    file = tmp_path / "test_some.py"
    file.write_text(
        TESTS + f"\n@pytest.fixture(autouse=True)\ndef told(request):\n"
        f"    open({str(ran)!r}, 'a').write(request.node.originalname + ' ')\n"
    )
    monkeypatch.chdir(tmp_path)
    asked = ["gpu-tests", "--json-out", ".", "--keep", "kept", "--"]
    # The first one without xdist, which gives some tests other names.
    assert pytest_report.main([*asked, "-k", "test_passes or test_fails", file.name]) == 1
    assert ran.read_text() == "test_passes test_fails test_fails "
    file.write_text(file.read_text().replace('assert x == "a"', "pass"))
    ran.unlink()
    assert pytest_report.main([*asked, *workers, file.name]) == 1
    assert sorted(ran.read_text().split()) == [
        "test_breaks_at_the_end",
        "test_fails",
        "test_is_expected_to_fail",
        "test_skips",
    ]
    (path,) = tmp_path.glob("gpu-tests/*.json")
    found = {row["metric"]: row["ours"] for row in results.read(path)["rows"]}
    # What was expected to fail counts as skipped, and what failed at first has passed.
    assert found == {"passed": 3, "failed": 1, "skipped": 2}
