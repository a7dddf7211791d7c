"""Load a model from the cache that the test has filled, and print its memory report."""

from __future__ import annotations

import json
import os
import sys

import torch

import inductor_ext
from inductor_ext import events, exc
from inductor_ext.hooks.records import CompileRecord
from test.support.memory_plans import forget_plans


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(64, 256)
        self.down = torch.nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x))).sum()


def main(elsewhere: str) -> None:
    """Print the compiles and the report, and the error if the plans are missing."""
    compiled = torch.compile(Model(), backend="inductor_ext")
    with events.capture() as records:
        compiled(torch.randn(32, 64)).backward()
    report = inductor_ext.memory_report(compiled)
    forget_plans()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = elsewhere
    try:
        error = str(inductor_ext.memory_report(compiled))
    except exc.PlanNotFoundError as missing:
        error = str(missing)
    result = {
        "events": [record.name for record in records],
        "caches": [record.cache for record in records if isinstance(record, CompileRecord)],
        "report": report.to_json(),
        "error": error,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
