"""Lowering of tanh without branches, for the tanh form of GELU in GEMM epilogues.

Triton links libdevice's tanh, which branches for every element: 22 instructions and two branches.
In the epilogue of a matmul, a thread has 64 elements or more, whose branches diverge [measured on
an H200, bfloat16, 4096 x 4096 x 1024 with GELU: 110 us; cuBLAS without GELU: 43 us]. This
lowering computes both formulas, which takes 15 instructions:

    |x| < 0.85: tanh(x) = x + x q(x^2)
    otherwise:  tanh(x) = +-(1 - 2 / (1 + e^(2 |x|)))

q is a minimax fit of tanh(x) / x - 1 on [0, 0.85] that minimizes the relative error of tanh. The
second formula follows from the definition of tanh; for a smaller border, the difference would lose
more bits. If the power overflows, its reciprocal is 0 and the result 1. Evaluated with FMAs, the
error is below 2 ulp; `ex2.approx` and `rcp.approx` add a little: the test
`test_inline_ptx_is_as_near_as_cuda_s_own` allows 2.5 ulp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from inductor_ext.lowerings import register_lowering
from inductor_ext.lowerings.pointwise import inline_ptx

BORDER = 0.85
"""Smallest |x| for which the second formula is used."""

INNER = (
    0.0,
    -0.3333326578140259,
    0.13331478834152222,
    -0.05379645898938179,
    0.021121082827448845,
    -0.007142814341932535,
    0.0014401726657524705,
)
"""Coefficients of q, constant term first. The sum with 0 makes q(0) = +0, so that tanh(-0) = -0."""


def _outer_instructions() -> Iterator[str]:
    """Yield the PTX instructions of the second formula."""
    yield f"mul.f32 outer, size, {inline_ptx.constant(2 * math.log2(math.e))}"
    yield "ex2.approx.ftz.f32 outer, outer"
    yield f"add.f32 outer, outer, {inline_ptx.constant(1.0)}"
    yield "rcp.approx.ftz.f32 outer, outer"
    yield f"fma.rn.f32 outer, outer, {inline_ptx.constant(-2.0)}, {inline_ptx.constant(1.0)}"


FUNCTION = inline_ptx.PtxFunction(
    "tanh", inline_ptx.assemble_odd_function(INNER, _outer_instructions(), BORDER)
)


@register_lowering(torch.ops.aten.tanh.default)
def tanh(stock: Callable[..., Any], x: Any) -> Any:
    """Lower tanh; see `PtxFunction.lower`."""
    return FUNCTION.lower(stock, x)
