"""Atomic writes."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

from inductor_ext.storage.atomic import atomic_write

KILLED = """
import os, signal, sys
from inductor_ext.storage import digest
import pytest

from inductor_ext.storage.atomic import atomic_write
with atomic_write(sys.argv[1]) as temporary:
    open(temporary, "w").write("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_the_old_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "net.pt2"
    path.write_text("old")
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)])
    assert done.returncode == -9
    assert path.read_text() == "old"
    with atomic_write(path) as temporary:
        pathlib.Path(temporary).write_text("new")
    assert path.read_text() == "new"


def test_an_error_of_a_write_names_the_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "net.pt2"
    with (
        pytest.raises(OSError, match=rf"No space left on device: '{re.escape(str(path))}'"),
        atomic_write(path),
        open("/dev/full", "w") as full,
    ):
        full.write("all")
    assert list(tmp_path.iterdir()) == []
