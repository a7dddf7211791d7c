"""Writes into expanded tensors, whose elements share memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors is deprecated")


def _fill_where(x: torch.Tensor) -> Any:
    view = x.expand(2, *x.shape)
    view[view > 1] = 2
    return x * 1, view + 1


def _fill_two_dims(x: torch.Tensor) -> Any:
    view = x[:, None, :, None].expand(-1, 3, -1, 2)
    view.masked_fill_(view > 1, 0)
    return x * 2


def _fill_an_intermediate(x: torch.Tensor) -> Any:
    y = x * 2
    view = y[:1].expand(4, *y.shape[1:])
    view[:, torch.tensor([0, 3], device=x.device)] = 3
    view[2].masked_fill_(y[0] < -1, -1.0)
    return y, view * 2


def _put_different_values(x: torch.Tensor) -> Any:
    view = x[:1].expand(4, *x.shape[1:])
    indices = torch.tensor([[0, 2], [3, 3]], device=x.device)
    values = torch.tensor([7, 9], dtype=x.dtype, device=x.device)
    view.index_put_((indices[0], indices[1]), values)
    return x * 1


def _write_one_position(x: torch.Tensor) -> Any:
    view = x.expand(3, *x.shape)
    view[1, 0] = 5
    return x * 1, view * 2


_PROGRAMS = (
    _fill_where,
    _fill_two_dims,
    _fill_an_intermediate,
    _put_different_values,
    _write_one_position,
)


@pytest.mark.parametrize("program", _PROGRAMS)
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float16, {"dynamic": True}),
        (torch.int32, {"options": {"cpp_wrapper": True}}),
    ],
)
def test_elements_have_the_value_that_was_written(
    program: Callable[..., Any], dtype: torch.dtype, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    x = (torch.randn(3, 8) * 3).to(dtype)
    if dtype.is_floating_point:
        x[0, 0], x[1, 2], x[2, 3] = -math.inf, -math.inf, math.nan
    other = x.clone()
    expected = program(x)
    compiled = torch.compile(program, backend="inductor_ext", fullgraph=True, **options)
    torch.testing.assert_close((compiled(other), other), (expected, x), equal_nan=True)


def test_gradients_of_elements_that_were_written_once() -> None:
    leaf = torch.randn(3, 8, requires_grad=True)

    def write(x: torch.Tensor) -> Any:
        return _write_one_position(x * 1)[0]

    (expected,) = torch.autograd.grad(write(leaf).square().sum(), leaf)
    result = torch.compile(write, backend="inductor_ext")(leaf)
    (gradient,) = torch.autograd.grad(result.square().sum(), leaf)
    torch.testing.assert_close(gradient, expected)


def test_the_same_formula_in_a_program_is_a_sum() -> None:
    def add_differences(x: torch.Tensor) -> torch.Tensor:
        filled = x.expand(2, 3, 8).masked_fill(x > 0, 2.0)
        return x + (filled - x).sum([0], keepdim=True).view(3, 8)

    x = torch.randn(3, 8)
    compiled = torch.compile(add_differences, backend="inductor_ext")
    torch.testing.assert_close(compiled(x), add_differences(x))
