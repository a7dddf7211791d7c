"""Random GEMMs of model layers, and their measurement.

The sizes are those of layers that neither the benchmark suite nor the shipped tuning tables have:
hidden sizes from 512 to 7168, MLPs of 2 to 4 times the width, one key-value head for 1 to 8 query
heads, at few rows (decode) and many (prefill). The kinds are those that models have: linear layers
with and without bias, residuals, Q, K and V from one input, SwiGLU, norms before a linear layer,
int8 and int4 weights, sizes that are not a multiple of 8, and batches.

    python -m benchmarks.gemm.layer_problems --count 400 --budget-seconds 500 --out layers.json

The table that this writes has the time of Inductor's kernels and of the candidates that the cost
model ranks first. `measurements/` has such tables, compressed (`gzip -9n`); `read` reads them. That
of the H100 has the first 497 GEMMs from seed 0 and the first 888 from seed 100000; the rules of
`autotune.default_choice` come from it. That of the H200 has the first 375 from seed 200000. It was
measured when the rules existed, and tests them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from inductor_ext.autotune import results
from inductor_ext.templates.fused_ops import Dequant, Epilogue, Prologue, RowNorm
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import EpilogueInput

__all__ = ["MEASUREMENTS", "draw_problem", "draw_problems", "main", "read"]

MEASUREMENTS = Path(__file__).parent / "measurements"
"""The folder of measurements, one file per device."""

_WIDTHS = (512, 640, 768, 896, 1152, 1536, 1600, 2048, 2304, 2560, 3072, 3200, 4608, 5120, 6656)
_MLP_RATIOS = (2.0, 8 / 3, 3.5, 4.0)
_FEW_ROWS = (1, 1, 1, 2, 3, 4, 6, 8, 8, 12, 16, 24, 32, 32, 48, 64)
_MANY_ROWS = (96, 128, 197, 256, 333, 512, 1024, 1500, 2048, 4096)
_ODD_SIZES = (63, 100, 367, 1001, 1003, 1283, 2047, 2305, 3001, 4099)
_GELU_OPERATIONS = 25


def _draw_sizes(rng: random.Random) -> tuple[int, int]:
    """Return N and K of a linear layer."""
    width = rng.choice(_WIDTHS)
    hidden = round(width * rng.choice(_MLP_RATIOS) / 64) * 64
    attention = max(64, width // rng.choice((1, 1, 2, 4, 8)) // 64 * 64)
    return rng.choice(((attention, width), (width, width), (hidden, width), (width, hidden)))


def _draw_rows(rng: random.Random, few: float) -> int:
    return rng.choice(_FEW_ROWS if rng.random() < few else _MANY_ROWS)


def _draw_dtype(rng: random.Random) -> str:
    return rng.choice(("bfloat16", "bfloat16", "bfloat16", "float16"))


def _draw_linear(rng: random.Random) -> GemmProblem:
    n, k = _draw_sizes(rng)
    return GemmProblem.contiguous("mm", _draw_rows(rng, 0.75), n, k, _draw_dtype(rng))


def _draw_bias(rng: random.Random) -> GemmProblem:
    (n, k), dtype = _draw_sizes(rng), _draw_dtype(rng)
    pointwise = rng.choice((1, _GELU_OPERATIONS))
    epilogue = Epilogue((EpilogueInput(dtype, "row"),), pointwise)
    return GemmProblem.contiguous("addmm", _draw_rows(rng, 0.6), n, k, dtype, epilogue=epilogue)


def _draw_residual(rng: random.Random) -> GemmProblem:
    (n, k), dtype = _draw_sizes(rng), _draw_dtype(rng)
    epilogue = Epilogue((EpilogueInput(dtype, "matrix"),), 1)
    return GemmProblem.contiguous("mm", _draw_rows(rng, 0.7), n, k, dtype, epilogue=epilogue)


def _draw_attention_parts(rng: random.Random) -> tuple[int, tuple[int, ...]]:
    """Return K, and the widths of the Q, K and V projections."""
    width = rng.choice(_WIDTHS)
    shared = max(64, width // rng.choice((1, 2, 4, 8)) // 64 * 64)
    return width, (width, shared, shared)


def _draw_qkv(rng: random.Random) -> GemmProblem:
    k, parts = _draw_attention_parts(rng)
    return GemmProblem.contiguous(
        "mm", _draw_rows(rng, 0.75), sum(parts), k, _draw_dtype(rng), parts=parts
    )


def _draw_gated(rng: random.Random) -> GemmProblem:
    width = rng.choice(_WIDTHS)
    hidden = round(width * rng.choice(_MLP_RATIOS) / 64) * 64
    return GemmProblem.contiguous(
        "mm",
        _draw_rows(rng, 0.75),
        2 * hidden,
        width,
        _draw_dtype(rng),
        parts=(hidden, hidden),
        epilogue=Epilogue(gated=True),
    )


def _draw_norm(rng: random.Random) -> GemmProblem:
    dtype, rows = _draw_dtype(rng), rng.choice((1, 1, 1, 2, 4, 8, 16))
    prologue = Prologue(RowNorm("rms", 1, dtype))
    if rng.random() < 0.5:
        k, parts = _draw_attention_parts(rng)
        return GemmProblem.contiguous(
            "mm", rows, sum(parts), k, dtype, parts=parts, prologue=prologue
        )
    n, k = _draw_sizes(rng)
    return GemmProblem.contiguous("mm", rows, n, k, dtype, prologue=prologue)


def _draw_quantized(rng: random.Random) -> GemmProblem:
    rows, kind = _draw_rows(rng, 0.85), rng.choice(("int8", "uint4"))
    dequant = Dequant("column") if kind == "int8" else Dequant("group", 128)
    parts: tuple[int, ...] = ()
    if rng.random() < 0.3:
        k, parts = _draw_attention_parts(rng)
        n = sum(parts)
    else:
        n, k = _draw_sizes(rng)
    k = -(-k // 128) * 128
    return GemmProblem.contiguous(
        "mixed", rows, n, k, b_dtype=kind, parts=parts, prologue=Prologue(dequant=dequant)
    )


def _draw_odd(rng: random.Random) -> GemmProblem:
    n, k = _draw_sizes(rng)
    if rng.random() < 0.5:
        k = rng.choice(_ODD_SIZES)
    else:
        n = rng.choice(_ODD_SIZES)
    rows = rng.choice((1, 7, 16, 33, 64, 100, 256, 999, 2048))
    return GemmProblem.contiguous("mm", rows, n, k, _draw_dtype(rng))


def _draw_batched(rng: random.Random) -> GemmProblem:
    length, size = rng.choice((49, 64, 128, 196, 257, 512, 1024)), rng.choice((32, 64, 80, 128))
    rows = rng.choice((1, 4, length))
    n, k = rng.choice(((length, size), (size, length)))
    return GemmProblem.contiguous(
        "bmm",
        rows,
        n,
        k,
        _draw_dtype(rng),
        batch=rng.choice((8, 16, 32, 96)),
        layouts="rc" if n == length else "rr",
    )


_KINDS: Mapping[Callable[[random.Random], GemmProblem], int] = {
    _draw_linear: 28,
    _draw_bias: 12,
    _draw_residual: 8,
    _draw_qkv: 9,
    _draw_gated: 9,
    _draw_norm: 9,
    _draw_quantized: 12,
    _draw_odd: 8,
    _draw_batched: 5,
}
"""Kinds with their weights."""


def draw_problem(seed: int) -> GemmProblem:
    """Return the GEMM of a seed."""
    rng = random.Random(seed)
    return rng.choices(list(_KINDS), list(_KINDS.values()))[0](rng)


def draw_problems(count: int, seed: int) -> list[GemmProblem]:
    """Return different GEMMs.

    Args:
        count: how many.
        seed: the first seed.
    """
    problems: dict[GemmProblem, None] = {}
    while len(problems) < count:
        problems[draw_problem(seed)] = None
        seed += 1
    return list(problems)


def read(path: Path) -> list[results.TuningResult]:
    """Return the entries of a compressed table."""
    entries = json.loads(gzip.decompress(path.read_bytes()))["entries"]
    return [results.TuningResult.from_json(entry) for entry in entries]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget-seconds", type=float, default=float("inf"))
    parser.add_argument("--out", type=Path, required=True, help="the table to write")
    parser.add_argument(
        "--without", nargs="*", type=Path, default=[], help="tables whose GEMMs are skipped"
    )
    options = parser.parse_args(arguments)

    import torch

    from benchmarks.gemm.retune_tables import measure
    from inductor_ext.autotune import inductor_benchmark
    from inductor_ext.templates.device import Device

    done = {entry.problem for path in options.without for entry in results.read_table(path)}
    problems = [p for p in draw_problems(options.count, options.seed) if p not in done]
    device = Device.from_torch(torch.cuda.get_device_properties(0))
    measure(problems, device, inductor_benchmark.cuda_bench, options.out, options.budget_seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
