"""The make rules, scripts/make_venv.sh and .ci/run, with stand-ins for Python and for make.

The stand-ins record how they are called; nothing is downloaded or built.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

STAND_IN = """#!/bin/bash
# Answers as an interpreter does for `-c`, `-m venv FOLDER` and `-m pip install ...`.
case "$1 $2" in
  "-c import sys;"*) exit "${FAKE_VERSION_CHECK:-0}" ;;
  *metadata*) exit "${FAKE_TORCH_REQUIRES_NO_TRITON:-1}" ;;
  "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip") echo "${*:3}" >>"$CALLS"; [[ "$*" != *"${FAKE_PIP_FAILS_ON:-nothing}"* ]] ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that `make venv` needs, and the stand-in as ./python."""
    for name in ("Makefile", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("requirements", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "python").write_text(STAND_IN)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def make(checkout: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MAKE") and name not in ("MFLAGS", "TORCH", "VENV", "PYTHON")
    }
    return subprocess.run(
        ["make", "venv", "PYTHON=./python", *arguments],
        cwd=checkout,
        env={**inherited, "CALLS": str(checkout / "calls"), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def installs(checkout: Path) -> list[str]:
    """The pip calls since the last query."""
    calls = checkout / "calls"
    lines = calls.read_text().splitlines() if calls.exists() else []
    calls.unlink(missing_ok=True)
    return lines


def test_a_fresh_set_up_installs_the_pins_and_only_once(checkout: Path) -> None:
    assert make(checkout).returncode == 0
    torch, tools, torchao, triton, ours = installs(checkout)
    pin = (ROOT / "requirements" / "torch.txt").read_text().strip()
    assert f" {pin} -c " in torch
    assert "--no-deps" in tools
    assert "requirements/tools.txt" in tools
    assert "requirements/demo.txt" in tools
    assert "requirements/examples.txt" in tools
    assert "requirements/docs.txt" in tools
    assert f"--target .venv/torchao -r {checkout}/requirements/torchao.txt" in torchao
    assert triton.endswith("--no-deps -r requirements/triton.txt".replace("req", f"{checkout}/req"))
    assert ours.endswith(f"--no-deps --no-build-isolation -e {checkout}")

    assert make(checkout).returncode == 0
    assert installs(checkout) == []


def test_the_triton_that_torch_requires_is_kept(checkout: Path) -> None:
    assert make(checkout, FAKE_TORCH_REQUIRES_NO_TRITON="0").returncode == 0
    calls = installs(checkout)
    assert len(calls) == 4
    assert not any("triton.txt" in call for call in calls)
    tools = (ROOT / "requirements" / "tools.txt").read_text().splitlines()
    assert not any(line.startswith("triton") for line in tools)  # Nor is torch constrained by one.


@pytest.mark.parametrize("changed", ["requirements/tools.txt", "pyproject.toml"])
def test_a_changed_pin_updates_in_place(checkout: Path, changed: str) -> None:
    assert make(checkout).returncode == 0
    installs(checkout)
    own = checkout / ".venv" / "own"
    own.touch()
    stamp = next((checkout / ".venv").glob(".ready-*")).stat().st_mtime
    os.utime(checkout / changed, (stamp + 5, stamp + 5))
    assert "updating .venv" in make(checkout).stdout
    assert len(installs(checkout)) == 5
    assert own.exists()


def test_another_torch_is_noticed_in_both_directions(checkout: Path) -> None:
    assert make(checkout).returncode == 0
    assert make(checkout, "TORCH=torch==2.11.0").returncode == 0
    assert " torch==2.11.0 " in installs(checkout)[5]
    assert make(checkout).returncode == 0
    assert len(installs(checkout)) == 5


def test_a_failed_set_up_is_repeated(checkout: Path) -> None:
    broken = make(checkout, FAKE_PIP_FAILS_ON="tools.txt -r")
    assert broken.returncode != 0
    assert not list((checkout / ".venv").glob(".ready-*"))
    leftover = checkout / ".venv" / "half-unpacked"
    leftover.touch()
    assert "new virtual environment" in make(checkout).stdout
    assert not leftover.exists()
    assert list((checkout / ".venv").glob(".ready-*"))


def test_an_environment_made_by_hand_is_kept(checkout: Path) -> None:
    own = checkout / ".venv" / "own"
    subprocess.run(["./python", "-m", "venv", ".venv"], cwd=checkout, check=True)
    own.touch()
    assert "updating .venv" in make(checkout).stdout
    assert own.exists()
    assert len(installs(checkout)) == 5


@pytest.mark.parametrize("torch", ["torch", "torch>=2.11"])
def test_a_torch_without_a_version_is_refused(checkout: Path, torch: str) -> None:
    refused = make(checkout, f"TORCH={torch}")
    assert refused.returncode != 0
    assert f"TORCH={torch} has no version" in refused.stderr
    assert installs(checkout) == []


def test_a_python_without_pins_is_refused(checkout: Path) -> None:
    refused = make(checkout, FAKE_VERSION_CHECK="1")
    assert refused.returncode != 0
    assert "./python is not Python 3.11 to 3.14" in refused.stderr
    assert not (checkout / ".venv" / "bin").exists()


def run_ci(
    folder: Path, *failing: str, test: str = "", seconds: int = 5400
) -> subprocess.CompletedProcess[str]:
    """.ci/run with a stand-in for make, in which the named goals fail.

    Args:
        test: a shell command that the goal `test` runs.
        seconds: what the run may take.
    """
    stand_in = folder / "make"
    stand_in.write_text(
        f"""#!/bin/bash
echo "called $*" | sed "s|$CI_VENVS|VENVS|"
if [ "$1" = test ]; then
  :
  {test}
fi
if [[ " {" ".join(failing)} " == *" $1 "* ]]; then
  echo "no space" >&2
  exit 1
fi
"""
    )
    stand_in.chmod(0o755)
    return subprocess.run(
        ["bash", ".ci/run"],
        cwd=ROOT,
        env={
            **{k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"},
            "PATH": f"{folder}:{os.environ['PATH']}",
            "CI_VENVS": str(folder / "venvs"),
            "CI_SECONDS": str(seconds),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


NOT_RUN = "smoke tests not run: no environment with torch==2.14.1 ("
OTHER = "VENV=VENVS/venv-torch-2.14.1 TORCH=torch==2.14.1"


@pytest.mark.parametrize("failing", ["", "lint", "test", "smoke"])
def test_continuous_integration_runs_all_and_fails_with_each(tmp_path: Path, failing: str) -> None:
    run = run_ci(tmp_path, failing)
    assert run.stdout.splitlines() == ["called lint", "called test", f"called smoke {OTHER}"]
    assert run.returncode == (1 if failing else 0)
    printed = "no space\n" + f"failed: {failing}\n"
    assert run.stderr == (printed if failing else "")


def test_the_other_torch_is_installed_out_of_sight(tmp_path: Path) -> None:
    assert run_ci(tmp_path).returncode == 0
    log = (tmp_path / "venvs" / "venv-torch-2.14.1.log").read_text()
    assert log == f"called venv {OTHER}\n"


def test_a_missing_environment_is_not_a_failure(tmp_path: Path) -> None:
    run = run_ci(tmp_path, "venv")
    assert run.returncode == 0
    assert run.stdout.splitlines() == [
        "called lint",
        "called test",
        f"{NOT_RUN}no space); log in {tmp_path}/venvs/venv-torch-2.14.1.log",
    ]
    assert run.stderr == ""


def test_smoke_tests_are_not_begun_too_late(tmp_path: Path) -> None:
    run = run_ci(tmp_path, seconds=899)
    assert run.returncode == 0
    message = "smoke tests not run: of 899 s, less than 900 s are left"
    assert run.stdout.splitlines() == ["called lint", "called test", message]
    assert run_ci(tmp_path, "test", seconds=899).returncode == 1


def test_a_kept_environment_is_brought_up_to_date(tmp_path: Path) -> None:
    """make's stamp is outdated by a newer pin, but not by that of another checkout."""
    stamp = tmp_path / "venvs" / "venv-torch-2.14.1" / ".ready-torch==2.14.1"
    stamp.parent.mkdir(parents=True)
    stamp.touch()
    assert run_ci(tmp_path).returncode == 0
    assert not stamp.exists()


FOLDER = "libraries-" + (ROOT / "requirements/torch.txt").read_text().strip().replace("==", "-")


class TestLibraries:
    """Libraries of generated C++ that are kept between runs."""

    COMPILE = """
        folder=${TORCHINDUCTOR_CACHE_DIR:-none}
        echo "found $(cd $folder 2>/dev/null && find . -type f | sort | tr '\n' ' ')"
        mkdir -p $folder/ab $folder/fxgraph && cd $folder
        touch ab/x.main.cpp ab/x.main.so ab/x.py fxgraph/y"""

    def found(self, folder: Path, test: str = COMPILE) -> str:
        """The files that the tests of a run find in the cache folder of Inductor."""
        lines = run_ci(folder, test=test).stdout.splitlines()
        return next(line for line in lines if line.startswith("found")).strip()

    def test_libraries_are_kept_and_all_else_is_removed(self, tmp_path: Path) -> None:
        assert self.found(tmp_path) == "found"
        assert self.found(tmp_path) == "found ./ab/x.main.cpp ./ab/x.main.so"
        kept = [path.name for path in (tmp_path / "venvs" / FOLDER).rglob("*.main.*")]
        assert sorted(kept) == ["x.main.cpp", "x.main.so"]

    def test_none_of_a_killed_run_or_of_another_compiler(self, tmp_path: Path) -> None:
        stamp = tmp_path / "venvs" / f"{FOLDER}.stamp"
        self.found(tmp_path)
        assert stamp.read_text().startswith((ROOT / "requirements/torch.txt").read_text().strip())
        assert self.found(tmp_path, f"{self.COMPILE}\n kill -9 $PPID") != "found"
        assert not stamp.exists()
        assert self.found(tmp_path) == "found"
        stamp.write_text("torch==2.1.0, g++ 5")
        assert self.found(tmp_path) == "found"

    def test_runs_at_the_same_time_do_not_share_them(self, tmp_path: Path) -> None:
        self.found(tmp_path)
        with (tmp_path / "venvs" / f"{FOLDER}.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert self.found(tmp_path, 'echo "found ${TORCHINDUCTOR_CACHE_DIR:-}"') == "found"


def test_an_unwritable_folder_is_not_a_failure(tmp_path: Path) -> None:
    (tmp_path / "venvs").touch()
    run = run_ci(tmp_path)
    assert run.returncode == 0
    assert run.stdout.splitlines()[2].startswith(f"{NOT_RUN}{tmp_path}/venvs cannot be used)")
