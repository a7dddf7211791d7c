"""Lowerings of floor division, remainder and fmod of floating-point numbers, as in eager mode.

Eager mode computes all three from the exact `fmod`. Inductor rounds down the rounded quotient
instead, and computes the remainder of vectors in C++ from that:

    0.5 // 0.1 = 5            instead of 4: float32(0.1) is larger than 0.1
    1 % inf    = NaN          instead of 1
    1e7 % 0.3  = 0            instead of 0.0026

In remainder and fmod of tensors of 16 bits, eager mode rounds a number from Python to 16 bits.
Inductor does not, and these functions are discontinuous.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._inductor.ops_handler import OpsHandler
from torch._inductor.virtualized import ops

from inductor_ext.lowerings import register_lowering

aten = torch.ops.aten

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@register_lowering(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(stock: Callable[..., Any], a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    """Lower a division; floor division of floating-point numbers is that of this module."""
    if rounding_mode != "floor" or not _is_float(a, b):
        return stock(a, b, rounding_mode=rounding_mode)
    return _lower(aten.div.Tensor_mode, floor_quotient)(a, b)


@register_lowering(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
def remainder(stock: Callable[..., Any], a: Any, b: Any) -> Any:
    """Lower a remainder; that of floating-point numbers is that of this module."""
    if not _is_float(a, b):
        return stock(a, b)
    return _lower(aten.remainder.Tensor, floor_remainder, rounds=True)(a, b)


@register_lowering(aten.fmod.Tensor, aten.fmod.Scalar)
def fmod(stock: Callable[..., Any], a: Any, b: Any) -> Any:
    """Lower fmod; a number from Python is rounded to the dtype."""
    if not _is_float(a, b):
        return stock(a, b)
    return _lower(aten.fmod.Tensor, ops.fmod, rounds=True)(a, b)


def floor_quotient(a: Any, b: Any) -> Any:
    """Compute the largest integer that is not larger than the exact a / b.

    The quotient of `a - mod` and `b` is an integer but for rounding. It is rounded to the nearest
    one. If `b` is 0, the result is a / b; a quotient of 0 has the sign of a / b.
    """
    dtype = torch.float32
    zero, half, one = (ops.constant(value, dtype) for value in (0.0, 0.5, 1.0))
    # `truediv` is rounded twice in Triton. There is nothing else until torch 2.12.
    divide = ops.div_rn if hasattr(OpsHandler, "div_rn") else ops.truediv
    exact = divide(a, b)
    mod = ops.fmod(a, b)
    quotient = divide(ops.sub(a, mod), b)
    quotient = ops.where(_signs_differ(mod, b), ops.sub(quotient, one), quotient)
    below = ops.floor(quotient)
    nearest = ops.where(ops.gt(ops.sub(quotient, below), half), ops.add(below, one), below)
    signed = ops.where(ops.ne(quotient, zero), nearest, ops.mul(exact, zero))
    return ops.where(ops.ne(b, zero), signed, exact)


def floor_remainder(a: Any, b: Any) -> Any:
    """Compute the remainder of floor division, which has the sign of `b`, exactly."""
    mod = ops.fmod(a, b)
    return ops.where(_signs_differ(mod, b), ops.add(mod, b), mod)


def _signs_differ(mod: Any, b: Any) -> Any:
    zero = ops.constant(0.0, torch.float32)
    differ = ops.ne(ops.lt(mod, zero), ops.lt(b, zero))
    return ops.logical_and(ops.ne(mod, zero), differ)


def _is_float(a: Any, b: Any) -> bool:
    """Whether the result has a floating-point dtype that these lowerings know."""
    from torch._inductor.lowering import get_promoted_dtype
    from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as Promotion

    return get_promoted_dtype(a, b, type_promotion_kind=Promotion.DEFAULT) in _DTYPES


def _lower(
    operator: Any, compute: Callable[[Any, Any], Any], *, rounds: bool = False
) -> Callable[[Any, Any], Any]:
    """Return a lowering with type promotion and broadcasting.

    Args:
        operator: the operator.
        compute: computes one element of the result, with Inductor's `ops`.
        rounds: whether a number from Python is rounded to the dtype of a tensor.
    """
    from torch._inductor import lowering

    def lower(a: Any, b: Any) -> Any:
        if rounds:
            dtype = (b if _is_number(a) else a).get_dtype()
            a, b = _round(a, dtype), _round(b, dtype)
        return lowering.make_pointwise(compute)(a, b)

    return lowering.register_lowering(operator, broadcast=True, lowering_dict={})(lower)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _round(value: Any, dtype: torch.dtype) -> Any:
    if not _is_number(value) or not math.isfinite(value):
        return value
    return torch.tensor(value, dtype=dtype).item()
