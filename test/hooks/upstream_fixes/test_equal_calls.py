"""Results of equal calls of an operator are different tensors, also in training."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from test.support.memory_sharing import find_sharing


def _model(x: torch.Tensor) -> list[torch.Tensor]:
    ascending = x.sort()[0]
    rows = x[None, None]
    attention = [functional.scaled_dot_product_attention(rows, rows, rows) for _ in range(2)]
    first, second = ascending.chunk(2)
    # The last two are one tensor, and `first` and `second` parts of it.
    parts = [x.topk(3)[0][1:], x.topk(3)[0][:2], first, second]
    return [x.sort()[0], x.sort()[0], *attention, *parts, ascending, ascending]


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_results_share_memory_as_in_eager_mode(training: bool) -> None:
    x = torch.randn(8, 8, requires_grad=training)
    results, expected = torch.compile(_model, backend="inductor_ext")(x), _model(x)
    torch.testing.assert_close(results, expected)
    assert find_sharing(results) == find_sharing(expected)
    if training:
        gradients = [torch.autograd.grad(sum(r.sum() for r in rs), x) for rs in (results, expected)]
        torch.testing.assert_close(*gradients)
