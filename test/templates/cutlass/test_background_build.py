"""Builds in a background process."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest

from inductor_ext.templates.cutlass import background_build
from inductor_ext.templates.cutlass.background_build import build_later
from inductor_ext.templates.cutlass.nvcc_build import Toolchain, built, is_built
from test.support.scripted_nvcc import BAD, GOOD, Machine, script


class TestLater:
    @pytest.fixture
    def toolchain(self, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Toolchain:
        """A toolchain with a scripted linker."""
        programs = {
            "c++": 'while [ "$1" != -o ]; do shift; done; echo linked >"$2"',
            "objcopy": 'cp "${@: -2:1}" "${@: -1}"',
        }
        for name, text in programs.items():
            (machine.folder / name).write_text(f"#!/bin/bash\n{text}\n")
            (machine.folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{machine.folder}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setattr(background_build, "started_processes", [])
        known = machine.toolchain
        runtime = machine.folder / "libcudart_static.a"
        return Toolchain(
            known.nvcc, known.version, known.headers, str(machine.folder / "c++"), runtime
        )

    def test_another_process_builds(self, machine: Machine, toolchain: Toolchain) -> None:
        assert build_later([GOOD, BAD], machine.store, toolchain) == [GOOD, BAD]
        (process,) = background_build.started_processes
        assert process.wait() == 0
        assert is_built(GOOD, machine.store)
        with built(GOOD, machine.store) as file:
            assert file.read_bytes() == b"linked\n"
        # The error is stored as well, so that nothing is left to build.
        assert build_later([GOOD, BAD], machine.store, toolchain) == []
        assert machine.runs == 2
        assert background_build.started_processes == [process]

    def test_a_running_build_continues_until_it_is_killed(
        self, machine: Machine, toolchain: Toolchain
    ) -> None:
        forever = script("echo $$ >/dev/null; exec sleep 600", "kernel_2")
        assert build_later([forever], machine.store, toolchain) == [forever]
        while not machine.runs:
            time.sleep(0.01)
        assert build_later([forever], machine.store, toolchain) == [forever]
        (process,) = background_build.started_processes
        process.terminate()
        assert process.wait() == 1
        compiler = int(machine.log.read_text().split()[1])
        with contextlib.suppress(FileNotFoundError):
            # Its new parent may not wait for it.
            while Path(f"/proc/{compiler}/stat").read_text().split()[2] != "Z":
                time.sleep(0.01)
        assert not is_built(forever, machine.store, toolchain)
        # Another process can build it now.
        assert not background_build.is_claimed(forever, machine.store)
        machine.store.collect()
        assert list((machine.folder / "store" / "building").iterdir()) == []
