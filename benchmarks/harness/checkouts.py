"""Compares two checkouts of the project in child processes, in alternation.

A benchmark calls `main` with a function that returns its figures. Every round runs the benchmark's
script once with the package of this checkout and once with that of another one. The median of the
rounds' ratios is reported, because the speed of a shared machine drifts by more than the difference
between two versions. Other modules of `benchmarks` are imported only in the parent process: in a
child, they would be those of the other checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Figures = dict[str, float]


@dataclass(frozen=True)
class Comparison:
    """What a benchmark measures in two checkouts."""

    suite: str
    """The suite of the results."""
    case: str
    units: Mapping[str, str]
    """Metrics with their units. Lower is better."""
    rounds: int
    """Default number of rounds."""


def _measure_folder(script: Path, folder: Path) -> Figures:
    """Return the figures that a script measures with the package in a folder."""
    environment = {"PYTHONPATH": str(folder), "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    done = subprocess.run(
        [sys.executable, str(script), "--child"],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def main(
    comparison: Comparison,
    script: Path,
    description: str | None,
    argv: Sequence[str] | None,
) -> int:
    """Measure both checkouts, print the figures and store them; the exit code is 0.

    Args:
        comparison: what is measured.
        script: the file that prints the figures of one checkout as JSON if its argument is
            `--child`.
        description: of the command line.
        argv: arguments of the command line.
    """
    from benchmarks.harness import results

    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--baseline", type=Path, metavar="FOLDER", required=True, help="another checkout"
    )
    parser.add_argument("--rounds", type=int, default=comparison.rounds, help="2 or more")
    parser.add_argument("--json-out", type=Path, metavar="DIR")
    args = parser.parse_args(argv)
    if not (args.baseline / "inductor_ext").is_dir():
        parser.error("--baseline must name a checkout, a folder that contains inductor_ext/")
    if args.rounds < 2:
        parser.error(f"--rounds is {args.rounds}, but a spread needs 2 or more")

    folders = {"now": Path.cwd(), "before": args.baseline.resolve()}
    samples: dict[str, list[Figures]] = {name: [] for name in folders}
    for number in range(args.rounds):
        for name in sorted(folders, reverse=bool(number % 2)):
            samples[name].append(_measure_folder(script.resolve(), folders[name]))
    rows = []
    for metric, unit in comparison.units.items():
        now, before = (
            statistics.median(figures[metric] for figures in samples[name])
            for name in ("now", "before")
        )
        pairs = zip(samples["now"], samples["before"], strict=True)
        low, ratio, high = statistics.quantiles([a[metric] / b[metric] for a, b in pairs], n=4)
        print(f"{metric:38} {now:10.3f} {unit:5} before {before:10.3f}  ratio {ratio:.3f}")
        rows.append(
            results.make_row(
                comparison.case,
                metric,
                unit,
                ours=now,
                spread=(high - low) / ratio,
                note=f"before: {before:.3f} {unit}; median of the ratios {ratio:.3f}",
            )
        )
    if args.json_out is not None:
        command = f"python -m benchmarks.{script.stem} --baseline FOLDER --rounds {args.rounds}"
        header = results.collect_header(comparison.suite, command, results.name_hardware("cpu"))
        print(results.write(args.json_out, {**header, "rows": rows}))
    return 0
