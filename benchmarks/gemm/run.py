"""GEMM benchmark on a GPU: eager (cuBLAS), Inductor in several configurations, and the extension.

All variants run every case of `gemm.cases` in one process. They are timed in alternation, with
operands in DRAM. `graph` is the time under CUDA graphs, for code compiled for CUDA graphs; `call`
is the time of ordinary calls. Every result is compared with float64, and a wrong result gets no
time. `compile` is the wall time from an empty cache to the first result of an ordinary call,
including tuning, with compile workers running; `--warm` also measures it from warm caches. `tuning`
is the part of it per GEMM that was tuned.

A run of the whole suite takes longer than many machines can be reserved. It measures the
representative cases first (`--quick` measures only these), stops within the given time budget, and
can be resumed:

    python -m benchmarks.gemm.run --budget-seconds 520 --json-out DIR --resume FILE

`--no-table` measures compile times without any stored results for a GEMM. `--processes 3` compiles
that many cases at the same time, while one process at a time uses the GPU; compile times are not
measured then. Times from runs with many processes may be worse than those of a single process,
because tuning then measures on a busy host (see `gpu_lock`).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import torch
from torch._inductor import config as inductor_config

from benchmarks.gemm import cases as gemm_suite
from benchmarks.gemm.cases import Case, Program
from benchmarks.gemm.measurement import Measurement, compute_error, is_accurate
from benchmarks.harness import gpu_lock, measure, results, resumable, variants
from benchmarks.harness.gpu_timing import Mode, Timer
from benchmarks.harness.variants import CompiledProgram, Variant
from inductor_ext.autotune import results_db
from inductor_ext.templates.device import Device

__all__ = [
    "CaseRunner",
    "HasProgram",
    "compute_lower_bound",
    "main",
    "make_rows",
    "measure_case",
]

MODES: tuple[Mode, ...] = ("call", "graph")
"""In the order of compilation: only the first mode starts with empty caches."""

_Programs = dict[Mode, dict[str, CompiledProgram]]
"""The compiled programs to measure, by mode and variant."""


def compute_lower_bound(case: Case, device: str) -> float | None:
    """Return the lower bound (us) of the kernel time, without launch; None for unknown GPUs."""
    if device == "cpu":
        return None
    properties = Device.from_torch(torch.cuda.get_device_properties(0))
    bound = case.problem.roofline(properties)
    return bound if math.isfinite(bound) else None


class HasProgram(Protocol):
    """What `measure_case` needs of a case."""

    @property
    def name(self) -> str:
        """Name of the case in the results."""

    def program(self, device: str | torch.device, seed: int = 0) -> Program:
        """See `gemm_suite.Case.program`."""


def measure_case(
    case: HasProgram,
    variant_list: Sequence[Variant],
    timer: Timer,
    *,
    rounds: int | None = None,
    warm: bool = False,
) -> dict[str, Measurement]:
    """Compile, check and time one case.

    Args:
        case: a case of the suite, or another one.
        variant_list: the variants; the error of eager mode is always computed.
        timer: timer of the device to measure on.
        rounds: see `Timer.measure`.
        warm: whether to compile once more from warm caches.

    Returns:
        Measurements by variant, and by the name of other ways to compute the layer
            (`Program.alternatives`).
    """
    with gpu_lock.hold_gpu():
        program = case.program(timer.device)
        reference = program.reference()
    measurements: dict[str, Measurement] = {}
    compiled: _Programs = {mode: {} for mode in MODES if mode == "call" or timer.device == "cuda"}
    # Both dynamo and Inductor read `freezing`.
    with torch.no_grad(), inductor_config.patch(freezing=program.frozen):
        for group in variants.group_by_backend(variant_list):
            with contextlib.ExitStack() as stack:
                if group[0].backend is not None:
                    stack.enter_context(variants.use_fresh_caches())
                for variant in group:
                    measurements[variant.name] = measurement = Measurement()
                    try:
                        for mode, programs in compiled.items():
                            programs[variant.name] = _compile(
                                variant, mode, program, measurement, warm
                            )
                    except Exception as failure:
                        # A failing variant must not invalidate the measurements of the others.
                        measurement.failure = f"{type(failure).__name__}: {str(failure)[:300]}"
        with gpu_lock.hold_gpu():
            _check(program, reference, compiled, measurements)
            del reference
            _time(program, compiled, measurements, timer, rounds)
    return measurements


def _check(
    program: Program,
    reference: Sequence[torch.Tensor],
    compiled: _Programs,
    measurements: Mapping[str, Measurement],
) -> None:
    """Remove the variants with wrong results from `compiled`."""
    eager = compute_error(program.function(*program.inputs), reference)
    for mode, name in [(mode, name) for mode, programs in compiled.items() for name in programs]:
        error = compute_error(compiled[mode][name].call(), reference)
        if is_accurate(error, eager):
            measurements[name].record_error(error)
        else:
            measurements[name].failure = f"wrong: error {error:.1e}, eager {eager:.1e}, {mode}"
            del compiled[mode][name]


def _time(
    program: Program,
    compiled: _Programs,
    measurements: dict[str, Measurement],
    timer: Timer,
    rounds: int | None,
) -> None:
    for name in program.alternatives:
        measurements[name] = Measurement()
    for mode, programs in compiled.items():
        calls = {name: entry.call for name, entry in programs.items()} | dict(program.alternatives)
        times = timer.measure(calls, mode, rounds)
        for name in calls:
            if name in times:
                measurements[name].times[mode] = times[name]
            else:
                measurements[name].failure = "no CUDA graph can hold it"


def _compile(
    variant: Variant, mode: Mode, program: Program, measurement: Measurement, warm: bool
) -> CompiledProgram:
    def compile_program(**options: Any) -> CompiledProgram:
        return variants.compile_and_call(variant, program.function, program.inputs, options)

    if mode == "graph":
        with variants.without_recording():
            return compile_program(**{"triton.cudagraphs": True})
    with variants.collect_tuned_gemms() as gemms:
        compiled = compile_program()
    if variant.backend is not None:
        # Inductor with TMA reuses from the caches what Inductor without TMA has compiled.
        if variant.name != "stock-max-tma":
            measurement.compile = compiled.seconds
            measurement.tuning = max((gemm.seconds for gemm in gemms), default=None)
            measurement.choices = tuple(gemm.choice for gemm in gemms)
        if warm:
            measurement.compile_warm = compile_program().seconds
    return compiled


def make_rows(
    case: str, measurements: Mapping[str, Measurement], bound: float | None = None
) -> list[results.Row]:
    """Return the measurements of a case as result rows.

    Args:
        case: name of the case.
        measurements: see `measure_case`.
        bound: microseconds of the roofline.
    """
    rows: list[results.Row] = []
    failures = {name: item.failure for name, item in measurements.items() if item.failure}
    inductor = [variant for variant in variants.VARIANTS.values() if variant.is_stock]
    with_cutlass = variants.VARIANTS["ours-cutlass"]
    for mode in MODES:
        samples = {
            name: measure.summarize(item.times[mode])
            for name, item in measurements.items()
            if mode in item.times
        }
        for name, title in (
            *((variant.name, variant.title) for variant in (*inductor, with_cutlass)),
            *((name, f"{name} weights") for name in measurements if name not in variants.VARIANTS),
        ):
            compared = [samples[key] for key in ("ours", name, "eager") if key in samples]
            if name not in measurements or not compared:
                continue
            notes = [f"{key}: {failures[key]}" for key in ("ours", name) if key in failures]
            rows.append(
                variants.make_row(
                    case,
                    f"{mode}, {title}",
                    "us",
                    {key: sample.median for key, sample in samples.items()},
                    name,
                    floor=bound,
                    spread=max(sample.spread for sample in compared),
                    note="; ".join(notes) or None,
                )
            )
    for metric, attribute, unit in (
        ("compile", "compile", "s"),
        ("compile, warm", "compile_warm", "s"),
        ("error", "error", "1"),
    ):
        values = {name: getattr(item, attribute) for name, item in measurements.items()}
        for variant in inductor:
            if values.get(variant.name) is not None:
                title = f"{metric}, {variant.title}"
                rows.append(variants.make_row(case, title, unit, values, variant.name))
    tuning = measurements["ours"].tuning if "ours" in measurements else None
    if tuning is not None:
        note = "; ".join(measurements["ours"].choices) or None
        rows.append(variants.make_row(case, "tuning", "s", {"ours": tuning}, "stock", note=note))
    return rows


class CaseRunner:
    """Measures cases one after the other.

    Args:
        names: names of the variants.
        rounds: see `measure_case`.
        warm: see `measure_case`.
        seconds: whether compile times are part of the results.
        bound: like `compute_lower_bound`, for the cases that are measured.
    """

    def __init__(
        self,
        names: Sequence[str],
        rounds: int | None,
        warm: bool,
        seconds: bool = True,
        bound: Callable[[Any, str], float | None] = compute_lower_bound,
    ) -> None:
        self.variants = variants.select(names)
        self.rounds, self.warm, self.seconds, self.bound = rounds, warm, seconds, bound
        self.timer = Timer("cuda" if torch.cuda.is_available() else "cpu")
        variants.start_workers(self.variants, self.timer.device)

    def __call__(self, case: HasProgram) -> resumable.CaseResult:
        """Measure a case; failures are part of the result."""
        start = time.monotonic()
        try:
            measurements = measure_case(
                case, self.variants, self.timer, rounds=self.rounds, warm=self.warm
            )
        except Exception as failure:
            line = f"{case.name}: {type(failure).__name__}: {str(failure)[:500]}"
            return resumable.CaseResult([], line, failed=True)
        if not self.seconds:
            for item in measurements.values():
                item.compile = item.tuning = item.compile_warm = None
        if self.timer.device == "cuda":
            torch.cuda.empty_cache()
        return resumable.CaseResult(
            make_rows(case.name, measurements, self.bound(case, self.timer.device)),
            _format_line(case, measurements, time.monotonic() - start),
            failed=any(item.failure for item in measurements.values()),
        )


def _format_line(case: HasProgram, measurements: Mapping[str, Measurement], seconds: float) -> str:
    parts = []
    for name, item in measurements.items():
        values = item.times.get("graph") or item.times.get("call")
        text = f"{measure.summarize(values).median:.1f}" if values else "-"
        compiled = f" ({item.compile:.1f} s)" if item.compile is not None else ""
        parts.append(f"{name} {text}{compiled}{f' {item.failure}' if item.failure else ''}")
    return f"{case.name}: {', '.join(parts)}; {seconds:.1f} s in all"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. The exit code is 1 if a variant failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--group", nargs="+", choices=gemm_suite.GROUPS, help="only cases of these")
    parser.add_argument("--case", nargs="+", choices=sorted(gemm_suite.CASES), metavar="NAME")
    parser.add_argument(
        "--rows", type=int, nargs="+", metavar="M", help="only cases with one of these M"
    )
    parser.add_argument("--quick", action="store_true", help="only the representative cases")
    variants.add_argument(parser)
    parser.add_argument("--rounds", type=int, help="measurements per variant; by default, as fit")
    parser.add_argument("--warm", action="store_true", help="also compile from warm caches")
    parser.add_argument(
        "--no-table", action="store_true", help="ignore shipped tuning results; with one process"
    )
    parser.add_argument("--list", action="store_true", help="print the cases and exit")
    resumable.add_arguments(parser)
    options = parser.parse_args(arguments)
    if options.no_table and options.processes > 1:
        parser.error("--no-table needs --processes 1: other processes read the table")
    cases = [
        case
        for case in gemm_suite.CASES.values()
        if (not options.group or case.group in options.group)
        and (not options.case or case.name in options.case)
        and (not options.rows or case.m in options.rows)
        and (case.quick or not options.quick)
    ]
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    start = time.monotonic()
    header = results.collect_header("gemm", results.format_command(), commit=options.commit)
    ledger = resumable.Ledger(header, options.json_out, options.resume)
    todo = [case for case in cases if case.name not in ledger.cases]
    names = ["eager", *options.variants]
    make = functools.partial(CaseRunner, names, options.rounds, options.warm)
    with contextlib.ExitStack() as stack:
        if options.no_table:
            empty = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            stack.enter_context(mock.patch.object(results_db, "TABLES", empty))
        case_results = gpu_lock.run(todo, make, options.processes, options.budget_seconds)
        count, failed = ledger.add_all(case_results)
    print(f"{count} of {len(todo)} measured in {time.monotonic() - start:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
