"""A network of two linear layers, and its inputs."""

from __future__ import annotations

import torch


class Net(torch.nn.Module):
    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 8)
        self.second = torch.nn.Linear(8, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


def batch(rows: int = 3) -> tuple[torch.Tensor]:
    return (torch.linspace(-1, 1, rows * 4).view(rows, 4),)


def differentiable_batch() -> tuple[torch.Tensor]:
    return (batch()[0].requires_grad_(),)
