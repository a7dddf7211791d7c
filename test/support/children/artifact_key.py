"""Print the keys of a few programs, exported in this process, as one JSON object.

Run with several PYTHONHASHSEEDs it must print the same. The first argument is a number of objects
created in advance, so that addresses differ, too.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch.export import Dim

from inductor_ext import settings
from inductor_ext.cpp_wrapper.cache import key as artifact_key


class Branches(torch.nn.Module):
    """Weights, tied and shared ones, a branch with a closure, nested inputs and a derived size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(8, 8)
        self.tied = torch.nn.Linear(8, 8)
        self.tied.weight = self.linear.weight
        self.register_buffer("scale", torch.rand(16)[4:12])
        self.register_buffer("unused", torch.rand(3), persistent=False)

    def forward(self, x: torch.Tensor, named: dict[str, torch.Tensor], *, flag: int = 3) -> Any:
        def yes(y: torch.Tensor) -> torch.Tensor:
            return y + named["b"] * flag

        def no(y: torch.Tensor) -> torch.Tensor:
            return y - self.scale

        y = torch.cond(x.sum() > 0, yes, no, (self.tied(self.linear(x)),))
        return {"z": y, "a": y.view(-1, 2, 8) + torch.tensor([1.0, 2.0])[:, None]}


class Late(torch.nn.Module):
    """Unbacked sizes, with a check of them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.sum().to(torch.int64).item()
        torch._check(n >= 2)
        torch._check(n < 100)
        return torch.zeros(n, 2).sum(0) + x.nonzero().sum()


def programs() -> dict[str, torch.export.ExportedProgram]:
    """By name."""
    x = torch.randn(6, 8)
    named = {"b": torch.rand(8), "a": torch.rand(2)}
    shapes = {"x": {0: 2 * Dim("half", min=2, max=64)}, "named": {"a": None, "b": None}}
    return {
        "branches": torch.export.export(
            Branches().eval(), (x, named), {"flag": 3}, dynamic_shapes=shapes | {"flag": None}
        ),
        "late": torch.export.export(Late(), (torch.ones(4),)),
    }


def main() -> None:
    objects = [object() for _ in range(int(sys.argv[1]))]
    keys = {
        name: artifact_key.compute_key(program, settings.Settings(), {"max_autotune": True})
        for name, program in programs().items()
    }
    assert objects is not None
    print(json.dumps(keys))


if __name__ == "__main__":
    main()
