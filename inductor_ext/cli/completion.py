"""`inductor-ext completion SHELL`: prints the completion of commands and options for a shell.

The package `shtab` writes the script from the parsers of the commands.
"""

from __future__ import annotations

import argparse
import importlib

from inductor_ext import exc

EXAMPLE = "inductor-ext completion bash > /etc/bash_completion.d/inductor-ext"
EXIT_CODES = {0: "the script was printed", 2: "the package shtab is not installed"}

_SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=_SHELLS, help="the shell")


def run(arguments: argparse.Namespace) -> int:
    """Print the script.

    Raises:
        exc.MissingDependencyError: shtab is not installed.
    """
    try:
        import shtab
    except ImportError:
        raise exc.MissingDependencyError(feature="Shell completion", package="shtab") from None
    print(shtab.complete(make_parser(), shell=arguments.shell))
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return one parser with all commands."""
    from inductor_ext.cli import main

    parser = argparse.ArgumentParser(prog=main.PROGRAM)
    parser.add_argument("--version", action="store_true", help="print the versions and exit")
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command")
    for name, summary in main.COMMANDS.items():
        module = importlib.import_module(f"inductor_ext.cli.{name}")
        module.add_arguments(commands.add_parser(name, help=summary))
    return parser
