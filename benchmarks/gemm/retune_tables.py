"""Re-measures the GEMMs of a shipped tuning table on this GPU, and merges the results into a table.

A table is valid for one GPU model, the kernel sources it was measured with, and its Triton and CUDA
versions; elsewhere its entries are only hints (see `inductor_ext.autotune.results_db`). Parts of a
table can be measured on several GPUs at once; every part stops within its time budget.

    python -m benchmarks.gemm.retune_tables measure --part 1/4 --budget-seconds 200 --out part1.json
    python -m benchmarks.gemm.retune_tables merge part*.json

The table for another GPU model is made from the same GEMMs:

    python -m benchmarks.gemm.retune_tables measure --out part.json
    python -m benchmarks.gemm.retune_tables \
        --table inductor_ext/autotune/tables/nvidia-h100-80gb-hbm3.json merge part.json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from benchmarks.gemm.cases import CASES
from inductor_ext import config
from inductor_ext.autotune import inductor_benchmark, results, tuner
from inductor_ext.autotune.candidate_run import BenchmarkBackend
from inductor_ext.autotune.results import Environment, TuningResult
from inductor_ext.hooks import scope
from inductor_ext.templates.device import Device
from inductor_ext.templates.format import problem_words
from inductor_ext.templates.problem import GemmProblem

__all__ = ["TABLE", "list_problems", "main", "measure", "select_newest"]

TABLE = Path(results.__file__).parent / "tables" / "nvidia-h200.json"

AT_ONCE = 6
"""GEMMs that are compiled together: enough to keep compile workers busy; few, because a run that
ends loses those in progress."""


def list_problems(
    table: Iterable[TuningResult], part: int, parts: int, excluded: Iterable[TuningResult] = ()
) -> list[GemmProblem]:
    """Return one part of a table's GEMMs without CUTLASS, mixing large and small ones.

    For GEMMs of the suite, the suite's problem is used, because tables do not record what is gated
    and how.

    Args:
        table: entries.
        part: from 1 to `parts`; all parts together are the whole table.
        parts: number of parts.
        excluded: entries that need not be measured again.
    """
    done = {entry.problem for entry in excluded}
    suite = {case.problem: case.problem for case in CASES.values()}
    selection = {
        suite.get(entry.problem, entry.problem)
        for entry in table
        if "+" not in entry.environment.templates and entry.problem not in done
    }
    return sorted(selection, key=lambda x: (x.m * x.n * x.k, x.key))[part - 1 :: parts]


def measure(
    problems: Sequence[GemmProblem],
    device: Device,
    make_bench: Callable[[int], BenchmarkBackend],
    out: Path,
    seconds: float,
) -> list[TuningResult]:
    """Measure GEMMs, and save the results after every few.

    Args:
        problems: the result of `list_problems`.
        device: the device of this process.
        make_bench: see `tuner.tune`.
        out: the table to write.
        seconds: time after which no further GEMMs are started.
    """
    begin = time.monotonic()
    settings = config.snapshot({})
    entries: list[TuningResult] = []
    for start in range(0, len(problems), AT_ONCE):
        if time.monotonic() - begin > seconds:
            break
        with scope.compile_scope(settings):
            decisions = tuner.tune(problems[start : start + AT_ONCE], device, make_bench, settings)
        entries += [
            TuningResult.of(problem, decision, Environment.of(device, problem.operation))
            for problem, decision in decisions.items()
            if decision.origin == "measured"
        ]
        results.write_table(out, entries)
        print(f"{len(entries)} of {len(problems)}, {time.monotonic() - begin:.0f} s", flush=True)
    return entries


def select_newest(table: Iterable[TuningResult]) -> list[TuningResult]:
    """Return the newest measurement of every GEMM on every device, for any versions."""
    newest: dict[tuple[GemmProblem, str], TuningResult] = {}
    for entry in sorted(table, key=lambda x: (x.measured, x.line)):
        newest[entry.problem, entry.environment.device] = entry
    return list(newest.values())


def _parse_part(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text} is not a part such as 1/4")
    return int(part), int(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--table", type=Path, default=TABLE, help="by default that of the H200")
    actions = parser.add_subparsers(dest="action", required=True)
    measure_parser = actions.add_parser("measure", help="measure its GEMMs on this GPU")
    measure_parser.add_argument("--part", type=_parse_part, default=(1, 1), metavar="I/N")
    measure_parser.add_argument(
        "--only", default="", help="only GEMMs whose description contains this text"
    )
    measure_parser.add_argument(
        "--without", nargs="*", type=Path, default=[], help="tables whose GEMMs are skipped"
    )
    measure_parser.add_argument("--budget-seconds", type=float, default=float("inf"))
    measure_parser.add_argument("--out", type=Path, required=True)
    merge_parser = actions.add_parser(
        "merge", help="merge tables into it, keeping the newest result of every GEMM"
    )
    merge_parser.add_argument("tables", nargs="+", type=Path)
    options = parser.parse_args(arguments)
    is_new = options.action == "merge" and not options.table.exists()
    table = [] if is_new else results.read_table(options.table)
    if options.action == "merge":
        new_entries = [entry for path in options.tables for entry in results.read_table(path)]
        count = results.write_table(options.table, select_newest([*table, *new_entries]))
        print(f"{count} GEMMs in {options.table}")
        return 0
    excluded = [entry for path in options.without for entry in results.read_table(path)]
    part, parts = options.part
    problems = [
        problem
        for problem in list_problems(table, part, parts, excluded)
        if options.only in problem_words(problem)
    ]
    device = Device.from_torch(torch.cuda.get_device_properties(0))
    measure(problems, device, inductor_benchmark.cuda_bench, options.out, options.budget_seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
