"""Compiler processes of this process, which end with it: none is left behind by a killed build."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from typing import NoReturn


@contextlib.contextmanager
def start_compiler(
    command: Sequence[str], scratch: pathlib.Path, log: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program; on exit from the context, kill it and all its child processes.

    Args:
        command: the program and its arguments.
        scratch: folder for its temporary files.
        log: file name in `scratch` for its output.
    """
    # `end_compilers` takes this lock, so it cannot miss a process that has just been started.
    with open(scratch / log, "wb") as output, _starting:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(scratch), "LC_ALL": "C"},
            # nvcc starts child processes; a separate session allows killing the whole group.
            start_new_session=True,
        )
        _running.add(process.pid)
    try:
        yield process
    finally:
        if process.poll() is None:
            _kill(process.pid)
            process.wait()
        _running.discard(process.pid)


_running: set[int] = set()
"""Process groups that this process has started."""

_starting = threading.RLock()
"""Held while a process is started, until it is in `_running`."""


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def end_compilers() -> NoReturn:
    """Kill the compilers that all threads have started, and exit this process immediately."""
    _starting.acquire()
    for group in tuple(_running):
        _kill(group)
    os._exit(1)
