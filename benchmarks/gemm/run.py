"""GEMM benchmark on a GPU: eager (cuBLAS), Inductor in several configurations, and the extension.

All contenders run every case of `gemm.cases` in one process. They are timed in alternation, with
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
import dataclasses
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
from benchmarks.harness import gpu_lock, measure, results, resumable, variants
from benchmarks.harness.gpu_timing import Mode, Timer
from benchmarks.harness.variants import Compiled, Contender
from inductor_ext.autotune import results_db
from inductor_ext.templates.device import Device

__all__ = [
    "ROUNDING",
    "WORSE",
    "Bench",
    "HasProgram",
    "Measured",
    "error",
    "floor",
    "main",
    "measure_case",
    "rows",
]

MODES: tuple[Mode, ...] = ("call", "graph")
"""In the order of compilation: only the first mode starts with empty caches."""

WORSE = 2.0
"""Maximum error of a result, relative to the error of eager mode."""

ROUNDING = 2**-8
"""Error that is accepted for any bfloat16 result, as a fraction of the norm."""


@dataclasses.dataclass
class Measured:
    """Measurements of one contender, or of another way to compute the layer."""

    times: dict[Mode, list[float]] = dataclasses.field(default_factory=dict)
    """Microseconds of every round."""
    compile: float | None = None
    """Seconds, from an empty cache."""
    again: float | None = None
    """Seconds, from warm caches."""
    error: float | None = None
    """Distance from float64, as a fraction of the norm."""
    failure: str | None = None
    """Why there are no times."""
    tuning: float | None = None
    """Seconds of `compile` per tuned GEMM, if any was tuned."""
    choices: tuple[str, ...] = ()
    """The kernel selected for every tuned GEMM."""


_Ready = dict[Mode, dict[str, Compiled]]
"""The calls to measure, by mode and contender."""


def error(found: Any, reference: Sequence[torch.Tensor]) -> float:
    """Return the relative Frobenius-norm error over all results; NaN if a result is NaN."""
    results_ = found if isinstance(found, (tuple, list)) else (found,)
    deviation = norm = 0.0
    for result, exact in zip(results_, reference, strict=True):
        deviation += float((result.double() - exact).square().sum())
        norm += float(exact.square().sum())
    return math.sqrt(deviation / norm)


def floor(case: Case, device: str) -> float | None:
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
    ways: Sequence[Contender],
    timer: Timer,
    *,
    rounds: int | None = None,
    warm: bool = False,
) -> dict[str, Measured]:
    """Compile, check and time one case.

    Args:
        case: a case of the suite, or another one.
        ways: the contenders; eager mode is always measured.
        timer: timer of the device to measure on.
        rounds: see `Timer.measure`.
        warm: whether to compile once more from warm caches.

    Returns:
        Measurements by contender, and by the name of other ways to compute the layer
            (`Program.rivals`).
    """
    with gpu_lock.turn():
        program = case.program(timer.device)
        reference = program.reference()
    found: dict[str, Measured] = {}
    ready: _Ready = {mode: {} for mode in MODES if mode == "call" or timer.device == "cuda"}
    # Both dynamo and Inductor read `freezing`.
    with torch.no_grad(), inductor_config.patch(freezing=program.frozen):
        for family in variants.families(ways):
            with contextlib.ExitStack() as stack:
                if family[0].backend is not None:
                    stack.enter_context(variants.fresh_caches())
                for way in family:
                    found[way.name] = measured = Measured()
                    try:
                        for mode in ready:
                            ready[mode][way.name] = _compile(way, mode, program, measured, warm)
                    except Exception as failure:
                        # A failing contender must not invalidate the measurements of the others.
                        measured.failure = f"{type(failure).__name__}: {str(failure)[:300]}"
        with gpu_lock.turn():
            _check(program, reference, ready, found)
            del reference
            _time(program, ready, found, timer, rounds)
    return found


def _check(
    program: Program,
    reference: Sequence[torch.Tensor],
    ready: _Ready,
    found: Mapping[str, Measured],
) -> None:
    """Remove the contenders with wrong results from `ready`."""
    eager = error(program.function(*program.inputs), reference)
    for mode, name in [(mode, name) for mode, ways in ready.items() for name in ways]:
        deviation = error(ready[mode][name].call(), reference)
        if deviation <= max(WORSE * eager, ROUNDING):
            found[name].error = max(deviation, found[name].error or 0.0)
        else:
            found[name].failure = f"wrong: error {deviation:.1e}, eager {eager:.1e}, {mode}"
            del ready[mode][name]


def _time(
    program: Program,
    ready: _Ready,
    found: dict[str, Measured],
    timer: Timer,
    rounds: int | None,
) -> None:
    for name in program.rivals:
        found[name] = Measured()
    for mode, ways in ready.items():
        calls = {name: compiled.call for name, compiled in ways.items()} | dict(program.rivals)
        times = timer.measure(calls, mode, rounds)
        for name in calls:
            if name in times:
                found[name].times[mode] = times[name]
            else:
                found[name].failure = "no CUDA graph can hold it"


def _compile(
    way: Contender, mode: Mode, program: Program, measured: Measured, warm: bool
) -> Compiled:
    def compiled(**options: Any) -> Compiled:
        return variants.compile_and_call(way, program.function, program.inputs, options)

    if mode == "graph":
        with variants.unrecorded():
            return compiled(**{"triton.cudagraphs": True})
    with variants.tuning() as tuned:
        found = compiled()
    if way.backend is not None:
        # Inductor with TMA finds in the caches what Inductor without TMA has compiled.
        if way.name != "stock-max-tma":
            measured.compile = found.seconds
            measured.tuning = max((item.seconds for item in tuned), default=None)
            measured.choices = tuple(item.choice for item in tuned)
        if warm:
            measured.again = compiled().seconds
    return found


def rows(case: str, found: Mapping[str, Measured], bound: float | None = None) -> list[results.Row]:
    """Return the measurements of a case as result rows.

    Args:
        case: name of the case.
        found: see `measure_case`.
        bound: microseconds of the roofline.
    """
    made: list[results.Row] = []
    failures = {name: item.failure for name, item in found.items() if item.failure}
    stocks = [way for way in variants.CONTENDERS.values() if way.is_stock]
    for mode in MODES:
        samples = {
            name: measure.summarize(item.times[mode])
            for name, item in found.items()
            if mode in item.times
        }
        for name, title in (
            *((way.name, way.title) for way in (*stocks, variants.CONTENDERS["ours-cutlass"])),
            *((name, f"{name} weights") for name in found if name not in variants.CONTENDERS),
        ):
            shown = [samples[key] for key in ("ours", name, "eager") if key in samples]
            if name not in found or not shown:
                continue
            notes = [f"{key}: {failures[key]}" for key in ("ours", name) if key in failures]
            made.append(
                variants.row(
                    case,
                    f"{mode}, {title}",
                    "us",
                    {key: sample.median for key, sample in samples.items()},
                    name,
                    floor=bound,
                    spread=max(sample.spread for sample in shown),
                    note="; ".join(notes) or None,
                )
            )
    for metric, attribute, unit in (
        ("compile", "compile", "s"),
        ("compile, warm", "again", "s"),
        ("error", "error", "1"),
    ):
        values = {name: getattr(item, attribute) for name, item in found.items()}
        for way in stocks:
            if values.get(way.name) is not None:
                made.append(variants.row(case, f"{metric}, {way.title}", unit, values, way.name))
    tuning = found["ours"].tuning if "ours" in found else None
    if tuning is not None:
        note = "; ".join(found["ours"].choices) or None
        made.append(variants.row(case, "tuning", "s", {"ours": tuning}, "stock", note=note))
    return made


class Bench:
    """Measures cases one after the other.

    Args:
        names: names of the contenders.
        rounds: see `measure_case`.
        warm: see `measure_case`.
        seconds: whether compile times are part of the results.
        bound: like `floor`, for the cases that are measured.
    """

    def __init__(
        self,
        names: Sequence[str],
        rounds: int | None,
        warm: bool,
        seconds: bool = True,
        bound: Callable[[Any, str], float | None] = floor,
    ) -> None:
        self.ways = variants.chosen(names)
        self.rounds, self.warm, self.seconds, self.bound = rounds, warm, seconds, bound
        self.timer = Timer("cuda" if torch.cuda.is_available() else "cpu")
        variants.start_workers(self.ways, self.timer.device)

    def __call__(self, case: HasProgram) -> resumable.Outcome:
        """Measure a case; failures are part of the outcome."""
        start = time.monotonic()
        try:
            found = measure_case(case, self.ways, self.timer, rounds=self.rounds, warm=self.warm)
        except Exception as failure:
            line = f"{case.name}: {type(failure).__name__}: {str(failure)[:500]}"
            return resumable.Outcome([], line, failed=True)
        if not self.seconds:
            for value in found.values():
                value.compile = value.tuning = value.again = None
        if self.timer.device == "cuda":
            torch.cuda.empty_cache()
        return resumable.Outcome(
            rows(case.name, found, self.bound(case, self.timer.device)),
            _line(case, found, time.monotonic() - start),
            failed=any(value.failure for value in found.values()),
        )


def _line(case: HasProgram, found: Mapping[str, Measured], seconds: float) -> str:
    shown = []
    for name, item in found.items():
        values = item.times.get("graph") or item.times.get("call")
        text = f"{measure.summarize(values).median:.1f}" if values else "-"
        compiled = f" ({item.compile:.1f} s)" if item.compile is not None else ""
        shown.append(f"{name} {text}{compiled}{f' {item.failure}' if item.failure else ''}")
    return f"{case.name}: {', '.join(shown)}; {seconds:.1f} s in all"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. The exit code is 1 if a contender failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--group", nargs="+", choices=gemm_suite.GROUPS, help="only these")
    parser.add_argument("--case", nargs="+", choices=sorted(gemm_suite.CASES), metavar="NAME")
    parser.add_argument("--rows", type=int, nargs="+", metavar="M", help="only those of so many")
    parser.add_argument("--quick", action="store_true", help="only those that stand for all")
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=list(variants.CONTENDERS),
        default=variants.USUAL,
        metavar="NAME",
        help=f"some of {', '.join(variants.CONTENDERS)}; by default all but the last",
    )
    parser.add_argument("--rounds", type=int, help="measurements of each; by default, as fit")
    parser.add_argument("--warm", action="store_true", help="compile again, from the caches")
    parser.add_argument(
        "--no-table", action="store_true", help="as if the package had none; with one process"
    )
    parser.add_argument("--list", action="store_true", help="print the cases, and measure none")
    resumable.add_arguments(parser)
    options = parser.parse_args(arguments)
    if options.no_table and options.processes > 1:
        parser.error("--no-table needs --processes 1: others have the table")
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
    header = results.collect_header("gemm", results.command_line(), commit=options.commit)
    ledger = resumable.Ledger(header, options.json_out, options.resume)
    todo = [case for case in cases if case.name not in ledger.done]
    names = ["eager", *options.contenders]
    make = functools.partial(Bench, names, options.rounds, options.warm)
    with contextlib.ExitStack() as stack:
        if options.no_table:
            nothing = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            stack.enter_context(mock.patch.object(results_db, "TABLES", nothing))
        outcomes = gpu_lock.outcomes(todo, make, options.processes, options.budget_seconds)
        count, failed = ledger.take(outcomes)
    print(f"{count} of {len(todo)} measured in {time.monotonic() - start:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
