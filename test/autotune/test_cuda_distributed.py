"""A model on two GPUs, by data, by shards and by tensors: ranks agree, and results are the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.mark.parametrize("mode", ["ddp", "fsdp", "tp"])
def test_two_ranks_agree_and_results_equal_one_rank(mode: str, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    child = ["-m", "test.support.children.ranks", mode, "cuda", str(tmp_path)]
    # Every rank compiles: cache hits are not logged.
    caches = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
    subprocess.run([*torchrun, *child], check=True, env={**os.environ, **caches})
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first["products"] == second["products"]
    assert len(first["products"]) >= 4
    tuned = first["tuned"] + second["tuned"]
    assert first["products"].keys() & set(tuned)
    # One rank measured while the other waited.
    assert len(tuned) == len(set(tuned))
    assert max(first["error"], second["error"]) < 4e-2
