"""Models with constants, and eager models of the two sets of constants of a compiled model."""

from __future__ import annotations

import pathlib
from typing import Any

import torch
from torch import nn

from test.support import aot_util
from test.support.aot_util import Artifact


class Buffers(nn.Module):
    """Named buffers, and a function of them and the input."""

    def __init__(self, function: Any, **buffers: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(*args, **dict(self.named_buffers(remove_duplicate=False)))


class Layers(nn.Module):
    """Two layers of different size, a buffer and a tensor of another dtype."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(4, width)
        self.down = nn.Linear(width, 3)
        self.register_buffer("scale", torch.rand(3))
        self.register_buffer("order", torch.tensor([2, 0, 1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.down(self.up(x).relu()) * self.scale)[:, self.order]


FQNS = {"up.weight", "up.bias", "down.weight", "down.bias", "scale", "order"}


def layers(device: str, width: int = 8) -> tuple[nn.Module, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    return Layers(width).to(device), (torch.randn(2, 4, device=device),)


def fresh(model: nn.Module) -> dict[str, torch.Tensor]:
    """New values for all parameters and floating buffers, by name."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        name: torch.rand_like(tensor) if tensor.is_floating_point() else tensor.flip(0)
        for name, tensor in tensors.items()
    }


class Updated:
    """A runner of an artifact, and the eager models of its two sets of constants."""

    def __init__(self, artifact: Artifact, folder: pathlib.Path, args: tuple[Any, ...]) -> None:
        self.runner = artifact.runner(folder)
        self.args = args
        self.active = aot_util.clone(artifact.eager)
        self.inactive = aot_util.clone(artifact.eager)
        fqns = self.runner.get_constant_names_to_original_fqns()
        self._names = {fqn: name for name, fqn in fqns.items()}

    def update(
        self, values: dict[str, torch.Tensor], *, inactive: bool = False, **options: bool
    ) -> None:
        named = {self._names[fqn]: value for fqn, value in values.items()}
        full = len(values) == len(self._names)
        self.runner.update_constant_buffer(named, inactive, full, **options)
        model = self.inactive if inactive else self.active
        model.load_state_dict(values, strict=False)

    def swap(self) -> None:
        self.runner.swap_constant_buffer()
        self.active, self.inactive = self.inactive, self.active

    def check(self) -> None:
        with torch.no_grad():
            expected = self.active(*self.args)
        (actual,) = self.runner.run(list(self.args))
        torch.testing.assert_close(actual, expected)
