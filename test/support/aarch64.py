"""Stand-ins for a cross compiler and for torch on aarch64, and running aarch64 code under qemu."""

from __future__ import annotations

import os
import pathlib
import shutil
import struct
import subprocess
from collections.abc import Iterator, Sequence

import torch

from inductor_ext import _compat
from test.support import cpp_client

COMPILER = "aarch64-linux-gnu-g++"
QEMU = "qemu-aarch64"
TORCH = os.environ.get("TEST_AARCH64_TORCH")
"""Folder of torch for aarch64, of the installed torch's release; None if there is none here."""

_CPUINFO = """processor\t: {}
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1

"""


def is_available() -> bool:
    """Whether code for aarch64 can be compiled and run here."""
    return TORCH is not None and all(map(shutil.which, (COMPILER, QEMU)))


def make_torch(folder: pathlib.Path, version: str = torch.__version__, machine: int = 183) -> str:
    """Make a folder that looks like torch for aarch64, with this torch's headers."""
    (folder / "lib").mkdir(parents=True)
    header = b"\x7fELF" + bytes([2, 1, 1]) + bytes(9) + struct.pack("<HH", 3, machine)
    (folder / "lib" / "libtorch_cpu.so").write_bytes(header)
    (folder / "include").symlink_to(_compat.torch_folder() / "include")
    (folder / "version.py").write_text(f"__version__ = '{version}'\n")
    return str(folder)


def make_compiler(folder: pathlib.Path) -> pathlib.Path:
    """Write a program named like the cross compiler that compiles for this machine instead.

    Returns:
        A file to which it appends its arguments, a line per call.
    """
    log, path = folder / "commands", folder / COMPILER
    libraries = _compat.torch_folder() / "lib"
    path.write_text(
        "#!/bin/bash\n"
        f'echo "$@" >> {log}\n'
        'for argument in "$@"; do case $argument in\n'
        "  -march=armv8-a|-DAT_BUILD_ARM_VEC256_WITH_SLEEF) ;;\n"
        "  -DCPU_CAPABILITY_NEON) kept+=(-DCPU_CAPABILITY_AVX2 -mavx2 -mfma -mf16c) ;;\n"
        f'  -L*) kept+=("-L{libraries}") ;;\n'
        '  *) kept+=("$argument") ;;\n'
        "esac; done\n"
        'exec g++ "${kept[@]}"\n'
    )
    path.chmod(0o755)
    return log


def run(source: pathlib.Path, folder: pathlib.Path, arguments: Sequence[str]) -> str:
    """Compile a C++ program that uses torch for aarch64, and run it; return what it prints.

    Libraries of CUDA and their users in torch are replaced by empty ones: the program uses none.
    """
    assert TORCH is not None
    libraries, empty, program = pathlib.Path(TORCH, "lib"), folder / "empty", folder / source.stem
    empty.mkdir()
    for name in _list_missing(libraries):
        subprocess.run(
            [COMPILER, "-shared", f"-Wl,-soname,{name}", "-x", "c++", "/dev/null", "-o", name],
            cwd=empty,
            check=True,
        )
    include = pathlib.Path(TORCH, "include")
    headers = [cpp_client.include_folder(), include, include / "torch/csrc/api/include"]
    subprocess.run(
        [
            *(COMPILER, "-std=c++20", "-O1", str(source), "-o", str(program)),
            *(part for path in headers for part in ("-isystem", str(path))),
            *(f"-L{libraries}", f"-L{empty}", f"-Wl,-rpath-link,{libraries}:{empty}"),
            *("-Wl,--unresolved-symbols=ignore-in-shared-libs", "-ltorch_cpu", "-lc10"),
            *("-ldl", "-pthread"),
        ],
        check=True,
    )
    environment = {
        "LD_LIBRARY_PATH": f"{empty}:{libraries}",
        "LD_PRELOAD": ":".join(str(path) for path in empty.glob("libtorch_*")),
        "OMP_NUM_THREADS": "1",
    }
    variables = [part for name, text in environment.items() for part in ("-E", f"{name}={text}")]
    done = subprocess.run(
        [QEMU, "-L", str(_make_root(folder)), *variables, str(program), *arguments],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _list_missing(libraries: pathlib.Path) -> Iterator[str]:
    """Yield libraries of CUDA that torch's CPU libraries need."""
    readelf = COMPILER.replace("g++", "readelf")
    for name in ("libtorch.so", "libtorch_cpu.so"):
        command = [readelf, "-d", str(libraries / name)]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for line in listed.splitlines():
            needed = line.partition("Shared library: [")[2].rstrip("]")
            if needed.startswith(("libcu", "libtorch_cu")):
                yield needed


def _make_root(folder: pathlib.Path) -> pathlib.Path:
    """Make a root folder for qemu, in which the files about the CPU are those of an Arm CPU."""
    root = folder / "root"
    cpus = root / "sys/devices/system/cpu"
    cpus.mkdir(parents=True)
    (root / "proc").mkdir()
    (root / "proc/cpuinfo").write_text("".join(map(_CPUINFO.format, range(2))))
    for name in ("possible", "present"):
        (cpus / name).write_text("0-1\n")
    (root / "lib").symlink_to("/usr/aarch64-linux-gnu/lib")
    return root
