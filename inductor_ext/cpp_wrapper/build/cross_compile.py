"""What a compile for another processor architecture needs: a cross compiler, and torch for it.

The compiled model includes torch's headers and links with its libraries, which differ between
architectures. They come from an unpacked wheel of the same release of torch (the setting
`aot_cross_torch`). Nothing of it is run or imported.
"""

from __future__ import annotations

import pathlib
import platform
import re
import shutil
import struct
from collections.abc import Sequence

from inductor_ext import _compat

COMPILERS = {"aarch64": "aarch64-linux-gnu-g++"}
"""The cross compiler for each architecture other than x86-64."""

_ELF_MACHINES = {"aarch64": 183}
"""The architectures in ELF headers (e_machine), from the ELF supplement of each."""

_LIBRARY = "lib/libtorch_cpu.so"
_HEADERS = "include/torch/csrc/inductor/aoti_torch"


def is_needed(machine: str) -> bool:
    """Whether code for an architecture cannot be compiled by this machine's own compiler."""
    return machine != platform.machine()


def find_missing_compiler(machine: str) -> tuple[str, str] | None:
    """Return why code for an architecture cannot be compiled, and the remedy; None if it can."""
    compiler = COMPILERS[machine]
    if shutil.which(compiler) is not None:
        return None
    why = f"the cross compiler {compiler} is not installed"
    fix = f"Install it, or compile on a machine of the architecture {machine}."
    return why, fix


def find_missing_torch(machine: str, folder: str | None, version: str) -> tuple[str, str] | None:
    """Return why a folder is not torch for an architecture, and the remedy; None if it is.

    Args:
        machine: the architecture, as in `platform.machine()`.
        folder: the setting `aot_cross_torch`.
        version: version of the installed torch, which must be that of the folder.
    """
    release = _release(version)
    fix = (
        f"Unpack the wheel of torch {release} for {machine} (`pip download torch=={release} "
        f"--no-deps --platform manylinux_2_28_{machine}`, then `python -m zipfile -e`), and set "
        "aot_cross_torch to the folder `torch` in it."
    )
    if folder is None:
        return f"torch's libraries for {machine} are not known", fix
    root = pathlib.Path(folder)
    library = root / _LIBRARY
    if not library.is_file() or not (root / _HEADERS).is_dir():
        return f"aot_cross_torch={folder!r} does not contain {_LIBRARY} and torch's headers", fix
    if _read_elf_machine(library) != _ELF_MACHINES[machine]:
        return f"the libraries in aot_cross_torch={folder!r} are not for {machine}", fix
    found = read_version(root)
    if found is None or _release(found) != release:
        return f"aot_cross_torch={folder!r} contains torch {found}, and this is {version}", fix
    return None


def read_version(folder: pathlib.Path) -> str | None:
    """Return the version of torch in a folder; None if it is unknown."""
    try:
        text = (folder / "version.py").read_text()
    except OSError:
        return None
    match = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
    return match[1] if match is not None else None


def move_folders(folders: Sequence[str], torch: pathlib.Path) -> list[str]:
    """Return the folders of headers or libraries in torch as those in another torch.

    Others are left out: the cross compiler has folders of its own.

    Args:
        folders: paths for this machine.
        torch: folder of the other torch.
    """
    own = _compat.torch_folder()
    paths = [pathlib.Path(folder) for folder in folders if folder]
    return [str(torch / path.relative_to(own)) for path in paths if path.is_relative_to(own)]


def _release(version: str) -> str:
    return version.partition("+")[0]


def _read_elf_machine(path: pathlib.Path) -> int | None:
    with open(path, "rb") as file:
        header = file.read(20)
    if len(header) < 20 or header[:4] != b"\x7fELF" or header[5] != 1:  # 1: little-endian
        return None
    return int(struct.unpack_from("<H", header, 18)[0])
