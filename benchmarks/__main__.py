"""Run benchmarks and compare them with the committed results.

    python -m benchmarks list
    python -m benchmarks run SUITE [--json-out DIR] [--check] [ARGUMENT ...]
    python -m benchmarks check FILE ...
    python -m benchmarks report [SUITE ...]

`run` measures a suite and writes DIR/SUITE/HARDWARE.json; it passes further arguments to the suite.
`check`, and `run --check`, compare a result with the committed one of the same hardware: a row
counts if it differs by more than the spreads of both measurements. The exit code is 1 if a row is
worse, and 2 if there is nothing to compare with. `report` summarizes the committed results.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import compare, results
from benchmarks.harness.suites import SUITES


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="list the suites")
    run = commands.add_parser("run", help="measure a suite")
    run.add_argument("suite", choices=SUITES, metavar="SUITE")
    run.add_argument("--json-out", default="out", metavar="DIR", help="default: out")
    run.add_argument("--check", action="store_true", help="compare with the committed result")
    check = commands.add_parser("check", help="compare results with the committed ones")
    check.add_argument("files", nargs="+", type=Path, metavar="FILE")
    report = commands.add_parser("report", help="summarize the committed results")
    report.add_argument("suites", nargs="*", metavar="SUITE")
    options, more = parser.parse_known_args(arguments)
    if more and options.command != "run":
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    if options.command == "list":
        return _list()
    if options.command == "run":
        return _run(options.suite, options.json_out, options.check, more)
    if options.command == "check":
        return max(check_file(path) for path in options.files)
    return _report(options.suites)


def _list() -> int:
    width = max(map(len, SUITES))
    for suite in SUITES.values():
        print(f"{suite.name:{width}}  {'GPU' if suite.gpu else 'CPU'}  {suite.about}")
    return 0


def _run(name: str, folder: str, check: bool, more: Sequence[str]) -> int:
    written = {path: path.stat().st_mtime_ns for path in Path(folder).glob(f"{name}/*.json")}
    command = [sys.executable, *SUITES[name].command(str(Path(folder).absolute()), *more)]
    code = subprocess.run(command, cwd=results.CHECKOUT).returncode
    if code or not check:
        return code
    new = [
        path
        for path in Path(folder).glob(f"{name}/*.json")
        if written.get(path) != path.stat().st_mtime_ns
    ]
    return max((check_file(path) for path in new), default=2)


def check_file(path: Path, committed: Path = results.RESULTS) -> int:
    """Print how a result differs from the committed one, and return the exit code."""
    after = results.read(path)
    reference = committed / results.make_relative_path(after)
    if not reference.exists():
        print(f"{path}: there is no committed result of this suite and hardware", file=sys.stderr)
        return 2
    before = results.read(reference)
    changes = compare.find_changes(before, after)
    keys = [{(row["case"], row["metric"]) for row in doc["rows"]} for doc in (before, after)]
    worse = sum(change.worse for change in changes)
    if changes:
        print(compare.render_changes(changes))
    print(
        f"{path}: {len(keys[0] & keys[1])} rows compared with {(before['commit'] or '')[:12]}, "
        f"{worse} worse, {len(changes) - worse} better, {len(keys[0] - keys[1])} not measured"
    )
    return 1 if worse else 0


def _report(names: Sequence[str]) -> int:
    files = sorted(results.RESULTS.glob("*/*.json"))
    unknown = set(names) - {path.parent.name for path in files}
    if unknown:
        print(f"no results of {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    for path in files:
        if not names or path.parent.name in names:
            print(summarize(results.read(path)))
    return 0


def summarize(document: results.Document) -> str:
    """One line for the run, and one for each metric with values of both: the geometric mean of
    the extension's value over that of Inductor (default), the best and the worst case.
    """
    lines = [f"{document['suite']} on {document['hardware']}, {document['date'][:10]}"]
    ratios: dict[str, list[float]] = {}
    for row in document["rows"]:
        if ratio := results.find_ratio(row):
            ratios.setdefault(f"{row['metric']} ({row['better']} is better)", []).append(ratio)
    for metric, values in ratios.items():
        mean = statistics.geometric_mean(values)
        lines.append(
            f"  {metric}: {mean:.3f} of Inductor in {len(values)} cases, "
            f"{min(values):.3f} to {max(values):.3f}"
        )
    if not ratios:
        lines.append(f"  {len(document['rows'])} rows without a value of Inductor")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
