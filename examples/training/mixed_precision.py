"""Train with autocast, gradient accumulation and activation checkpointing, in a plain loop.

The model is compiled once, and the loop is the usual one. `torch.utils.checkpoint` works inside
of the compiled model: its activations are computed again in the backward pass.

It prints the losses of compiled and of eager training:

    eager     2.6357 2.4281 2.2303
    compiled  2.6357 2.4281 2.2303
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

ACCUMULATE = 2
"""Batches per step of the optimizer."""


class Classifier(torch.nn.Module):
    """Two blocks whose activations are not kept, and a head of ten classes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
            for _ in range(2)
        )
        self.head = torch.nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def train(compile_model: Callable[[torch.nn.Module], torch.nn.Module]) -> list[float]:
    """Return the loss of each of three steps."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Classifier().to(device)
    step_model = compile_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = torch.randn(ACCUMULATE, 16, 64, device=device)
    labels = torch.randint(10, (ACCUMULATE, 16), device=device)
    losses = []
    for _ in range(3):
        total = 0.0
        for x, label in zip(batches, labels, strict=True):
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(step_model(x), label) / ACCUMULATE
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def main() -> tuple[list[float], list[float]]:
    """Return the losses of eager and of compiled training."""
    eager = train(lambda model: model)
    compiled = train(lambda model: torch.compile(model, backend="inductor_ext"))
    print("eager    ", *(f"{loss:.4f}" for loss in eager))
    print("compiled ", *(f"{loss:.4f}" for loss in compiled))
    return eager, compiled


if __name__ == "__main__":
    main()
