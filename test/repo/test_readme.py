"""The README's code runs as written, and its numbers are those of the committed results."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

from benchmarks.harness import results

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("code", PYTHON, ids=["quickstart", "ahead_of_time"])
def test_code_runs(code: str, tmp_path: pathlib.Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_table_is_that_of_the_committed_result() -> None:
    (path,) = (ROOT / "benchmarks" / "results").glob("quickstart-*.json")
    assert results.render_table(results.read(path)).strip() in README


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert [link for link in links if not (ROOT / link).exists()] == []
    assert len(links) > 5


def test_named_tests_exist() -> None:
    """docs/switch.md names the test that holds each promise."""
    page = (ROOT / "docs" / "switch.md").read_text()
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)(\*?)`", page)
    assert len(named) > 8
    for file, name, open_ended in named:
        source = (ROOT / "test" / file).read_text()
        ending = r"\w*" if open_ended else r"\b"
        assert re.search(rf"def {name}{ending}\(", source), f"{file}::{name}"
