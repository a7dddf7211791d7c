"""Reductions in C++ kernels: 8-bit integers, bool, and the tails of tiled loops."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest
import torch
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

Tensors = Sequence[torch.Tensor]


def _check(model: Callable[..., Tensors], inputs: Tensors, **options: object) -> str:
    """Compare a compiled function with eager mode; return the generated code."""
    expected = model(*inputs)
    compiled = torch.compile(model, backend="inductor_ext", fullgraph=True, **options)
    results, code = run_and_get_code(compiled, *inputs)
    for index, (result, value) in enumerate(zip(results, expected, strict=True)):
        assert result.dtype == value.dtype, index
        torch.testing.assert_close(
            result, value, atol=1e-3, rtol=1e-3, msg=lambda text, i=index: f"result {i}: {text}"
        )
    return "\n".join(code)


@pytest.mark.parametrize("simdlen", [None, 256])
def test_unused_lanes_of_8_bit_vectors_do_not_enter_a_reduction(simdlen: int | None) -> None:
    torch.manual_seed(0)
    inputs = [
        torch.arange(40, 80, dtype=torch.uint8),
        torch.randint(-128, -3, (70,), dtype=torch.int8),
        torch.full((17,), 255, dtype=torch.uint8),
        torch.randint(40, 256, (9, 33), dtype=torch.uint8),
        torch.randint(3, 128, (20000,), dtype=torch.int8),
    ]

    def model(a: torch.Tensor, b: torch.Tensor, *others: torch.Tensor) -> list[torch.Tensor]:
        results = [a.min(), a.argmin(), (a - a.min()).float() / (a.max() - a.min()).float()]
        results += [(a + 1).sum(dtype=a.dtype), (a | 1).prod(dtype=a.dtype), a.float().var()]
        results += [b.max(), b.argmax(), (b + 1).sum(dtype=b.dtype), (b * 3).amin()]
        c, image, d = others
        results += [
            c.argmin(),
            c.amin(),
            *image.min(0),
            *image.max(1, keepdim=True),
            image.argmin(),
        ]
        return [*results, d.amin(), d.argmin(), (d + 1).sum(dtype=d.dtype)]

    with config.patch({"cpp.simdlen": simdlen}):
        _check(model, inputs)


def test_8_bit_reductions_of_dynamic_sizes() -> None:
    def model(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.amin(), x.argmin(), x.amin(0), x.amax(1), x.long().sum()]

    compiled = torch.compile(model, backend="inductor_ext", dynamic=True)
    for rows, columns in ((19, 40), (33, 71)):
        x = torch.randint(40, 80, (rows, columns), dtype=torch.uint8)
        for result, value in zip(compiled(x), model(x), strict=True):
            assert torch.equal(result, value)


def test_reductions_of_bool() -> None:
    torch.manual_seed(0)
    inputs = [
        torch.rand(17) > 0.3,
        torch.randint(0, 127, (66, 17), dtype=torch.int8),
        torch.randn(13, 40).bfloat16(),
    ]

    def reduce(x: torch.Tensor) -> list[torch.Tensor]:
        results = [x.min(), x.max(), x.sum(dtype=x.dtype), x.prod(dtype=x.dtype), x.all()]
        for dim in range(x.ndim):
            results += [*x.min(dim), *x.max(dim), x.prod(dim, dtype=x.dtype), x.any(dim)]
        return results

    def model(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> list[torch.Tensor]:
        return [*reduce(x), *reduce(y > 5), *reduce(~(y > 5).t()), *reduce(z > 0)]

    _check(model, inputs)


def _pad_channels(gelu: torch.Tensor, padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.nn.functional.pad(gelu.permute(3, 2, 1, 0), (0, 0, 0, padding), value=0.5)
    return torch.nn.functional.pad(gelu, (0, 0, 0, 0, 0, padding), value=0.5), rows


def test_tails_of_tiled_loops_around_a_reduction_store_their_own_elements() -> None:
    """The tiled loops are the first and the last; another one is between them."""
    torch.manual_seed(0)
    sizes = (66, 58), (18, 10), (35, 27)
    inputs = [
        torch.randn(1, 8, size, size).contiguous(memory_format=torch.channels_last)
        for size, _ in sizes
    ]

    def model(*xs: torch.Tensor) -> list[torch.Tensor]:
        results = []
        for x, (_, padding) in zip(xs, sizes, strict=True):
            gelu = (x * 0.5) * (torch.erf(x * 0.7071067811865476) + 1)
            columns, rows = _pad_channels(gelu, padding)
            results.append(torch.matmul(columns, rows))
            if padding != 58:
                product = columns * rows.transpose(2, 3)
                results += [product.amax(-1), product.mean(-1).relu() + 1, product.argmin(-1)]
        return results

    code = _check(model, inputs)
    # For each size, the elements left by vectors of 16 and of 8.
    for rest in (2, 3):
        store = rf"tmp_acc\d+_vec\.store\([^;]*static_cast<int64_t>\({rest}L\)\)"
        assert re.search(store, code)


def test_results_in_half_precision_that_are_stored_twice() -> None:
    def program(*inputs: torch.Tensor) -> list[torch.Tensor]:
        results = []
        for x in inputs:
            results += [x.amax(0), x.amax(0) * 2, x.amax(0, keepdim=True) + x]
            results += [(x * 2).nansum(1), (x * 2).nanmean(1), x.sum(-2), x.sum(-2, True).clone()]
            results += [(x > 0).any(0), (x > 0).any(0, keepdim=True) & (x > 1)]
        return results

    torch.manual_seed(0)
    shapes = (33, 40), (40, 5), (3, 33, 19)
    inputs = [
        torch.randn(shape).to(dtype) for shape in shapes for dtype in (torch.half, torch.bfloat16)
    ]
    inputs += [x.mT for x in inputs]
    compiled = torch.compile(program, backend="inductor_ext", fullgraph=True)
    for actual, expected in zip(compiled(*inputs), program(*inputs), strict=True):
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual.float(), expected.float(), rtol=1e-2, atol=1e-2)
