"""Fragmentation of GPU memory over calls of changing shapes: eager mode, Inductor, the extension.

A transformer runs steps whose batch sizes and lengths come from a seeded sequence, compiled once
with dynamic shapes. The caching allocator keeps what it has reserved from the driver: memory that
is reserved but fits no request is lost. A case is inference or training (forward, loss, backward
and AdamW), and has these rows:

- the peaks of reserved and of allocated bytes, weights and optimizer state included,
- the ratio of these peaks, and that of reserved to allocated bytes after the last step,
- the segments that the allocator requested from the driver, and the requests that it had to repeat
  after freeing its cache.

All are counted from a cache that was emptied after the compile. A compile within the steps would
count as well; the note of the peaks has the number of graphs that were compiled in them.

    python -m benchmarks.memory.fragmentation [--kinds KIND ...] [--steps N] [--json-out DIR]
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn

from benchmarks.harness import results, resumable, variants
from benchmarks.memory.peak import MIB
from benchmarks.memory.steps import VARIANTS

__all__ = [
    "KINDS",
    "SCALE",
    "Fragmentation",
    "Scale",
    "Transformer",
    "main",
    "make_fragmentation",
    "make_rows",
    "make_shapes",
    "run_steps",
]

KINDS = ("inference", "training")

SEED = 0


@dataclass(frozen=True)
class Scale:
    """Sizes of the model and of its inputs."""

    width: int
    layers: int
    heads: int
    vocabulary: int
    batch: int
    """Largest batch size; the smallest is 2, because torch compiles 1 separately."""
    length: int
    """Largest number of tokens; the smallest is 16."""


SCALE = Scale(width=512, layers=4, heads=8, vocabulary=2048, batch=16, length=512)


class _Layer(nn.Module):
    """Attention and a gated feed-forward network."""

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.heads = scale.heads
        self.norms = nn.ModuleList(nn.LayerNorm(scale.width) for _ in range(2))
        self.qkv = nn.Linear(scale.width, 3 * scale.width)
        self.out = nn.Linear(scale.width, scale.width)
        self.up = nn.Linear(scale.width, 8 * scale.width)
        self.down = nn.Linear(4 * scale.width, scale.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        gate, value = self.up(self.norms[1](x)).chunk(2, -1)
        result: Tensor = x + self.down(nn.functional.silu(gate) * value)
        return result


class Transformer(nn.Module):
    """Maps token ids `[batch, length]` to logits `[batch, length, vocabulary]`."""

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.embedding = nn.Embedding(scale.vocabulary, scale.width)
        self.layers = nn.ModuleList(_Layer(scale) for _ in range(scale.layers))
        self.head = nn.Linear(scale.width, scale.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def make_shapes(scale: Scale, steps: int, seed: int = SEED) -> list[tuple[int, int]]:
    """Return the batch size and length of each step. The same arguments give the same shapes."""
    generator = random.Random(seed)
    return [
        (generator.randint(2, scale.batch), generator.randint(16, scale.length))
        for _ in range(steps)
    ]


@dataclass(frozen=True)
class Fragmentation:
    """What the allocator counted during the steps."""

    reserved: int
    """Bytes, at the peak."""
    allocated: int
    """Bytes, at the peak."""
    end_reserved: int
    end_allocated: int
    segments: int
    """Segments that were requested from the driver."""
    retries: int
    """Requests that were repeated after the cache had been freed."""
    graphs: int = 0
    """Graphs that were compiled during the steps."""

    @property
    def peak_ratio(self) -> float:
        """Reserved over allocated bytes, each at its peak."""
        return self.reserved / self.allocated

    @property
    def end_ratio(self) -> float:
        """Reserved over allocated bytes after the last step."""
        return self.end_reserved / self.end_allocated


def make_fragmentation(
    before: Mapping[str, int], after: Mapping[str, int], graphs: int
) -> Fragmentation:
    """Return the counts of the steps between two results of `torch.cuda.memory_stats`.

    Args:
        before: the statistics at the start, when peaks were reset and segments were live.
        after: the statistics at the end.
        graphs: the number of graphs that were compiled in between.
    """
    live = before["segment.all.current"]
    requested = after["segment.all.allocated"] - before["segment.all.allocated"]
    return Fragmentation(
        reserved=after["reserved_bytes.all.peak"],
        allocated=after["allocated_bytes.all.peak"],
        end_reserved=after["reserved_bytes.all.current"],
        end_allocated=after["allocated_bytes.all.current"],
        segments=live + requested,
        retries=after["num_alloc_retries"] - before["num_alloc_retries"],
        graphs=graphs,
    )


class _Step:
    """A step of the model by one backend.

    Args:
        scale: sizes of the model.
        kind: "inference" or "training".
        backend: of torch.compile; None for eager mode.
        device: "cpu" or "cuda".
        dtype: of the weights.
    """

    def __init__(
        self, scale: Scale, kind: str, backend: str | None, device: str, dtype: torch.dtype
    ) -> None:
        torch.manual_seed(SEED)
        model = Transformer(scale).to(device, dtype).train(kind == "training")
        self.tokens = torch.randint(scale.vocabulary, (scale.batch, scale.length), device=device)
        self.model = model
        self.run: Callable[[Tensor], Tensor] = model
        if backend is not None:
            self.run = torch.compile(model, backend=backend, dynamic=True)
        self.optimizer = None
        if kind == "training":
            # Fused, because its other implementations allocate copies of all weights.
            self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def __call__(self, shape: tuple[int, int]) -> Tensor:
        """Run the step at a batch size and a length; return the loss, or the sum of the logits."""
        batch, length = shape
        tokens = self.tokens[:batch, :length].contiguous()
        if self.optimizer is None:
            with torch.no_grad():
                return self.run(tokens).sum(dtype=torch.float32)
        loss = nn.functional.cross_entropy(self.run(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def run_steps(
    scale: Scale,
    kind: str,
    backend: str | None,
    shapes: Sequence[tuple[int, int]],
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    start: Callable[[], None] = lambda: None,
) -> Tensor:
    """Run the steps of one backend; return their losses, or the sums of their logits.

    Args:
        scale: sizes of the model.
        kind: "inference" or "training".
        backend: of torch.compile; None for eager mode.
        shapes: batch size and length of each step.
        device: "cpu" or "cuda".
        dtype: of the weights.
        start: called after the model has been compiled and has run, before the first step.
    """
    step = _Step(scale, kind, backend, device, dtype)
    # The second call of training is the first one with the optimizer's state.
    for shape in ((scale.batch // 2, scale.length // 2), (scale.batch // 2 + 1, scale.length // 3)):
        step(shape)
    start()
    # Freed before the next step begins, as by `loss.item()`.
    return torch.tensor([step(shape).item() for shape in shapes])


def _measure(
    scale: Scale, kind: str, backend: str | None, shapes: Sequence[tuple[int, int]]
) -> Fragmentation:
    """Measure one backend in a cache that was emptied."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    before: dict[str, int] = {}
    graphs = torch._dynamo.utils.counters["stats"]

    def start() -> None:
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before.update(torch.cuda.memory_stats(), graphs=graphs["unique_graphs"])

    run_steps(scale, kind, backend, shapes, start=start)
    torch.cuda.synchronize()
    compiled = graphs["unique_graphs"] - before.pop("graphs")
    return make_fragmentation(before, torch.cuda.memory_stats(), compiled)


def make_rows(case: str, measured: Mapping[str, Fragmentation]) -> list[results.Row]:
    """Return result rows.

    Args:
        case: the model and the kind of step.
        measured: by variant.
    """
    compiled = ", ".join(f"{name} {found.graphs}" for name, found in measured.items())
    table: tuple[tuple[str, str, Callable[[Fragmentation], float]], ...] = (
        ("peak reserved", "MiB", lambda found: found.reserved / MIB),
        ("peak allocated", "MiB", lambda found: found.allocated / MIB),
        ("reserved/allocated, peaks", "1", lambda found: found.peak_ratio),
        ("reserved/allocated, end", "1", lambda found: found.end_ratio),
        ("segments", "segments", lambda found: found.segments),
        ("retries", "retries", lambda found: found.retries),
    )
    return [
        variants.make_row(
            case,
            metric,
            unit,
            {name: read(found) for name, found in measured.items()},
            "stock",
            note=f"graphs compiled during the steps: {compiled}" if unit == "MiB" else None,
        )
        for metric, unit, read in table
    ]


def _measure_case(scale: Scale, kind: str, steps: int) -> resumable.CaseResult:
    """Measure a kind of step with all variants. A variant that fails is left out."""
    shapes = make_shapes(scale, steps)
    measured: dict[str, Fragmentation] = {}
    failures = []
    for name, backend in VARIANTS.items():
        try:
            measured[name] = _measure(scale, kind, backend, shapes)
        except Exception as error:
            failures.append(f"  {name}: {type(error).__name__}: {str(error)[:300]}")
    case = f"transformer, {kind}, {steps} steps"
    rows = make_rows(case, measured) if measured else []
    return resumable.CaseResult(rows, _format(case, rows, failures), bool(failures))


def _format(case: str, rows: Sequence[results.Row], failures: Sequence[str]) -> str:
    """Return the lines that are printed for a case."""
    lines = [case]
    for row in rows:
        columns: dict[str, Any] = {name: row[name] for name in ("eager", "stock", "ours")}
        values = " ".join(f"{name} {value or 0:9.2f}" for name, value in columns.items())
        lines.append(f"  {row['metric']:26} {values}  {row['unit']}")
    return "\n".join([*lines, *failures])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 1 if a variant failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--steps", type=int, default=200, help="steps of each variant")
    resumable.add_arguments(parser)
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps is {options.steps}, but must be at least 1")
    if not torch.cuda.is_available():
        parser.error(f"needs a CUDA device, and torch {torch.__version__} finds none")
    header = results.collect_header(
        "memory-fragmentation",
        results.format_command(),
        results.name_hardware("cuda"),
        commit=options.commit,
    )
    ledger = resumable.Ledger(header, options.json_out, options.resume)
    done = {
        case.split(", ")[1] for case in ledger.cases if case.endswith(f" {options.steps} steps")
    }

    def run() -> Iterator[resumable.CaseResult]:
        kinds = [kind for kind in options.kinds if kind not in done]
        for kind in resumable.take_within(kinds, options.budget_seconds):
            yield _measure_case(SCALE, kind, options.steps)

    _, failed = ledger.add_all(run())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
