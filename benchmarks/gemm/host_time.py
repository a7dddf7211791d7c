"""Host time of calls without CUDA graphs: layers with int8 and int4 weights, and in bfloat16.

Without CUDA graphs, decoding is limited by the time that the host takes to start kernels. The
layers are those of `cases.py` with few rows. A measurement is the time of many calls until the last
of them has returned, without waiting for the GPU. `quantized` compares a layer that the extension
compiles with the same layer in bfloat16 that Inductor compiles, `bfloat16` that layer compiled by
both, all without tuning. The column `eager` is the layer in bfloat16 in eager mode.

    python -m benchmarks.gemm.host_time [--case NAME ...] [--rounds N] [--json-out DIR]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._inductor import config as inductor_config

from benchmarks.gemm import cases as gemm_suite
from benchmarks.gemm.cases import Case, Program
from benchmarks.gemm.measurement import compute_error, is_accurate
from benchmarks.harness import measure, results, resumable, variants

__all__ = ["CASES", "main", "make_rows", "measure_case"]

ROUNDS = 40

CALLS = 50
"""Calls of a measurement, fewer than a GPU's queue holds: the host never waits."""

CASES: Mapping[str, Case] = {
    name: case
    for name, case in gemm_suite.CASES.items()
    if case.m <= 16 and case.kind.startswith(("int8", "int4"))
}
"""Layers with quantized weights and few rows, by name."""


def measure_case(case: Case, device: str, rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Return the microseconds of a call in every round, in alternation.

    Args:
        case: one of `CASES`.
        device: "cuda", or "cpu" to try it.
        rounds: number of measurements.

    Returns:
        By "quantized" (compiled by the extension), "ours", "stock" and "eager" (in bfloat16).

    Raises:
        ValueError: a result is wrong.
    """
    program = case.program(device)
    layer = program.alternatives["bf16"]
    ours, stock = variants.VARIANTS["ours-default"], variants.VARIANTS["stock"]
    calls: dict[str, Callable[[], Any]] = {"eager": layer}
    with torch.no_grad(), inductor_config.patch(freezing=program.frozen):
        for name, variant, function, inputs in (
            ("quantized", ours, program.function, program.inputs),
            ("ours", ours, layer, ()),
            ("stock", stock, layer, ()),
        ):
            with variants.use_fresh_caches():
                calls[name] = variants.compile_and_call(variant, function, inputs).call
        _check(program, calls["quantized"])
        timers = {name: _time_calls(call) for name, call in calls.items()}
        return measure.alternate(timers, rounds)


def _check(program: Program, call: Callable[[], Any]) -> None:
    exact = program.reference()
    eager = compute_error(program.function(*program.inputs), exact)
    error = compute_error(call(), exact)
    if not is_accurate(error, eager):
        raise ValueError(f"The result is wrong: error {error:.1e}, in eager mode {eager:.1e}.")


def _time_calls(call: Callable[[], Any]) -> Callable[[], float]:
    """Return a function that measures the microseconds that the host takes for a call."""
    for _ in range(CALLS):
        call()

    def time_calls() -> float:
        variants.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        seconds = time.perf_counter() - start
        variants.synchronize()
        return seconds / CALLS * 1e6

    return time_calls


def make_rows(case: str, times: Mapping[str, Sequence[float]]) -> list[results.Row]:
    """Return result rows.

    Args:
        case: name of the case.
        times: see `measure_case`.
    """
    samples = {name: measure.summarize(values) for name, values in times.items()}
    return [
        variants.make_row(
            case,
            title,
            "us",
            {
                "ours": samples[ours].median,
                "stock": samples["stock"].median,
                "eager": samples["eager"].median,
            },
            "stock",
            spread=max(samples[name].spread for name in (ours, "stock")),
        )
        for title, ours in (("quantized", "quantized"), ("bfloat16", "ours"))
    ]


def _run_case(case: Case, device: str, rounds: int) -> resumable.CaseResult:
    try:
        rows = make_rows(case.name, measure_case(case, device, rounds))
    except Exception as failure:
        line = f"{case.name}: {type(failure).__name__}: {str(failure)[:300]}"
        return resumable.CaseResult([], line, failed=True)
    torch._dynamo.reset()
    parts = [f"{r['metric']} {r['ours']:.1f} (stock {r['stock']:.1f})" for r in rows]
    return resumable.CaseResult(rows, f"{case.name}: {', '.join(parts)}", failed=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 1 if a case failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    names = list(CASES)
    parser.add_argument("--case", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="measurements of a call")
    resumable.add_arguments(parser)
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    header = results.collect_header("host-time", results.format_command(), commit=options.commit)
    ledger = resumable.Ledger(header, options.json_out, options.resume)
    remaining = [CASES[name] for name in options.case if name not in ledger.cases]
    _, failed = ledger.add_all(
        _run_case(case, device, options.rounds)
        for case in resumable.take_within(remaining, options.budget_seconds)
    )
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
