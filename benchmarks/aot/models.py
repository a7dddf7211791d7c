"""The models of the AOT benchmark: full size, random weights.

The architectures are those of `memory.models`, in their well-known sizes. Nothing is downloaded,
and values are equal in every process.
"""

# A module's call returns Any to the type checker.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.memory import models as memory_models

__all__ = ["MODELS", "Model"]

Inputs = tuple[Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Model:
    """One model of the benchmark."""

    name: str
    build: Callable[[], tuple[nn.Module, Inputs]]
    batch: int
    """Number of calls that are timed together; a single call of a small model is too short for the
    clock."""

    def make(self) -> tuple[nn.Module, Inputs]:
        """Return the module in eval mode, without gradients, and its positional inputs."""
        torch.manual_seed(0)
        module, inputs = self.build()
        return module.eval().requires_grad_(False), inputs


class Pointwise(nn.Module):
    """One fused kernel on few elements, to measure the cost of a call."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x * 2 + 1)


class Eight(nn.Module):
    """The same with eight inputs, to measure the cost of an input."""

    def forward(
        self, a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor, g: Tensor, h: Tensor
    ) -> Tensor:
        return torch.relu(a + b + c + d + e + f + g + h)


def _make_mlp() -> tuple[nn.Module, Inputs]:
    layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 16))
    return layers, (torch.randn(8, 64),)


def _make_bert() -> tuple[nn.Module, Inputs]:
    module = memory_models.Bert(768, 12, 12, 30522, 512)
    return module, (
        torch.randint(30522, (1, 128)),
        torch.zeros(1, 128, dtype=torch.int64),
        torch.tensor([128]),
    )


def _make_resnet() -> tuple[nn.Module, Inputs]:
    return memory_models.ResNet(64, (3, 4, 6, 3)), (torch.randn(1, 3, 224, 224),)


def _make_llama() -> tuple[nn.Module, Inputs]:
    return memory_models.Llama(576, 9, 3, 24, 32000), (torch.randint(32000, (1, 128)),)


MODELS = {
    model.name: model
    for model in (
        Model("pointwise", lambda: (Pointwise(), (torch.randn(8),)), 1000),
        Model("eight inputs", lambda: (Eight(), tuple(torch.randn(8, 8))), 1000),
        Model("mlp", _make_mlp, 1000),
        Model("bert", _make_bert, 1),
        Model("resnet", _make_resnet, 1),
        Model("llama", _make_llama, 1),
    )
}
"""By name: one kernel, eight inputs, two layers, BERT-base, ResNet-50, 24 layers of a Llama."""
