"""The command line: `inductor-ext COMMAND ...`, also `python -m inductor_ext COMMAND ...`.

A command is a module of this package with `add_arguments(parser)` and `run(arguments) -> exit
code`, and an entry in `COMMANDS`. It is imported only when the command is run, so that `--help` and
`--version` are fast: neither imports torch.

Exit codes: the command's own, 0 on success; 2 for wrong usage and for every error that the
extension raises on purpose, which is printed as one line on stderr (`--traceback` shows the whole
traceback). Any other exception is a bug and keeps its traceback.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from inductor_ext import __version__, _compat, exc
from inductor_ext.settings.type_checks import suggest_name

_PROGRAM = "inductor-ext"


COMMANDS = {
    "build": "compile a model into a package",
    "cache": "show the contents of the artifact cache, or clear it",
    "cutlass": "build, list or remove CUTLASS kernels",
    "diff": "compare two packages",
    "doctor": "check what this machine can compile, and what is missing",
    "explain": "run a program and report the kernel of every GEMM, with the reason",
    "inspect": "show the contents, signatures and requirements of a package",
    "memory": "show how a compiled model uses memory",
    "plan": "plan memory for the buffers in a CSV file",
    "report": "write one HTML page about what a program compiles, or about a package",
    "sign": "sign a package with an Ed25519 key",
    "tune": "show, export, import or clear tuning results of GEMMs",
    "verify": "check that a package is intact, and who has signed it",
}
"""Name and summary of each command."""


def _make_parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        usage="%(prog)s [-h] [--version] [--traceback] COMMAND ...",
        description="Tools around the inductor_ext backend of torch.compile.",
        epilog=f"commands:\n{listing}\n\n`{_PROGRAM} COMMAND --help` shows the help of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the versions and exit")
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    parser.add_argument("command", nargs="?", metavar="COMMAND", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _format_versions() -> str:
    try:
        torch = _compat.torch_version()
    except ImportError:
        torch = "not installed"
    return f"inductor_ext {__version__}, torch {torch}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments after the program's name; by default those of the process.

    Returns:
        The exit code.

    Raises:
        SystemExit: after --help, and with code 2 on wrong usage, as raised by argparse.
    """
    parser = _make_parser()
    arguments = parser.parse_args(argv)
    if arguments.version:
        print(_format_versions())
        return 0
    if arguments.command is None:
        parser.print_help()
        return 0
    command = arguments.command
    if command not in COMMANDS:
        hint = suggest_name(command, COMMANDS)
        parser.error(f"unknown command {command!r}.{hint} The commands are: {', '.join(COMMANDS)}.")
    own_parser = argparse.ArgumentParser(
        prog=f"{_PROGRAM} {command}", description=f"{COMMANDS[command]}."
    )
    try:
        module = importlib.import_module(f"inductor_ext.cli.{command}")
        module.add_arguments(own_parser)
        code: int = module.run(own_parser.parse_args(arguments.arguments))
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (such as `| head`) has closed the pipe. Python must not flush the rest at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except exc.InductorExtError as error:
        if arguments.traceback:
            raise
        print(f"{_PROGRAM}: {error}", file=sys.stderr)
        return 2
    return code
