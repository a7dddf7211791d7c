"""Floor division, remainder and fmod of floating-point numbers equal those of eager mode."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from test.support.aot_util import DEVICES

Tensor = torch.Tensor

EXACT = (torch.float32, torch.float64)
"""In 16 bits, eager mode rounds the intermediate values of a floor division of two tensors."""

VALUES = (0.0, -0.0, 1.0, -1.0, 0.1, 0.3, 7.5, -7.5, 1e-3, 1e7, -1e7, math.inf, -math.inf, math.nan)


def _divide(a: Tensor, b: Tensor) -> list[Tensor]:
    results = [torch.remainder(a, b), torch.fmod(a, b), a % 0.1, torch.fmod(a, 0.1), 0.7 % a]
    results += [a % -3, a % math.inf, a % 0.0, a // 0.1, a // 3, a // math.inf, a // 0.0, 0.7 // a]
    if a.dtype in EXACT:
        results += [a // b, torch.div(a[:, None], b[:7], rounding_mode="floor")]
        results += [(a > 0).int() // b, torch.arange(len(a), device=a.device) % b]
    return results


def _pairs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return all pairs of `VALUES`, and random numbers whose number is no multiple of a vector."""
    generator = torch.Generator().manual_seed(0)
    values = torch.tensor(VALUES, dtype=torch.float64)
    a, b = (grid.flatten() for grid in torch.meshgrid(values, values, indexing="ij"))
    random = torch.randn(2, 101, generator=generator, dtype=torch.float64)
    a, b = torch.cat([a, random[0] * 50]), torch.cat([b, random[1]])
    return a.to(dtype), b.to(dtype)


def _assert_same(results: list[Tensor], expected: list[Tensor]) -> None:
    for index, (result, value) in enumerate(zip(results, expected, strict=True)):
        assert result.dtype == value.dtype
        same = (result == value) | (result.isnan() & value.isnan())
        if value.is_cuda and value.dtype == torch.float32:
            # On torch 2.11, large quotients are rounded twice: one unit in the last place.
            same |= (value.abs() > 2**24) & ((result / value - 1).abs() <= 2**-23)
        signs = (result.signbit() == value.signbit()) | (value != 0)
        assert bool((same & signs).all()), f"result {index}"


@pytest.mark.parametrize("device", DEVICES)
def test_results_are_those_of_eager_mode(device: str) -> None:
    dtypes = (*EXACT, torch.float16, torch.bfloat16)
    pairs = [[value.to(device) for value in _pairs(dtype)] for dtype in dtypes]

    def model(pairs: Any) -> list[Tensor]:
        return [result for a, b in pairs for result in _divide(a, b)]

    compiled = torch.compile(model, backend="inductor_ext", fullgraph=True)
    _assert_same(compiled(pairs), model(pairs))


def test_scalar_code_and_dynamic_sizes() -> None:
    """Neither vectors nor, in the second call, the sizes of the first."""
    options = {"cpp.simdlen": 0, "cpp_wrapper": True}
    compiled = torch.compile(_divide, backend="inductor_ext", dynamic=True, options=options)
    a, b = _pairs(torch.float32)
    for count in (len(a), 50):
        _assert_same(compiled(a[:count], b[:count]), _divide(a[:count], b[:count]))


def test_integers_are_divided_by_inductor() -> None:
    def model(a: Tensor, b: Tensor) -> list[Tensor]:
        return [a // b, a % b, torch.fmod(a, b), torch.div(a, b, rounding_mode="trunc"), a / b]

    a, b = torch.arange(-20, 21), torch.tensor([3, -3]).repeat(21)[:41]
    _assert_same(torch.compile(model, backend="inductor_ext")(a, b), model(a, b))
