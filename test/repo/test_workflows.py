"""CI on GitHub runs targets of `.ci/run` and `make`."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORKFLOWS = [path.read_text() for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))]


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = {target for text in WORKFLOWS for target in re.findall(r"run: make (\w+)", text)}
    assert named == {"lint", "test", "smoke"}
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in named)


def test_the_other_torch_is_that_of_ci_run() -> None:
    (other,) = re.findall(r"^other=(\S+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    named = {torch for text in WORKFLOWS for torch in re.findall(r"TORCH=(torch==\S+)", text)}
    assert named == {other}


def test_pre_commit_runs_the_pinned_ruff() -> None:
    pinned = re.findall(
        r"^ruff==(\S+)", (ROOT / "requirements/tools.txt").read_text(), re.MULTILINE
    )
    (used,) = re.findall(r"rev: v(\S+)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert [used] == pinned
