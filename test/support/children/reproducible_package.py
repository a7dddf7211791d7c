"""Compiles a package into the path that is the first argument.

The program has an assert on two sizes, whose order in a set depends on PYTHONHASHSEED, and more
C++ than one translation unit gets.
"""

from __future__ import annotations

import sys

import torch
from torch.export import Dim

import inductor_ext
from test.support.built_models import uncached_packages

torch.manual_seed(0)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second = x.nonzero(), y.nonzero()
        torch._check(first.shape[0] <= second.shape[0] + y.shape[0])
        return self.linear(x).topk(2)[0], torch.cat([first, second])


rows = {0: Dim("rows", min=2, max=64)}
program = torch.export.export(
    Model(), (torch.ones(3, 8), torch.ones(5, 8)), dynamic_shapes=({0: Dim.STATIC}, rows)
)
with uncached_packages():
    inductor_ext.aoti_compile_and_package(
        program, package_path=sys.argv[1], inductor_configs={"aot_unit_size": 1000}
    )
