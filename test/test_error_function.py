"""The error function of Triton kernels: which compiles get it, its accuracy, and what it costs."""

from __future__ import annotations

import math
import re
import tempfile
from pathlib import Path

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton")

from inductor_ext import activation, config
from inductor_ext.lowerings import error_function
from test import fake_cuda, kernel_util

SIZE = 1 << 16

on_a_stand_in = pytest.mark.skipif(
    torch.cuda.is_available(), reason="lowered on a stand-in for a GPU"
)


def lowered(*, ours: bool = True, dtype: torch.dtype = torch.bfloat16) -> fake_cuda.Lowered:
    if not ours:
        return fake_cuda.lower(functional.gelu, ((SIZE,), dtype))
    with activation._scope(config.snapshot({})):
        return fake_cuda.lower(functional.gelu, ((SIZE,), dtype))


def evaluated(x: torch.Tensor) -> torch.Tensor:
    """The formulas as a GPU evaluates them: each multiply-add is rounded once, to float32."""

    def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | float) -> torch.Tensor:
        return (a.double() * b.double() + c).float()

    def polynomial(coefficients: tuple[float, ...], x: torch.Tensor) -> torch.Tensor:
        value = torch.full_like(x, coefficients[-1])
        for coefficient in reversed(coefficients[:-1]):
            value = fma(value, x, coefficient)
        return value

    size = x.abs()
    inner = fma(polynomial(error_function.INNER, x * x), x, x.double())
    outer = 1 - torch.exp2(polynomial(error_function.OUTER, size) * size)
    return torch.where(size < error_function.BORDER, inner, torch.copysign(outer, x))


def test_errors_are_below_two_units_in_the_last_place() -> None:
    x = torch.cat((torch.linspace(-6, 6, 1_000_001), torch.logspace(-37, 1, 100_001)))
    exact = torch.erf(x.double())
    above = torch.nextafter(exact.abs().float(), torch.tensor(math.inf))
    unit = above.double() - exact.abs().float().double()
    errors = (evaluated(x).double() - exact).abs() / unit
    assert errors.max() < 2


@pytest.mark.parametrize(
    ("x", "value"),
    [(0.0, 0.0), (-0.0, -0.0), (5.0, 1.0), (-1e30, -1.0), (math.inf, 1.0), (-math.inf, -1.0)],
)
def test_ends(x: float, value: float) -> None:
    found = float(evaluated(torch.tensor(x)))
    assert found == value
    assert math.copysign(1, found) == math.copysign(1, value)


def test_not_a_number_stays_one() -> None:
    assert evaluated(torch.tensor(math.nan)).isnan()


@on_a_stand_in
def test_the_kernel_computes_gelu() -> None:
    x = torch.linspace(-8, 8, SIZE)
    code = lowered(dtype=torch.float32).code
    assert "libdevice.erf(" not in code
    # The interpreter has none of CUDA's library.
    code, powers = re.subn(
        r"tl.inline_asm_elementwise\('ex2[^\[]*\[(\w+)\].*\)", r"tl.exp2(\1)", code
    )
    code, signs = re.subn(r"libdevice.copysign\((\w+), (\w+)\)", r"tl.where(\2 < 0, -\1, \1)", code)
    assert powers == signs == 1
    found = kernel_util.interpret_modules({"gelu": (code, [x])})["gelu"]
    torch.testing.assert_close(found, functional.gelu(x.double()).float(), rtol=1e-5, atol=2e-7)


@on_a_stand_in
def test_stock_keeps_its_own() -> None:
    ((_, source),) = lowered(ours=False).kernels().items()
    assert "libdevice.erf(" in source


@on_a_stand_in
def test_what_is_no_float32_is_left_to_stock() -> None:
    with activation._scope(config.snapshot({})):
        found = fake_cuda.lower(torch.erf, ((SIZE,), torch.float64))
    assert all("libdevice.erf(" in source for source in found.kernels().values())


@on_a_stand_in
def test_it_takes_fewer_instructions_than_stock_s() -> None:
    counts = []
    for ours in (True, False):
        ((name, source),) = lowered(ours=ours).kernels().items()
        counts.append(arithmetic(name, source))
    assert counts[0] < 0.7 * counts[1]


def arithmetic(name: str, source: str) -> int:
    """Instructions in SASS of a pointwise kernel, which handles 8 elements a thread."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    with tempfile.TemporaryDirectory() as folder:
        kernel = kernel_util.load(name, source, Path(folder))
        signature = dict.fromkeys(kernel.arg_names, "*bf16")
        signature |= {"xnumel": "i32", "XBLOCK": "constexpr"}
        pointers = [i for i, each in enumerate(kernel.arg_names) if signature[each][0] == "*"]
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
    told = kernel_util.cuobjdump(binary.asm["cubin"], "-sass")
    found = re.findall(r"^\s+/\*[0-9a-f]{4}\*/\s+([^;]*);", told, re.MULTILINE)
    return sum(each.split()[0] != "NOP" for each in found)
