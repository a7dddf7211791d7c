"""Running compilers and linkers."""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
from collections.abc import Sequence

from inductor_ext import events, progress


def run_all(commands: Sequence[Sequence[str]]) -> None:
    """Run commands in parallel, see `run`."""
    from torch._inductor import config

    workers = max(1, min(len(commands), config.compile_threads or 1, os.cpu_count() or 1))
    with (
        events.timed("compile_units"),
        progress.stage("C++ units", len(commands)) as units,
        concurrent.futures.ThreadPoolExecutor(workers) as pool,
    ):
        futures = [pool.submit(run, command) for command in commands]
        for future in futures:
            future.add_done_callback(lambda _: units.advance())
        # Wait for all commands, so that nothing is written after an error has been reported.
        for future in futures:
            future.result()


def run(command: Sequence[str]) -> None:
    """Run a compiler or linker.

    Raises:
        torch._inductor.exc.CppCompileError: it fails; contains its output.
    """
    from torch._inductor.exc import CppCompileError

    process = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if process.returncode != 0:
        raise CppCompileError(list(command), process.stdout + process.stderr)
