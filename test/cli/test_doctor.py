"""The command `inductor-ext doctor` in a process, as a user starts it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
