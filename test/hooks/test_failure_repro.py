"""The program that is written when a compile fails by a bug, and its minimization."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from inductor_ext import exc
from inductor_ext.cli import main
from inductor_ext.hooks import failure_repro
from inductor_ext.memory import budget_search

FAIL = """\
import inductor_ext.memory.budget_search as search
def fail(kind, graph):
    if any("cumsum" in str(node.target) for node in graph.graph.nodes):
        raise RuntimeError("made up")
search.note_graph = fail
"""


@pytest.fixture(autouse=True)
def reset() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def model(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x).cumsum(0).sin() + 1


def compile_and_fail(
    error: Exception, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> BaseException:
    """Compile the model with an error in a pass; return what torch raises."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(budget_search, "note_graph", fail)
    options = {"repro_dir": str(folder), "memory_reorder": False, "epilogue_fusion": False}
    compiled = torch.compile(model, backend="inductor_ext", options=options)
    with pytest.raises(Exception) as caught:
        compiled(torch.ones(3, 4))
    return caught.value


def list_notes(error: BaseException) -> list[str]:
    return [
        note
        for cause in failure_repro._list_causes(error)
        for note in getattr(cause, "__notes__", ())
    ]


def test_a_bug_is_repeated_by_a_program(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = compile_and_fail(RuntimeError("made up\nsecond line"), tmp_path, monkeypatch)
    (path,) = tmp_path.iterdir()
    if sys.version_info >= (3, 11):
        assert list_notes(error) == [
            f"inductor_ext: {path} repeats this error; `inductor-ext minify {path}` shortens it."
        ]
    head = path.read_text().splitlines()[:8]
    assert "made up" in head[0]
    assert "second line" not in head[0]
    assert f"torch {torch.__version__}" in head[1]
    assert "inductor_ext.config.memory_reorder = False" in head
    assert "torch._inductor.config.epilogue_fusion = False" in head
    # Without the error, the program runs.
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_errors_on_purpose_are_no_bugs(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = compile_and_fail(
        exc.MissingKernelError(kernel="k", folder="f", why="it was not built"),
        tmp_path,
        monkeypatch,
    )
    assert list_notes(error) == []
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    error = compile_and_fail(RuntimeError("made up"), tmp_path / "file", monkeypatch)
    assert "made up" in str(error)
    assert list_notes(error) == []


@pytest.mark.slow
def test_minify(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compile_and_fail(RuntimeError("made up"), tmp_path, monkeypatch)
    (path,) = tmp_path.iterdir()
    assert main.main(["minify", str(path)]) == 2
    assert "it does not fail" in capsys.readouterr().err
    header, separator, rest = path.read_text().partition("inductor_ext.config.memory_reorder")
    path.write_text(f"{header}{FAIL}{separator}{rest}")
    output = tmp_path / "smaller.py"
    assert main.main(["minify", str(path), "--output", str(output)]) == 0
    assert capsys.readouterr().out.startswith(f"{output}: ")
    text = output.read_text()
    assert "cumsum" in text
    assert "sin" not in text.partition("def forward")[2]


def test_minify_without_a_program(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["minify", str(tmp_path / "none.py")]) == 2
    assert "the file does not exist" in capsys.readouterr().err
