"""An nvcc that is a script, sources that tell it what to do, and a store for what it builds."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from inductor_ext.storage.artifact_store import ArtifactStore
from inductor_ext.storage.paths import kernel_folder
from inductor_ext.templates.cutlass.find_headers import Headers
from inductor_ext.templates.cutlass.nvcc_build import Toolchain, built
from inductor_ext.templates.cutlass.source import Source
from inductor_ext.toolchain import components

NVCC = """#!/bin/bash
# Of the device's half it does what the source says, after writing down that it has begun.
while [ "$1" != -o ]; do [ "$1" = -DINDUCTOR_EXT_DEVICE ] && device=1; shift; done
[ -z "$device" ] && exec touch "$2"
echo "begin $$ $(basename "$2")" >>"{log}"
out=$2 file=$3
eval "$(sed -n 's/^nvcc: //p' "$file")"
echo "end $$" >>"{log}"
"""


class Scripted(Toolchain):
    """An nvcc that is a script. What is linked is the device's half."""

    def link(self, source: Source, folder: Path, scratch: Path) -> None:
        shutil.copy(scratch / "kernel.cubin", folder / "kernel.so")

    @classmethod
    def at(
        cls, folder: Path, version: str = "13.0.88", release: tuple[int, int, int] = (4, 2, 0)
    ) -> Scripted:
        """One whose program is in that folder."""
        return cls(str(folder / "nvcc"), version, Headers(folder, release), "c++", folder)


class Machine:
    """A folder with an nvcc that is a script, and a store."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.log.touch()
        program = folder / "nvcc"
        program.write_text(NVCC.format(log=self.log))
        program.chmod(0o755)
        self.toolchain = Scripted.at(folder)
        self.store = ArtifactStore(folder / "store", 1 << 30)

    def built(self, what: Source, **options: Any) -> bytes:
        with built(what, self.store, self.toolchain, **options) as file:
            return file.read_bytes()

    @property
    def runs(self) -> int:
        """How often nvcc has been started."""
        return self.sequence.count("begin")

    @property
    def sequence(self) -> list[str]:
        """When nvcc began and ended."""
        return [line.split()[0] for line in self.log.read_text().splitlines()]


def script(text: str, name: str = "kernel_1") -> Source:
    """A source that tells the script what to do."""
    return Source(name, f"nvcc: {text}\n", "90a")


GOOD = script('echo good >"$out"')
BAD = script('echo "$file(3): error: no such thing"; echo "warning: none"; exit 2')
KILLED = script('test -e "$(dirname "$0")/fixed" && echo good >"$out" && exit; kill -9 $$')


def real_store() -> ArtifactStore:
    """For what nvcc really builds: where the caller keeps Inductor's cache, if he does."""
    for part in (components.probe("nvcc"), components.probe("cutlass")):
        if not part.available:
            pytest.skip(f"no {part.title}: {part.why}")
    return ArtifactStore(kernel_folder(), 1 << 30)
