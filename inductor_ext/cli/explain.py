"""`inductor-ext explain SCRIPT`: runs a program and reports the kernel of each of its GEMMs.

The program runs in this process with the extension active and with all caches of compiled code
disabled.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import runpy
import sys
from collections.abc import Sequence

from inductor_ext import exc
from inductor_ext.reports.text import check_writable, write_file

EXAMPLE = "inductor-ext explain train.py --steps 1"
EXIT_CODES = {0: "or another one: that of the program", 2: "the program or the file is missing"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", metavar="SCRIPT", help="Python program that compiles a model")
    rest = parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="arguments of the program"
    )
    # In Python 3.11, argparse reports REMAINDER arguments as missing if the script is missing.
    rest.required = False
    parser.add_argument(
        "--max-autotune",
        action="store_true",
        help="benchmark GEMMs without tuning results, even if the program does not set "
        "max_autotune",
    )
    parser.add_argument(
        "--candidates", action="store_true", help="list the measured candidates of every GEMM"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the report as one JSON object, and what the program prints on stderr",
    )
    parser.add_argument("--output", metavar="OUT", help="also write the report as JSON to a file")


def run(arguments: argparse.Namespace) -> int:
    """Run the program with the extension active, and print the report when it ends or fails.

    Returns:
        The program's exit code.

    Raises:
        exc.BadReportFileError: the program does not exist, or the JSON file cannot be written. Both
            are checked before the program runs.
        BaseException: raised by the program.
    """
    from inductor_ext import events
    from inductor_ext.hooks.records import CompileRecord
    from inductor_ext.lowerings.records import AttentionRecord
    from inductor_ext.reports.gemm_report import GemmReport, listen

    check_program(arguments.script)
    # The program may change the working directory.
    out = None if arguments.output is None else os.path.abspath(arguments.output)
    if out is not None:
        check_writable(out)
    with (
        listen() as compiled_gemms,
        events.capture(CompileRecord) as compiles,
        events.capture(AttentionRecord) as attention,
    ):
        try:
            output = sys.stderr if arguments.json else sys.stdout
            with contextlib.redirect_stdout(output):
                return run_program(arguments.script, arguments.arguments, arguments.max_autotune)
        finally:
            report = GemmReport(arguments.script, compiled_gemms(), tuple(attention))
            table = report.table(candidates=arguments.candidates)
            print(report.to_json() if arguments.json else table)
            if not compiles:
                print(explain_empty_report(), file=output)
            if out is not None:
                write_file(out, report.to_json())


def check_program(path: str) -> None:
    """Raise an error if the program does not exist.

    Raises:
        exc.BadReportFileError: it does not exist.
    """
    if not os.path.isfile(path):
        raise exc.BadReportFileError(
            file=path,
            where="",
            why="the file does not exist",
            fix="Pass the path of a Python program.",
        )


def explain_empty_report() -> str:
    """Return why the report on a program is empty."""
    from inductor_ext import config

    if not config.snapshot().enabled:
        return "The extension is disabled: the setting enabled is False."
    return (
        "Inductor compiled nothing in the program's process. Processes started by the program are "
        "not observed."
    )


def run_program(script: str, arguments: Sequence[str], max_autotune: bool) -> int:
    """Run a program with the extension active, and return its exit code.

    Args:
        script: the Python file.
        arguments: of the program.
        max_autotune: whether to set Inductor's option of this name.
    """
    from torch._inductor import config as inductor_config

    from inductor_ext.hooks.activate import activate

    before = sys.argv, sys.path[0]
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    patch = inductor_config.patch(max_autotune=True) if max_autotune else contextlib.nullcontext()
    try:
        with activate(), patch:
            runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        # Python prints any other exit value and exits with 1.
        print(ended.code, file=sys.stderr)
        return 1
    finally:
        sys.argv, sys.path[0] = before
    return 0
