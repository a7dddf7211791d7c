"""Operators are not made in-place on tensors whose elements share memory."""

from __future__ import annotations

import pytest
import torch

Tensor = torch.Tensor

ROWS, COLUMNS = torch.tensor([0, 1]), torch.tensor([1, 2])


def _write(x: Tensor) -> list[Tensor]:
    """Write into expanded constants, expanded computed tensors, and an unfolded tensor."""
    ones, row, scalar = torch.ones(4, 1).expand(4, 4), (x * 2).expand(3, 4, 4), x.sum().expand(4, 4)
    places, lines = (ROWS, COLUMNS), torch.tensor([0, 0, 2, 3])
    zeros = x.new_zeros(1).expand(x.shape[0], 3)
    return [
        ones.index_put(places, x[0, :2]),
        torch.zeros(4, 1).expand(4, 4).index_put(places, x[0, :2], accumulate=True),
        scalar.index_put(places, x[0, :2]),
        zeros.index_put(places, x[0, :2]),
        ones.index_add(0, lines, x),
        ones.scatter(1, lines[:, None], x),
        torch.diagonal_scatter(ones, x[0, :3], 1),
        torch.diagonal_scatter(torch.zeros(()).expand(4, 4), x[0]),
        torch.diagonal_scatter(row, x[:3], 0, 1, 2) + 1,
        torch.select_scatter(scalar, x[0], 1, 1),
        torch.as_strided_scatter(ones, x[0, :2], (2,), (1,)),
        *torch._foreach_add([ones, scalar], [x, x * x]),
        (x[0] * 2).unfold(0, 3, 1).index_put((ROWS[:1], COLUMNS[:1]), x[0, :1]),
    ]


@pytest.mark.parametrize("dynamic", [False, True])
def test_each_element_is_written_alone(dynamic: bool) -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(_write, backend="inductor_ext", fullgraph=True, dynamic=dynamic)
    for index, (result, value) in enumerate(zip(compiled(x), _write(x), strict=True)):
        assert result.stride() == value.stride(), f"result {index}"
        assert torch.allclose(result, value), f"result {index}"


def test_dense_operands_are_written_in_place() -> None:
    """No copy is made of a tensor whose elements have their own memory."""
    from torch._inductor.utils import run_and_get_code

    def model(x: Tensor) -> Tensor:
        return (x @ x)[:, ::2].index_put((ROWS, ROWS), x[0, :2])

    x = torch.randn(4, 4)
    _, (code,) = run_and_get_code(torch.compile(model, backend="inductor_ext"), x)
    assert code.count("empty_strided_cpu((") == 1
