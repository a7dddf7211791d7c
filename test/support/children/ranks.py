"""Run by torchrun: train a model for one step and write this rank's decisions and errors.

    torchrun --standalone --nproc-per-node 2 -m test.support.children.ranks MODE DEVICE FOLDER

MODE is ddp, fsdp or tp, and DEVICE is cuda or cpu.

The file FOLDER/RANK.json has the kernel of each matmul, the problems that this rank has measured,
and the largest relative error of outputs and gradients against a single process in float64.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from inductor_ext import events
from inductor_ext.templates.records import MatmulRecord, TuningRecord

WIDTH, HIDDEN, ROWS = 512, 2048, 64
"""Rows are those of a rank, where the batch is divided among ranks."""


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, HIDDEN)
        self.down = torch.nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(x)))
        return out


def parallel(model: torch.nn.Sequential, mode: str, mesh: DeviceMesh, options: Any) -> Any:
    """The model divided among ranks, compiled by the extension."""
    compiling = {"backend": "inductor_ext", "options": options, "dynamic": False}
    if mode == "fsdp":
        for block in model:
            block.compile(**compiling)
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    if mode == "tp":
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in model:
            parallelize_module(block, mesh, plan)
        return torch.compile(model, **compiling)
    return torch.compile(DistributedDataParallel(model), **compiling)


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    difference = torch.linalg.vector_norm(value.double() - reference)
    return (difference / torch.linalg.vector_norm(reference)).item()


def main(mode: str, device_type: str, folder: Path) -> None:
    """Take one step, on the same data as a single process would."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda = device_type == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device_type, (ranks,))
    torch.manual_seed(0)
    dtype = torch.bfloat16 if cuda else torch.float32
    model = torch.nn.Sequential(Block(), Block()).to(device, dtype)
    exact = copy.deepcopy(model).double()
    x = torch.randn(ranks * ROWS, WIDTH, device=device, dtype=dtype)
    mine = x if mode == "tp" else x[rank * ROWS : (rank + 1) * ROWS]
    options = {"tuning_cache_dir": str(folder / "tuning")}
    if cuda:
        options["max_autotune"] = True  # type: ignore[assignment]
    with events.capture() as records:
        run = parallel(model, mode, mesh, options)
        out = run(mine)
        out.square().mean().backward()
    expected = exact(x.double())
    expected.square().mean().backward()
    rows = slice(None) if mode == "tp" else slice(rank * ROWS, (rank + 1) * ROWS)
    errors = [relative_error(out.detach(), expected[rows].detach())]
    for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        errors.append(relative_error(ours.grad, theirs.grad))
    products = {
        record.problem.key: record.chosen.to_json() if record.chosen else None
        for record in records
        if isinstance(record, MatmulRecord) and record.problem
    }
    tuned = [record.problem.key for record in records if isinstance(record, TuningRecord)]
    result = {"products": products, "tuned": tuned, "error": max(errors)}
    (folder / f"{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
