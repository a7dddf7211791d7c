"""Divisions of integers by C++ kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("two_threads")

Division = Callable[[Tensor, Tensor], Tensor]

_DIVISIONS: dict[str, Division] = {
    "floor": torch.floor_divide,
    "trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "remainder": torch.remainder,
    "fmod": torch.fmod,
}
_DTYPES = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def _numbers(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """All pairs of small and extreme numbers with small divisors other than zero.

    Eager mode ends the process where a truncated division of 32 or 64 bits overflows.
    """
    limits = torch.iinfo(dtype)
    values = {-7, -1, 0, 1, 6, limits.min + (dtype.itemsize >= 4), limits.max}
    x = torch.tensor(sorted(v for v in values if v >= limits.min), dtype=dtype)
    y = torch.tensor([v for v in (-3, -1, 1, 2, 5) if v >= limits.min], dtype=dtype)
    return x.unsqueeze(1).expand(-1, 37), y.repeat(13)[:37]


@pytest.mark.parametrize("name", _DIVISIONS)
def test_lanes_that_are_not_used_are_not_divided(name: str) -> None:
    def program(*inputs: Tensor) -> list[Tensor]:
        results = []
        for x, y in zip(inputs[::2], inputs[1::2], strict=True):
            quotient = _DIVISIONS[name](x, y)
            results += [
                quotient,
                _DIVISIONS[name](x[0, 1], y),
                F.pad(quotient, (3, 5)),
                torch.slice_scatter(y.expand_as(x), quotient[:, 2:9], 1, 2, 9),
            ]
        return results

    inputs = [number for dtype in _DTYPES for number in _numbers(dtype)]
    compiled = torch.compile(program, backend="inductor_ext")
    for actual, expected in zip(compiled(*inputs), program(*inputs), strict=True):
        assert actual.dtype == expected.dtype
        assert actual.equal(expected)


@pytest.mark.parametrize("name", _DIVISIONS)
def test_a_division_by_zero_is_an_error(name: str) -> None:
    compiled = torch.compile(_DIVISIONS[name], backend="inductor_ext")
    x, y = torch.arange(1, 50_004), torch.full((50_003,), 3)
    assert compiled(x, y).equal(_DIVISIONS[name](x, y))
    y[40_000] = 0
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        _DIVISIONS[name](x, y)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        compiled(x, y)


def test_a_quotient_wraps_around() -> None:
    compiled = torch.compile(_DIVISIONS["trunc"], backend="inductor_ext")
    x = torch.full((37,), torch.iinfo(torch.int64).min)
    assert compiled(x, torch.full_like(x, -1)).equal(x)
