"""C++ kernels: integers of 8 and 16 bits, 8-bit floating-point numbers, and Booleans."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Tensors = Sequence[torch.Tensor]


def _check(model: Callable[..., Tensors], *inputs: torch.Tensor) -> None:
    results = torch.compile(model, backend="inductor_ext", fullgraph=True)(*inputs)
    for index, (result, value) in enumerate(zip(results, model(*inputs), strict=True)):
        assert result.dtype == value.dtype, index
        if result.is_floating_point():
            result, value = result.float(), value.float()
        assert torch.equal(result, value), index


def test_operations_on_small_integers_keep_the_dtype() -> None:
    torch.manual_seed(0)
    x = torch.randint(-30000, 30000, (9, 17), dtype=torch.int16)

    def model(*xs: torch.Tensor) -> list[torch.Tensor]:
        results = []
        for x in xs:
            size = x.abs()
            results += [size.amax(), size.amin(0), size.argmax(1), torch.maximum(size, x)]
            results += [size.clamp(3, 9), size % 7, x.sign().amax(0), size.prod(dtype=x.dtype)]
            results += [torch.div(x, 3, rounding_mode="trunc").amax(0)]
        return results

    _check(model, x, x.to(torch.int8), x.t())


def test_8_bit_floating_point_numbers_are_converted() -> None:
    torch.manual_seed(0)
    dtypes = torch.float8_e5m2, torch.float8_e4m3fn
    others = torch.bool, torch.int8, torch.uint8, torch.int32, torch.half, torch.bfloat16
    number = (torch.rand(9, 33) > 0.3).float()

    def model(number: torch.Tensor, *xs: torch.Tensor) -> list[torch.Tensor]:
        results = []
        for x in xs:
            results += [x.all(), x.all(0), x.t().all(1, keepdim=True), x.any((0, 1))]
            results += [torch.where(x.bool(), 1.0, 2.0)]
            results += [x.to(other) for other in (*others, *dtypes)]
            results += [number.to(other).to(x.dtype) for other in others]
        return results

    _check(model, number, *(number.to(dtype) for dtype in dtypes))


def test_values_without_a_known_dtype_are_converted() -> None:
    """A vectorized pooling kernel has such values."""
    torch.manual_seed(0)
    image = torch.randn(2, 3, 8, 8)

    def model(*xs: torch.Tensor) -> list[torch.Tensor]:
        return [y for x in xs for y in torch.nn.functional.max_pool2d(x, 2, return_indices=True)]

    _check(model, image.contiguous(memory_format=torch.channels_last), image.transpose(2, 3))


def test_masked_blocks_of_booleans() -> None:
    """Comparisons of integers and of float64 are masks of other vectors than those of float32."""

    def model(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        results = []
        for value in (x > 3, x.int() > 3, y > 0, y.float() > 0, y.half() > 0, (x * 1).bool()):
            rows = torch.nn.functional.pad(value, (0, 0, 1, 0))
            columns = torch.nn.functional.pad(value, (2, 1), value=True)
            results += [rows, columns, torch.slice_scatter(~value, value[:-1], 0, 1)]
        return results

    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 7, (9, 37), generator=generator)
    _check(model, x, torch.randn(9, 37, generator=generator).double())
