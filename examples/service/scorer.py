"""The model that the service serves: a score of four features, as a package."""

from __future__ import annotations

import torch

import inductor_ext

LARGEST_BATCH = 32


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))


def write_package(path: str) -> None:
    """Compile the model for batches of any size up to the largest one."""
    batch = torch.export.Dim("batch", min=1, max=LARGEST_BATCH)
    program = torch.export.export(make_model(), (torch.ones(2, 4),), dynamic_shapes=({0: batch},))
    inductor_ext.aoti_compile_and_package(program, package_path=path)
