"""The command line: `inductor-ext COMMAND ...`, also `python -m inductor_ext COMMAND ...`.

A command is a module with `add_arguments(parser)` and `run(arguments) -> exit code`, and an entry
in `COMMANDS`. Its module is imported only when the command is run, so that `--help` and `--version`
are fast: neither imports torch.

Exit codes: the command's own, 0 on success; 2 for wrong usage and for every error that the
extension raises on purpose, which is printed as one line on stderr (`--traceback` shows the whole
traceback). Any other exception is a bug and keeps its traceback.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import sys
from collections.abc import Sequence

from inductor_ext import __version__, _compat, exc
from inductor_ext.settings.type_checks import suggest_name

_PROGRAM = "inductor-ext"


@dataclasses.dataclass(frozen=True)
class Command:
    """A subcommand."""

    name: str
    summary: str
    module: str
    """Full name of the module that defines `add_arguments` and `run`."""


COMMANDS = (
    Command(
        "cache",
        "show the contents of the artifact cache, or clear it",
        "inductor_ext.cli.cache",
    ),
    Command(
        "cutlass",
        "build, list or remove CUTLASS kernels",
        "inductor_ext.cli.cutlass",
    ),
    Command(
        "diff",
        "compare two packages",
        "inductor_ext.cli.diff",
    ),
    Command(
        "doctor",
        "check what this machine can compile, and what is missing",
        "inductor_ext.cli.doctor",
    ),
    Command(
        "explain",
        "run a program and report the kernel of every GEMM, with the reason",
        "inductor_ext.cli.explain",
    ),
    Command(
        "inspect",
        "show the contents, signatures and requirements of a package",
        "inductor_ext.cli.inspect",
    ),
    Command(
        "memory",
        "show how a compiled model uses memory",
        "inductor_ext.cli.memory",
    ),
    Command(
        "plan",
        "plan memory for the buffers in a CSV file",
        "inductor_ext.cli.plan",
    ),
    Command(
        "tune",
        "show, export, import or clear tuning results of GEMMs",
        "inductor_ext.cli.tune",
    ),
    Command(
        "verify",
        "check that a package is intact",
        "inductor_ext.cli.verify",
    ),
)


def _make_parser() -> argparse.ArgumentParser:
    width = max(len(command.name) for command in COMMANDS)
    listing = "\n".join(f"  {command.name:<{width}}  {command.summary}" for command in COMMANDS)
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
    commands = {command.name: command for command in COMMANDS}
    if arguments.command not in commands:
        hint = suggest_name(arguments.command, commands)
        parser.error(
            f"unknown command {arguments.command!r}.{hint} The commands are: {', '.join(commands)}."
        )
    command = commands[arguments.command]
    own_parser = argparse.ArgumentParser(
        prog=f"{_PROGRAM} {command.name}", description=f"{command.summary}."
    )
    try:
        module = importlib.import_module(command.module)
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
