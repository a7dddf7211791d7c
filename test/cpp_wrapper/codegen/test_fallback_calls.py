"""Operators that generated C++ calls by name: every kind of argument and result, and their errors.

Many calls are in one model, since most of a compile's time does not depend on their number.
"""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.export import Dim

import inductor_ext
from inductor_ext import exc
from inductor_ext.cpp_wrapper.codegen import fallback_arguments, shim_calls
from test.support import aot_util, compile_util

_NAMESPACE = "fallback_calls_test"

_OPERATORS: dict[str, Callable[..., Any]] = {
    "number(Tensor x, Scalar s=2) -> Tensor": lambda x, s=2: x + s,
    "optional(Tensor x, *, Scalar? s=None, int? n=None) -> Tensor": (
        lambda x, s=None, n=None: x + (5 if s is None else s) + (7 if n is None else n)
    ),
    "numbers(Tensor x, Scalar[] s, float[]? f=None) -> Tensor": (
        lambda x, s, f=None: x + sum(s) + (100 if f is None else sum(f))
    ),
    "sizes(Tensor x, SymInt[] s, int[2] p=1, SymInt k=3) -> Tensor": (
        lambda x, s, p=(1, 1), k=3: x + sum(s) * k + p[0] * 10 + p[1]
    ),
    "text(Tensor x, str s, *, str[]? t=None, bool b=False) -> Tensor": (
        lambda x, s, t=None, b=False: x + sum(map(ord, s + "".join(t or ["A"]))) + 1000 * b
    ),
    "place(Tensor x, Device d, ScalarType t, Layout? f=None, MemoryFormat? m=None) -> Tensor": (
        lambda x, d, t, f=None, m=None: x.to(device=d, dtype=t) + (0 if m is None else 1)
    ),
    "several(Tensor[] x, Tensor? y, Tensor?[] z) -> (Tensor, Tensor[])": (
        lambda x, y, z: (
            sum(x, torch.zeros(3)) + (1 if y is None else y),
            [t * 2 for t in z if t is not None],
        )
    ),
    "add_in_place(Tensor(a!) x, Scalar s, Tensor(b!)? y=None) -> ()": (
        lambda x, s, y=None: (x.add_(s), y is None or y.mul_(2), None)[2]
    ),
}


def _fail(x: torch.Tensor, s: Any, name: str, values: list[float]) -> torch.Tensor:
    raise ValueError("the reason")


def _count(x: torch.Tensor) -> Any:
    return torch.library.get_ctx().new_dynamic_size()


@pytest.fixture(scope="module", autouse=True)
def operators() -> Iterator[Any]:
    """The operators of the tests: `torch.ops.fallback_calls_test`."""
    library = torch.library.Library(_NAMESPACE, "DEF")
    schema = "fail(Tensor x, Scalar s, str name, float[] values) -> Tensor"
    fakes = {
        **_OPERATORS,
        schema: lambda x, s, name, values: x + 1,
        "count(Tensor x) -> SymInt": _count,
    }
    for schema, fake in fakes.items():
        name = schema.partition("(")[0]
        library.define(schema)
        library.impl(name, _fail if name == "fail" else fake, "CPU")
        torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=library)
    yield torch.ops.fallback_calls_test
    library._destroy()


def _call_by_executor(
    x: torch.Tensor, i: torch.Tensor, z: torch.Tensor, n: torch.Tensor
) -> list[Any]:
    """Calls whose arguments torch's proxy executor can pass."""
    ops = torch.ops.fallback_calls_test
    rows = n.shape[0]
    return [
        *(ops.number(i), ops.number(i, True), ops.number(x, 0.5), ops.number(i > 1, False)),
        *(ops.number(i, rows * 2 + 1), ops.number(i, s=2**62 + 1)),
        *(ops.optional(i), ops.optional(i, s=True), ops.optional(i, n=3, s=1.5)),
        *(ops.optional(x, s=None, n=None), ops.optional(i, s=rows)),
        *(ops.numbers(i, [1, rows]), ops.numbers(i, [1.5, 2.5], f=[1.0, 2.0])),
        *(ops.numbers(i, [True, True], []), ops.sizes(i, [rows, 2]), ops.sizes(i, [1], 4, k=rows)),
        *(ops.text(i, 'a"b\\\n%'), ops.text(i, "", t=["x", '"'], b=True)),
        ops.place(x, torch.device("cpu"), torch.bfloat16, torch.strided, torch.channels_last),
        *(z - z.conj(), torch.addmm(z, z.mH, z), torch.baddbmm(z[None], z[None], z[None], beta=2)),
        *(z / 2, z - 1j, z[0, 0] + 1j, 1j - z, z.imag - 1, torch.lerp(z, z * 2, 0.5)),
        *(torch.nn.functional.linear(z, z, z[0]), z.conj().imag * 2, torch.view_as_real(z) + 1),
        *(i**40, 3**i, torch.addmm(i[None], i[None], i[:, None] * i, alpha=2)),
        torch.where(x[0] > 0, x[0].half(), 2.0),
    ]


def _call_dispatcher(
    x: torch.Tensor, i: torch.Tensor, z: torch.Tensor, n: torch.Tensor
) -> list[Any]:
    """Calls with arguments that torch's proxy executor cannot pass, and all kinds of results."""
    ops = torch.ops.fallback_calls_test
    rows = n.shape[0]
    first = n[0].item()
    changed, other, complex_ = x.clone(), x + 1, z.clone()
    ops.add_in_place(changed, True, other)
    ops.add_in_place(complex_, 1j)
    total, doubles = ops.several([x, x], x, [None, x])
    empty, more = ops.several([], None, [x, x])
    return [
        *(changed, other, complex_, total, empty, *doubles, *more),
        *(ops.number(x, 1 + 2j), ops.number(i, rows / 2), ops.number(i, first)),
        *(ops.number(i, rows > 3), ops.text(x, "", b=rows > 3)),
        *(ops.number(x, float("inf")), ops.number(x, float("nan")), ops.numbers(x, [])),
        *(ops.numbers(i, [1, 2.5, 3j]), ops.numbers(i, [True, rows, first], [float("-inf")])),
        *(ops.sizes(i, []), ops.sizes(i, [], [1, 2], rows)),
        *(torch.full((3,), 1j), torch.full_like(z, 2), z.reciprocal(), z ** (1 + 1j)),
        *(z == 1j, z.masked_fill(z.real > 0, 1j), torch.where(z.real > 0, z, 1j)),
        *(torch.sub(z, z, alpha=2j), torch.addmm(z, z, z, alpha=1j), z.clone().fill_(2j)),
    ]


def _inputs() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return (
        torch.rand(3) + 0.25,
        torch.arange(3),
        torch.randn(3, 3, dtype=torch.complex64),
        torch.rand(5),
    )


_DYNAMIC = (None, None, None, {0: Dim.DYNAMIC})


def _check_package(function: Callable[..., Any], path: pathlib.Path) -> None:
    model = aot_util.as_module(function)
    program = torch.export.export(model, _inputs(), dynamic_shapes=_DYNAMIC)
    package = inductor_ext.aoti_compile_and_package(program, package_path=str(path / "m.pt2"))
    with torch.no_grad():
        aot_util.assert_same(inductor_ext.load(package)(*_inputs()), function(*_inputs()))


def test_package_passes_arguments_through_executor(tmp_path: pathlib.Path) -> None:
    _check_package(_call_by_executor, tmp_path)


def test_package_passes_other_arguments_to_dispatcher(tmp_path: pathlib.Path) -> None:
    _check_package(_call_dispatcher, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("function", [_call_by_executor, _call_dispatcher])
def test_compile_with_cpp_wrapper(function: Callable[..., Any]) -> None:
    compiled = torch.compile(
        function, backend="inductor_ext", fullgraph=True, options={"cpp_wrapper": True}
    )
    inputs = _inputs()
    torch._dynamo.mark_dynamic(inputs[3], 0)
    with torch.no_grad(), torch._dynamo.config.patch(capture_scalar_outputs=True):
        actual = compiled(*inputs)
        aot_util.assert_same(actual, function(*_inputs()))


@pytest.mark.parametrize(
    ("call", "described"),
    [
        (
            lambda ops, x: ops.fail(x, True, 'n"', [1.5]),
            f"{_NAMESPACE}::fail(x=float32[2, 2] from input 'x', s=True, name='n\"', values=[1.5])",
        ),
        (
            lambda ops, x: ops.fail(x.t(), 1j, "n", []),
            f"{_NAMESPACE}::fail(x=float32[2, 2] from input 'x', s=1j, name='n', values=[])",
        ),
        (
            lambda _, x: x.masked_scatter(x > 0, x[0]),
            (
                "aten::masked_scatter(float32[2, 2] from input 'x', bool[2, 2], "
                "float32[2] from input 'x')"
            ),
        ),
        (
            lambda _, x: x.scatter_reduce(0, (x * 5).long(), x, "amax"),
            "aten::scatter_reduce_(float32[2, 2], 0, int64[2, 2], float32[2, 2] from input 'x')",
        ),
        (
            lambda _, x: x.long().index_put(((x[0] * 5).long(),), x[0].long(), accumulate=True),
            "aten::index_put_(int64[2, 2], int64[2], int64[2], 1)",
        ),
    ],
    ids=["executor", "dispatcher", "shim", "scatter", "index_put"],
)
def test_error_names_operator_arguments_and_reason(
    operators: Any, tmp_path: pathlib.Path, call: Callable[..., Any], described: str
) -> None:
    x = torch.ones(2, 2)
    program = torch.export.export(aot_util.as_module(lambda x: call(operators, x)), (x,))
    package = inductor_ext.aoti_compile_and_package(program, package_path=str(tmp_path / "m.pt2"))
    model = inductor_ext.load(package)
    with pytest.raises(exc.ArtifactRunError) as raised:
        model(x)
    message = str(raised.value)
    assert f"The operator {described} failed: " in message
    if compile_util.TORCH >= (2, 13):
        reasons = ("the reason", "Number of elements", "out of bounds")
        assert any(reason in message for reason in reasons)


def test_other_schemas_are_refused_by_name(operators: Any, tmp_path: pathlib.Path) -> None:
    model = aot_util.as_module(lambda x: x.sum() + operators.count(x))
    program = torch.export.export(model, (torch.ones(3),))
    with pytest.raises(Exception, match=f"Cannot generate C.. for a call of {_NAMESPACE}::count"):
        inductor_ext.aoti_compile_and_package(program, package_path=str(tmp_path / "m.pt2"))


def test_arguments_are_complete_and_of_the_schemas_type(operators: Any) -> None:
    complete = fallback_arguments.complete
    assert complete(operators.optional.default, [None], {"s": True}) == [None, True, None]
    assert complete(operators.optional.default, [None], {"n": True}) == [None, None, 1]
    assert complete(operators.numbers.default, [None, (1, 2j), [1, 2]], {}) == [
        *(None, [1, 2j], [1.0, 2.0]),
    ]
    assert complete(operators.sizes.default, [None, [], 4], {}) == [None, [], [4, 4], 3]
    values = complete(torch.ops.aten.where.ScalarOther, [None, None, 1j], {})
    assert values == [None, None, 1j]
    (_, number) = complete(torch.ops.aten.eq.Tensor, [None, 2], {})
    assert number == fallback_arguments.ScalarTensor(2, torch.int64)


@pytest.mark.parametrize("text", ['a"b', "\\n", "??/", "\n\t\0", "\u00fc1", ""])
def test_literals_are_what_a_compiler_reads(text: str) -> None:
    literal = shim_calls.quote(text)
    assert literal.isascii()
    assert "?" not in literal
    # Python reads octal escapes as C++ does.
    assert ast.literal_eval(literal).encode("latin-1").decode() == text
