"""A process that tunes in the background on a GPU, and the compile that uses its result."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from inductor_ext import events
from inductor_ext.autotune import background_tuning
from inductor_ext.autotune.tuning_queue import TuningQueue
from inductor_ext.templates.records import MatmulRecord

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_the_next_compile_uses_the_results(tmp_path: Path) -> None:
    options = {"tuning": "background", "tuning_cache_dir": str(tmp_path)}
    # A size that no shipped table has.
    x, w = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((24, 480), (720, 480))
    )

    def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w.t()

    origins = []
    for _ in range(2):
        torch._dynamo.reset()
        with events.capture(MatmulRecord) as records:
            y = torch.compile(model, backend="inductor_ext", options=options)(x, w)
        origins += [record.origin for record in records]
        torch.testing.assert_close(y, model(x, w), rtol=2e-2, atol=0.5)
        for process in background_tuning.started_processes:
            assert process.wait(timeout=300) == 0
    assert origins[0] in ("unknown", "predicted")
    assert origins[-1] == "cache"
    assert TuningQueue(tmp_path).read() == []
