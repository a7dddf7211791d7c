"""Gradients of views whose base is transposed in-place after they were created."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch


def _transpose(x: torch.Tensor) -> Any:
    view = x[1:]
    x.t_()
    return view


def _return_both(x: torch.Tensor) -> Any:
    view = x.view(-1)
    x.transpose_(0, 1)
    return view, x


def _compute_with_the_view(x: torch.Tensor) -> Any:
    view = x[1:]
    x.unsqueeze_(0)
    return view * 2, x.sum(1)


def _write_after(x: torch.Tensor) -> Any:
    view = x[:, 1:]
    y = torch.neg_(x)
    y.swapaxes_(0, 1)
    x += 1
    x[0] = 3
    y.t_()
    return view, x * 2, y.mul_(2)


@pytest.mark.parametrize(
    "program", [_transpose, _return_both, _compute_with_the_view, _write_after]
)
@pytest.mark.parametrize("size", [(4, 4), (2, 3)])
@pytest.mark.parametrize("grad", [True, False])
def test_results_and_gradients(
    program: Callable[..., Any], size: tuple[int, int], *, grad: bool
) -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(size, requires_grad=grad)]
    leaves.append(leaves[0].detach().clone().requires_grad_(grad))

    def model(x: torch.Tensor) -> Any:
        return program(x * 1)

    found = []
    for function, leaf in zip(
        (model, torch.compile(model, backend="inductor_ext", fullgraph=True)), leaves, strict=True
    ):
        results = function(leaf)
        results = results if isinstance(results, tuple) else (results,)
        if grad:
            weights = [torch.arange(1.0, r.numel() + 1).view(r.shape) for r in results]
            losses = [(r * w).sum() for r, w in zip(results, weights, strict=True)]
            torch.stack(losses).sum().backward()
        found.append(([r.detach() for r in results], leaf.grad))
    torch.testing.assert_close(found[1], found[0])


def test_an_input_keeps_its_new_sizes() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        x.t_()
        return x + 1

    x = torch.randn(2, 3)
    expected = x.t() + 1
    result = torch.compile(model, backend="inductor_ext")(x)
    assert x.shape == (3, 2)
    torch.testing.assert_close(result, expected)
