"""The outcome of a pytest run as a result."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import results, suite_report

REPORT = """
<testsuites><testsuite>
  <testcase classname="test.test_a" name="one"/>
  <testcase classname="test.test_a.TestB" name="two"><failure>x</failure></testcase>
  <testcase classname="test.test_a" name="three"><error>x</error></testcase>
  <testcase classname="test.test_c" name="four"><skipped>x</skipped></testcase>
  <testcase classname="test.test_c.TestD.test_five@test/test_c.py" name="kernels"/>
</testsuite></testsuites>
"""


def test_counts_by_file() -> None:
    rows = list(suite_report.rows(ElementTree.fromstring(REPORT)))
    counts = {(row["case"], row["metric"]): row["ours"] for row in rows}
    assert counts == {
        ("test/test_a.py", "passed"): 1,
        ("test/test_a.py", "failed"): 2,
        ("test/test_a.py", "skipped"): 0,
        ("test/test_c.py", "passed"): 1,
        ("test/test_c.py", "failed"): 0,
        ("test/test_c.py", "skipped"): 1,
    }


def test_rows_are_valid_results() -> None:
    header = results.collect_header("gpu-tests", "python -m benchmarks.suite_report")
    document = {**header, "rows": list(suite_report.rows(ElementTree.fromstring(REPORT)))}
    results.validate(document)


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
        def wait(self, timeout: float | None = None) -> int:
            if timeout is None:
                return super().wait()
            while not begun.exists():
                time.sleep(0.01)
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(suite_report.subprocess, "Popen", Process)
    (tmp_path / "pytest.ini").touch()
    monkeypatch.chdir(tmp_path)
    asked = ["gpu-tests", "--budget-seconds", "5", "--json-out", "."]
    assert suite_report.main([*asked, "--", tests.name]) == pytest.ExitCode.INTERRUPTED
    (path,) = tmp_path.glob("gpu-tests-*.json")
    found = results.read(path)["rows"]
    assert {row["metric"]: row["ours"] for row in found}["failed"] == 1
    assert {row["metric"]: row["ours"] for row in found}["passed"] == 1
    assert {row["note"] for row in found} == {"ended after 5 s, with tests left"}
