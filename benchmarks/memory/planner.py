"""How close the static memory planner comes to the lower bound, and how long it takes.

    python -m benchmarks.memory.planner [--instances DIR] [--json-out DIR]

Public instances are planned with the default number of iterations and with `LARGE`; synthetic
problems of three sizes with the default only. Times are CPU seconds of this single thread, since
planning never waits. The lower bound cannot be reached in every problem.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.harness import measure, results
from inductor_ext.memory.planner import csv_io
from inductor_ext.memory.planner.interval import Interval
from inductor_ext.memory.planner.solver import DEFAULT_ITERATIONS, solve

__all__ = ["LARGE", "generate_training_graph", "main"]

LARGE = 40_000
"""Number of iterations for which the dense public instances take about ten seconds on one core."""

SIZES = (200, 2_000, 20_000)
ROUNDS = 3


def generate_training_graph(count: int, seed: int, *, few_sizes: bool) -> list[Interval]:
    """Generate a synthetic problem with the live ranges of a training step.

    A quarter of the buffers in the first half (the forward) is saved until the matching step of the
    backward. Most others live for a few steps, and some for up to two hundred.

    Args:
        count: number of buffers, one created per step.
        few_sizes: use sizes as in a model of equal layers, multiples of a few units; otherwise any
            number of bytes from 64 to 16 MiB, log-uniformly distributed, which is harder to pack.
    """
    draw = random.Random(seed)
    problem = []
    for step in range(count):
        if few_sizes:
            unit = draw.choice([1 << 20] * 6 + [1 << 14, 1 << 8])
            size = unit * draw.choice([1, 1, 2, 3, 4, 4, 16])
        else:
            size = int(2 ** draw.uniform(6, 24))
        kind = draw.random()
        if kind < 0.25 and step < count // 2:
            end = 2 * (count // 2) - step + draw.randrange(4)
        elif kind < 0.9:
            end = step + 1 + min(int(draw.expovariate(1 / 3)), 40)
        else:
            end = step + draw.randrange(6, 200)
        problem.append(Interval(step, end, size, 64))
    return problem


def _make_rows(case: str, problem: Sequence[Interval], iterations: int) -> Iterator[results.Row]:
    seconds = []
    for _ in range(ROUNDS if iterations == DEFAULT_ITERATIONS else 1):
        begin = time.process_time()
        plan = solve(problem, iterations=iterations)
        seconds.append(time.process_time() - begin)
    sample = measure.summarize(seconds)
    note = f"{len(problem)} buffers"
    if iterations != DEFAULT_ITERATIONS:
        note += f", --iterations {iterations}"
    values: list[tuple[str, str, float, float | None, float | None]] = [
        ("peak", "bytes", plan.peak, plan.lower_bound, None),
        ("peak / lower bound", "1", plan.ratio, 1.0, None),
        ("cpu time", "s", sample.median, None, sample.spread if len(seconds) > 1 else None),
    ]
    for metric, unit, value, floor, spread in values:
        yield results.make_row(
            case, metric, unit, ours=value, floor=floor, spread=spread, note=note
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all cases and write the results; return the exit code."""
    program = "python -m benchmarks.memory.planner"
    parser = argparse.ArgumentParser(prog=program, description=__doc__)
    parser.add_argument(
        "--instances",
        default=Path(__file__).parent / "instances",
        type=Path,
        help="folder of CSV problems",
    )
    parser.add_argument("--json-out", default="benchmarks/results", help="folder of the result")
    options = parser.parse_args(arguments)
    header = results.collect_header(
        "planner", results.format_command(), results.name_hardware("cpu")
    )
    rows: list[results.Row] = []
    problem: Sequence[Interval]
    for path in sorted(options.instances.glob("*.csv")):
        problem = csv_io.read(path).intervals
        rows += _make_rows(path.stem, problem, DEFAULT_ITERATIONS)
        if rows[-2]["ours"] != 1.0:
            rows += _make_rows(f"{path.stem}, long", problem, LARGE)
    for count in SIZES:
        for few_sizes in (True, False):
            kind = "few sizes" if few_sizes else "any sizes"
            problem = generate_training_graph(count, 0, few_sizes=few_sizes)
            rows += _make_rows(f"training {count}, {kind}", problem, DEFAULT_ITERATIONS)
    document: results.Document = {**header, "rows": rows}
    print(results.render_table(document))
    print(results.write(options.json_out, document))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
