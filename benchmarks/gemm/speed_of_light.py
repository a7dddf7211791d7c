"""Lower bounds that GPU kernels can reach: a launch, reading weights, and a plain matmul.

A GEMM with small M must read its weights, and the lower bound in the tables assumes the sustained
DRAM bandwidth. A real kernel also pays for its launch and for the latency before the first and
after the last bytes, which matter if the whole kernel takes 20 us. These kernels therefore read
as many bytes as 16-, 8- and 4-bit weights have, in many configurations, and keep the maximum; the
fastest one is the best that a GEMM can hope for. `launch` is a kernel that reads nothing.

A GEMM with large M and an epilogue is no faster than the matmul alone, for which cuBLAS is timed.

    python -m benchmarks.gemm.speed_of_light --json-out DIR
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.harness import measure, results, variants
from benchmarks.harness.gpu_timing import Timer
from inductor_ext.templates.device import Device

__all__ = ["main", "make_reader", "make_readers"]

SHAPES = ((16, 28672, 4096), (16, 14336, 4096), (16, 4096, 14336), (16, 6144, 4096))
"""M, N and K of matmuls that are bound by reading weights; the first one is a gate-up
projection."""

COMPUTE_BOUND = ((2048, 4096, 14336), (2048, 6144, 4096))
"""M, N and K of compute-bound matmuls: down projection with residual, and QKV."""

BITS = (16, 8, 4)
"""Bits of a weight."""

BLOCKS = (2048, 4096, 8192)
"""32-bit words that a program reads at once."""

WARPS = (4, 8, 16)

PROGRAMS = (0, 1, 2, 4)
"""Programs per SM, each of which loops until everything is read; 0 for one program per block."""

STAGES = (1, 4)
"""Loads in flight at once in one program."""


@triton.jit  # type: ignore[untyped-decorator]
def _read(  # type: ignore[no-untyped-def]
    source, target, count, BLOCK: tl.constexpr, STAGES: tl.constexpr
):
    lanes = tl.arange(0, BLOCK)
    maximum = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(
        tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK, num_stages=STAGES
    ):
        offsets = start + lanes
        maximum = tl.maximum(maximum, tl.load(source + offsets, mask=offsets < count, other=0))
    tl.store(target + tl.program_id(0), tl.max(maximum, 0))


def make_reader(
    source: torch.Tensor, block: int, warps: int, programs: int, stages: int
) -> tuple[Callable[[], Any], torch.Tensor]:
    """Return a call that reads int32 words, and the tensor with the maximum of every program and 0.

    Args:
        source: int32 [count].
        block, warps, programs, stages: see `BLOCKS`, `WARPS`; the total number of programs;
            `STAGES`.
    """
    target = torch.empty(programs, dtype=torch.int32, device=source.device)

    def call() -> None:
        _read[(programs,)](source, target, source.numel(), block, stages, num_warps=warps)

    return call, target


def make_readers(source: torch.Tensor, sms: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield all configurations of the reader by name, each called once and checked."""
    expected = max(0, int(source.max()))
    for block, warps, per_sm, stages in itertools.product(BLOCKS, WARPS, PROGRAMS, STAGES):
        blocks = -(-source.numel() // block)
        if not per_sm and stages > 1:
            continue
        programs = min(blocks, per_sm * sms) if per_sm else blocks
        call, target = make_reader(source, block, warps, programs, stages)
        call()
        if int(target.max()) != expected:
            raise AssertionError(f"{block} words, {warps} warps, {per_sm} programs: wrong maximum")
        grid = f"{per_sm} programs an SM" if per_sm else "a program for each block"
        yield f"{block} numbers at once, {warps} warps, {grid}, {stages} stages", call


def _make_operands(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    return a, torch.randn(n, k, device="cuda", dtype=torch.bfloat16)


def _measure_matmuls(rounds: int) -> Iterator[results.Row]:
    timer = Timer("cuda")
    for m, n, k in COMPUTE_BOUND:
        a, b = _make_operands(m, n, k)
        residual = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
        calls = {
            "product alone": functools.partial(torch.mm, a, b.t()),
            "product and sum": functools.partial(torch.addmm, residual, a, b.t()),
        }
        for call in calls.values():
            call()
        for metric, times in timer.measure(calls, "graph", rounds).items():
            sample = measure.summarize(times)
            values = {"eager": sample.median}
            yield variants.make_row(
                f"{m}x{n}x{k}", metric, "us", values, "stock", spread=sample.spread, note="cuBLAS"
            )


def _measure_readers(rounds: int) -> Iterator[results.Row]:
    device = Device.from_torch(torch.cuda.get_device_properties(0))
    timer = Timer("cuda")
    for m, n, k in SHAPES:
        a, b = _make_operands(m, n, k)
        for bits in BITS:
            source = torch.randint(2**31 - 1, (n * k * bits // 32,), device="cuda").int()
            calls = dict(make_readers(source, device.sms))
            minima = {name: min(v) for name, v in timer.measure(calls, "graph", 5).items()}
            best = sorted(minima, key=minima.__getitem__)[:6]
            launch, _ = make_reader(source[:32], 32, 1, 1, 1)
            calls = {name: calls[name] for name in best} | {"launch": launch}
            calls["cublas"] = functools.partial(torch.mm, a, b.t())
            for call in calls.values():
                call()
            times = timer.measure(calls, "graph", rounds)
            samples = {name: measure.summarize(time) for name, time in times.items()}
            fastest = min(best, key=lambda name: samples[name].median)
            case = f"weights of {bits} bits, {m}x{n}x{k}"
            reading, matmul = samples[fastest], samples["cublas"]
            yield variants.make_row(
                case,
                "reading alone",
                "us",
                {"ours": reading.median, "eager": matmul.median},
                "stock",
                floor=n * k * bits / 8 / device.bandwidth * 1e6,
                spread=max(reading.spread, matmul.spread),
                note=f"{fastest}; eager is cuBLAS with weights of 16 bits",
            )
            if bits == BITS[0]:
                launch_sample = samples["launch"]
                values = {"ours": launch_sample.median}
                yield variants.make_row(
                    case,
                    "launch",
                    "us",
                    values,
                    "stock",
                    spread=launch_sample.spread,
                    note="reads 128 bytes",
                )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--commit", help="commit of the source tree if it is not a git checkout")
    parser.add_argument("--json-out", type=Path, help="folder of the results")
    options = parser.parse_args(arguments)
    header = results.collect_header(
        "speed-of-light", results.format_command(), commit=options.commit
    )
    rows = []
    for row in itertools.chain(_measure_readers(options.rounds), _measure_matmuls(options.rounds)):
        rows.append(row)
        print({key: value for key, value in row.items() if value is not None}, flush=True)
    if options.json_out:
        results.write(options.json_out, {**header, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
