"""`any` and `all`: dtype of the result, and an empty list of dimensions."""

from __future__ import annotations

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
