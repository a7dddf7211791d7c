"""Train with DistributedDataParallel in two processes, on the CPU with gloo.

Wrap the model first and compile the wrapper: torch then splits the graph so that gradients are
sent while the backward pass is still running. On GPUs, use `backend="nccl"` and start the script
by torchrun.

It prints the difference between the gradient of two processes and that of one process that gets
all samples:

    2 processes: largest difference from one process 1.5e-08
"""

from __future__ import annotations

import os
import tempfile

import torch
from torch import distributed, multiprocessing
from torch.nn.parallel import DistributedDataParallel

WORLD = 2


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))


def make_samples() -> torch.Tensor:
    return torch.randn(8 * WORLD, 16, generator=torch.Generator().manual_seed(1))


def run(rank: int, folder: str) -> None:
    """One process: a step on its part of the samples. Rank 0 writes the gradients."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD
    )
    model = DistributedDataParallel(make_model())
    compiled = torch.compile(model, backend="inductor_ext")
    compiled(make_samples().chunk(WORLD)[rank]).square().mean().backward()
    if rank == 0:
        torch.save([p.grad for p in model.parameters()], os.path.join(folder, "gradients.pt"))
    distributed.destroy_process_group()


def main() -> float:
    """Return the largest difference of a gradient."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run, (folder,), nprocs=WORLD)
        gradients = torch.load(os.path.join(folder, "gradients.pt"))
    reference = make_model()
    reference(make_samples()).square().mean().backward()
    difference = max(
        float((mine - parameter.grad).abs().max())
        for mine, parameter in zip(gradients, reference.parameters(), strict=True)
    )
    print(f"{WORLD} processes: largest difference from one process {difference:.1e}")
    return difference


if __name__ == "__main__":
    main()
