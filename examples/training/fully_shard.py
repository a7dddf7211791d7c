"""Train with FSDP2: parameters, gradients and optimizer state are spread over the processes.

Shard first, then compile each block: the parameters of a block are gathered before its compiled
code runs, and freed after it. On GPUs, use `backend="nccl"` and start the script by torchrun.

It prints the losses of two sharded processes and those of one process, without sharding:

    1 process    1.2169 0.5263 0.2258
    2 processes  1.2169 0.5263 0.2258
"""

import tempfile

import torch
from torch import distributed, multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WORLD = 2


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(32, 128), torch.nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def train(model: torch.nn.Module) -> list[float]:
    """Return the losses of three steps. All processes get the same samples."""
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(Block(), Block())


def run(rank: int, folder: str) -> None:
    """One process: it keeps a part of the parameters."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD
    )
    mesh = init_device_mesh("cpu", (WORLD,))
    model = make_model()
    for block in model:
        fully_shard(block, mesh=mesh)
        block.compile(backend="inductor_ext")
    fully_shard(model, mesh=mesh)
    losses = train(model)
    if rank == 0:
        torch.save(losses, f"{folder}/losses.pt")
    distributed.destroy_process_group()


def main() -> tuple[list[float], list[float]]:
    """Return the losses of one process and of sharded ones."""
    alone = train(make_model())
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run, (folder,), nprocs=WORLD)
        sharded: list[float] = torch.load(f"{folder}/losses.pt")
    print("1 process   ", *(f"{loss:.4f}" for loss in alone))
    print("2 processes ", *(f"{loss:.4f}" for loss in sharded))
    return alone, sharded


if __name__ == "__main__":
    main()
