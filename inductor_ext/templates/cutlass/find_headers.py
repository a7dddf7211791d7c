"""Find CUTLASS's headers and their version.

They come from the nvidia-cutlass package, which is located but not imported, or from a checkout. If
they are missing or too old, the error says so and names the command that installs them.
"""

from __future__ import annotations

import os
import pathlib
import re
from dataclasses import dataclass

from inductor_ext import exc
from inductor_ext.toolchain import components
from inductor_ext.toolchain.probes.cutlass import CUTLASS_INSTALL

LOWEST = (4, 2, 0)
"""The oldest CUTLASS release that has everything the sources use."""


@dataclass(frozen=True)
class Headers:
    """CUTLASS's headers on this machine."""

    root: pathlib.Path
    """Absolute path of the folder that contains `include`."""
    version: tuple[int, int, int]

    @property
    def include(self) -> pathlib.Path:
        """The include folder for nvcc. CUTLASS's host utilities (tools/util) are not needed."""
        return self.root / "include"

    @property
    def release(self) -> str:
        """The version as text, such as "4.2.0"."""
        return ".".join(map(str, self.version))


def find(cutlass_dir: str | os.PathLike[str] | None = None) -> Headers:
    """Return CUTLASS's headers on this machine.

    Args:
        cutlass_dir: a checkout of CUTLASS; None to use Inductor's setting of that name, the
            variable TORCHINDUCTOR_CUTLASS_DIR or the package nvidia-cutlass.

    Raises:
        exc.MissingToolchainError: they are not found, or too old.
    """
    if cutlass_dir is None:
        component = components.probe("cutlass")
        component.require()
        assert component.path is not None
        root, install = pathlib.Path(component.path), CUTLASS_INSTALL
    else:
        root = pathlib.Path(cutlass_dir).absolute()
        install = f"give a checkout of CUTLASS as cutlass_dir, or none and {CUTLASS_INSTALL}"
    file = root / "include" / "cutlass" / "version.h"
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise _missing(f"{file} cannot be read ({error.strerror})", install) from None
    numbers = [re.search(rf"#define CUTLASS_{name}\s+(\d+)", text) for name in _NUMBERS]
    if not all(numbers):
        raise _missing(f"{file} states no version", install)
    major, minor, patch = (int(number[1]) for number in numbers if number)
    headers = Headers(root, (major, minor, patch))
    if headers.version < LOWEST:
        lowest = ".".join(map(str, LOWEST))
        raise _missing(f"{root} has CUTLASS {headers.release}, and {lowest} is needed", install)
    return headers


_NUMBERS = ("MAJOR", "MINOR", "PATCH")


def _missing(why: str, install: str) -> exc.MissingToolchainError:
    return exc.MissingToolchainError(part="CUTLASS", why=why, install=install)
