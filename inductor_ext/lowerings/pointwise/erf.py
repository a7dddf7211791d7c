"""Lowering of erf with fewer instructions than CUDA's libdevice, for GELU in GEMM epilogues.

Triton links libdevice's erf, which selects each of seven coefficients per element with two moves;
nvcc uses one instruction for that. GELU of a large GEMM output is instruction-bound, so Inductor's
kernel was slower than eager mode [measured on an H200: 18 us more for 2048 x 16384 elements].
This lowering evaluates both polynomials, with the coefficients as immediates, which reduces GELU
from 34 to 22 instructions per element:

    |x| < 1:   erf(x) = x + x q(x^2)
    otherwise: erf(x) = +-(1 - 2^(|x| p(|x|)))

q and p are minimax fits: q of erf(x) / x - 1 on [0, 1], minimizing its relative error, and p of
log2(erfc(t)) / t on [1, 4], minimizing the relative error of erf. Beyond 4, erf rounds to 1; p's
leading coefficient is negative, so the power of two stays 0 there. Evaluated with FMAs, the error
is below 2 ulp, which is the bound that CUDA documents for its own erf. `ex2.approx` adds a little:
the test `test_inline_ptx_is_as_near_as_cuda_s_own` allows 2.5 ulp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from inductor_ext.lowerings import register_lowering
from inductor_ext.lowerings.pointwise import inline_ptx

BORDER = 1.0
"""Smallest |x| for which the second formula is used."""

INNER = (
    0.12837912142276764,
    -0.37612324953079224,
    0.11280179768800735,
    -0.02671130932867527,
    0.004917548969388008,
    -0.0005631413077935576,
)
"""Coefficients of q, constant term first."""

OUTER = (
    -1.6257473230361938,
    -0.9253584146499634,
    -0.14065423607826233,
    0.025549795478582382,
    -0.0022059744223952293,
)
"""Coefficients of p, constant term first."""


def _outer_instructions() -> Iterator[str]:
    """Yield the PTX instructions of the second formula."""
    yield from inline_ptx.evaluate_polynomial("outer", OUTER, "size")
    yield "mul.f32 outer, outer, size"
    # libdevice's exp2 takes three more instructions to handle results below 2^-126. Flushing them
    # to 0 is exact here, as 1 minus such a result rounds to 1.
    yield "ex2.approx.ftz.f32 outer, outer"
    yield f"sub.f32 outer, {inline_ptx.constant(1.0)}, outer"


FUNCTION = inline_ptx.PtxFunction(
    "erf", inline_ptx.assemble_odd_function(INNER, _outer_instructions(), BORDER)
)


@register_lowering(torch.ops.aten.erf.default)
def erf(stock: Callable[..., Any], x: Any) -> Any:
    """Lower erf; see `PtxFunction.lower`."""
    return FUNCTION.lower(stock, x)
