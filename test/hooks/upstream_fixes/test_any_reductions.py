"""`any` and `all`, and `sum` and `prod` of Booleans."""

from __future__ import annotations

import pytest
import torch


def test_dtype_and_shape_are_those_of_eager_mode() -> None:
    torch.manual_seed(0)
    x = torch.randint(0, 2, (3, 4, 5), dtype=torch.uint8)

    def model(*xs: torch.Tensor) -> list[torch.Tensor]:
        results = []
        for x in xs:
            for reduce in torch.any, torch.all:
                results += [reduce(x), reduce(x, 0), reduce(x, -1, True), reduce(x, (0, 2))]
                results += [reduce(x, [0, 1], keepdim=True), reduce(x, dim=()), reduce(x[0, 0, 0])]
                results += [reduce(x == 0, (0, 1)), reduce(x, (0, 1)) * 200, reduce(x[:0], (0, 1))]
        return results

    inputs = x, x.to(torch.int8), x.bool(), x.float()
    results = torch.compile(model, backend="inductor_ext", fullgraph=True)(*inputs)
    for index, (result, value) in enumerate(zip(results, model(*inputs), strict=True)):
        assert result.dtype == value.dtype, index
        assert torch.equal(result, value), index


def _sums_of_booleans(*inputs: torch.Tensor) -> list[torch.Tensor]:
    results = []
    for x in inputs:
        for value in x, x != x[:1]:
            results += [value.sum(dtype=torch.bool), value.sum(0, dtype=torch.bool)]
            results += [value.sum((0, 1), keepdim=True, dtype=torch.bool)]
            results += [value.sum([], dtype=torch.bool), value.sum(-1, True, dtype=torch.bool)]
            results += [value.prod(dtype=torch.bool)]
            results += [value.prod(0, dtype=torch.bool), value.prod(-1, True, dtype=torch.bool)]
    return results


def _compare_sums(device: str) -> None:
    torch.manual_seed(0)
    # Few rows are added without a loop.
    shapes = (3, 17), (2, 40), (130, 9), (1030, 2)
    numbers = [torch.randint(-1, 2, shape, device=device) for shape in shapes]
    inputs = [*(x.bool() for x in numbers), numbers[0].float() / 4, numbers[2].to(torch.int8)]
    results = torch.compile(_sums_of_booleans, backend="inductor_ext", fullgraph=True)(*inputs)
    for index, (result, value) in enumerate(zip(results, _sums_of_booleans(*inputs), strict=True)):
        assert result.dtype == value.dtype, index
        assert torch.equal(result, value), index


def test_sum_and_prod_of_booleans() -> None:
    _compare_sums("cpu")


@pytest.mark.gpu
def test_sum_and_prod_of_booleans_on_a_gpu() -> None:
    _compare_sums("cuda")
