"""The record of a memory plan: modules and operators of its storages."""

from __future__ import annotations

import re

import torch

from test.support.memory_compiles import compiled, planning


def test_the_record_has_modules_and_operators() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Linear(16, 64)
            self.down = torch.nn.Linear(64, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.nn.functional.gelu(self.up(x)))

    model = torch.nn.Sequential(Block(), Block())
    with planning() as records, torch.no_grad():
        x = torch.randn(8, 16)
        torch.testing.assert_close(compiled(model)(x), model(x), atol=1e-5, rtol=1e-4)
    (record,) = records
    modules = {storage.module for storage in record.storages}
    assert {"0.up", "0.down", "1.up", "1.down"} & modules
    assert any("addmm" in storage.operator for storage in record.storages)
    line = record.describe()
    assert re.match(r"memory_plan: call \(inference\) peak [\d.]+ -> [\d.]+ MiB, lower bound", line)
