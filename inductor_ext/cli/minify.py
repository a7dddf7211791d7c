"""`inductor-ext minify REPRO`: shortens a program that repeats a failed compile.

REPRO is a program that the extension has written when a compile failed (setting `repro_dir`).
torch's minifier removes operators as long as the error stays, in another process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from inductor_ext import exc
from inductor_ext.reports.text import write_file

EXAMPLE = "inductor-ext minify repro_0123456789ab.py --output smaller.py"
EXIT_CODES = {0: "the shorter program was written", 2: "the program does not fail, or is missing"}

_HEADER = ("#", "import inductor_ext", "inductor_ext.", "import torch._ind", "torch._inductor.")
_STDERR = 2
"""File descriptor: what the minifier prints is not the result of the command."""

_STEP = re.compile(r"minified_(\d+)_nodes\.py")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("repro", metavar="REPRO", help="a program that the extension has written")
    parser.add_argument(
        "--output", metavar="FILE", help="the shorter program (default: REPRO with .min.py)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Shorten the program, and print its path.

    Raises:
        exc.BadReportFileError: there is no such program, it does not fail, or the output cannot be
            written.
    """
    source = os.path.abspath(arguments.repro)
    if not os.path.isfile(source):
        raise _error(source, "the file does not exist")
    output = arguments.output or f"{source.removesuffix('.py')}.min.py"
    with tempfile.TemporaryDirectory(prefix="inductor_ext-") as folder:
        if _run(source, "run", folder) == 0:
            raise _error(source, "it does not fail")
        code = _run(source, "minify", folder)
        steps = [
            (int(match[1]), path)
            for path in pathlib.Path(folder, "checkpoints").glob("*.py")
            if (match := _STEP.fullmatch(path.name))
        ]
        if not steps:
            raise _error(source, f"torch's minifier found no error in it (exit status {code})")
        nodes, smallest = min(steps)
        write_file(output, _read_header(source) + smallest.read_text())
    if arguments.json:
        print(json.dumps({"file": output, "nodes": nodes}))
    else:
        print(f"{output}: {nodes} nodes")
    return 0


def _run(program: str, action: str, folder: str) -> int:
    """Run a program in a folder, where it may write files, and return the exit status."""
    return subprocess.run(
        [sys.executable, program, action],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=_STDERR,
        env={
            **os.environ,
            "INDUCTOR_EXT_REPRO_DIR": folder,
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        },
    ).returncode


def _read_header(path: str) -> str:
    """Return the first lines of a program: what failed, the versions and the settings."""
    with open(path, encoding="utf-8") as file:
        lines = itertools.takewhile(lambda line: line.startswith(_HEADER), file)
        return "".join(lines)


def _error(path: str, why: str) -> exc.BadReportFileError:
    fix = (
        "Pass a program that the extension has written when a compile failed, and that fails here."
    )
    return exc.BadReportFileError(file=path, where="", why=why, fix=fix)
