"""`inductor-ext report FILE`: writes one HTML page about a program's compiles, or about a package.

A program runs in this process with the extension active and with all caches of compiled code
disabled. A package (.pt2) is not run: the page shows its contents.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
from typing import TYPE_CHECKING

from inductor_ext.cli import explain
from inductor_ext.reports.compile_trace import write_trace
from inductor_ext.reports.text import check_writable

if TYPE_CHECKING:
    from inductor_ext.reports.compile_report import CompileReport
    from inductor_ext.reports.contents_report import ContentsReport

EXAMPLE = "inductor-ext report -o report.html train.py --steps 1"
EXIT_CODES = {
    0: "or another one: that of the program",
    2: "the program or package cannot be read, or a file cannot be written",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE", help="Python program that compiles a model, or a .pt2 package"
    )
    rest = parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="arguments of the program"
    )
    # In Python 3.11, argparse reports REMAINDER arguments as missing if the file is missing.
    rest.required = False
    parser.add_argument(
        "-o",
        "--output",
        metavar="OUT",
        default="report.html",
        help="file for the page (default: report.html)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="also print the report as one JSON object, and what the program prints on stderr",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="run the program under torch's profiler, and report the kernels by time",
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="also write the compiles as a trace in Chrome's format, for ui.perfetto.dev",
    )
    parser.add_argument(
        "--max-autotune",
        action="store_true",
        help="benchmark GEMMs without tuning results, even if the program does not set "
        "max_autotune",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the page about a package, or run a program and write the page when it ends or fails.

    Returns:
        The program's exit code; 0 for a package.

    Raises:
        exc.BadReportFileError: the program does not exist, or a file cannot be written. Both are
            checked before the program runs.
        exc.BadPackageError, exc.IncompatibleArtifactError: see `read_contents`.
        BaseException: raised by the program.
    """
    from torch._inductor import config as inductor_config

    from inductor_ext.reports import compile_collector, kernel_times
    from inductor_ext.reports.compile_report import CompileReport
    from inductor_ext.reports.contents_report import read_contents

    # The program may change the working directory.
    out = os.path.abspath(arguments.output)
    check_writable(out)
    trace = None if arguments.trace is None else os.path.abspath(arguments.trace)
    messages = sys.stderr if arguments.json else sys.stdout
    if os.path.isdir(arguments.file) or arguments.file.endswith(".pt2"):
        _write(read_contents(arguments.file), out, arguments.json)
        return 0
    explain.check_program(arguments.file)
    kernels = None
    try:
        with contextlib.ExitStack() as stack:
            if arguments.profile:
                kernels = stack.enter_context(kernel_times.profile_program())
                # So that the profiler sees every C++ kernel.
                stack.enter_context(inductor_config.patch({"cpp.enable_kernel_profile": True}))
            stack.enter_context(write_trace(trace))
            collect = stack.enter_context(compile_collector.observe())
            stack.enter_context(contextlib.redirect_stdout(messages))
            return explain.run_program(arguments.file, arguments.arguments, arguments.max_autotune)
    finally:
        facts = collect(arguments.file)
        environment = compile_collector.describe_environment(facts)
        facts = dataclasses.replace(facts, environment=environment)
        if kernels is not None:
            profile = dataclasses.replace(kernels(), scope="the program's compiled graphs")
            facts = dataclasses.replace(facts, kernels=profile)
        _write(CompileReport(facts), out, arguments.json)
        if not facts.graphs:
            print(explain.explain_empty_report(), file=messages)


def _write(report: CompileReport | ContentsReport, out: str, as_json: bool) -> None:
    report.save(out)
    print(report.to_json() if as_json else f"The report is in {out}.")
