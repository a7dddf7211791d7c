"""The command `inductor-ext report` with a program; test/reports has it with a package."""

from __future__ import annotations

import html
import json
from pathlib import Path

import pytest

import inductor_ext
from inductor_ext.cli import main
from inductor_ext.reports.compile_phases import FIRST_CALL, PHASES

SCRIPT = """\
import sys
import torch

@torch.compile
def matmul(a, b):
    return a @ b

print(matmul(torch.ones(2, 3), torch.ones(3, 4)).sum().item(), *sys.argv[1:], __name__)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_a_program_runs_as_it_is(
    script: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    script.write_text(SCRIPT + "import os; os.chdir('/'); sys.exit(3)\n")
    out = tmp_path / "page.html"
    command = ["report", "-o", str(out), str(script), "--flag", "1"]
    assert main.main(command) == 3
    assert capsys.readouterr().out == f"24.0 --flag 1 __main__\nThe report is in {out}.\n"
    assert main.main(["report", "--json", *command[1:]]) == 3
    printed = capsys.readouterr()
    assert printed.err == "24.0 --flag 1 __main__\n"
    page = out.read_text()
    assert f"Report on {script}" in page
    assert "aten.mm float32[2, 3] x float32[3, 4]" in page
    assert "Not measured: no call was profiled." in page
    loaded = json.loads(printed.out)
    assert len(loaded["gemms"]) == 1
    assert len(loaded["graphs"]) == 1
    # Found by sampling: a short phase may be missing.
    assert {phase["name"] for phase in loaded["phases"]} <= {*PHASES, FIRST_CALL}
    assert sum(phase["seconds"] for phase in loaded["phases"]) > 0
    assert loaded["environment"]["device"].startswith("CPU (")


def test_a_program_under_the_profiler(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.write_text(SCRIPT + "matmul(torch.ones(2, 3), torch.ones(3, 4))\ntorch.ones(3).cos()\n")
    out = tmp_path / "page.html"
    assert main.main(["report", "--profile", "-o", str(out), "--json", str(script)]) == 0
    kernels = json.loads(capsys.readouterr().out)["kernels"]
    calls = {kernel["name"]: kernel["calls"] for kernel in kernels["kernels"]}
    # Not the operators of the compile, and not those of eager mode. In the first call of a graph,
    # torch may dispatch an operator twice.
    assert calls["aten::mm"] in (2, 3)
    assert not {"aten::cos", "aten::ones", "aten::sum"} & calls.keys()
    assert "in the program's compiled graphs under torch's profiler." in html.unescape(
        out.read_text()
    )


def test_a_failing_program_is_reported_up_to_the_failure(
    script: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    script.write_text(SCRIPT + "import os; os.chdir('/'); raise KeyError('of the program')\n")
    with pytest.raises(KeyError, match="of the program"):
        main.main(["report", str(script)])
    assert "The report is in" in capsys.readouterr().out
    assert "aten.mm" in (tmp_path / "report.html").read_text()


def test_a_program_that_compiles_nothing(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.write_text("print('it runs')\n")
    out = tmp_path / "page.html"
    assert main.main(["report", "-o", str(out), str(script)]) == 0
    assert "Inductor compiled nothing" in capsys.readouterr().out
    assert "Nothing was compiled." in out.read_text()
    script.write_text(SCRIPT)
    with inductor_ext.config.patch(enabled=False):
        assert main.main(["report", "-o", str(out), str(script)]) == 0
    assert "the setting enabled is False" in capsys.readouterr().out


def test_bad_paths_are_rejected_before_the_run(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = str(tmp_path / "absent" / "page")
    for arguments in (["-o", absent], ["-o", str(tmp_path)]):
        assert main.main(["report", *arguments, str(script)]) == 2
        output = capsys.readouterr()
        assert output.out == ""
        assert "cannot be written: " in output.err
    assert main.main(["report", "-o", str(tmp_path / "p.html"), str(tmp_path / "no.py")]) == 2
    assert "the file does not exist" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main.main(["report"])
    assert capsys.readouterr().err.endswith("arguments are required: FILE\n")
