"""`inductor-ext plan FILE`: plans a memory problem given as a CSV file.

For trying the planner on problems from elsewhere, and for comparing it with other planners. Does
not import torch. Ctrl-C ends the search, and the best plan so far is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Sequence

from inductor_ext.cli.argument_types import parse_input, parse_natural
from inductor_ext.memory.planner import csv_io
from inductor_ext.memory.planner.interval import Interval, Placement, verify
from inductor_ext.memory.planner.solver import DEFAULT_ITERATIONS, solve

EXAMPLE = "inductor-ext plan buffers.csv --align 256 --output plan.csv"
EXIT_CODES = {0: "a plan was found", 2: "the input is invalid, and nothing is written"}

_FAR = 1.002
"""Ratio of peak to lower bound above which the default number of iterations is increased."""

_PATIENCE = 12_000_000
"""Limit on iterations times buffers when increasing them: about 10 to 20 s of CPU time."""


def _parse_power_of_two(text: str) -> int:
    value = parse_natural(text)
    if value < 1 or value & (value - 1):
        raise argparse.ArgumentTypeError(f"{text} is not a power of two")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        type=parse_input,
        help="CSV with the columns id, lower, upper and size, or - for the standard input: a "
        "buffer of `size` bytes is live from step `lower` until before step `upper`",
    )
    parser.add_argument(
        "--align",
        type=_parse_power_of_two,
        default=1,
        metavar="N",
        help="alignment of every buffer in bytes, a power of two; sizes are rounded up to it "
        "(default: 1)",
    )
    parser.add_argument(
        "--iterations",
        type=parse_natural,
        metavar="N",
        help="search iterations; the time grows with N and with the number of buffers "
        f"(default: {DEFAULT_ITERATIONS}, increased for up to about 20 s of CPU time while the "
        f"peak is above {_FAR} times the lower bound)",
    )
    parser.add_argument(
        "--seed",
        type=parse_natural,
        default=0,
        metavar="N",
        help="seed of the search (default: 0)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--output", metavar="CSV", help="write the table with a column `offset` to this file"
    )


def _plan(intervals: Sequence[Interval], iterations: int | None, seed: int) -> Placement:
    budget = DEFAULT_ITERATIONS if iterations is None else iterations
    plan = solve(intervals, iterations=budget, seed=seed)
    most = _PATIENCE // max(len(intervals), 1)
    # Ctrl-C ends the search for a better plan.
    with contextlib.suppress(KeyboardInterrupt):
        while iterations is None and plan.ratio > _FAR and budget < most:
            budget = min(8 * budget, most)
            other = solve(intervals, iterations=budget, seed=seed)
            plan = min(plan, other, key=lambda candidate: candidate.peak)
    return plan


def run(arguments: argparse.Namespace) -> int:
    """Plan the problem in the file and print the result.

    Raises:
        exc.BadProblemFileError: see `csv_io`.
    """
    if arguments.output is not None:
        csv_io.check_writable(arguments.output)
    problem = csv_io.read(arguments.file, arguments.align)
    begin = time.process_time()
    plan = _plan(problem.intervals, arguments.iterations, arguments.seed)
    verify(problem.intervals, plan.offsets, plan.peak)
    seconds = time.process_time() - begin
    if arguments.output is not None:
        csv_io.write(arguments.output, problem, plan.offsets)
    if arguments.json:
        report = {
            "buffers": len(problem.intervals),
            "lower_bound": plan.lower_bound,
            "peak": plan.peak,
            "ratio": plan.ratio,
            "cpu_seconds": round(seconds, 6),
            "verified": True,
        }
        print(json.dumps(report, indent=2))
        return 0
    print(f"buffers      {len(problem.intervals)}")
    print(f"lower bound  {plan.lower_bound} bytes")
    print(f"peak         {plan.peak} bytes, {plan.ratio:.4f} of the lower bound, verified")
    print(f"found by     {plan.method}, {seconds:.3f} s of CPU time")
    return 0
