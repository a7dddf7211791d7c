"""Math functions of Triton kernels as inline PTX, with fewer instructions than CUDA's libdevice.

A `PtxFunction` replaces one unary op in Triton kernels on NVIDIA GPUs. The instructions are inline
assembly rather than Inductor ops, because LLVM would otherwise optimize them for each of the 128
elements per thread of a GEMM tile: a kernel with GELU on a 128 x 256 tile compiles in half the
time.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._inductor import config as inductor_config
from torch._inductor.virtualized import ops

from inductor_ext import numerics

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class PtxFunction:
    """A function of a float32 as PTX."""

    name: str
    """Inductor's op, such as "erf"."""
    asm: str
    """Inline assembly that computes $0 from $1; see `assemble_odd_function`."""

    def lower(self, stock: Callable[..., Any], x: Any) -> Any:
        """Lower a call of the op for floats of up to 32 bits in Triton kernels on NVIDIA GPUs.

        Everything else uses Inductor's lowering, as do compiles that require bitwise equality with
        CUDA's math library (`numerics.uses_cuda_math`).
        """
        by_triton = x.get_device().type == "cuda" and inductor_config.cuda_backend == "triton"
        if x.get_dtype() not in _DTYPES or not by_triton or torch.version.hip:
            return stock(x)
        if numerics.uses_cuda_math():
            return stock(x)
        from torch._inductor.lowering import make_pointwise

        return make_pointwise(functools.partial(self.compute, x.get_dtype()))(x)

    def compute(self, dtype: torch.dtype, x: Any) -> Any:
        """Compute in float32; Inductor keeps float32 values unrounded until the store."""
        if dtype != torch.float32:
            x = ops.to_dtype(x, torch.float32, src_dtype=dtype)
        y = ops.inline_asm_elementwise(x, asm=self.asm, constraints="=f,f", dtype=torch.float32)
        return y if dtype == torch.float32 else ops.to_dtype(y, dtype, src_dtype=torch.float32)


def assemble_odd_function(inner: Sequence[float], outer: Iterable[str], border: float) -> str:
    """Return inline assembly for an odd function f that two formulas give.

    Below the border, f(x) = x + x q(x^2); from there on, f(x) = +-g(|x|).

    Args:
        inner: coefficients of q, constant term first.
        outer: instructions that set the register `outer` to g; `size` is |x|.
        border: smallest |x| for which the second formula is used.
    """
    instructions = (
        ".reg .f32 size, square, inner, outer",
        ".reg .pred within",
        "abs.f32 size, $1",
        "mul.f32 square, $1, $1",
        *evaluate_polynomial("inner", inner, "square"),
        "fma.rn.f32 inner, inner, $1, $1",
        *outer,
        "copysign.f32 outer, $1, outer",
        f"setp.lt.f32 within, size, {constant(border)}",
        "selp.f32 $0, inner, outer, within",
    )
    return f"{{ {'; '.join(instructions)}; }}"


def evaluate_polynomial(name: str, coefficients: Sequence[float], x: str) -> Iterator[str]:
    """Yield the instructions that evaluate a polynomial by Horner's method.

    Args:
        name: register of the result.
        coefficients: constant term first.
        x: register of the argument.
    """
    yield f"mov.f32 {name}, {constant(coefficients[-1])}"
    for coefficient in reversed(coefficients[:-1]):
        yield f"fma.rn.f32 {name}, {name}, {x}, {constant(coefficient)}"


def constant(value: float) -> str:
    """Return the PTX literal of a float32."""
    return f"0f{struct.unpack('>I', struct.pack('>f', value))[0]:08X}"
