"""Divisions of integers by C++ kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.nn import functional as F

from inductor_ext import _compat
from inductor_ext.hooks.upstream_fixes.cpu_division import remove_flag

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


def test_kernels_do_not_share_a_flag() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        return x // y + 1

    x, y = torch.tensor([7, -7, 9]), torch.tensor([2, 2, -4])
    flag = "inductor_cpu_integer_div_error"
    result, code = run_and_get_code(torch.compile(program, backend="inductor_ext"), x, y)
    assert torch.equal(result, program(x, y))
    assert flag not in "".join(code)
    _, code = run_and_get_code(torch.compile(program), x, y)
    assert (flag in "".join(code)) == (_compat.minor_version(torch.__version__) >= (2, 13))


def test_only_statements_on_the_flag_are_removed() -> None:
    kernel = """
    std::atomic<int> inductor_cpu_integer_div_error{0};
    inductor_cpu_integer_div_error_flag = &inductor_cpu_integer_div_error;
    out_ptr0[0] = in_ptr0[0];
    inductor_cpu_integer_div_error_flag = nullptr;
    inductor_cpu_throw_if_integer_div_error(inductor_cpu_integer_div_error);
    """
    assert remove_flag(kernel) == "\n    out_ptr0[0] = in_ptr0[0];\n    "
    assert remove_flag("out_ptr0[0] = 0;") == "out_ptr0[0] = 0;"
