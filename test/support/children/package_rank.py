"""One rank of a tensor-parallel MLP that uses the package that rank 0 has compiled.

    python -m test.support.children.package_rank RANK FOLDER DEVICE

The first layer is split by its outputs, the second by its inputs. The weights of both ranks are in
one file, which each rank maps. Prints one line of JSON: the largest error against the whole model
in float64, and whether the model uses the tensors that it was given.
"""

from __future__ import annotations

import json
import pathlib
import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import nn

import inductor_ext

WIDTH = 64


class Mlp(nn.Module):
    """The whole model, or the part of a rank."""

    def __init__(self, inner: int, is_part: bool) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH, bias=False)
        self.is_part = is_part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(self.up(x).relu())
        return collectives.all_reduce(y, "sum", dist.group.WORLD) if self.is_part else y


def split(whole: Mlp, rank: int) -> dict[str, torch.Tensor]:
    """Return the weights of a rank."""
    rows = slice(rank * WIDTH, (rank + 1) * WIDTH)
    return {
        "up.weight": whole.up.weight[rows].clone(),
        "up.bias": whole.up.bias[rows].clone(),
        "down.weight": whole.down.weight[:, rows].contiguous(),
    }


@torch.no_grad()
def main() -> None:
    """Run the rank."""
    rank, folder, device = int(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
    backend, place = "gloo", torch.device("cpu")
    if device == "cuda":
        backend, place = "nccl", torch.device("cuda", rank)
        torch.cuda.set_device(place)
    store = f"file://{folder / 'store'}"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    whole = Mlp(2 * WIDTH, is_part=False).eval()
    x = torch.randn(5, WIDTH)
    package, weights = folder / "rank.pt2", folder / "weights.pt"
    if rank == 0:
        parts = [split(whole, other) for other in range(2)]
        torch.save(parts, weights)
        part = Mlp(WIDTH, is_part=True).eval().to(place)
        part.load_state_dict(parts[0])
        program = torch.export.export(part, (x.to(place),))
        inductor_ext.aoti_compile_and_package(program, package_path=package)
    dist.barrier()
    mapped = torch.load(weights, mmap=True)[rank]
    state = {name: tensor.to(place) for name, tensor in mapped.items()}
    model = inductor_ext.load(package, weights=state, device=place)
    error = (model(x.to(place)).cpu().double() - whole.double()(x.double())).abs().max().item()
    addresses = {name: tensor.data_ptr() for name, tensor in model.constants().items()}
    is_shared = addresses == {name: tensor.data_ptr() for name, tensor in state.items()}
    print(json.dumps({"error": error, "is_shared": is_shared}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
