"""Compile time of eight small models with and without the fixes of Inductor bugs.

The models are compiled on the CPU with `backend="inductor_ext"`, in one process and thread, with
and without `hooks.upstream_fixes` in alternation and with an empty cache folder each time. The
figures are CPU seconds of the process and of the C++ compilers that it runs, which depend less on
what else the machine does than elapsed time does.

    python -m benchmarks.compile_time [--rounds N] [--models NAME ...] [--json-out DIR]
"""

from __future__ import annotations

import argparse
import gc
import inspect
import os
import resource
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from benchmarks.harness import measure, results

if TYPE_CHECKING:
    import torch

_Call = Callable[[], object]


def _decoder(dynamic: bool = False) -> _Call:
    """Two decoder layers: RMSNorm, fused QKV, causal attention, gated MLP."""
    import torch
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

    model = nn.Sequential(Layer(64), Layer(64)).eval()
    return _inference(model, torch.randn(3, 16, 64), dynamic=dynamic)


def _decoder_with_cache() -> _Call:
    """One step of attention that writes its keys and values into a static cache."""
    import torch
    from torch.nn import functional as F

    width, heads = 64, 4
    weights = torch.randn(width, 3 * width) / 8

    def step(
        x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, position: torch.Tensor
    ) -> torch.Tensor:
        query, key, value = (x @ weights).view(x.shape[0], heads, 1, -1).chunk(3, dim=-1)
        keys.index_copy_(2, position, key)
        values.index_copy_(2, position, value)
        return F.scaled_dot_product_attention(query, keys, values)

    cache = (torch.zeros(2, heads, 32, 16), torch.zeros(2, heads, 32, 16))
    return _inference(step, torch.randn(2, width), *cache, torch.tensor([5]))


def _encoder_training() -> _Call:
    """A training step of two encoder layers."""
    import torch
    from torch import nn

    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    compiled = torch.compile(encoder, backend="inductor_ext")
    x = torch.randn(3, 16, 64)
    return lambda: compiled(x).sum().backward()


def _convolutions() -> _Call:
    """Three blocks of convolution, batch norm, ReLU and pooling."""
    import torch
    from torch import nn

    blocks: list[nn.Module] = []
    for channels in (16, 32, 64):
        convolution = nn.LazyConv2d(channels, 3, padding=1)
        blocks += [convolution, nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(2)]
    return _inference(nn.Sequential(*blocks).eval(), torch.randn(2, 3, 32, 32))


def _batch_norm_training() -> _Call:
    """A training step of a residual block, whose running statistics are mutated."""
    import torch
    from torch import nn

    body = nn.Sequential(
        nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1)
    )
    compiled = torch.compile(lambda x: x + body(x), backend="inductor_ext")
    x = torch.randn(2, 8, 16, 16)
    return lambda: compiled(x).sum().backward()


def _images() -> _Call:
    """Normalization of uint8 images by their minimum and maximum, and of each channel."""
    import torch

    def normalize(images: torch.Tensor) -> torch.Tensor:
        low, high = images.amin((1, 2), keepdim=True), images.amax((1, 2), keepdim=True)
        scaled = (images - low) / (high - low).clamp(min=1)
        return (scaled - scaled.mean((0, 1, 2))) / scaled.std((0, 1, 2))

    return _inference(normalize, torch.randint(0, 255, (4, 32, 48, 3), dtype=torch.uint8))


def _embeddings() -> _Call:
    """A recommender: embedding bags, pairwise dot products, MLP."""
    import torch
    from torch import nn

    tables = nn.ModuleList(nn.EmbeddingBag(50, 16) for _ in range(4))
    top = nn.Sequential(nn.Linear(4 * 16 + 16, 32), nn.ReLU(), nn.Linear(32, 1))

    def recommend(indices: torch.Tensor) -> torch.Tensor:
        vectors = torch.stack([table(indices) for table in tables], 1)
        pairs = (vectors @ vectors.mT).flatten(1)
        scores: torch.Tensor = top(torch.cat([vectors.flatten(1), pairs], 1))
        return scores.sigmoid()

    return _inference(recommend, torch.randint(0, 50, (8, 5)))


def _inference(model: Callable[..., object], *inputs: torch.Tensor, dynamic: bool = False) -> _Call:
    """Return a call of a newly compiled model without gradients."""
    import torch

    compiled = torch.compile(model, backend="inductor_ext", dynamic=dynamic)
    return torch.no_grad()(lambda: compiled(*inputs))


MODELS: dict[str, Callable[[], _Call]] = {
    "decoder": _decoder,
    "decoder, dynamic batch": lambda: _decoder(dynamic=True),
    "decoder, static cache": _decoder_with_cache,
    "encoder, training step": _encoder_training,
    "convolutions": _convolutions,
    "batch norm, training step": _batch_norm_training,
    "uint8 images": _images,
    "embeddings": _embeddings,
}
"""Functions that return the call that compiles a model."""


class Fixes:
    """The fixes of Inductor bugs, which can be switched off after their hooks are installed.

    The hooks of the fixes are installed after all others, so that their targets can be restored.
    """

    def __init__(self) -> None:
        from torch._inductor import lowering

        from inductor_ext.hooks import lowering_dispatch, scope, upstream_fixes

        with mock.patch.object(upstream_fixes, "install_hooks"):
            scope.install_hooks()
        targets, lowerings = self._read_targets(), dict(lowering.lowerings)
        upstream_fixes.install_hooks()
        lowering_dispatch.install_hooks()
        self._targets = [
            (owner, name, function)
            for (owner, name, function), new in zip(targets, self._read_targets(), strict=True)
            if function is not new[-1]
        ]
        self._lowerings = {
            operator: function
            for operator, function in lowerings.items()
            if function is not lowering.lowerings[operator]
        }

    @staticmethod
    def _read_targets() -> list[tuple[Any, str, Any]]:
        """Return the owner, the name and the function of every target that a fix replaces."""
        from inductor_ext.hooks import registry, upstream_fixes

        places = {
            place: None
            for hook in upstream_fixes.HOOKS
            if hook.kind == "replaced" and (place := registry.find_owner(hook))
        }
        return [(owner, name, inspect.getattr_static(owner, name)) for owner, name in places]

    @contextmanager
    def without(self) -> Iterator[None]:
        """Inside, graphs are compiled without the fixes."""
        from torch._inductor import lowering

        from inductor_ext.hooks import upstream_fixes
        from inductor_ext.hooks.upstream_fixes import returned_views

        with ExitStack() as stack:
            # Every compile installs hooks that are missing.
            stack.enter_context(mock.patch.object(upstream_fixes, "install_hooks"))
            for owner, name, function in self._targets:
                stack.enter_context(mock.patch.object(owner, name, function))
            stack.enter_context(mock.patch.dict(lowering.lowerings, self._lowerings))
            # The fixes that `hooks.compile_fx` calls.
            stack.enter_context(mock.patch.object(returned_views, "view_inputs"))
            yield


def measure_compile(make_call: Callable[[], _Call]) -> float:
    """Return the CPU seconds of the first call of a newly compiled model."""
    import torch
    from torch._inductor.utils import fresh_cache

    torch.compiler.reset()
    call = make_call()
    gc.collect()
    with fresh_cache():
        before = _read_cpu_seconds()
        call()
        return _read_cpu_seconds() - before


def _read_cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def compare(fixes: Fixes, name: str, rounds: int) -> results.Row:
    """Return a row: the compile time with the fixes, and its ratio to that without them."""

    def with_fixes() -> float:
        return measure_compile(MODELS[name])

    def without_fixes() -> float:
        with fixes.without():
            return measure_compile(MODELS[name])

    with_fixes(), without_fixes()  # imports, and what is compiled once per process
    times = measure.alternate({"with": with_fixes, "without": without_fixes}, rounds)
    ratios = [a / b for a, b in zip(times["with"], times["without"], strict=True)]
    seconds, without = (statistics.median(values) for values in times.values())
    return results.make_row(
        "small models on the CPU",
        name,
        "s",
        ours=seconds,
        spread=measure.summarize(ratios).spread,
        note=f"without the fixes: {without:.3f} s; ratio {seconds / without:.3f}",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and store the results; the exit code is 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=12, help="2 or more")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--json-out", type=Path, metavar="DIR")
    args = parser.parse_args(argv)
    if args.rounds < 2:
        parser.error(f"--rounds is {args.rounds}, but a spread needs 2 or more")
    # Kernels are compiled one after another, in processes that have ended when they are counted.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    fixes = Fixes()
    rows = []
    for name in args.models:
        rows.append(compare(fixes, name, args.rounds))
        print(f"{name:28} {rows[-1]['ours']:7.3f} s, {rows[-1]['note']}", flush=True)
    if args.json_out is not None:
        command = results.format_command()
        header = results.collect_header("compile-time", command, results.name_hardware("cpu"))
        print(results.write(args.json_out, {**header, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
