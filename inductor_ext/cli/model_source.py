"""Models that are named on the command line: `FILE.py:NAME`."""

from __future__ import annotations

import inspect
import os
import runpy
import sys
from typing import Any

from inductor_ext import exc

DEFAULT_NAME = "make"
"""The name in a Python file if none is given."""


def split(source: str) -> tuple[str, str]:
    """Return the path and the name in it."""
    path, separator, name = source.rpartition(":")
    if separator and path.endswith(".py"):
        return path, name
    return source, DEFAULT_NAME


def check_file(path: str) -> None:
    """Check that a file exists.

    Raises:
        exc.BadModelSourceError: it does not.
    """
    if not os.path.isfile(path):
        raise exc.BadModelSourceError(source=path, why="there is no such file")


def run_file(path: str, name: str) -> Any:
    """Run a Python file, which may import modules beside it, and return what `name` gives.

    Raises:
        exc.BadModelSourceError: the file does not define the name.
    """
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    try:
        names = runpy.run_path(path)
        if name not in names:
            raise exc.BadModelSourceError(source=path, why=f"it defines no {name!r}")
        value = names[name]
        return value() if inspect.isroutine(value) else value
    finally:
        del sys.path[0]
