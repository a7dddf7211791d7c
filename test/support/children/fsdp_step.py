"""Run once for each rank: training steps of a sharded model by eager mode, Inductor, the extension.

    python -m test.support.children.fsdp_step RANK RANKS DEVICE FOLDER NAME ...

DEVICE is cpu or cuda, and the names are keys of `BACKENDS`. Parameters are gathered for each block,
and freed after its forward and its backward. The file FOLDER/RANK.json has for each name:

- error: the largest relative error of loss and gradients against one process in float64,
- peak: bytes of a step above the level before it,
- gathered: bytes of gathered parameters between forward and backward,
- unsharded: bytes of all parameters when they are gathered,
- members: the number of buffers in arenas.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch._inductor import config as inductor_config
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import inductor_ext
from benchmarks.harness import measure
from inductor_ext import events
from inductor_ext.memory.records import MemoryPlanRecord

BACKENDS = {
    "eager": (None, {}),
    "inductor": ("inductor", {}),
    "auto": ("inductor_ext", {}),
    "always": ("inductor_ext", {"memory_arenas": "always", "memory_debug": True}),
}
"""By name: the backend and the settings of the extension."""

WIDTH, ROWS, BLOCKS = 128, 96, 2


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(self.norm(x)).chunk(2, -1)
        out: torch.Tensor = x + self.down(torch.nn.functional.silu(gate) * value)
        return out


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(Block() for _ in range(BLOCKS)))


def shard(model: torch.nn.Sequential, backend: str | None, mesh: DeviceMesh) -> None:
    """Compile and shard every block."""
    for block in model:
        if backend is not None:
            block.compile(backend=backend, dynamic=False)
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)


def count_gathered_bytes(model: torch.nn.Sequential) -> int:
    """Return the bytes of the gathered parameters of all blocks."""
    total = 0
    for block in model:
        state: Any = block._get_fsdp_state()  # type: ignore[operator]
        for parameter in state._fsdp_param_group.fsdp_params:
            gathered = parameter.all_gather_outputs
            total += sum(tensor.untyped_storage().nbytes() for tensor in gathered)
    return total


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    difference = torch.linalg.vector_norm(value.double() - reference)
    return (difference / torch.linalg.vector_norm(reference)).item()


def measure_peak(step: Callable[[], object], device: str) -> int:
    if device == "cuda":
        torch.cuda.empty_cache()
        return measure.measure_gpu_peak(step)
    return measure.measure_peak_allocated(step)


def run(name: str, rank: int, mesh: DeviceMesh, device: str) -> dict[str, float]:
    """Return the measurements of one backend."""
    backend, settings = BACKENDS[name]
    torch._dynamo.reset()
    exact = make_model().to(device)
    model = copy.deepcopy(exact)
    exact = exact.double()
    x = torch.randn(mesh.size() * ROWS, WIDTH, device=device)
    mine = x[rank * ROWS : (rank + 1) * ROWS]
    shard(model, backend, mesh)
    gathered = []

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(mine).square().mean()
        gathered.append(count_gathered_bytes(model))
        loss.backward()
        return loss

    def train() -> None:
        step()
        model.zero_grad()

    with (
        inductor_ext.config.patch(settings),
        inductor_config.patch(fx_graph_cache=False),
        events.capture(MemoryPlanRecord) as records,
    ):
        train()
        loss = step()
    expected = exact(x.double()).square().mean()
    expected.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    errors = [relative_error(total / mesh.size(), expected.detach())]
    for parameter, other in zip(model.parameters(), exact.parameters(), strict=True):
        gradient: Any = parameter.grad
        assert other.grad is not None
        errors.append(relative_error(gradient.full_tensor(), other.grad))
    model.zero_grad()
    del loss, expected, exact
    for block in model:
        block.unshard()
    unsharded = count_gathered_bytes(model)
    for block in model:
        block.reshard()
    return {
        "error": max(errors),
        "peak": measure_peak(train, device),
        "gathered": max(gathered),
        "unsharded": unsharded,
        "members": sum(s.arena is not None for record in records for s in record.storages),
    }


def main(rank: int, ranks: int, device: str, folder: Path, names: list[str]) -> None:
    """Measure the backends of these names and write the file."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
    )
    mesh = init_device_mesh(device, (ranks,))
    measurements = {name: run(name, rank, mesh, device) for name in names}
    (folder / f"{rank}.json").write_text(json.dumps(measurements))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), sys.argv[5:])
