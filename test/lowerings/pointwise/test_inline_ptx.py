"""Math functions as inline PTX: which compiles get them, their accuracy, and what they cost."""

from __future__ import annotations

import functools
import math
import re
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch._inductor.config
from torch.nn import functional

pytest.importorskip("triton")

from inductor_ext import config
from inductor_ext.hooks import scope
from inductor_ext.lowerings.pointwise import erf, inline_ptx, tanh
from test.support import fake_cuda, kernel_compiler, kernel_interpreter

SIZE = 1 << 16

on_a_stand_in = pytest.mark.skipif(
    torch.cuda.is_available(), reason="lowered on a stand-in for a GPU"
)


class Case(NamedTuple):
    function: inline_ptx.PtxFunction
    operator: Callable[[torch.Tensor], torch.Tensor]
    gelu: Callable[[torch.Tensor], torch.Tensor]
    """The form of GELU that calls the operator."""
    instructions: float
    """Limit for the instructions of GELU, over those of Inductor."""


CASES = {
    "erf": Case(erf.FUNCTION, torch.erf, functional.gelu, 0.7),
    "tanh": Case(
        tanh.FUNCTION, torch.tanh, functools.partial(functional.gelu, approximate="tanh"), 0.85
    ),
}

each_function = pytest.mark.parametrize("name", CASES)


def lowered(
    name: str, *, ours: bool = True, dtype: torch.dtype = torch.bfloat16
) -> fake_cuda.Lowered:
    """GELU, lowered by the extension or by Inductor."""
    if not ours:
        return fake_cuda.lower(CASES[name].gelu, ((SIZE,), dtype))
    with scope.compile_scope(config.snapshot({})):
        return fake_cuda.lower(CASES[name].gelu, ((SIZE,), dtype))


def evaluated(name: str, x: torch.Tensor) -> torch.Tensor:
    """Evaluate the instructions: a multiply-add rounds once, to float32."""
    known = {"$1": x}

    def value(name: str) -> torch.Tensor:
        if not name.startswith("0f"):
            return known[name]
        (number,) = struct.unpack(">f", bytes.fromhex(name[2:]))
        return torch.full_like(x, number)

    lines = CASES[name].function.asm.strip("{} ").split(";")
    for line in filter(None, map(str.strip, lines)):
        operation, to, *names = line.replace(",", "").split()
        if operation == ".reg":
            continue
        known[to] = INSTRUCTIONS[operation](*map(value, names))
    return known["$0"]


INSTRUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "abs.f32": torch.abs,
    "add.f32": torch.add,
    "copysign.f32": lambda sign, size: torch.copysign(size, sign),
    "ex2.approx.ftz.f32": torch.exp2,
    "fma.rn.f32": lambda a, b, c: (a.double() * b.double() + c.double()).float(),
    "mov.f32": torch.clone,
    "mul.f32": torch.mul,
    "rcp.approx.ftz.f32": torch.reciprocal,
    "selp.f32": lambda one, other, first: torch.where(first, one, other),
    "setp.lt.f32": torch.lt,
    "sub.f32": torch.sub,
}


@each_function
def test_errors_are_below_two_units_in_the_last_place(name: str) -> None:
    x = torch.cat((torch.linspace(-12, 12, 1_000_001), torch.logspace(-37, 1, 100_001)))
    exact = CASES[name].operator(x.double())
    above = torch.nextafter(exact.abs().float(), torch.tensor(math.inf))
    unit = above.double() - exact.abs().float().double()
    errors = (evaluated(name, x).double() - exact).abs() / unit
    assert errors.max() < 2


@each_function
@pytest.mark.parametrize(
    ("x", "value"),
    [(0.0, 0.0), (-0.0, -0.0), (12.0, 1.0), (-1e30, -1.0), (math.inf, 1.0), (-math.inf, -1.0)],
)
def test_large_values_have_the_limits(name: str, x: float, value: float) -> None:
    result = float(evaluated(name, torch.tensor(x)))
    assert result == value
    assert math.copysign(1, result) == math.copysign(1, value)


@each_function
def test_nan_stays_nan(name: str) -> None:
    assert evaluated(name, torch.tensor(math.nan)).isnan()


@on_a_stand_in
@each_function
def test_the_kernel_computes_gelu(name: str) -> None:
    x = torch.linspace(-8, 8, SIZE)
    code = lowered(name, dtype=torch.float32).code
    assert f"libdevice.{name}(" not in code
    # The interpreter cannot execute PTX.
    formula = {"erf": r"tl.erf(\1)", "tanh": r"(2 * tl.sigmoid(2 * \1) - 1)"}[name]
    code, times = re.subn(r"tl.inline_asm_elementwise\('{[^\[]*\[(\w+)\].*\)", formula, code)
    assert times == 1
    result = kernel_interpreter.interpret_modules({"gelu": (code, [x])})["gelu"]
    expected = CASES[name].gelu(x.double()).float()
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=5e-7)


@on_a_stand_in
@each_function
def test_inductor_keeps_its_own(name: str) -> None:
    ((_, source),) = lowered(name, ours=False).kernels().items()
    assert f"libdevice.{name}(" in source


@on_a_stand_in
@each_function
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float16_is_computed_in_float32(name: str, dtype: torch.dtype) -> None:
    operator = CASES[name].operator
    with scope.compile_scope(config.snapshot({})):
        result = fake_cuda.lower(lambda x: operator(x) + 1, ((SIZE,), dtype))
    ((_, source),) = result.kernels().items()
    assert f"libdevice.{name}(" not in source
    ((argument,),) = (
        re.findall(r"'=f,f', \[(\w+)\]", line) for line in source.splitlines() if "abs.f32" in line
    )
    assert re.search(rf"{argument} = \w+\.to\(tl\.float32\)", source)
    # Like all values of Inductor in float16, it is rounded when it is stored.
    assert ".to(tl.bfloat16)" not in source
    assert ".to(tl.float16)" not in source


@on_a_stand_in
@each_function
def test_wider_dtypes_are_left_to_inductor(name: str) -> None:
    with scope.compile_scope(config.snapshot({})):
        result = fake_cuda.lower(CASES[name].operator, ((SIZE,), torch.float64))
    assert all(f"libdevice.{name}(" in source for source in result.kernels().values())


@on_a_stand_in
def test_integers_are_left_to_inductor() -> None:
    with scope.compile_scope(config.snapshot({})):
        result = fake_cuda.lower(torch.tanh, ((SIZE,), torch.int32))
    assert all("libdevice.tanh(" in source for source in result.kernels().values())


CUDA_MATH = ["emulate_precision_casts"]
if hasattr(torch._inductor.config.eager_numerics, "use_pytorch_libdevice"):
    CUDA_MATH.append("eager_numerics.use_pytorch_libdevice")


@on_a_stand_in
@each_function
@pytest.mark.parametrize("flag", CUDA_MATH)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bitwise_cuda_results_use_inductors_kernel(
    name: str, flag: str, dtype: torch.dtype
) -> None:
    with torch._inductor.config.patch({flag: True}):
        ours, inductor = (
            lowered(name, ours=value, dtype=dtype).kernels() for value in (True, False)
        )
    assert ours == inductor
    (source,) = ours.values()
    assert f"libdevice.{name}(" in source
    # Every float16 op rounds, as in eager mode.
    rounds = flag == "emulate_precision_casts" and dtype == torch.bfloat16
    assert (".to(tl.bfloat16)" in source) == rounds


@on_a_stand_in
@each_function
def test_it_takes_fewer_instructions_than_inductors(name: str) -> None:
    counts = []
    for ours in (True, False):
        ((kernel, source),) = lowered(name, ours=ours).kernels().items()
        counts.append(instructions(kernel, source))
    assert len(counts[0]) < CASES[name].instructions * len(counts[1])
    # Behind the end of a kernel is a loop that nothing reaches.
    assert sum("BRA" in text for text in counts[0]) == 1


def instructions(name: str, source: str) -> list[str]:
    """Instructions in SASS of a pointwise kernel, which handles 8 elements a thread."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    with tempfile.TemporaryDirectory() as folder:
        kernel = kernel_interpreter.load(name, source, Path(folder))
        signature = dict.fromkeys(kernel.arg_names, "*bf16")
        signature |= {"xnumel": "i32", "XBLOCK": "constexpr"}
        pointers = [i for i, name in enumerate(kernel.arg_names) if signature[name][0] == "*"]
        binary = triton.compile(
            ASTSource(
                kernel,
                signature,
                {"XBLOCK": 1024},
                {(i,): [["tt.divisibility", 16]] for i in pointers},
            ),
            target=GPUTarget("cuda", 90, 32),
            options={"num_warps": 4},
        )
    sass = kernel_compiler.cuobjdump(binary.asm["cubin"], "-sass")
    found = re.findall(r"^\s+/\*[0-9a-f]{4}\*/\s+([^;]*);", sass, re.MULTILINE)
    return [text for text in found if text.split()[0] != "NOP"]


@pytest.mark.gpu
@each_function
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_with_rounding_ops_gpu_bits_are_inductors(name: str, dtype: torch.dtype) -> None:
    """The extension compiles to Inductor's code; float16 results equal eager mode's."""
    operator = CASES[name].operator

    def function(x: torch.Tensor) -> torch.Tensor:
        return operator(x) * 3 + 1

    x = torch.linspace(-5, 5, SIZE, device="cuda").to(dtype)
    with torch._inductor.config.patch(emulate_precision_casts=True, force_disable_caches=True):
        torch._dynamo.reset()
        inductor = torch.compile(function, backend="inductor")(x)
        torch._dynamo.reset()
        extension = torch.compile(function, backend="inductor_ext")(x)
    assert torch.equal(extension, inductor)
    if dtype != torch.float32:
        # Triton brings a library of its own, whose float32 may differ in the last bit: of a half
        # that shows where it is next to the middle of two.
        different = (extension != function(x)).double().mean().item()
        assert different < 1e-3
