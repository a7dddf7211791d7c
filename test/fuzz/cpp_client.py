"""Calls a package from C++ by several threads under the address and thread sanitizers.

    python -m test.fuzz.cpp_client --calls 10000      calls with each sanitizer

The client, the driver (`test/cpp_wrapper/client/driver.cpp`) and the compiled model are
instrumented; libtorch is not. No report is suppressed. Four threads call the model. Meanwhile
another thread replaces the inactive weights, folds, swaps and frees them. One call in 16 is wrong
and must be refused; the others must return what one of the two sets of weights gives. The model is
loaded again every 500 calls. OpenMP has one thread, because its library is not instrumented. Leaks
are reports, too.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import results as results_format

THREADS = 4
_ROUND = 500
_MIN_COMMITTED = 1000


@dataclass(frozen=True)
class Outcome:
    """What a soak counted."""

    calls: int
    loads: int
    swaps: int
    wrong: int
    reports: tuple[str, ...]


def compile_package(folder: Path) -> None:
    """Write a package, inputs and two states of its weights."""
    import torch

    import inductor_ext

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(32, 24)
            self.norm = torch.nn.LayerNorm(24)
            self.linear = torch.nn.Linear(24, 48)

        def forward(self, ids: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = self.norm(self.table(ids) + x)
            # The product with exp is folded when the weights are replaced.
            rows = torch.nn.functional.linear(hidden, self.linear.weight.exp(), self.linear.bias)
            return torch.nn.functional.gelu(rows).softmax(-1), rows.sort(dim=-1).values

    torch.manual_seed(0)
    nets = [Net().eval() for _ in range(2)]
    inputs = (torch.randint(32, (6,)), torch.randn(6, 24))
    rows = torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(nets[0], inputs, dynamic_shapes=({0: rows}, {0: rows}))
    configs = {"aot_inductor.use_runtime_constant_folding": True, "aot_self_test": True}
    inductor_ext.aoti_compile_and_package(
        program, package_path=folder / "model.pt2", inductor_configs=configs
    )
    torch.save(list(inputs), folder / "inputs.pt")
    for index, net in enumerate(nets):
        torch.save(dict(net.state_dict()), folder / f"state{index}.pt")


_COMPILER = """#!/bin/sh
exec {compiler} "$@" -fsanitize={sanitizer}
"""


def write_compiler(folder: Path, sanitizer: str) -> Path:
    """Write a g++ that instruments what it compiles."""
    path = folder / "g++"
    path.write_text(_COMPILER.format(compiler=shutil.which("g++"), sanitizer=sanitizer))
    path.chmod(0o755)
    return path


def compile_instrumented(folder: Path, sanitizer: str) -> None:
    """The same, with a library that the sanitizer sees, in a process with its own cache."""
    environment = {
        **os.environ,
        "CXX": str(write_compiler(folder, sanitizer)),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
    }
    command = [sys.executable, "-m", "test.fuzz.cpp_client", "--compile", str(folder)]
    subprocess.run(command, env=environment, check=True)


def read_reports(text: str) -> tuple[str, ...]:
    """Return the summary of each report in the output of a process."""
    reports = re.findall(r"^SUMMARY: (.*)$|^(.*runtime error: .*)$", text, re.MULTILINE)
    # Without its folder, a file has the same name in every run.
    return tuple(re.sub(r"\(?/\S*/", "", " ".join(report)).strip() for report in reports)


def soak(program: Path, folder: Path, calls: int) -> Outcome:
    """Call the package in `folder` by the driver `program`."""
    from test.support.cpp_client import Driver

    files = [folder / name for name in ("inputs.pt", "state0.pt", "state1.pt")]
    driver = Driver(program)
    loads = swaps = wrong = done = 0
    try:
        while done < calls:
            count = min(_ROUND, calls - done)
            loaded, tested, reply = driver.run(
                ("load", folder / "model.pt2", {"num_runners": THREADS}),
                ("self_test",),
                ("soak", THREADS, count, *files),
            )
            assert loaded.value()
            assert tested.value()
            numbers = re.fullmatch(r"(\d+) wrong, (\d+) swaps", reply.value())
            assert numbers is not None
            wrong, swaps = wrong + int(numbers[1]), swaps + int(numbers[2])
            loads, done = loads + 1, done + count
    finally:
        code = driver.wait()
        reports = read_reports(driver.errors())
    if code and not reports:
        reports = (f"the process ended with exit code {code}",)
    return Outcome(done, loads, swaps, wrong, reports)


def rows(outcomes: Mapping[str, Outcome]) -> list[results_format.Row]:
    """The results in the benchmarks' schema."""
    table = []
    for sanitizer, outcome in outcomes.items():
        counts = {
            "calls": outcome.calls,
            "loads": outcome.loads,
            "swaps": outcome.swaps,
            "wrong": outcome.wrong,
            "reports": len(outcome.reports),
        }
        for metric, value in counts.items():
            is_size = metric in ("calls", "loads", "swaps")
            unit = "calls" if metric == "wrong" else metric
            note = "; ".join(dict.fromkeys(outcome.reports)) if metric == "reports" else ""
            row = results_format.make_row(
                sanitizer,
                metric,
                unit,
                better="higher" if is_size else "lower",
                ours=value,
                note=note or None,
            )
            table.append(row)
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; return 1 if there is a report or a wrong result, otherwise 0."""
    parser = argparse.ArgumentParser(prog="python -m test.fuzz.cpp_client")
    parser.add_argument("--calls", type=int, default=1000, help="calls with each sanitizer")
    parser.add_argument("--results", type=Path, default=results_format.RESULTS, help="folder")
    parser.add_argument("--compile", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.compile:
        compile_package(options.compile)
        return 0
    from test.support import cpp_client

    header = results_format.collect_header("cpp-client", results_format.format_command())
    outcomes = {}
    for sanitizer in cpp_client.SANITIZERS:
        if not cpp_client.has_sanitizer(sanitizer):
            print(f"g++ has no library of the {sanitizer} sanitizer")
            return 1
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            compile_instrumented(folder, sanitizer)
            program = cpp_client.build_driver(folder, sanitizer)
            outcomes[sanitizer] = outcome = soak(program, folder, options.calls)
        print(
            f"{sanitizer}: {outcome.calls} calls, {outcome.loads} loads, {outcome.swaps} swaps, "
            f"{outcome.wrong} wrong, {len(outcome.reports)} reports",
            *outcome.reports,
            sep="\n",
            flush=True,
        )
    if options.calls >= _MIN_COMMITTED:
        document: results_format.Document = {**header, "rows": rows(outcomes)}
        print(f"written: {results_format.write(options.results, document)}")
    return int(any(outcome.reports or outcome.wrong for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
