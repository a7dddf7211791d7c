"""The command `inductor-ext doctor` in a process, as a user starts it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from inductor_ext.reports import bug_report
from test.support.doctor_process import (
    CHECKOUT,
    SCHEMA,
    VARIABLES,
    assert_schema,
    doctor_process,
    flat,
)


@pytest.fixture(autouse=True)
def without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


class TestProcess:
    def test_json(self, tmp_path: Path) -> None:
        (tmp_path / "tmp").mkdir()
        environment: dict[str, str | None] = {
            "TMPDIR": str(tmp_path / "tmp"),
            "TORCHINDUCTOR_CACHE_DIR": None,
        }
        done = doctor_process("doctor", "--json", environment=environment, cwd=tmp_path)
        assert done.stderr == ""
        report = json.loads(done.stdout)
        assert_schema(report, SCHEMA)
        assert done.returncode == (0 if report["ok"] else 1)
        # The cache folder is reported but not created.
        assert report["caches"][0]["path"].startswith(str(tmp_path / "tmp"))
        assert list((tmp_path / "tmp").iterdir()) == []

    def test_a_machine_without_compilers(self, tmp_path: Path) -> None:
        hidden = dict.fromkeys(("CXX", "CC", "CUDACXX", "CUDA_HOME", "CUDA_PATH"))
        environment = {"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", **hidden}
        done = doctor_process("doctor", environment=environment)
        assert (done.returncode, done.stderr) == (1, "")
        text = flat(done.stdout)
        assert "C++ compiler MISSING why: g++ is not found on PATH to fix: apt-get" in text
        assert text.endswith("The backend cannot compile here.")

    def test_a_reader_that_leaves(self) -> None:
        # The pipe is closed before torch is imported, long before anything is printed.
        command = [sys.executable, "-m", "inductor_ext", "doctor"]
        with subprocess.Popen(
            command, cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()
            assert process.stderr.read() == b""
        assert process.returncode == 1


class TestBugReport:
    """`--report`."""

    def test_a_file(self, tmp_path: Path) -> None:
        home = str(CHECKOUT.parent)
        environment = {"HOME": home, "CUDA_VISIBLE_DEVICES": f"{home}/x"}
        path = tmp_path / "bug.md"
        done = doctor_process("doctor", "--report", str(path), environment=environment)
        assert done.stderr == ""
        assert done.stdout == (
            f"Complete the first sections of {path}, and paste it into a new issue.\n"
        )
        text = path.read_text()
        assert [line for line in text.splitlines() if line.startswith("#")] == [
            "# Bug report",
            "## What happens",
            "## A program that shows it",
            "## Without the extension",
            "## Environment",
        ]
        data = json.loads(text.partition("````json\n")[2].partition("\n````")[0])
        assert_schema(data, SCHEMA)
        assert done.returncode == (0 if data["ok"] else 1)
        assert data["environment"]["CUDA_VISIBLE_DEVICES"] == "~/x"
        assert f"{home}/" not in text
        assert list(tmp_path.iterdir()) == [path]

    def test_to_standard_output(self, tmp_path: Path) -> None:
        done = doctor_process("doctor", "--report", "-", environment={}, cwd=tmp_path)
        assert done.stdout.startswith("# Bug report\n")
        assert list(tmp_path.iterdir()) == []

    def test_a_folder_that_does_not_exist(self, tmp_path: Path) -> None:
        path = tmp_path / "none" / "bug.md"
        done = doctor_process("doctor", "--report", str(path), environment={})
        assert (done.returncode, done.stdout) == (2, "")
        assert f"{path}" in done.stderr
        assert done.stderr.count("\n") == 1

    def test_text_that_contains_code_fences(self) -> None:
        report = bug_report.render("```\nx", {"a": "/home/me/b"}, "/home/me")
        assert "````text\n```\nx\n````" in report
        assert '"a": "~/b"' in report
        assert "/home/me" in bug_report.render("/home/me/a", {}, "/")
