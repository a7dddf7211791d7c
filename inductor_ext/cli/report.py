"""`inductor-ext report FILE`: writes one HTML page about a program's compiles, or about a package.

A program runs in this process with the extension active and with all caches of compiled code
disabled. The exit code is then the program's own. A package (.pt2) is not run: the page shows its
contents, and the exit code is 0, or 2 if it cannot be read.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os

from inductor_ext.cli import explain
from inductor_ext.report import compile_collector, html_parts, kernel_times
from inductor_ext.report.compile_report import CompileReport
from inductor_ext.report.contents_report import ContentsReport, read_contents


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
    parser.add_argument("--json", metavar="OUT", help="also write the report as JSON")
    parser.add_argument(
        "--profile",
        action="store_true",
        help="run the program under torch's profiler, and report the kernels by time",
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

    # The program may change the working directory.
    out = os.path.abspath(arguments.output)
    json_out = None if arguments.json is None else os.path.abspath(arguments.json)
    for path in filter(None, (out, json_out)):
        html_parts.check_writable(path)
    if os.path.isdir(arguments.file) or arguments.file.endswith(".pt2"):
        _write(read_contents(arguments.file), out, json_out)
        return 0
    explain.check_program(arguments.file)
    kernels = None
    try:
        with contextlib.ExitStack() as stack:
            if arguments.profile:
                kernels = stack.enter_context(kernel_times.profile_program())
                # So that the profiler sees every C++ kernel.
                stack.enter_context(inductor_config.patch({"cpp.enable_kernel_profile": True}))
            collect = stack.enter_context(compile_collector.observe())
            return explain.run_program(arguments.file, arguments.arguments, arguments.max_autotune)
    finally:
        facts = collect(arguments.file)
        environment = compile_collector.describe_environment(facts)
        facts = dataclasses.replace(facts, environment=environment)
        if kernels is not None:
            profile = dataclasses.replace(kernels(), scope="the program's compiled graphs")
            facts = dataclasses.replace(facts, kernels=profile)
        _write(CompileReport(facts), out, json_out)
        if not facts.graphs:
            print(explain.explain_empty_report())


def _write(report: CompileReport | ContentsReport, out: str, json_out: str | None) -> None:
    report.save(out)
    print(f"The report is in {out}.")
    if json_out is not None:
        html_parts.write_page(json_out, report.to_json())
