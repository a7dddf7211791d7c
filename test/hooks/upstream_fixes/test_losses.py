"""multilabel_margin_loss with padded targets, and its gradient."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from test.support.aot_util import DEVICES

TARGETS = [[3, 0, -1, 1], [1, -1, -1, -1], [-1, 0, 1, 2], [2, 0, 3, 1]]


@pytest.mark.parametrize("device", DEVICES)
def test_padding_is_ignored(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    targets = torch.tensor(TARGETS, device=device)

    def model(x: torch.Tensor) -> list[torch.Tensor]:
        losses = [
            functional.multilabel_margin_loss(x, targets, reduction=reduction)
            for reduction in ("none", "mean", "sum")
        ]
        return [*losses, functional.multilabel_margin_loss(x[0], targets[0], reduction="none")]

    compiled = torch.compile(model, backend="inductor_ext", fullgraph=True)
    values = torch.randn(4, 4, generator=generator).to(device)
    gradients, results = [], []
    for function in (model, compiled):
        x = values.clone().requires_grad_()
        results.append(function(x))
        gradients += torch.autograd.grad([loss.sum() for loss in results[-1]], [x])
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(gradients[1], gradients[0])
