"""`inductor-ext build`: compiles a model from a Python file or an exported program."""

from __future__ import annotations

import pathlib

import pytest
import torch

import inductor_ext
from inductor_ext.cli import main

SOURCE = """
import torch
from torch.export import Dim, export
import beside  # a module in the same folder


class Model(torch.nn.Module):
    def forward(self, x):
        return x.sin() + beside.VALUE


x = torch.ones(4, 8)
tuple_of_two = (Model(), (x,))


def make():
    return export(Model(), (x,), dynamic_shapes=({0: Dim("rows", min=2, max=64)},))


def several():
    return {"one": make(), "two": export(Model(), (x,))}


def tuple_of_three():
    return Model(), (x,), ({0: Dim("rows", min=2, max=64)},)


def number():
    return 5
"""


@pytest.fixture
def source(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "beside.py").write_text("VALUE = 2\n")
    path = tmp_path / "model.py"
    path.write_text(SOURCE)
    return path


def expected(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 2


@pytest.mark.parametrize(
    ("name", "rows"), [("", 6), (":make", 6), (":tuple_of_two", 4), (":tuple_of_three", 6)]
)
def test_a_model_of_a_python_file(
    source: pathlib.Path, name: str, rows: int, capsys: pytest.CaptureFixture[str]
) -> None:
    output = source.with_suffix(".pt2")
    assert main.main(["build", f"{source}{name}"]) == 0
    assert capsys.readouterr().out.startswith(f"{output}: ")
    x = torch.randn(rows, 8)
    torch.testing.assert_close(inductor_ext.load(output)(x), expected(x))


def test_several_models_a_target_and_options(source: pathlib.Path, tmp_path: pathlib.Path) -> None:
    output = tmp_path / "fleet.pt2"
    words = ["--output", str(output), "--set", "aot_check_inputs=False"]
    words += ["--target", "x86-64-v4", "--target", "x86-64-v2"]
    assert main.main(["build", f"{source}:several", *words]) == 0
    for name in ("one", "two"):
        model = inductor_ext.load(output, name)
        torch.testing.assert_close(model(torch.ones(4, 8)), expected(torch.ones(4, 8)))
    assert model.manifest is not None
    described = model.manifest.models["one"]
    assert [variant.target for variant in described.variants] == ["x86-64-v4"]
    assert described.options["aot_check_inputs"] is False


def test_an_exported_program(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "program.pt2"
    torch.export.save(torch.export.export(torch.nn.Linear(8, 4), (torch.ones(2, 8),)), path)
    assert main.main(["build", str(path)]) == 0
    assert inductor_ext.load(tmp_path / "program.package.pt2")(torch.ones(2, 8)).shape == (2, 4)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("none.py", "none.py has no model: there is no such file."),
        ("model.py:nothing", "model.py has no model: it defines no 'nothing'."),
        ("model.py:number", "'number' gives a value of type int instead of an exported program"),
        ("beside.pt2", "it was not written by torch.export.save"),
    ],
)
def test_what_is_not_a_model(
    source: pathlib.Path, name: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source.with_name("beside.pt2").write_bytes(b"nothing")
    assert main.main(["build", str(source.with_name(name)), "--output", "x.pt2"]) == 2
    printed = capsys.readouterr()
    assert why in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--target", "sm_90x"], "Unknown target 'sm_90x'"),
        (["--set", "no_such_option=1"], "no_such_option"),
        (["--output", "package.zip"], ".pt2"),
    ],
)
def test_bad_arguments_are_refused_before_the_compile(
    source: pathlib.Path, words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["build", str(source), *words]) == 2
    assert why in capsys.readouterr().err
    assert not source.with_suffix(".pt2").exists()


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built with CUDA")
@pytest.mark.parametrize("names", [["sm_90"], ["x86-64-v2", "ptx", "H100"]])
def test_a_gpu_needs_a_cuda_build(
    source: pathlib.Path, names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for name in names for word in ("--target", name)]
    assert main.main(["build", str(source), *words]) == 2
    assert "is built without CUDA" in capsys.readouterr().err
    assert not source.with_suffix(".pt2").exists()


def test_an_option_needs_a_value(source: pathlib.Path) -> None:
    with pytest.raises(SystemExit) as stop:
        main.main(["build", str(source), "--set", "max_autotune"])
    assert stop.value.code == 2
