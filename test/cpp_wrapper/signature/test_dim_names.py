"""The names of `torch.export.Dim` in signatures, in errors and in the output of `inspect`."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.export import Dim, ExportedProgram

import inductor_ext
from inductor_ext import exc
from inductor_ext.cli import main
from inductor_ext.cpp_wrapper.signature import dim_names, from_export
from inductor_ext.cpp_wrapper.signature.guard_filter import find_shape_environment
from inductor_ext.cpp_wrapper.signature.signature import (
    Range,
    Signature,
    SymbolInput,
    SymbolOutput,
    TensorInput,
    TensorOutput,
)
from test.support.aot_util import Function
from test.support.checks_library import tensor_input
from test.support.exported_programs import export, reload


def named_signature(program: ExportedProgram) -> Signature:
    """The signature of a package that is compiled from a program."""
    placeholders = program.graph.find_nodes(op="placeholder")
    environment = find_shape_environment(node.meta.get("val") for node in placeholders)
    assert environment is not None
    names = dim_names.read_dim_names(environment)
    return dim_names.rename_symbols(from_export.derive_signature(program), names)


def shapes_of(signature: Signature) -> dict[str, tuple[int | str, ...]]:
    return {inp.name: inp.shape for inp in signature.inputs if isinstance(inp, TensorInput)}


def separate(x: torch.Tensor, y: torch.Tensor) -> Any:
    return x + 1, {"double": y * 2, "size": y.shape[0]}


BATCH = Dim("batch", min=1, max=64)
X, Y = torch.zeros(4, 3), torch.zeros(9, 8)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("change", [lambda program: program, ExportedProgram.run_decompositions])
def test_sizes_have_the_names_of_the_export(
    strict: bool, change: Callable[[ExportedProgram], ExportedProgram]
) -> None:
    program = torch.export.export(
        Function(separate),
        (X, Y),
        dynamic_shapes={"x": {0: BATCH}, "y": {0: 2 * BATCH + 1}},
        strict=strict,
    )
    signature = named_signature(change(program))
    assert shapes_of(signature) == {"x": ("batch", 3), "y": ("2*batch + 1", 8)}
    assert signature.symbols == {"batch": Range(1, 64)}
    _, double, size = signature.outputs
    assert double == TensorOutput("[1]['double']", "float32", ("2*batch + 1", 8), "cpu")
    assert size == SymbolOutput("[1]['size']", "int", "2*batch + 1")


def test_a_name_that_only_derived_sizes_use_is_kept() -> None:
    shapes = {"x": {0: 2 * BATCH + 1}, "y": {0: 2 * BATCH + 1}}
    program = export(lambda x, y: x + y, Y, Y, shapes=shapes)
    assert shapes_of(named_signature(program)) == {
        "x": ("2*batch + 1", 8),
        "y": ("2*batch + 1", 8),
    }


def test_sizes_without_a_name_keep_their_symbols() -> None:
    shapes = {"x": {0: Dim.AUTO, 1: Dim.DYNAMIC}, "y": {0: BATCH, 1: Dim.DYNAMIC}}
    program = export(separate, X, Y, shapes=shapes)
    shapes_before = shapes_of(from_export.derive_signature(program))
    shapes_after = shapes_of(named_signature(program))
    assert shapes_after["x"] == shapes_before["x"]
    assert shapes_after["y"] == ("batch", shapes_before["y"][1])


def test_one_name_is_used_for_all_sizes_that_are_equal() -> None:
    program = export(lambda x, y: x + y, X, X, shapes={"x": {0: Dim.AUTO}, "y": {0: BATCH}})
    assert shapes_of(named_signature(program)) == {"x": ("batch", 3), "y": ("batch", 3)}


def test_a_saved_program_has_symbols() -> None:
    program = reload(export(separate, X, Y, shapes={"x": {0: BATCH}, "y": None}))
    signature = named_signature(program)
    (symbol,) = signature.symbols
    assert symbol != "batch"
    assert shapes_of(signature)["x"] == (symbol, 3)


@pytest.mark.parametrize("name", ["if", "None"])
def test_a_keyword_is_not_a_name(name: str) -> None:
    program = export(separate, X, Y, shapes={"x": {0: Dim(name)}, "y": None})
    assert named_signature(program) == from_export.derive_signature(program)


MIXED = Signature(
    inputs=(
        tensor_input("x", ("s0", "2*s1 + s0", "s10"), ("s1", 1, "s0*s1")),
        SymbolInput("n", "args[1]", "int", "s2"),
    ),
    outputs=(TensorOutput("[0]", "float32", ("u0", "s0"), "cpu"),),
    symbols={"s0": Range(1), "s1": Range(2), "s10": Range(3), "s2": Range(4)},
    constraints=("s0 % 2 == 0", "max(s1, 2) < s2"),
    unchecked=("L['s1'].size()[0] < s1",),
)


def test_every_expression_is_renamed() -> None:
    signature = dim_names.rename_symbols(MIXED, {"s0": "batch", "s1": "width"})
    (x, n) = signature.inputs
    assert x == tensor_input("x", ("batch", "2*width + batch", "s10"), ("width", 1, "batch*width"))
    assert n == MIXED.inputs[1]
    assert signature.outputs == (TensorOutput("[0]", "float32", ("u0", "batch"), "cpu"),)
    assert list(signature.symbols) == ["batch", "width", "s10", "s2"]
    assert signature.constraints == ("batch % 2 == 0", "max(width, 2) < s2")
    assert signature.unchecked == ("L['s1'].size()[0] < width",)


@pytest.mark.parametrize("name", ["s1", "u0", "n", "max"])
def test_ambiguous_names_are_not_used(name: str) -> None:
    """Other symbols, scalar inputs and functions would have the same name in an expression."""
    assert dim_names.rename_symbols(MIXED, {"s0": name}) == MIXED
    assert dim_names.rename_symbols(MIXED, {"s0": "same", "s1": "same"}) == MIXED


def test_a_name_may_be_that_of_a_tensor_or_of_its_own_scalar() -> None:
    signature = dim_names.rename_symbols(MIXED, {"s0": "x", "s2": "n"})
    assert signature.inputs[0].shape[0] == "x"  # type: ignore[union-attr]
    assert signature.inputs[1] == SymbolInput("n", "args[1]", "int", "n")


def bounded(x: torch.Tensor, y: torch.Tensor, count: torch.Tensor) -> Any:
    end = count.item()
    torch._check(end >= 0)
    torch._check(end <= y.shape[0])
    return x + 1, y[:end] * 2


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> str:
    shapes = {"x": {0: BATCH}, "y": {0: Dim("length"), 1: 2 * Dim("half")}, "count": None}
    program = export(bounded, X, Y, torch.tensor(3), shapes=shapes)
    path = str(tmp_path_factory.mktemp("names") / "model.pt2")
    inductor_ext.aoti_compile_and_package(program, package_path=path)
    return path


@pytest.mark.parametrize(
    ("condition", "message", "received"),
    [
        ("u0 <= 9L", "u0 <= 9", '" + std::to_string(u0)'),
        (
            "2L*u10 <= 9L + u9",
            "2*u10 <= u9 + 9",
            'u9 = " + std::to_string(u9) + ", u10 = " + std::to_string(u10)',
        ),
        (
            "c10::div_floor_integer(static_cast<int64_t>(s7), static_cast<int64_t>(2L)) < u0",
            "batch//2 < u0",
            'batch = " + std::to_string(s7) + ", u0 = " + std::to_string(u0)',
        ),
    ],
)
def test_an_assert_reports_all_sizes(condition: str, message: str, received: str) -> None:
    """Inductor's reports the first of a set."""
    start = f'if (!({condition})) {{ throw std::runtime_error("Expected '
    symbols = set(re.findall(r"[us]\d+", condition))
    completed = {
        dim_names.complete_assert(
            f"{start}{message.replace('batch', 's7')} but received "
            f'" + std::to_string({symbol})); }}',
            {"s7": "batch"},
        )
        for symbol in symbols
    }
    assert completed == {f"{start}{message} but received {received}); }}"}


def test_other_lines_are_not_asserts() -> None:
    for line in ("auto buf0 = u0;", '// Expected u0 but received " + u1', ""):
        assert dim_names.complete_assert(line, {"u0": "batch"}) == line


def test_inspect_shows_names(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["inspect", package]) == 0
    text = capsys.readouterr().out
    for part in ("[batch, 3]", "1 <= batch <= 64", "[length, 2*half]", "0 <= length"):
        assert part in text
    assert main.main(["inspect", "--json", package]) == 0
    report = json.loads(capsys.readouterr().out)
    signature = report["manifest"]["models"]["model"]["signature"]
    assert [inp["shape"] for inp in signature["inputs"]] == [
        ["batch", 3],
        ["length", "2*half"],
        [],
    ]
    assert list(signature["symbols"]) == ["batch", "length", "half"]


def test_errors_show_names(package: str) -> None:
    model = inductor_ext.load(package)
    assert model(X, Y, torch.tensor(5))[1].shape == (5, 8)
    calls: list[tuple[tuple[Any, ...], str]] = [
        ((1, Y, torch.tensor(3)), "the model takes a tensor (float32, [batch, 3])"),
        ((X, Y[:, :7].clone(), torch.tensor(3)), "must be 2*half for a whole number half"),
    ]
    for args, message in calls:
        with pytest.raises(exc.InputMismatchError) as caught:
            model(*args)
        assert message in str(caught.value)
    message = r"Expected (u\d+) <= length but received length = 9, \1 = 10"
    with pytest.raises(exc.ArtifactRunError, match=message):
        model(X, Y, torch.tensor(10))


def test_the_cache_distinguishes_names(tmp_path: pathlib.Path) -> None:
    """The programs differ only in the name of a size."""
    for name in ("batch", "rows", "batch"):
        path = str(tmp_path / "model.pt2")
        program = export(lambda x: x + 1, X, shapes={"x": {0: Dim(name, max=64)}})
        inductor_ext.aoti_compile_and_package(
            program, package_path=path, inductor_configs={"artifact_cache": True}
        )
        signature = inductor_ext.load(path).signature
        assert signature is not None
        assert list(signature.symbols) == [name]
