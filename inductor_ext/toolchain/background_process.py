"""Processes of this package that go on after the one that has started them."""

from __future__ import annotations

import os
import subprocess
import sys


def start(
    started: list[subprocess.Popen[bytes]],
    module: str,
    *arguments: str,
    stdin: int = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """Start a module as a program without output, in a session of its own.

    Args:
        started: processes that were started before. The new one is added, and those that have ended
            are removed, which reaps them.
        module: name of the module.
        arguments: of the program.
        stdin: as for `subprocess.Popen`.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=stdin,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)},
        # Ctrl-C in the terminal must not reach it.
        start_new_session=True,
    )
    started[:] = [child for child in (*started, process) if child.poll() is None]
    return process
