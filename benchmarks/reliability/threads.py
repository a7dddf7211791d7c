"""Threads that compile at the same time, half of them with Inductor (default): same bits as alone.

    python -m benchmarks.reliability.threads --threads 8 --rounds 10 --json-out DIR

Each thread compiles another model in each round, by turns with Inductor (default) and with the
extension, and checks every result against eager mode. Afterwards, two more processes compile the
same models in one thread: one with the extension, one that does not import it. The results have to
be equal bit for bit, which shows that a compile neither sees another one's settings nor changes
what Inductor generates.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.harness import results
from benchmarks.reliability.child import COMPILERS, run_task

__all__ = ["METRICS", "compare", "measure"]

METRICS = ("equal bits", "wrong or an error", "other bits")
"""What is counted, in the order of `compare`."""


def compare(
    together: Mapping[str, str], alone: Mapping[str, str], compiler: str
) -> tuple[int, int, int]:
    """Count a compiler's results.

    Args:
        together: results of threads that compile at the same time: "compiler/width" to a digest, or
            to "wrong" or an error.
        alone: results of the same models in one thread.

    Returns:
        The equal ones, the wrong ones and errors, and the right ones with other bits.
    """
    names = [name for name in together if name.startswith(f"{compiler}/")]
    equal = [name for name in names if together[name] == alone[name]]
    failed = [name for name in names if not together[name].startswith("sha256:")]
    return len(equal), len(failed), len(names) - len({*equal, *failed})


def measure(threads: int, rounds: int, only: str | None = None) -> dict[str, str]:
    """Return the digests of all results of a process.

    Args:
        only: the compiler whose models one thread compiles; None compiles all, in `threads`.
    """
    limit = () if only is None else ("--only", only)
    digests: dict[str, str] = run_task("threads", str(threads), str(rounds), *limit)
    return digests


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; return 1 if a result is wrong or has other bits."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10, help="compiles of each thread")
    parser.add_argument("--json-out", type=Path, help="folder of results")
    options = parser.parse_args(arguments)
    header = results.collect_header("threads", results.format_command())
    together = measure(options.threads, options.rounds)
    counts = {}
    for compiler in COMPILERS:
        alone = measure(options.threads, options.rounds, compiler)
        counts[compiler] = compare(together, alone, compiler)
        for name, digest in together.items():
            if name in alone and digest != alone[name]:
                print(f"{name}: {digest}, alone {alone[name]}")
    stock, ours = (counts[compiler] for compiler in COMPILERS)
    case = f"{options.threads} threads, {options.rounds} compiles each"
    rows = [
        results.make_row(
            case,
            metric,
            "results",
            better="higher" if metric == "equal bits" else "lower",
            stock=stock_count,
            ours=our_count,
        )
        for metric, stock_count, our_count in zip(METRICS, stock, ours, strict=True)
    ]
    results.report(header, rows, options.json_out)
    return int(any(stock[1:] + ours[1:]))


if __name__ == "__main__":
    sys.exit(main())
