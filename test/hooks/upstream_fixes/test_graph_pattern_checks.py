"""Attention that patterns of Inductor take for another one, and reads in random order."""

from __future__ import annotations

import math

import pytest
import torch
from torch._inductor.utils import run_and_get_code

Tensor = torch.Tensor


def _attend(scores: Tensor, values: Tensor, dim: int) -> Tensor:
    return torch.matmul(torch.softmax(scores, dim=dim), values)


def attend_over_other_dimensions(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    scores = torch.matmul(q, k.transpose(-2, -1))
    return [_attend(scores.div(math.sqrt(4)), v, 1), _attend(scores.mul(0.25), v, -2)]


def attend_to_permuted_keys(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Batch, sequence, heads, features: the keys of another batch are attended to."""
    query, key, value = q.permute(0, 2, 1, 3), k.permute(2, 0, 1, 3), v.permute(0, 2, 1, 3)
    scores = torch.matmul(query, key.transpose(-2, -1)).div(math.sqrt(4))
    transposed = torch.matmul(q, k.permute(1, 0, 3, 2)).div(math.sqrt(4))
    return [_attend(scores, value, -1), _attend(transposed, v, -1)]


def attend(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    scores = torch.matmul(q, k.transpose(-2, -1)).div(math.sqrt(4))
    return [_attend(scores, v, -1)]


@pytest.mark.parametrize("training", [False, True])
def test_attention(training: bool) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(4, 4, 4, 4, requires_grad=training) for _ in range(3)]

    def model(*xs: Tensor) -> list[Tensor]:
        return attend_over_other_dimensions(*xs) + attend_to_permuted_keys(*xs) + attend(*xs)

    compiled = torch.compile(model, backend="inductor_ext", fullgraph=True)
    results, code = run_and_get_code(compiled, *inputs)
    torch.testing.assert_close(results, model(*inputs), atol=1e-4, rtol=1e-4)
    calls = code[0].count("= torch.ops.aten._scaled_dot_product_flash_attention")
    assert calls == 1  # only `attend` is the attention of the pattern


def test_rows_in_random_order() -> None:
    def shuffle(x: Tensor) -> list[Tensor]:
        return [x[torch.randperm(8)], x[torch.randperm(len(x))] * 2, x[torch.randperm(4)[:3]]]

    x = torch.arange(16.0).reshape(8, 2)
    shuffled, doubled, some = torch.compile(shuffle, backend="inductor_ext", fullgraph=True)(x)
    assert torch.equal(shuffled.sort(0).values, x)
    assert torch.equal(doubled.sort(0).values, x * 2)
    assert some.shape == (3, 2)
    assert int(some.max()) < 8
