"""The outcomes of a pytest run as a result."""

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

OUTCOMES: dict[str, pytest_results.Outcome] = {
    "test/test_a.py::one": "passed",
    "test/test_a.py::TestB::two": "failed",
    "test/test_a.py::three[x-y]": "failed",
    "test/test_c.py::four": "skipped",
    "test/test_c.py::TestD::five": "passed",
}


def test_counts_by_file() -> None:
    rows = list(pytest_report.count_outcomes(OUTCOMES))
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
    document = {**header, "rows": list(pytest_report.count_outcomes(OUTCOMES))}
    results.validate(document)


@pytest.fixture
def in_background() -> Iterator[None]:
    """Ignore SIGINT, as shells do in processes that they start in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("in_background")
def test_interrupted_run_reports_finished_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = tmp_path / "started"
    tests = tmp_path / "test_some.py"
    tests.write_text(
        "import pathlib, time\n"
        "def test_fails(): assert False\n"
        "def test_passes(): pass\n"
        f"def test_sleeps(): pathlib.Path({str(started)!r}).touch(); time.sleep(600)\n"
    )

    class Process(subprocess.Popen[bytes]):
        interrupts = 0

        def wait(self, timeout: float | None = None) -> int:
            if timeout is None or self.interrupts == 2:
                return super().wait(timeout)
            while not started.exists():
                time.sleep(0.01)
            raise subprocess.TimeoutExpired(self.args, timeout)

        def send_signal(self, number: int) -> None:
            self.interrupts += 1
            if self.interrupts == 2:  # The first one is lost.
                super().send_signal(number)

    monkeypatch.setattr(pytest_report.subprocess, "Popen", Process)
    (tmp_path / "pytest.ini").touch()
    monkeypatch.chdir(tmp_path)
    options = ["gpu-tests", "--budget-seconds", "5", "--json-out", "."]
    assert pytest_report.main([*options, "--", tests.name]) == pytest.ExitCode.INTERRUPTED
    (path,) = tmp_path.glob("gpu-tests/*.json")
    rows = results.read(path)["rows"]
    assert {row["metric"]: row["ours"] for row in rows}["failed"] == 1
    assert {row["metric"]: row["ours"] for row in rows}["passed"] == 1
    ended = "ended after 5 s, with tests left"
    notes = {row["metric"]: row["note"] for row in rows}
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
def test_every_test_has_one_outcome(workers: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_other.py").write_text("import nothing_of_this_name\n")
    file = tmp_path / "test_results"
    plugin = ("-p", "benchmarks.harness.pytest_results", "--test-results", str(file))
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


def test_absent_file_has_no_outcomes(tmp_path: Path) -> None:
    assert pytest_results.read(tmp_path / "none") == {}


@pytest.mark.parametrize("workers", [(), ("-n", "1", "--dist", "loadgroup")], ids=["", "xdist"])
def test_run_continues_earlier_test_results(
    workers: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pytest.ini").touch()
    ran = tmp_path / "ran"
    file = tmp_path / "test_some.py"
    file.write_text(
        TESTS + f"\n@pytest.fixture(autouse=True)\ndef log(request):\n"
        f"    open({str(ran)!r}, 'a').write(request.node.originalname + ' ')\n"
    )
    monkeypatch.chdir(tmp_path)
    options = ["gpu-tests", "--json-out", ".", "--keep", "kept", "--"]
    # The first run is without xdist, which adds the group to node ids.
    assert pytest_report.main([*options, "-k", "test_passes or test_fails", file.name]) == 1
    assert ran.read_text() == "test_passes test_fails test_fails "
    file.write_text(file.read_text().replace('assert x == "a"', "pass"))
    ran.unlink()
    assert pytest_report.main([*options, *workers, file.name]) == 1
    assert sorted(ran.read_text().split()) == [
        "test_breaks_at_the_end",
        "test_fails",
        "test_is_expected_to_fail",
        "test_skips",
    ]
    (path,) = tmp_path.glob("gpu-tests/*.json")
    counts = {row["metric"]: row["ours"] for row in results.read(path)["rows"]}
    # An expected failure counts as skipped; the parametrized test passed in the second run.
    assert counts == {"passed": 3, "failed": 1, "skipped": 2}


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["absent.py"], pytest.ExitCode.USAGE_ERROR),
        (["-k", "nothing", "test_some.py"], pytest.ExitCode.NO_TESTS_COLLECTED),
        (["test_crashing.py"], 1),
    ],
)
def test_run_without_finished_tests_writes_no_result(
    arguments: list[str],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "test_some.py").write_text(TESTS)
    kill = "import os, signal\ndef test_kill(): os.kill(os.getpid(), signal.SIGKILL)\n"
    (tmp_path / "test_crashing.py").write_text(kill)
    monkeypatch.chdir(tmp_path)
    assert pytest_report.main(["gpu-tests", "--json-out", "out", "--", *arguments]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("pytest ended with exit code")
    assert line.endswith("before any test finished; no result of gpu-tests is written.")
    assert not (tmp_path / "out").exists()
