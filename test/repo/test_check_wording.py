"""`scripts/check_wording.py`: which lines it reads, and its findings."""

from __future__ import annotations

from pathlib import Path

import check_wording
import pytest


def found(path: Path, text: str) -> list[int]:
    """The numbers of the lines with findings."""
    path.write_text(text)
    return [
        int(line.removeprefix(f"{path}:").split(":")[0])
        for line in check_wording.find_problems(path)
    ]


def test_docstrings_comments_and_arguments_are_read(tmp_path: Path) -> None:
    code = (
        '"""The kernels of ours."""\n'
        "def f(stock):\n"
        '    """Call `stock`.\n'
        "\n"
        "    Args:\n"
        "        stock: what is told about the layout.\n"
        '    """\n'
        "    return stock  # lest it be called\n"
        "WIDTH = 1\n"
        '"""Of the second factor."""\n'
    )
    assert found(tmp_path / "code.py", code) == [1, 10, 6, 8]


def test_identifiers_and_values_are_not_read(tmp_path: Path) -> None:
    assert found(tmp_path / "code.py", 'stock = "kernels of ours"\n') == []


def test_code_in_a_page_is_not_read(tmp_path: Path) -> None:
    page = "`stock` is a name.\n```\nstock 1.0\n```\nWhat stock does.\n"
    assert found(tmp_path / "page.md", page) == [5]


def test_the_exit_code_fails_lint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("In vain.\n")
    assert check_wording.main([str(page)]) == 1
    assert "'In vain'; write: plain words" in capsys.readouterr().out
    page.write_text("A matmul.\n")
    assert check_wording.main([str(page)]) == 0
