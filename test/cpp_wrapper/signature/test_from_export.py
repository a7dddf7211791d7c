"""Signatures of exported programs: names, sizes, strides, ranges and guards."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from inductor_ext import exc
from inductor_ext.cpp_wrapper.codegen import input_checks
from inductor_ext.cpp_wrapper.signature import from_export
from inductor_ext.cpp_wrapper.signature.signature import (
    ConstantInput,
    ConstantOutput,
    Range,
    Signature,
    SymbolInput,
    SymbolOutput,
    TensorInput,
    TensorOutput,
)
from test.support.checks_library import accepts
from test.support.exported_programs import export


def saved_and_loaded(program: ExportedProgram) -> ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


def inputs_by_name(signature: Signature) -> dict[str, Any]:
    return {inp.name: inp for inp in signature.inputs}


def nested(x: Any, y: Any, *, batch: Any, n: int = 3, z: Any) -> Any:
    total = x.sum() + y.sum() + batch["ids"][1].sum() * n + z.sum()
    return total, {"twice": x * 2, "none": None, "size": x.shape[0]}, [3, batch["ids"][0]]


@pytest.fixture(scope="module")
def nested_program() -> ExportedProgram:
    batch = Dim("batch", min=2, max=64)
    ids = [torch.zeros(8, dtype=torch.int64), torch.zeros(9)]
    return export(
        nested,
        torch.zeros(4, 10),
        torch.zeros(3, 5, dtype=torch.bfloat16).t(),
        batch={"ids": ids},
        n=7,
        z=torch.zeros(1),
        shapes={
            "x": {0: batch},
            "y": None,
            "batch": {"ids": [{0: 2 * batch}, {0: 2 * batch + 1}]},
            "n": None,
            "z": None,
        },
    )


def test_inputs_have_names_and_paths_of_the_model(nested_program: ExportedProgram) -> None:
    signature = from_export.derive_signature(nested_program)
    assert [(inp.name, inp.path) for inp in signature.inputs] == [
        ("x", "args[0]"),
        ("y", "args[1]"),
        ("batch['ids'][0]", "kwargs['batch']['ids'][0]"),
        ("batch['ids'][1]", "kwargs['batch']['ids'][1]"),
        ("n", "kwargs['n']"),
        ("z", "kwargs['z']"),
    ]
    inputs = inputs_by_name(signature)
    assert inputs["n"] == ConstantInput("n", "kwargs['n']", 7)
    assert inputs["y"] == TensorInput("y", "args[1]", "bfloat16", (5, 3), (1, 5), "cpu")
    assert len(signature.tensors) == 5


def test_variable_arguments_are_numbered() -> None:
    def function(first: torch.Tensor, *rest: Any) -> torch.Tensor:
        return first + rest[0]["a"] + rest[1]

    example = torch.zeros(3)
    signature = from_export.derive_signature(export(function, example, {"a": example}, example))
    names = [(inp.name, inp.path) for inp in signature.inputs]
    assert names == [("first", "args[0]"), ("rest_0['a']", "args[1]['a']"), ("rest_1", "args[2]")]


def test_derived_sizes_are_expressions_of_the_same_symbol(nested_program: ExportedProgram) -> None:
    signature = from_export.derive_signature(nested_program)
    inputs = inputs_by_name(signature)
    (symbol,) = signature.symbols
    assert signature.symbols[symbol] == Range(2, 64)
    assert inputs["x"].shape == (symbol, 10)
    assert inputs["batch['ids'][0]"].shape == (f"2*{symbol}",)
    assert inputs["batch['ids'][1]"].shape == (f"2*{symbol} + 1",)
    # They follow from the sizes and the range.
    assert signature.constraints == signature.unchecked == ()


def test_outputs_have_paths_shapes_and_values(nested_program: ExportedProgram) -> None:
    signature = from_export.derive_signature(nested_program)
    (symbol,) = signature.symbols
    assert signature.outputs == (
        TensorOutput("[0]", "float32", (), "cpu"),
        TensorOutput("[1]['twice']", "float32", (symbol, 10), "cpu"),
        ConstantOutput("[1]['none']", None),
        SymbolOutput("[1]['size']", "int", symbol),
        ConstantOutput("[2][0]", 3),
        TensorOutput("[2][1]", "int64", (f"2*{symbol}",), "cpu"),
    )


def test_the_structures_are_those_that_torch_stores(nested_program: ExportedProgram) -> None:
    signature = from_export.derive_signature(nested_program)
    program = nested_program.module()
    info = program.graph._codegen.pytree_info
    assert signature.in_spec == pytree.treespec_dumps(info.in_spec)
    assert signature.out_spec == pytree.treespec_dumps(info.out_spec)


@pytest.mark.parametrize("way", [saved_and_loaded, ExportedProgram.run_decompositions])
def test_a_program_keeps_its_signature(
    nested_program: ExportedProgram, way: Callable[[ExportedProgram], ExportedProgram]
) -> None:
    assert from_export.derive_signature(way(nested_program)) == from_export.derive_signature(
        nested_program
    )


def test_a_model_of_no_arguments() -> None:
    signature = from_export.derive_signature(export(lambda: torch.ones(3)))
    assert signature.inputs == ()
    assert signature.outputs == (TensorOutput("", "float32", (3,), "cpu"),)
    input_checks.render(signature)


@dataclasses.dataclass
class Pair:
    """A container that is registered with pytree and checks its fields."""

    left: torch.Tensor
    right: torch.Tensor

    def __post_init__(self) -> None:
        if isinstance(self.left, int):
            raise TypeError("no number")


@pytest.fixture(scope="module")
def pair_registered() -> None:
    torch.export.register_dataclass(Pair, serialized_type_name="test.aot.Pair")


@pytest.mark.usefixtures("pair_registered")
def test_an_unknown_container_has_the_names_of_the_graph() -> None:
    signature = from_export.derive_signature(
        export(lambda pair: pair.left + pair.right, Pair(torch.zeros(3), torch.zeros(3)))
    )
    assert [inp.name for inp in signature.inputs] == ["pair_left", "pair_right"]


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, Range(0)),
        ({"min": 1}, Range(1)),
        ({"min": 3, "max": 9}, Range(3, 9)),
        ({"min": 0, "max": 9}, Range(0, 9)),
    ],
)
def test_ranges_are_those_of_export(limits: dict[str, int], expected: Range) -> None:
    program = export(lambda x: x + 1, torch.zeros(4), shapes=({0: Dim("n", **limits)},))
    (derived,) = from_export.derive_signature(program).symbols.values()
    assert derived == expected


def test_a_derived_size_without_its_symbol_is_solved() -> None:
    base = Dim("base", min=3, max=9)
    signature = from_export.derive_signature(
        export(lambda x: x + 1, torch.zeros(12, 1), shapes=({0: 4 * base},))
    )
    for size, right in ((8, False), (12, True), (14, False), (36, True), (40, False)):
        assert accepts(signature, [torch.zeros(size, 1)]) == right
    assert "Rule::solve" in input_checks.render(signature)


def test_the_minimum_of_a_derived_size_is_the_users() -> None:
    base = Dim("base", min=1, max=9)
    program = export(lambda x: x + 1, torch.zeros(13), shapes=({0: 4 * base + 1},))
    signature = from_export.derive_signature(program)
    assert list(signature.symbols.values()) == [Range(1, 9)]
    for size in (1, 4, 5, 9, 37, 41):
        right = size % 4 == 1 and 5 <= size <= 37
        assert accepts(signature, [torch.zeros(size)]) == right


GUARDED: dict[str, tuple[Callable[..., Any], list[torch.Tensor], Any, list[Any]]] = {
    "divisible": (
        lambda x: x.view(x.shape[0] // 4, 4, -1) if x.shape[0] % 4 == 0 else x,
        [torch.zeros(12, 6)],
        ({0: Dim.DYNAMIC},),
        [[(12, 6)], [(16, 6)], [(14, 6)], [(13, 6)], [(20, 6)]],
    ),
    "less": (
        lambda x, y: x.sum() if x.shape[0] < y.shape[0] else y.sum(),
        [torch.zeros(4), torch.zeros(9)],
        ({0: Dim.DYNAMIC}, {0: Dim.DYNAMIC}),
        [[(4,), (9,)], [(8,), (9,)], [(9,), (9,)], [(10,), (9,)]],
    ),
    "equal": (
        lambda x, y: x + y,
        [torch.zeros(4, 3), torch.zeros(4, 3)],
        ({0: Dim.AUTO, 1: Dim.AUTO}, {0: Dim.AUTO, 1: Dim.AUTO}),
        [[(4, 3), (4, 3)], [(5, 2), (5, 2)], [(5, 2), (5, 3)], [(4, 2), (5, 2)]],
    ),
    "product": (
        lambda x, y: x.reshape(-1) + y,
        [torch.zeros(4, 3), torch.zeros(12)],
        ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, {0: Dim.DYNAMIC}),
        [[(4, 3), (12,)], [(5, 3), (15,)], [(5, 3), (12,)]],
    ),
    "shifted": (
        lambda x, y: x[1:] + y,
        [torch.zeros(5), torch.zeros(4)],
        ({0: Dim("x") + 1}, {0: Dim("x")}),
        [[(5,), (4,)], [(9,), (8,)], [(8,), (8,)]],
    ),
    "branch": (
        lambda x: x * 2 if x.shape[0] > 5 else x,
        [torch.zeros(7)],
        ({0: Dim.DYNAMIC},),
        [[(7,)], [(6,)], [(5,)], [(2,)]],
    ),
}
"""A function, its inputs, dynamic shapes, and calls; the guards allow at least the first two."""


@pytest.mark.parametrize("way", [lambda program: program, saved_and_loaded])
@pytest.mark.parametrize("name", GUARDED)
def test_guards_hold_exactly_as_in_the_exported_module(
    name: str, way: Callable[[ExportedProgram], ExportedProgram]
) -> None:
    function, example, shapes, calls = GUARDED[name]
    program = way(export(function, *example, shapes=shapes))
    signature = from_export.derive_signature(program)
    module = program.module()
    assert signature.unchecked == ()
    verdicts = []
    for sizes in calls:
        tensors = [torch.zeros(size) for size in sizes]
        try:
            module(*tensors)
        except (AssertionError, RuntimeError):
            verdicts.append(False)
        else:
            verdicts.append(True)
        assert accepts(signature, tensors) == verdicts[-1], sizes
    assert verdicts[:2] == [True, True]
    assert not all(verdicts)
    input_checks.render(signature)


def test_asserts_on_sizes_are_checked_before_the_call() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        torch._check(x.shape[0] * 2 < 30)
        return x + 1

    signature = from_export.derive_signature(
        export(function, torch.zeros(4), shapes=({0: Dim.DYNAMIC},))
    )
    assert accepts(signature, [torch.zeros(14)])
    assert not accepts(signature, [torch.zeros(15)])


def test_conditions_on_values_are_checked_by_the_code() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        size = x.max().item()
        torch._check(size < 30)
        return torch.zeros(size)

    signature = from_export.derive_signature(export(function, torch.tensor([3, 4])))
    assert signature.constraints == signature.unchecked == ()
    ((size,),) = [output.shape for output in signature.outputs if isinstance(output, TensorOutput)]
    assert str(size).startswith("u")


@pytest.mark.parametrize(
    ("tensor", "right", "wrong"),
    [
        (torch.zeros(10, 4).t(), torch.zeros(7, 5).t(), torch.zeros(5, 7)),
        (torch.zeros(10, 8)[:, ::2], torch.zeros(5, 9)[:, ::3], torch.zeros(8, 5).t()),
        (torch.zeros(3, 1).expand(3, 7), torch.zeros(4, 1).expand(4, 5), torch.zeros(4, 5)),
    ],
)
def test_strides_follow_the_example(
    tensor: torch.Tensor, right: torch.Tensor, wrong: torch.Tensor
) -> None:
    shapes = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
    signature = from_export.derive_signature(export(lambda x: x * 2, tensor, shapes=shapes))
    assert accepts(signature, [tensor])
    assert accepts(signature, [right])
    assert not accepts(signature, [wrong])
    input_checks.render(signature)


def test_a_dynamic_scalar_is_an_input() -> None:
    signature = from_export.derive_signature(
        export(
            lambda x, n: x[:n] * n, torch.zeros(30, 2), 5, shapes=({0: Dim.DYNAMIC}, Dim.DYNAMIC)
        )
    )
    number = inputs_by_name(signature)["n"]
    assert isinstance(number, SymbolInput)
    assert number.type == "int"
    assert f"{number.symbol} <= {inputs_by_name(signature)['x'].shape[0]}" in signature.constraints
    assert accepts(signature, [torch.zeros(8, 2), torch.tensor(7)])
    assert not accepts(signature, [torch.zeros(8, 2), torch.tensor(9)])


def test_parameters_and_buffers_are_not_inputs() -> None:
    model = torch.nn.BatchNorm1d(4)
    program = torch.export.export(model, (torch.zeros(3, 4),))
    signature = from_export.derive_signature(program)
    assert [inp.name for inp in signature.inputs] == ["input"]
    assert [output.path for output in signature.outputs] == [""]


def test_an_object_is_rejected_by_name() -> None:
    program = export(lambda x: x + 1, torch.zeros(3))
    spec = program.graph_signature.input_specs[0]
    spec.arg = torch.export.graph_signature.CustomObjArgument("x", "test.Thing")
    with pytest.raises(exc.UncheckableInputError, match=r"object of class test\.Thing") as raised:
        from_export.derive_signature(program)
    assert "aot_check_inputs" not in str(raised.value)  # it would not help


class Unnamed:
    """Registered with pytree without a name for serialization."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class UnnamedTuple(NamedTuple):
    x: torch.Tensor


pytree.register_pytree_node(
    Unnamed, lambda value: ([value.x], None), lambda values, _: Unnamed(*values)
)


@pytest.mark.parametrize("cls", [Unnamed, UnnamedTuple])
def test_classes_without_a_serialized_name_are_refused_by_name(cls: Any) -> None:
    program = export(lambda x: {"value": [cls(x + 1)]}, torch.ones(3))
    with pytest.raises(exc.UnserializableClassError) as raised:
        from_export.derive_signature(program)
    name = f"{cls.__module__}.{cls.__qualname__}"
    assert str(raised.value).startswith(
        "The results of the exported program cannot be described in a package: "
        f"{name} has no name for serialization. Register the class"
    )
    assert isinstance(raised.value, NotImplementedError)
