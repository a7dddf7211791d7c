"""Signatures: their JSON, their expressions, and what is read from an exported program."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree
from torch.utils._sympy import functions

from inductor_ext import exc
from inductor_ext.cpp_wrapper.build import compiler
from inductor_ext.cpp_wrapper.codegen import input_checks
from inductor_ext.cpp_wrapper.signature import (
    conditions,
    expression,
    from_export,
    guard_filter,
    symbolic,
)
from inductor_ext.cpp_wrapper.signature.expression import Apply
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
from test.support.aot_util import Function
from test.support.checks_library import accepts, tensor_input

EXAMPLE = Signature(
    inputs=(
        TensorInput("x", "args[0]", "float32", ("s0", 10), ("10", 1), "cpu"),
        ConstantInput("n", "kwargs['n']", 3),
        ConstantInput("limit", "kwargs['limit']", -math.inf),
        SymbolInput("k", "args[1]", "int", "s1"),
    ),
    outputs=(
        TensorOutput("[0]", "float32", ("s0", 4), "cpu"),
        ConstantOutput("[1]", None),
        ConstantOutput("[2]", "text"),
        SymbolOutput("[3]", "int", "2*s0"),
    ),
    symbols={"s0": Range(2, 64), "s1": Range()},
    constraints=("s0 % 4 == 0",),
    unchecked=("Weird(s0)",),
    in_spec="in",
    out_spec="out",
)


def export(
    function: Callable[..., Any], *args: Any, shapes: Any = None, **kwargs: Any
) -> ExportedProgram:
    """The program of a function; `shapes` as torch.export takes them."""
    return torch.export.export(Function(function), args, kwargs, dynamic_shapes=shapes)


def saved_and_loaded(program: ExportedProgram) -> ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


def inputs_by_name(found: Signature) -> dict[str, Any]:
    return {inp.name: inp for inp in found.inputs}


# --- JSON -------------------------------------------------------------------------------------


def test_a_signature_comes_back_from_its_json() -> None:
    text = json.dumps(EXAMPLE.to_json(), allow_nan=False)
    assert Signature.from_json(json.loads(text)) == EXAMPLE


def test_the_json_is_what_tools_rely_on() -> None:
    written = EXAMPLE.to_json()
    assert written["inputs"][0] == {
        "kind": "tensor",
        "name": "x",
        "path": "args[0]",
        "dtype": "float32",
        "shape": ["s0", 10],
        "stride": ["10", 1],
        "device": "cpu",
    }
    assert [item["kind"] for item in written["inputs"]] == [
        "tensor",
        "constant",
        "constant",
        "symbol",
    ]
    assert [item["kind"] for item in written["outputs"]] == [
        "tensor",
        "none",
        "constant",
        "symbol",
    ]
    assert written["symbols"] == {
        "s0": {"min": 2, "max": 64},
        "s1": {"min": None, "max": None},
    }


@pytest.mark.parametrize("value", [1.5, -math.inf, math.nan, True, 7, "text", None])
def test_constants_keep_value_and_type(value: Any) -> None:
    found = Signature((ConstantInput("c", "args[0]", value),), (ConstantOutput("", value),))
    text = json.dumps(found.to_json(), allow_nan=False)
    back = Signature.from_json(json.loads(text))
    for inp in (*back.inputs, *back.outputs):
        assert isinstance(inp, (ConstantInput, ConstantOutput))
        assert type(inp.value) is type(value)
        assert repr(inp.value) == repr(value)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda s: [], "signature is []"),
        (lambda s: s.pop("inputs"), "expected an object with 'inputs'"),
        (lambda s: s.update(inputs="x"), "signature.inputs is 'x', expected a list"),
        (lambda s: s["inputs"][0].update(kind="tensors"), "signature.inputs[0] is {"),
        (lambda s: s["inputs"][0].update(dtype=3), "signature.inputs[0].dtype is 3"),
        (lambda s: s["inputs"][0].update(shape=[-1, 2]), "signature.inputs[0].shape[0] is -1"),
        (lambda s: s["inputs"][0].update(shape=[True, 2]), "signature.inputs[0].shape[0] is True"),
        (lambda s: s["inputs"][0].update(shape=[1]), "as many strides as sizes"),
        (lambda s: s["inputs"][1].update(value=[]), "signature.inputs[1].value is []"),
        (lambda s: s["inputs"][2].update(value={"float": "1"}), "inputs[2].value is {'float'"),
        (lambda s: s["inputs"][3].update(type="complex"), "signature.inputs[3].type is 'complex'"),
        (lambda s: s["outputs"][0].update(kind="x"), "signature.outputs[0] is {"),
        (lambda s: s["symbols"]["s0"].update(min="2"), "signature.symbols['s0'].min is '2'"),
        (lambda s: s.update(symbols=[]), "signature.symbols is []"),
        (lambda s: s.update(constraints=[3]), "signature.constraints[0] is 3"),
        (lambda s: s.update(in_spec=None), "signature.in_spec is None"),
    ],
)
def test_json_that_is_no_signature_is_refused_with_its_place(
    change: Callable[[Any], Any], where: str
) -> None:
    written = copy.deepcopy(EXAMPLE.to_json())
    changed = change(written)
    with pytest.raises(exc.BadSignatureError) as raised:
        Signature.from_json([] if changed == [] else written)
    assert where in str(raised.value)


# --- expressions ------------------------------------------------------------------------------


def test_python_and_cpp_have_the_same_opcodes_and_stack() -> None:
    source = (compiler.RUNTIME / "checks.cpp").read_text()
    (body,) = re.findall(r"enum Opcode : int64_t \{(.*?)\};", source, re.DOTALL)
    pairs = (
        "+:Add -:Subtract *:Multiply //:FloorDivide %:Modulo **:Power &:BitAnd |:BitOr ^:BitXor "
        "<<:LeftShift >>:RightShift ==:Equal !=:NotEqual <:Less <=:LessEqual >:Greater "
        ">=:GreaterEqual neg:Negate"
    )
    cpp = dict(re.findall(r"(\S+):(\w+)", pairs))
    names = [f"k{cpp.get(name, name.capitalize())}" for name in expression.OPCODES]
    assert re.findall(r"k\w+", body) == names
    assert re.findall(r"int kDepth = (\d+);", source) == [str(expression.DEPTH)]


@pytest.mark.parametrize(
    "text",
    [
        "s0",
        "-3",
        "2*s0 + 1",
        "a - (b - c)",
        "a - b - c",
        "(a + b)*c",
        "a // (b - c + 9)",
        "a // b // c",
        "a*(b // c)",
        "a // b*c",
        "-a**2",
        "(-a)**2",
        "2**(a**b)",
        "(a % b) == 0 and not (c < d)",
        "(a == b) == c",
        "a if b else c if d else e",
        "(a if b else c)*d",
        "max(1, u0)*min(a, b, c)",
        "1 <= a < b",
        "(a & b) | (c ^ d) << 2 >> e",
        "not (a and b) or c > 2",
        "-(-a // b)",
        "a*-1",
    ],
)
def test_expressions_are_shown_as_they_are_meant(text: str) -> None:
    node = expression.parse(text)
    assert expression.parse(expression.show(node)) == node
    names = expression.symbols(node)
    for step in range(1, 6):
        values = {name: (index * 7 + step * 3) % 5 + 1 for index, name in enumerate(names)}
        assert expression.evaluate(node, values) == int(eval(text, {}, values))


def test_expressions_are_shown_in_words_of_the_model() -> None:
    node = expression.parse("(2*s0 + 1) // s1")
    names = {"s0": "x.size(0)", "s1": "n"}
    assert expression.show(node, names) == "(2*x.size(0) + 1) // n"


@pytest.mark.parametrize(
    "text",
    [
        *("", "s0 +", "s0 / 2", "f(s0)", "x.size(0)", "1.5", "'a'", "a[0]", "2**a.b", "a in b"),
        *("max()", "abs(1, 2)", "9223372036854775808", "(" * 300 + "a" + ")" * 300, "~a"),
    ],
)
def test_what_is_no_expression_is_refused(text: str) -> None:
    with pytest.raises(exc.BadExpressionError):
        expression.parse(text)


def test_a_program_that_needs_too_deep_a_stack_is_refused() -> None:
    deep: expression.Node = "a"
    for _ in range(expression.DEPTH - 1):
        deep = Apply("-", ("a", deep))
    assert expression.program(deep, {"a": 0})[-1] == 0
    with pytest.raises(exc.BadExpressionError, match="nested more than"):
        expression.program(Apply("-", ("a", deep)), {"a": 0})


S, T = sympy.Symbol("s", integer=True, positive=True), sympy.Symbol("t", integer=True)


@pytest.mark.parametrize(
    ("expr", "text"),
    [
        (2 * S + 1, "2*s + 1"),
        (S - T - 3, "s - t - 3"),
        (-S, "-s"),
        (S * T * 4, "4*s*t"),
        (functions.FloorDiv(S, 4), "s // 4"),
        (functions.Mod(S + 1, 4), "(s + 1) % 4"),
        (functions.PythonMod(T, 4), "t % 4"),
        (functions.ModularIndexing(S, 4, 3), "s // 4 % 3"),
        (functions.Max(T, 1), "max(1, t)"),
        (S**2, "s**2"),
        (sympy.Eq(functions.Mod(S, 4), 0), "s % 4 == 0"),
        (sympy.And(S < T, sympy.Ne(T, 3)), "s < t and t != 3"),
        (sympy.Not(sympy.Or(S > 3, T > 3)), None),
        (functions.CeilToInt(functions.IntTrueDiv(S, T)), "-(-s // t)"),
        (functions.FloorToInt(functions.IntTrueDiv(S, T)), "s // t"),
    ],
)
def test_torch_s_expressions_have_the_same_value(expr: sympy.Basic, text: str | None) -> None:
    node = symbolic.to_node(expr)
    if text is not None:
        assert expression.show(node) == text
    for s in range(1, 30, 3):
        for t in (1, 3, 4, 8):
            value = expr.subs({S: s, T: t})
            expected = int(bool(value)) if value.is_Boolean else int(value)
            assert expression.evaluate(node, {"s": s, "t": t}) == expected


@pytest.mark.parametrize("expr", [functions.FloatTrueDiv(S, T), S / 2, sympy.sqrt(S), sympy.pi])
def test_what_is_not_of_integers_is_said(expr: sympy.Basic) -> None:
    with pytest.raises(ValueError, match="no operation on integers"):
        symbolic.to_node(expr)


# --- exported programs ------------------------------------------------------------------------


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


def test_inputs_have_the_model_s_names_and_paths(nested_program: ExportedProgram) -> None:
    found = from_export.derive_signature(nested_program)
    assert [(inp.name, inp.path) for inp in found.inputs] == [
        ("x", "args[0]"),
        ("y", "args[1]"),
        ("batch['ids'][0]", "kwargs['batch']['ids'][0]"),
        ("batch['ids'][1]", "kwargs['batch']['ids'][1]"),
        ("n", "kwargs['n']"),
        ("z", "kwargs['z']"),
    ]
    inputs = inputs_by_name(found)
    assert inputs["n"] == ConstantInput("n", "kwargs['n']", 7)
    assert inputs["y"] == TensorInput("y", "args[1]", "bfloat16", (5, 3), (1, 5), "cpu")
    assert len(found.tensors) == 5


def test_variable_arguments_are_numbered() -> None:
    def function(first: torch.Tensor, *rest: Any) -> torch.Tensor:
        return first + rest[0]["a"] + rest[1]

    example = torch.zeros(3)
    found = from_export.derive_signature(export(function, example, {"a": example}, example))
    names = [(inp.name, inp.path) for inp in found.inputs]
    assert names == [("first", "args[0]"), ("rest_0['a']", "args[1]['a']"), ("rest_1", "args[2]")]


def test_derived_sizes_are_expressions_of_the_same_symbol(nested_program: ExportedProgram) -> None:
    found = from_export.derive_signature(nested_program)
    inputs = inputs_by_name(found)
    (symbol,) = found.symbols
    assert found.symbols[symbol] == Range(2, 64)
    assert inputs["x"].shape == (symbol, 10)
    assert inputs["batch['ids'][0]"].shape == (f"2*{symbol}",)
    assert inputs["batch['ids'][1]"].shape == (f"2*{symbol} + 1",)
    # They follow from sizes and range.
    assert found.constraints == found.unchecked == ()


def test_outputs_have_paths_shapes_and_values(nested_program: ExportedProgram) -> None:
    found = from_export.derive_signature(nested_program)
    (symbol,) = found.symbols
    assert found.outputs == (
        TensorOutput("[0]", "float32", (), "cpu"),
        TensorOutput("[1]['twice']", "float32", (symbol, 10), "cpu"),
        ConstantOutput("[1]['none']", None),
        SymbolOutput("[1]['size']", "int", symbol),
        ConstantOutput("[2][0]", 3),
        TensorOutput("[2][1]", "int64", (f"2*{symbol}",), "cpu"),
    )


def test_the_structures_are_those_that_torch_stores(nested_program: ExportedProgram) -> None:
    found = from_export.derive_signature(nested_program)
    program = nested_program.module()
    info = program.graph._codegen.pytree_info
    assert found.in_spec == pytree.treespec_dumps(info.in_spec)
    assert found.out_spec == pytree.treespec_dumps(info.out_spec)


@pytest.mark.parametrize("way", [saved_and_loaded, ExportedProgram.run_decompositions])
def test_a_program_keeps_its_signature(
    nested_program: ExportedProgram, way: Callable[[ExportedProgram], ExportedProgram]
) -> None:
    assert from_export.derive_signature(way(nested_program)) == from_export.derive_signature(
        nested_program
    )


def test_a_model_of_no_arguments() -> None:
    found = from_export.derive_signature(export(lambda: torch.ones(3)))
    assert found.inputs == ()
    assert found.outputs == (TensorOutput("", "float32", (3,), "cpu"),)
    input_checks.render(found)


@dataclasses.dataclass
class Pair:
    """A container that is registered with pytree, and checks what it is given."""

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
    found = from_export.derive_signature(
        export(lambda pair: pair.left + pair.right, Pair(torch.zeros(3), torch.zeros(3)))
    )
    assert [inp.name for inp in found.inputs] == ["pair_left", "pair_right"]


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, Range(0)),
        ({"min": 1}, Range(1)),
        ({"min": 3, "max": 9}, Range(3, 9)),
        ({"min": 0, "max": 9}, Range(0, 9)),
    ],
)
def test_ranges_are_export_s(limits: dict[str, int], expected: Range) -> None:
    program = export(lambda x: x + 1, torch.zeros(4), shapes=({0: Dim("n", **limits)},))
    (found,) = from_export.derive_signature(program).symbols.values()
    assert found == expected


def test_a_size_that_is_derived_alone_can_be_solved_for() -> None:
    base = Dim("base", min=3, max=9)
    found = from_export.derive_signature(
        export(lambda x: x + 1, torch.zeros(12, 1), shapes=({0: 4 * base},))
    )
    for size, right in ((8, False), (12, True), (14, False), (36, True), (40, False)):
        assert accepts(found, [torch.zeros(size, 1)]) == right
    assert "Rule::solve" in input_checks.render(found)


def test_the_least_size_that_is_derived_alone_is_the_user_s() -> None:
    base = Dim("base", min=1, max=9)
    program = export(lambda x: x + 1, torch.zeros(13), shapes=({0: 4 * base + 1},))
    found = from_export.derive_signature(program)
    assert list(found.symbols.values()) == [Range(1, 9)]
    for size in (1, 4, 5, 9, 37, 41):
        right = size % 4 == 1 and 5 <= size <= 37
        assert accepts(found, [torch.zeros(size)]) == right


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
"""A function, its example, its dynamic shapes, and calls of which the guards allow the first two
and perhaps others."""


@pytest.mark.parametrize("way", [lambda program: program, saved_and_loaded])
@pytest.mark.parametrize("name", GUARDED)
def test_guards_hold_exactly_as_in_the_exported_module(
    name: str, way: Callable[[ExportedProgram], ExportedProgram]
) -> None:
    function, example, shapes, calls = GUARDED[name]
    program = way(export(function, *example, shapes=shapes))
    found = from_export.derive_signature(program)
    module = program.module()
    assert found.unchecked == ()
    verdicts = []
    for sizes in calls:
        tensors = [torch.zeros(size) for size in sizes]
        try:
            module(*tensors)
        except (AssertionError, RuntimeError):
            verdicts.append(False)
        else:
            verdicts.append(True)
        assert accepts(found, tensors) == verdicts[-1], sizes
    assert verdicts[:2] == [True, True]
    assert not all(verdicts)
    input_checks.render(found)


def test_asserts_on_sizes_are_checked_before_the_call() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        torch._check(x.shape[0] * 2 < 30)
        return x + 1

    found = from_export.derive_signature(
        export(function, torch.zeros(4), shapes=({0: Dim.DYNAMIC},))
    )
    assert accepts(found, [torch.zeros(14)])
    assert not accepts(found, [torch.zeros(15)])


def test_conditions_on_values_are_the_compiled_code_s_business() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        size = x.max().item()
        torch._check(size < 30)
        return torch.zeros(size)

    found = from_export.derive_signature(export(function, torch.tensor([3, 4])))
    assert found.constraints == found.unchecked == ()
    ((size,),) = [output.shape for output in found.outputs if isinstance(output, TensorOutput)]
    assert str(size).startswith("u")


@pytest.mark.parametrize(
    ("tensor", "right", "wrong"),
    [
        (torch.zeros(10, 4).t(), torch.zeros(7, 5).t(), torch.zeros(5, 7)),
        (torch.zeros(10, 8)[:, ::2], torch.zeros(5, 9)[:, ::3], torch.zeros(8, 5).t()),
        (torch.zeros(3, 1).expand(3, 7), torch.zeros(4, 1).expand(4, 5), torch.zeros(4, 5)),
    ],
)
def test_strides_follow_the_example_s(
    tensor: torch.Tensor, right: torch.Tensor, wrong: torch.Tensor
) -> None:
    shapes = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
    found = from_export.derive_signature(export(lambda x: x * 2, tensor, shapes=shapes))
    assert accepts(found, [tensor])
    assert accepts(found, [right])
    assert not accepts(found, [wrong])
    input_checks.render(found)


def test_a_number_that_varies_is_an_input() -> None:
    found = from_export.derive_signature(
        export(
            lambda x, n: x[:n] * n, torch.zeros(30, 2), 5, shapes=({0: Dim.DYNAMIC}, Dim.DYNAMIC)
        )
    )
    number = inputs_by_name(found)["n"]
    assert isinstance(number, SymbolInput)
    assert number.type == "int"
    assert f"{number.symbol} <= {inputs_by_name(found)['x'].shape[0]}" in found.constraints
    assert accepts(found, [torch.zeros(8, 2), torch.tensor(7)])
    assert not accepts(found, [torch.zeros(8, 2), torch.tensor(9)])


def test_parameters_and_buffers_are_no_inputs() -> None:
    model = torch.nn.BatchNorm1d(4)
    program = torch.export.export(model, (torch.zeros(3, 4),))
    found = from_export.derive_signature(program)
    assert [inp.name for inp in found.inputs] == ["input"]
    assert [output.path for output in found.outputs] == [""]


def test_an_object_is_refused_by_name() -> None:
    program = export(lambda x: x + 1, torch.zeros(3))
    spec = program.graph_signature.input_specs[0]
    spec.arg = torch.export.graph_signature.CustomObjArgument("x", "test.Thing")
    with pytest.raises(exc.UncheckableInputError, match=r"object of class test\.Thing"):
        from_export.derive_signature(program)


# --- guards of the compile --------------------------------------------------------------------


def test_guards_that_come_later_are_added_once() -> None:
    program = export(lambda x: x + 1, torch.zeros(4), shapes=({0: Dim.DYNAMIC},))
    found = from_export.derive_signature(program)
    (size,) = next(iter(program.graph.find_nodes(op="placeholder"))).meta["val"].shape
    environment = size.node.shape_env
    assert bool(size < 1000)
    assert bool(size > -1)
    later = conditions.add_guards(found, environment)
    (symbol,) = found.symbols
    assert later == dataclasses.replace(found, symbols={symbol: Range(2, 999)})
    assert conditions.add_guards(later, environment) == later


def asker(file: str) -> Callable[[Any], bool]:
    """A question about a size as a file of torch's asks it."""
    scope: dict[str, Any] = {}
    exec(compile("def ask(size): return bool(size < 16)", file, "exec"), scope)
    ask: Callable[[Any], bool] = scope["ask"]
    return ask


def test_what_is_only_faster_restricts_no_size() -> None:
    program = export(lambda x: x + 1, torch.zeros(4), shapes=({0: Dim.DYNAMIC},))
    found = from_export.derive_signature(program)
    (size,) = next(iter(program.graph.find_nodes(op="placeholder"))).meta["val"].shape
    environment = size.node.shape_env
    limits = dict(environment.var_to_range)
    with guard_filter.ignore_performance_guards(program):
        assert asker("/python/torch/_subclasses/fake_impls.py")(size)
        assert asker("/python/torch/_inductor/codegen/cpp.py")(size)
        assert environment.guards == []
        assert dict(environment.var_to_range) == limits
        assert conditions.add_guards(found, environment) == found
        assert asker("/python/torch/_inductor/lowering.py")(size)
    assert "evaluate_expr" not in vars(environment)
    (symbol,) = found.symbols
    assert conditions.add_guards(found, environment).symbols == {symbol: Range(2, 15)}


def test_a_condition_that_cannot_be_expressed_is_recorded() -> None:
    symbol = sympy.Symbol("s0", integer=True)
    known = Signature((tensor_input("x", ("s0",)),), (), {"s0": Range(2)})
    condition = sympy.Gt(functions.FloatTrueDiv(symbol, 3), 2)
    found = conditions.add_conditions(known, [condition])
    assert found.constraints == ()
    assert len(found.unchecked) == 1
    assert "s0" in found.unchecked[0]
