"""Compile time of four small models with `backend="inductor_ext"`, in two checkouts.

Two decoders, a training step of an encoder and a convolutional model are compiled on the CPU with
Inductor's caches disabled, in child processes of this checkout and of another one (`--baseline`, a
folder with an earlier version), as `harness.checkouts` describes.

    python -m benchmarks.compile_time --baseline FOLDER [--rounds N] [--json-out DIR]
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MODELS = (
    "decoder, inference",
    "decoder, dynamic batch",
    "encoder, training step",
    "convolutions, inference",
)


def _decoder() -> torch.nn.Module:
    """Return a decoder of two layers: RMSNorm, fused QKV, causal attention, gated MLP."""
    from torch import nn
    from torch.nn import functional as F

    class Layer(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.gate, self.up = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)
            self.down = nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).transpose(1, 3)
            query, key, value = qkv.unbind(2)
            attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + self.out(attended.transpose(1, 2).flatten(2))
            normed = self.norm2(x)
            gated: torch.Tensor = F.silu(self.gate(normed)) * self.up(normed)
            down: torch.Tensor = self.down(gated)
            return x + down

    return nn.Sequential(Layer(64), Layer(64))


def _first_call(model: str) -> Callable[[], object]:
    """Return the call that compiles a model of `MODELS`."""
    import torch
    from torch import nn

    if model.startswith("decoder"):
        dynamic = model.endswith("dynamic batch")
        compiled = torch.compile(_decoder().eval(), backend="inductor_ext", dynamic=dynamic)
        x = torch.randn(3, 16, 64)
    elif model.startswith("encoder"):
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        compiled = torch.compile(encoder, backend="inductor_ext")
        x = torch.randn(3, 16, 64)
    else:
        blocks: list[nn.Module] = []
        for channels in (16, 32, 64):
            convolution = nn.LazyConv2d(channels, 3, padding=1)
            blocks += [convolution, nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(2)]
        compiled = torch.compile(nn.Sequential(*blocks).eval(), backend="inductor_ext")
        x = torch.randn(2, 3, 32, 32)

    def call() -> object:
        if model.endswith("training step"):
            return compiled(x).sum().backward()
        with torch.no_grad():
            return compiled(x)

    return call


def measure() -> dict[str, float]:
    """Return the seconds that the first call of each model takes."""
    import torch

    # The imports and hooks of a first compile are not part of the figures.
    torch.compile(lambda x: x + 1, backend="inductor_ext")(torch.ones(3))
    figures = {}
    for model in MODELS:
        torch.compiler.reset()
        call = _first_call(model)
        start = time.perf_counter()
        call()
        figures[model] = time.perf_counter() - start
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and store the results; the exit code is 0."""
    argv = sys.argv[1:] if argv is None else argv
    if argv == ["--child"]:
        print(json.dumps(measure()))
        return 0
    from benchmarks.harness import checkouts

    units = dict.fromkeys(MODELS, "s")
    comparison = checkouts.Comparison("compile-time", "small models on the CPU", units, 4)
    return checkouts.main(comparison, Path(__file__), __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
