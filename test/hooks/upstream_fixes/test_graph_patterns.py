"""Rewrites of graphs: scaled softmax, views of one value, multiplication by 0, cumulative sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

Tensors = Sequence[torch.Tensor]


def _check(model: Callable[..., Tensors], *inputs: torch.Tensor, cpp_wrapper: bool = False) -> None:
    """Compare a compiled function with eager mode, bit for bit for integers."""
    options = {"cpp_wrapper": cpp_wrapper}
    compiled = torch.compile(model, backend="inductor_ext", fullgraph=True, options=options)
    for index, (result, value) in enumerate(zip(compiled(*inputs), model(*inputs), strict=True)):
        torch.testing.assert_close(
            result, value, equal_nan=True, msg=lambda text, i=index: f"result {i}: {text}"
        )


def _subtract_maximum(x: torch.Tensor) -> torch.Tensor:
    return x - x.amax(1, keepdim=True)


@pytest.mark.parametrize("cpp_wrapper", [False, True])
def test_scaled_integers_are_subtracted_from_their_maximum(cpp_wrapper: bool) -> None:
    torch.manual_seed(0)
    dtypes = torch.int32, torch.uint8, torch.int16
    inputs = [torch.randint(-(2**31), 2**31, (5, 9)).to(dtype) for dtype in dtypes]

    def model(*xs: torch.Tensor) -> list[torch.Tensor]:
        results = []
        for x in xs:
            product, other = x * 7, -3 * x
            results += [_subtract_maximum(product), _subtract_maximum(other)]
            results += [_subtract_maximum(product.to(torch.int16))]
            results += [_subtract_maximum(product.double()), _subtract_maximum(other.float())]
            results += [_subtract_maximum(x * (x[:, :1] | 1)), _subtract_maximum(x * x[0, 0])]
            results += [_subtract_maximum(x / 3), _subtract_maximum((x / 3).long())]
        return results

    _check(model, *inputs, cpp_wrapper=cpp_wrapper)


def test_scaled_numbers_are_rounded_before_their_maximum_is_subtracted() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(5, 9) * 3, torch.randint(-(2**31), 2**31, (5, 1), dtype=torch.int32)

    def model(x: torch.Tensor, scale: torch.Tensor) -> list[torch.Tensor]:
        results = [_subtract_maximum((x * 3.5).int()), _subtract_maximum((x / 0.3).to(torch.int8))]
        results += [_subtract_maximum((x.double() * 2.5).int()), _subtract_maximum(x * scale)]
        return [*results, _subtract_maximum(x * 2.5), _subtract_maximum((x / -3).double())]

    _check(model, *inputs)


def test_tensors_of_one_value_are_viewed_in_dtypes_of_other_sizes() -> None:
    """Inductor adds complex tensors as their real and imaginary parts."""
    torch.manual_seed(0)
    inputs = torch.randn(4, dtype=torch.complex64), torch.arange(4)

    def model(z: torch.Tensor, i: torch.Tensor) -> list[torch.Tensor]:
        full = torch.full((4,), 1j)
        results = [full + z, z - torch.full((4,), 2 - 1j), z + torch.tensor(1j), full + i]
        results += [torch.full_like(z, 1j) + z, i.new_full((4,), 3j, dtype=torch.complex64) + z]
        results += [torch.view_as_real(full) + z.real[:, None]]
        results += [torch.full((2,), 1.0).view(torch.float16) + i]
        return [*results, torch.full((1,), 258, dtype=torch.int32).view(torch.int8) + i]

    _check(model, *inputs)


def test_nan_and_infinity_times_zero_are_nan() -> None:
    x = torch.tensor([1.0, torch.nan, torch.inf, -2.0])

    def model(x: torch.Tensor) -> list[torch.Tensor]:
        halves, pairs = x.half() * 0, torch.complex(x, -x) * 0
        return [x * 0, 0 * x + 1, halves, pairs, 1 / (x * 0), x.clone().mul_(0), x.long() * 0]

    _check(model, x)


def test_sums_of_one_value_have_the_dtype_and_the_converted_value() -> None:
    def model(x: torch.Tensor) -> list[torch.Tensor]:
        return [
            torch.full((4,), 2.7, dtype=torch.int64).cumsum(0),
            torch.full((4,), 3, dtype=torch.bool).cumsum(0),
            torch.full((2, 4), 2.7).cumsum(-1, dtype=torch.int64),
            torch.full((4,), 2.5).cumsum(0, dtype=torch.float64),
            torch.full((4,), 3, dtype=torch.int16).cumsum(0),
            torch.full((), 2.5).cumsum(0),
            torch.full((2, 4), 2.5).cumsum(1) * x,
        ]

    _check(model, torch.ones(1))
