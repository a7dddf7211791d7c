"""The command line: `inductor-ext COMMAND ...`, also `python -m inductor_ext COMMAND ...`.

A command is a module of this package with `add_arguments(parser)`, `run(arguments) -> exit code`,
an `EXAMPLE`, the meaning of its `EXIT_CODES`, and an entry in `COMMANDS`. It is imported only when
the command is run, so that `--help` and `--version` are fast: neither imports torch.

Exit codes: the command's own, 0 on success; 2 for wrong usage, for every error that the extension
raises on purpose, and for output that cannot be written, such as to a full disk; 130 after Ctrl-C.
Errors are one line on stderr (`--traceback` shows the whole traceback). Any other exception is a
bug and keeps its traceback.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from types import ModuleType

from inductor_ext import __version__, _compat, exc
from inductor_ext.settings.type_checks import suggest_name

PROGRAM = "inductor-ext"

_INTERRUPTED = 128 + signal.SIGINT
"""The exit code that shells use for a process that Ctrl-C has ended."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors of a system that takes no more output."""

COMMANDS = {
    "bench": "compare eager mode, Inductor and the extension on a model",
    "build": "compile a model into a package",
    "cache": "show the contents of the artifact cache, or clear it",
    "completion": "print the completion of commands for a shell",
    "cutlass": "build, list or remove CUTLASS kernels",
    "diff": "compare two packages",
    "doctor": "check what this machine can compile, and what is missing",
    "explain": "run a program and report the kernel of every GEMM, with the reason",
    "inspect": "show the contents, signatures and requirements of a package",
    "memory": "show how a compiled model uses memory",
    "minify": "shorten a program that repeats a failed compile",
    "options": "show the settings, their values in this environment, and Inductor's options",
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
        prog=PROGRAM,
        usage="%(prog)s [-h] [--version] [--traceback] COMMAND ...",
        description="Tools around the inductor_ext backend of torch.compile.",
        epilog=f"commands:\n{listing}\n\n`{PROGRAM} COMMAND --help` shows the help of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the versions and exit")
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    parser.add_argument("command", nargs="?", metavar="COMMAND", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def make_command_parser(name: str) -> tuple[argparse.ArgumentParser, ModuleType]:
    """Return the parser of a command's arguments, and the module of the command."""
    module = importlib.import_module(f"inductor_ext.cli.{name}")
    codes = "; ".join(f"{code}: {meaning}" for code, meaning in module.EXIT_CODES.items())
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} {name}",
        description=f"{COMMANDS[name]}.",
        epilog=f"example: `{module.EXAMPLE}`. Exit codes: {codes}.",
    )
    module.add_arguments(parser)
    return parser, module


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
    try:
        own_parser, module = make_command_parser(command)
        code: int = module.run(own_parser.parse_args(arguments.arguments))
        sys.stdout.flush()
    except (exc.InductorExtError, KeyboardInterrupt, OSError) as error:
        ended = _explain(error)
        if ended is None or (arguments.traceback and not isinstance(error, BrokenPipeError)):
            raise
        code, text = ended
        if text:
            print(f"{PROGRAM}: {text}", file=sys.stderr)
    return code


def _explain(error: BaseException) -> tuple[int, str] | None:
    """Return the exit code and the text for an error; None for a bug."""
    if isinstance(error, exc.InductorExtError):
        return 2, str(error)
    if isinstance(error, KeyboardInterrupt):
        return _INTERRUPTED, "interrupted"
    if isinstance(error, BrokenPipeError):
        _discard_output()  # the reader (such as `| head`) has closed the pipe
        return 1, ""
    if isinstance(error, OSError) and error.errno in _FULL:
        _discard_output()
        return 2, f"the output cannot be written: {error.strerror}"
    return None


def _discard_output() -> None:
    """Keep Python from writing the rest of the output when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
