"""How the memory of a process grows with the number of compiles, beside Inductor (default).

    python -m benchmarks.reliability.compile_growth --count 200 --json-out DIR

Each compiler runs in a process of its own and compiles as many graphs, none of which is in a cache.
After each compile, Dynamo's code is dropped (`torch._dynamo.reset`) and garbage is collected. The
growth is the slope of a line through the resident memory after the first quarter of the compiles,
by the median of the slopes of all pairs (Theil 1950, Sen 1968), without pages of files.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import results
from benchmarks.reliability.child import COMPILERS, run_task

__all__ = ["find_slope", "measure"]


def find_slope(values: Sequence[float]) -> float:
    """Return the median slope of all pairs of values, per step, after the first quarter."""
    later = list(enumerate(values))[len(values) // 4 :]
    pairs = itertools.combinations(later, 2)
    return statistics.median((y - x) / (j - i) for (i, x), (j, y) in pairs)


def measure(compiler: str, count: int) -> list[float]:
    """Return the resident MiB of a process after each of its compiles."""
    resident: list[float] = run_task("grow", compiler, "--count", str(count))["resident"]
    return resident


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; return 1 if the extension's process grows faster."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--json-out", type=Path, help="folder of results")
    options = parser.parse_args(arguments)
    header = results.collect_header("compile-growth", results.format_command())
    resident = {compiler: measure(compiler, options.count) for compiler in COMPILERS}
    stock, ours = (find_slope(resident[compiler]) for compiler in COMPILERS)
    case = f"{options.count} compiles"
    ends = {compiler: values[-1] for compiler, values in resident.items()}
    rows = [
        results.make_row(case, "growth per compile", "MiB", stock=stock, ours=ours),
        results.make_row(
            case, "at the end", "MiB", stock=ends["inductor"], ours=ends["inductor_ext"]
        ),
    ]
    results.report(header, rows, options.json_out)
    return int(ours > stock * 1.05 + 0.005)


if __name__ == "__main__":
    sys.exit(main())
