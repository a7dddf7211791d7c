"""Runs generated C++ under the address sanitizer, which reports accesses outside of a buffer.

    python -m test.fuzz.address_sanitizer --count 40     operator samples and 40 random graphs

Only the code that is compiled here is instrumented: `write_compiler` writes a g++ that adds the
flags, and the parent starts its child processes with the sanitizer's library loaded first. Torch
allocates by functions that the library replaces, so that a kernel's access beyond the end of a
tensor is reported although torch is not instrumented. A child continues after a report. If it
crashes, the parent records that and starts another child with the next batch.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import results as results_format

if TYPE_CHECKING:
    from test.fuzz.op_sweep_cases import Case

_FLAGS = "-fsanitize=address -fsanitize-recover=address"

_OPTIONS = {
    "detect_leaks": 0,
    "detect_odr_violation": 0,
    "alloc_dealloc_mismatch": 0,
    "halt_on_error": 0,
    "verify_asan_link_order": 0,
}

_MIN_COMMITTED = 16


@dataclass(frozen=True)
class Sanitizer:
    """The libraries that a process under the sanitizer loads first."""

    libraries: tuple[str, ...]

    @classmethod
    def find(cls) -> Sanitizer | None:
        """Return the sanitizer of the installed g++; None if there is none."""
        if not shutil.which("g++"):
            return None
        # Exceptions of C++ need the standard library before torch loads it.
        paths = [_find_library(name) for name in ("libasan.so", "libstdc++.so.6")]
        return cls(tuple(map(str, paths))) if all(paths) else None

    def environment(self, folder: Path) -> dict[str, str]:
        """The environment of a process whose compiled code and reports are in `folder`."""
        options = {**_OPTIONS, "log_path": folder / "report"}
        return {
            **os.environ,
            "LD_PRELOAD": ":".join(self.libraries),
            "ASAN_OPTIONS": ":".join(f"{name}={value}" for name, value in options.items()),
            "CXX": str(write_compiler(folder)),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        }


def _find_library(name: str) -> Path | None:
    command = ["g++", f"-print-file-name={name}"]
    path = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    return path.resolve() if path.is_absolute() and path.exists() else None


def write_compiler(folder: Path) -> Path:
    """Write a g++ that instruments what it compiles; return its path."""
    path = folder / "g++"
    path.write_text(f'#!/bin/sh\nexec env -u LD_PRELOAD {shutil.which("g++")} "$@" {_FLAGS}\n')
    path.chmod(0o755)
    return path


def set_report_path(path: Path) -> None:
    """Write this process's further reports into files whose names begin with `path`."""
    ctypes.CDLL(None)["__sanitizer_set_report_path"](str(path).encode())


def read_reports(folder: Path, name: str = "report") -> list[str]:
    """Return the first line and the first frame of each report in `folder`."""
    reports = []
    for path in sorted(folder.glob(f"{name}.[0-9]*")):
        for text in path.read_text().split("ERROR: AddressSanitizer: ")[1:]:
            kind = re.split(r" on | in ", text.splitlines()[0])[0]
            frame = re.search(r"#0 0x\w+ (?:in )?(.*)", text)
            # Without its folder, the library has the same name in every run.
            place = re.sub(r"\(?/\S*/", "", frame[1]).strip() if frame else "unknown code"
            reports.append(f"{kind} in {place}")
    return reports


def _batches(count: int, operators: int) -> list[str]:
    """The names of the batches: operators of the sweep's sample, then random graphs."""
    from test.fuzz.graph_generator import BATCH

    sweep = len(_operator_batches()[:operators])
    return [f"operators-{i}" for i in range(sweep)] + [
        f"graphs-{seed}" for seed in range(0, count, BATCH)
    ]


def _operator_batches() -> list[list[Case]]:
    """The batches of the sweep's sample, those of many operators first."""
    from test.fuzz import op_sweep_cases

    cases = op_sweep_cases.supported(op_sweep_cases.sample_cases())
    return sorted(op_sweep_cases.batches(cases), key=len, reverse=True)


def _run_batch(name: str, count: int) -> int:
    """Run a batch under the extension; return how many cases or programs ran."""
    kind, number = name.rsplit("-", 1)
    if kind == "operators":
        from test.fuzz import op_sweep_judge

        return op_sweep_judge.run_cases(_operator_batches()[int(number)])
    from test.fuzz import graph_generator, graph_judge

    seeds = range(int(number), min(int(number) + graph_generator.BATCH, count))
    programs = [graph_generator.generate(seed) for seed in seeds]
    try:
        graph_judge.run_build(programs, ("compile", "default"), "inductor_ext")
    except Exception:
        outcomes = [
            graph_judge.run_alone(p, ("compile", "default"), "inductor_ext") for p in programs
        ]
        failures = (*graph_judge.FAILURES, graph_judge.Verdict.SKIPPED)
        return sum(outcome.verdict not in failures for outcome in outcomes)
    return len(programs)


def _run_child(names: Sequence[str], folder: Path, count: int) -> None:
    for name in names:
        set_report_path(folder / name)
        print(f"begin {name}", flush=True)
        print(f"end {name} {_run_batch(name, count)}", flush=True)


def _run_children(
    names: list[str], sanitizer: Sanitizer, folder: Path, count: int
) -> dict[str, int]:
    """Run all batches; return how many cases of each ran, -1 for a batch that crashed."""
    ran: dict[str, int] = {}
    module = "test.fuzz.address_sanitizer"
    while names:
        command = [sys.executable, "-m", module, "--child", str(folder), "--count", str(count)]
        child = subprocess.Popen(
            [*command, *names],
            env=sanitizer.environment(folder),
            stdout=subprocess.PIPE,
            stderr=(folder / "log").open("a"),
            text=True,
        )
        assert child.stdout is not None
        current = names[0]
        for line in child.stdout:
            word, *fields = line.split() or [""]
            if word == "begin":
                current = fields[0]
            elif word == "end":
                ran[fields[0]] = int(fields[1])
                print(f"{fields[0]}: {fields[1]}, {len(read_reports(folder, fields[0]))} reports")
        if child.wait():
            ran[current] = -1
            print(f"{current}: the process ended with exit code {child.returncode}", flush=True)
        elif len(ran.keys() & set(names)) < len(names):
            raise RuntimeError("a child process ended early without an error")
        names = [name for name in names if name not in ran]
    return ran


def rows(ran: Mapping[str, int], reports: Mapping[str, Sequence[str]]) -> list[results_format.Row]:
    """The results in the benchmarks' schema: counts, then each report and crash."""
    table = []
    for kind in ("operators", "graphs"):
        names = [name for name in ran if name.startswith(kind)]
        counts = {
            "cases": sum(max(ran[name], 0) for name in names),
            "reports": sum(len(reports[name]) for name in names),
            "crashes": sum(ran[name] < 0 for name in names),
        }
        for metric, value in counts.items():
            better = "higher" if metric == "cases" else "lower"
            table.append(
                results_format.make_row(kind, metric, metric, better=better, ours=value)  # type: ignore[arg-type]
            )
    for name, texts in reports.items():
        for text in dict.fromkeys(texts):
            row = results_format.make_row(
                name, "report", "reports", better="lower", ours=texts.count(text), note=text
            )
            table.append(row)
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; return 1 if there is a report or a crash, otherwise 0."""
    parser = argparse.ArgumentParser(prog="python -m test.fuzz.address_sanitizer")
    parser.add_argument("--count", type=int, default=40, help="random graphs")
    parser.add_argument("--operators", type=int, help="batches of operators; default all")
    parser.add_argument("--results", type=Path, default=results_format.RESULTS, help="folder")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("batches", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        _run_child(options.batches, options.child, options.count)
        return 0
    sanitizer = Sanitizer.find()
    if sanitizer is None:
        print("g++ has no libasan")
        return 1
    header = results_format.collect_header("address-sanitizer", results_format.format_command())
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        names = _batches(options.count, options.operators)
        ran = _run_children(names, sanitizer, folder, options.count)
        reports = {name: read_reports(folder, name) for name in ran}
    for name, texts in reports.items():
        for text in dict.fromkeys(texts):
            print(f"{name}: {text} ({texts.count(text)} times)")
    print(f"{sum(map(len, reports.values()))} reports")
    if options.count >= _MIN_COMMITTED:
        document: results_format.Document = {**header, "rows": rows(ran, reports)}
        print(f"written: {results_format.write(options.results, document)}")
    return int(any(reports.values()) or any(value < 0 for value in ran.values()))


if __name__ == "__main__":
    sys.exit(main())
