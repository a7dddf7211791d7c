"""The C++ checks of an artifact's inputs: every kind of invalid call, and an oracle."""

from __future__ import annotations

import ctypes
import pathlib
import random
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from inductor_ext import exc
from inductor_ext.cpp_wrapper.codegen import input_checks
from inductor_ext.cpp_wrapper.signature import expression
from inductor_ext.cpp_wrapper.signature.signature import (
    ConstantInput,
    Range,
    Signature,
    SymbolInput,
)
from test.support.checks_library import Library, accepts, tensor_input
from test.support.random_signatures import PROPERTIES, random_calls, random_signatures

MIXED = Signature(
    inputs=(
        tensor_input("x", ("s0", 10)),
        tensor_input("batch['ids']", ("s0", "2*s0 + 1"), dtype="int64"),
        ConstantInput("flag", "kwargs['flag']", True),
        SymbolInput("n", "args[1]", "int", "s1"),
        tensor_input("z", ("4*s5",), dtype="complex64"),
        tensor_input("w", (2, 3, 4, 4), (48, 1, 12, 3)),
        tensor_input("v", (2, 6), (9, 1)),
    ),
    outputs=(),
    symbols={"s0": Range(2, 64), "s1": Range(0), "s5": Range(1, 3)},
    constraints=("s0 % 4 == 0", "s1 <= s0", "s0 // s1 > 0"),
)

STRIDED = Signature(
    inputs=(tensor_input("x", ("s0", "s1"), ("s1*s9", "s9")), tensor_input("y", ("s1", "s9 + 1"))),
    outputs=(),
    symbols={"s0": Range(1), "s1": Range(1, 8), "s9": Range()},
)

EXPRESSIONS = Signature(
    inputs=(
        SymbolInput("a", "args[0]", "int", "a"),
        SymbolInput("b", "args[1]", "int", "b"),
        SymbolInput("c", "args[2]", "int", "c"),
    ),
    outputs=(),
    symbols=dict.fromkeys("abc", Range()),
)

FORMULAS = (
    "a + b",
    "a - b",
    "a*b",
    "a // b",
    "a % b",
    "a**3",
    "-a",
    "abs(a)",
    "min(a, b, 3)",
    "max(a, b, 3)",
    "a == b",
    "a != b",
    "a < b",
    "a <= b",
    "a > b",
    "a >= b",
    "a & b",
    "a | b",
    "a ^ b",
    "not a",
    "a > 0 and b > 0",
    "a > 1 and b > a",
    "not a or b < 0",
    "b != 0 and a // b > 1",
    "b == 0 or a % b == 1",
    "(a if b else a - 1)",
    "(7 if b == 0 else a // b)",
    "-(-a // b)",
    "1 - (a - (b - 2*a)) // (b*b)",
)

ONE_DIMENSION = {
    "symbol": Signature((tensor_input("x", ("s",)),), (), {"s": Range(3)}),
    "upper": Signature((tensor_input("x", ("s",)),), (), {"s": Range(None, 4)}),
    "linear": Signature((tensor_input("x", ("3 - 2*s",)),), (), {"s": Range(-9, 1)}),
    "empty": Signature((), ()),
    "quoted": Signature((tensor_input('é"??/\\', (3,)),), ()),
}


def formula(text: str) -> Signature:
    return replace(EXPRESSIONS, constraints=(f"({text}) == c",))


SIGNATURES = [
    MIXED,
    STRIDED,
    *ONE_DIMENSION.values(),
    *map(formula, FORMULAS),
    Signature(tuple(tensor_input(f"x{i}", (8, 16)) for i in range(10)), ()),
    *random_signatures(),
]

Check = Callable[..., str]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(SIGNATURES, tmp_path_factory.mktemp("checks"))


def number_of(signature: Signature) -> int:
    return SIGNATURES.index(signature)


def right() -> list[torch.Tensor]:
    """A valid call of MIXED."""
    return [
        torch.zeros(8, 10),
        torch.zeros(8, 17, dtype=torch.int64),
        torch.tensor(3),
        torch.zeros(8, dtype=torch.complex64),
        torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.zeros(2, 9)[:, :6],
    ]


def test_a_right_call_passes(library: Library) -> None:
    assert library(0, right()) == ""


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, None, "input 'x' is a null handle, but the model takes a tensor of dtype float32"),
        (
            0,
            torch.zeros(8, 10, dtype=torch.float64),
            (
                "input 'x' has dtype float64, but the model takes float32: "
                "call .to(torch.float32) on it"
            ),
        ),
        (
            0,
            torch.zeros(8, 10, 2),
            (
                "input 'x' has shape (8, 10, 2), of 3 dimensions, but the model takes "
                "(2 to 64, 10), of 2"
            ),
        ),
        (
            0,
            torch.zeros(8),
            "input 'x' has shape (8,), of 1 dimension, but the model takes (2 to 64, 10), of 2",
        ),
        (0, torch.zeros(8, 11), "input 'x': dimension 1 is 11, but the model takes 10"),
        (0, torch.zeros(65, 10), "input 'x': dimension 0 is 65, but the model takes 2 to 64"),
        (
            0,
            torch.zeros(1, 10),
            (
                "input 'x': dimension 0 is 1, but the model takes 2 to 64 (to allow less, "
                "export with torch.export.Dim(name, min=0) for this dimension)"
            ),
        ),
        (
            0,
            torch.zeros(10, 8).t(),
            ("input 'x' has strides (1, 8), but the model takes (10, 1): call .contiguous() on it"),
        ),
        (
            0,
            torch.zeros(8, 10).to_sparse(),
            (
                "input 'x' is of layout sparse_coo, but the model takes strided tensors: "
                "call .to_dense() on it"
            ),
        ),
        (
            0,
            torch.zeros(8, 10, device="meta"),
            "input 'x' is on meta, but the model takes cpu: call .to('cpu') on it",
        ),
        (
            0,
            torch.zeros(8, 10, dtype=torch.complex64).conj().imag,
            (
                "input 'x' has strides (20, 2), but the model takes (10, 1): "
                "call .contiguous() on it"
            ),
        ),
        (
            0,
            torch._neg_view(torch.zeros(81))[1:].view(8, 10),
            "input 'x' is a lazy negative: call .resolve_neg() on it",
        ),
        (
            1,
            torch.zeros(7, 17, dtype=torch.int64),
            (
                "input 'batch['ids']': dimension 0 is 7, but it must equal dimension 0 of 'x', "
                "which is 8"
            ),
        ),
        (
            1,
            torch.zeros(8, 16, dtype=torch.int64),
            (
                "input 'batch['ids']': dimension 1 is 16, but it must be 2*x.size(0) + 1, "
                "which is 17"
            ),
        ),
        (
            1,
            torch.zeros(17, 8, dtype=torch.int64).t(),
            (
                "input 'batch['ids']' has strides (1, 8), but the model takes (17, 1): "
                "call .contiguous() on it"
            ),
        ),
        (2, torch.tensor(-1), "input 'n' is -1, but the model takes 0 or more"),
        (
            2,
            torch.tensor(9),
            "input 'n': the model requires n <= x.size(0), but n is 9, x.size(0) is 8",
        ),
        (
            2,
            torch.tensor(0),
            ("input 'x': the model requires x.size(0) // n > 0, but x.size(0) is 8, n is 0"),
        ),
        (2, torch.tensor(3.0), "input 'n' has dtype float32, but the model takes int64"),
        (
            2,
            torch.tensor([3]),
            "input 'n' has shape (1,), of 1 dimension, but the model takes (), of 0",
        ),
        (
            3,
            torch.zeros(7, dtype=torch.complex64),
            "input 'z': dimension 0 is 7, but it must be 4*s5 for a whole number s5",
        ),
        (
            3,
            torch.zeros(16, dtype=torch.complex64),
            "input 'z': dimension 0 is 16, but z.size(0) // 4 must be 1 to 3",
        ),
        (
            3,
            torch.zeros(8, dtype=torch.complex64).conj(),
            "input 'z' is a lazy conjugate: call .resolve_conj() on it",
        ),
        (
            4,
            torch.zeros(2, 3, 4, 4),
            (
                "input 'w' has strides (48, 16, 4, 1), but the model takes (48, 1, 12, 3): "
                "call .contiguous(memory_format=torch.channels_last) on it"
            ),
        ),
        (
            5,
            torch.zeros(2, 6),
            (
                "input 'v' has strides (6, 1), but the model takes (9, 1): copy it into "
                "torch.empty_strided((2, 6), (9, 1), ...)"
            ),
        ),
    ],
)
def test_an_error_names_the_input_and_both_values(
    library: Library, place: int, value: torch.Tensor | None, message: str
) -> None:
    call: list[torch.Tensor | None] = [*right()]
    call[place] = value
    assert library(0, call) == message


def test_the_number_of_inputs_is_checked_before_they_are_read(library: Library) -> None:
    assert library(0, right()[:2]) == "the model takes 6 tensors, but was called with 2"
    empty = number_of(ONE_DIMENSION["empty"])
    assert library(empty, []) == ""
    assert library(empty, right()[:1]) == "the model takes 0 tensors, but was called with 1"


def test_a_dimension_has_to_be_a_multiple(library: Library) -> None:
    call = right()
    call[0], call[1] = torch.zeros(6, 10), torch.zeros(6, 13, dtype=torch.int64)
    message = "input 'x': dimension 0 is 6, but it must be a multiple of 4"
    assert library(0, call) == message


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 6, 7])
def test_ranges_without_an_end_and_linear_sizes(library: Library, size: int) -> None:
    tensor = [torch.zeros(size)]
    above = library(number_of(ONE_DIMENSION["symbol"]), tensor)
    assert above == (
        "" if size >= 3 else f"input 'x': dimension 0 is {size}, but the model takes 3 or more"
    )
    below = library(number_of(ONE_DIMENSION["upper"]), tensor)
    assert below == (
        "" if size <= 4 else f"input 'x': dimension 0 is {size}, but the model takes 4 or less"
    )
    linear = library(number_of(ONE_DIMENSION["linear"]), tensor)
    assert (linear == "") == (size % 2 == 1)


def test_names_are_written_unchanged(library: Library) -> None:
    message = library(number_of(ONE_DIMENSION["quoted"]), [torch.zeros(4)])
    assert message == "input 'é\"??/\\': dimension 0 is 4, but the model takes 3"


def test_unused_strides_are_not_checked(library: Library) -> None:
    assert library(0, [torch.zeros(8, 10), *right()[1:]]) == ""
    one = torch.empty_strided((3, 1), (2, 77))
    other = torch.empty_strided((1, 3), (99, 1))
    assert accepts(STRIDED, [one, other]) == (library(1, [one, other]) == "")
    strided = torch.zeros(3, 4, 2)[:, :, 0]
    assert library(1, [strided, torch.zeros(4, 3)]) == ""
    assert "'y': dimension 1 is 4, but it must be x.stride(0) // x.size(1) + 1, which is 3" in (
        library(1, [strided, torch.zeros(4, 4)])
    )


@pytest.mark.parametrize("text", FORMULAS)
def test_formulas_have_python_semantics(library: Library, text: str) -> None:
    node = expression.parse(text)
    which = number_of(formula(text))
    for a in range(-7, 8):
        for b in range(-3, 4):
            try:
                expected = int(eval(text, {"a": a, "b": b}))
            except ZeroDivisionError:
                with pytest.raises(ZeroDivisionError):
                    expression.evaluate(node, {"a": a, "b": b})
                call = [torch.tensor(a), torch.tensor(b), torch.tensor(0)]
                assert "the model requires" in library(which, call)
                continue
            assert expression.evaluate(node, {"a": a, "b": b}) == expected
            call = [torch.tensor(a), torch.tensor(b), torch.tensor(expected)]
            assert library(which, call) == ""
            call[2] += 1
            assert "the model requires" in library(which, call)


@pytest.mark.parametrize("text", ["a + b", "a*b", "a - b", "a // b", "a**3", "-a", "abs(a)"])
def test_values_beyond_64_bits_are_rejected(library: Library, text: str) -> None:
    ends = [-(1 << 63), -(1 << 62) - 1, -1, 0, 1, (1 << 62) + 1, (1 << 63) - 1]
    which = number_of(formula(text))
    for a in ends:
        for b in ends:
            if "/" in text and b == 0:
                continue
            exact = int(eval(text, {"a": a, "b": b}))
            wrapped = (exact + (1 << 63)) % (1 << 64) - (1 << 63)
            call = [torch.tensor(value) for value in (a, b, wrapped)]
            fits = exact == wrapped or text not in FORMULAS
            assert (library(which, call) == "") == fits, (a, b)


def test_random_calls_agree_with_the_oracle(library: Library) -> None:
    generator = random.Random(1)
    right = wrong = 0
    for which in range(len(SIGNATURES) - PROPERTIES, len(SIGNATURES)):
        for call in random_calls(SIGNATURES[which], generator):
            expected = accepts(SIGNATURES[which], call)
            message = library(which, call)
            assert (message == "") == expected, (SIGNATURES[which], call, message)
            right, wrong = right + expected, wrong + (not expected)
    assert right > 2000
    assert wrong > 2000


def test_a_tensor_costs_less_than_a_microsecond(library: Library) -> None:
    which = len(SIGNATURES) - PROPERTIES - 1
    tensors = [torch.zeros(8, 16) for _ in range(10)]
    best = 1.0
    for _ in range(20):
        start = time.perf_counter()
        assert library(which, tensors, repetitions=2000) == ""
        best = min(best, (time.perf_counter() - start) / 2000 / len(tensors))
    assert best < 1e-6


def test_dtypes_and_devices_have_the_numbers_of_the_c_interface() -> None:
    shim = ctypes.CDLL(str(pathlib.Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    checked = 0
    for number, name in enumerate(input_checks.DTYPES):
        function = getattr(shim, f"aoti_torch_dtype_{name}", None)
        if function is not None:
            assert function() == number
            checked += 1
    assert checked >= 20
    for name, number in input_checks.DEVICE_TYPES.items():
        assert getattr(shim, f"aoti_torch_device_type_{name}")() == number


def test_an_unexpected_dtype_is_named(library: Library) -> None:
    for name in input_checks.DTYPES:
        dtype = getattr(torch, name, None)
        if dtype is None or name.startswith("q") or name == "float32":
            continue
        tensor = torch.zeros(8, 10 * dtype.itemsize, dtype=torch.uint8).view(dtype)
        message = library(0, [tensor, *right()[1:]])
        assert message.startswith(f"input 'x' has dtype {name}, but the model takes float32")


@pytest.mark.parametrize(
    ("signature", "complaint"),
    [
        (
            Signature((tensor_input("x", ("s*t",)),), ()),
            "s*t depends on s, which cannot be derived from an input",
        ),
        (Signature((tensor_input("x", ("s // 2",)),), ()), "s // 2 depends on s"),
        (Signature((tensor_input("x", (3,)),), (), {}, ("u > 3",)), "u > 3 depends on u"),
        (
            Signature((tensor_input("x", (3,), dtype="float31"),), ()),
            "its dtype, float31, is not supported",
        ),
        (
            Signature((tensor_input("x", (3,), device="abacus"),), ()),
            "its device, abacus, is not supported",
        ),
    ],
)
def test_signatures_that_cannot_be_checked_are_rejected(
    signature: Signature, complaint: str
) -> None:
    with pytest.raises(exc.UncheckableInputError) as raised:
        input_checks.render(signature)
    assert complaint in str(raised.value)
    assert "aot_check_inputs=False" in str(raised.value)


def test_a_device_index_is_checked_if_there_are_several() -> None:
    one = Signature((tensor_input("x", (3,), device="cuda:1"),), ())
    both = Signature((tensor_input("y", (3,), device="cuda:0"), *one.inputs), ())
    assert "1, 6, 1, -1, Number::none" in input_checks.render(one)
    assert "1, 6, 1, 1, Number::none" in input_checks.render(both)


@pytest.mark.gpu
def test_tensors_must_be_on_the_device_of_the_model(tmp_path: pathlib.Path) -> None:
    inputs = (tensor_input("x", (3,), device="cuda:0"), tensor_input("y", (3,)))
    check = Library([Signature(inputs, ())], tmp_path)
    host, device = torch.zeros(3), torch.zeros(3, device="cuda")
    assert check(0, [device, host]) == ""
    assert check(0, [host, host]) == (
        "input 'x' is on cpu, but the model takes cuda: call .to('cuda') on it"
    )
    assert check(0, [device, device]) == (
        "input 'y' is on cuda, but the model takes cpu: call .to('cpu') on it"
    )
    assert check(0, [device, host], device_index=0) == ""
    assert check(0, [device, host], device_index=1) == (
        "input 'x' is on cuda:0, but the model takes cuda:1: call .to('cuda:1') on it"
    )
