"""Names of sizes that the caller of a compile gives, for a program that was saved and loaded."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest
import torch
from torch.export import Dim, ExportedProgram

import inductor_ext
from inductor_ext import exc
from inductor_ext.cpp_wrapper.load.model import LoadedModel
from inductor_ext.cpp_wrapper.signature import from_export, given_shapes
from inductor_ext.cpp_wrapper.signature.dim_names import rename_symbols
from inductor_ext.cpp_wrapper.signature.signature import Range, Signature, TensorInput
from test.support import compile_util
from test.support.exported_programs import export, reload

BATCH, LENGTH = Dim("batch", min=1, max=64), Dim("length", max=100)


class Net(torch.nn.Module):
    def forward(self, x: Any, text: Any, count: int, *, y: Any) -> Any:
        return x + count, text["ids"] * 2, y + 1


def arguments() -> tuple[tuple[Any, ...], dict[str, Any]]:
    text = {"ids": torch.zeros(4, 5)}
    return (torch.zeros(4, 3), text, 3), {"y": torch.zeros(9, 2)}


SHAPES = {
    "x": {0: BATCH},
    "text": {"ids": (BATCH, LENGTH)},
    "count": Dim.DYNAMIC,
    "y": {0: 2 * BATCH + 1, 1: Dim.AUTO},
}


@pytest.fixture(scope="module")
def program() -> ExportedProgram:
    return reload(torch.export.export(Net(), *arguments(), dynamic_shapes=SHAPES))


def shapes_of(signature: Signature) -> dict[str, tuple[int | str, ...]]:
    return {inp.name: inp.shape for inp in signature.inputs if isinstance(inp, TensorInput)}


@pytest.mark.parametrize("form", [dict, lambda shapes: tuple(shapes.values())])
def test_names_are_those_of_the_export(program: ExportedProgram, form: Any) -> None:
    names = given_shapes.read_names(program, form(SHAPES))
    signature = rename_symbols(from_export.derive_signature(program), names)
    (columns,) = (inp.shape[1] for inp in signature.tensors if inp.name == "y")
    assert shapes_of(signature) == {
        "x": ("batch", 3),
        "text['ids']": ("batch", "length"),
        "y": ("2*batch + 1", columns),
    }
    assert signature.symbols["batch"] == Range(1, 64)
    assert set(names.values()) == {"batch", "length"}


def test_a_dim_that_cannot_be_in_an_expression_gives_no_name(program: ExportedProgram) -> None:
    shapes = {**SHAPES, "text": {"ids": {1: Dim("if")}}}
    assert set(given_shapes.read_names(program, shapes).values()) == {"batch"}
    assert given_shapes.read_names(program, dict.fromkeys(SHAPES) | {"text": {"ids": None}}) == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": {1: BATCH}}, "expected no Dim at dynamic_shapes['x'][1], because the size is 3"),
        ({"x": {2: BATCH}}, "expected dimensions from 0 to 1 at dynamic_shapes['x']"),
        ({"x": (BATCH,)}, "expected 2 dimensions at dynamic_shapes['x']"),
        ({"x": 5}, "expected a dict, tuple or list of dimensions at dynamic_shapes['x']"),
        ({"x": {0: LENGTH}}, "expected the same name as for an equal size, 'length', at dynamic"),
        ({"y": {0: 2 * BATCH}}, "=2*batch: expected the size of the program, 2*s"),
        ({"count": BATCH}, "expected no named size at dynamic_shapes['count']"),
        (
            {"x": None, "text": {"ids": {0: BATCH, 1: BATCH}}, "y": None},
            "expected one size of the name 'batch', but s",
        ),
        ({"z": None}, "expected a dict from the names of the inputs, ['x', 'text', 'count', 'y']"),
        ({"text": None}, "expected the structure of the inputs: `inputs['text']` is a"),
        ({"text": {"id": None}}, "`inputs['text']` has keys ['ids'], but `dynamic_shapes['text']`"),
    ],
)
def test_other_shapes_are_refused(
    program: ExportedProgram, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(exc.BadArgumentError, match=re.escape(message)):
        given_shapes.read_names(program, {**SHAPES, **changes})


@pytest.mark.parametrize("shapes", [3, "x", ({0: BATCH},)])
def test_other_structures_are_refused(program: ExportedProgram, shapes: Any) -> None:
    with pytest.raises(exc.BadArgumentError, match=r"Invalid dynamic_shapes="):
        given_shapes.read_names(program, shapes)


@pytest.mark.skipif(compile_util.TORCH < (2, 14), reason="torch cannot export dynamic **kwargs")
@pytest.mark.parametrize("named", [True, False])
def test_variadic_arguments_have_entries_of_both_forms(named: bool) -> None:
    class Variadic(torch.nn.Module):
        def forward(self, x: Any, *rest: Any, **more: Any) -> Any:
            return x + 1, rest[0] + rest[1], more["u"] * 2

    entry = {0: BATCH}
    shapes = {"x": {0: LENGTH}, "rest": (entry, entry), "more": {"u": entry}}
    args = (torch.zeros(3), torch.zeros(4), torch.zeros(4))
    program = reload(
        torch.export.export(Variadic(), args, {"u": torch.zeros(4)}, dynamic_shapes=shapes)
    )
    flat = {"x": {0: LENGTH}, "rest_0": entry, "rest_1": entry, "u": entry}
    names = given_shapes.read_names(program, flat if named else shapes)
    signature = rename_symbols(from_export.derive_signature(program), names)
    assert list(shapes_of(signature).values()) == [("length",), *[("batch",)] * 3]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, program: ExportedProgram) -> pathlib.Path:
    """A package of two models, of which one is called with names."""
    other = reload(export(lambda x: x + 1, torch.zeros(4), shapes={"x": {0: BATCH}}))
    target = tmp_path_factory.mktemp("given") / "model.pt2"
    inductor_ext.aoti_compile_and_package(
        {"net": program, "other": other},
        package_path=target,
        dynamic_shapes={"net": SHAPES},
    )
    return target


def load(path: pathlib.Path, name: str = "model") -> LoadedModel:
    return inductor_ext.load(path, name)


def test_a_package_shows_the_names(path: pathlib.Path) -> None:
    assert load(path, "net").signature is not None
    shapes = shapes_of(load(path, "net").signature)
    assert shapes["x"] == ("batch", 3)
    assert shapes["y"][0] == "2*batch + 1"
    args, kwargs = arguments()
    outputs = load(path, "net")(*args, **kwargs)
    torch.testing.assert_close(outputs[0], torch.full((4, 3), 3.0))
    (symbol,) = shapes_of(load(path, "other").signature)["x"]
    assert re.fullmatch(r"s\d+", str(symbol))


def test_the_cache_tells_names_apart(tmp_path: pathlib.Path) -> None:
    program = reload(export(lambda x: x + 1, torch.zeros(4), shapes={"x": {0: BATCH}}))
    found = []
    for shapes in ({"x": {0: BATCH}}, {"x": {0: LENGTH}}, {"x": {0: BATCH}}):
        target = tmp_path / "model.pt2"
        inductor_ext.aoti_compile_and_package(
            program,
            package_path=target,
            dynamic_shapes=shapes,
            inductor_configs={"artifact_cache": True},
        )
        found.append(shapes_of(load(target).signature)["x"])
    assert found == [("batch",), ("length",), ("batch",)]


@pytest.mark.parametrize("shapes", [{"nett": SHAPES}, (SHAPES,)])
def test_names_of_models_are_checked_before_the_compile(
    program: ExportedProgram, shapes: Any, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(exc.BadArgumentError, match=r"names of models, which are 'net'\."):
        inductor_ext.aoti_compile_and_package(
            {"net": program}, package_path=tmp_path / "model.pt2", dynamic_shapes=shapes
        )
    assert list(tmp_path.iterdir()) == []
