"""Functions of vectors on CPU are accurate for small and for large numbers."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

Tensor = torch.Tensor


def _compute(small: Tensor, large: Tensor) -> list[Tensor]:
    elu = functional.elu(-small)
    return [torch.expm1(small), torch.expm1(-small), elu, torch.atanh(small), torch.acosh(large)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_errors_are_a_few_units_in_the_last_place(dtype: torch.dtype) -> None:
    small = torch.logspace(-20, -0.1, 67, dtype=torch.float64).to(dtype)
    large = torch.logspace(0, 38, 67, dtype=torch.float64).to(dtype)
    results = torch.compile(_compute, backend="inductor_ext")(small, large)
    for result, expected in zip(results, _compute(small.double(), large.double()), strict=True):
        error = (result.double() - expected).abs() / expected.abs().clamp_min(1e-300)
        assert error.max() < 4 * torch.finfo(dtype).eps
    values = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.5, -0.0] * 4, dtype=dtype)
    for function in (torch.expm1, torch.atanh, torch.acosh):
        result = torch.compile(function, backend="inductor_ext")(values)
        torch.testing.assert_close(result, function(values), equal_nan=True)
