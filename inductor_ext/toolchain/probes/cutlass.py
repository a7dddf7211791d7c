"""The probe for CUTLASS."""

from __future__ import annotations

import os
import sys
from typing import Any

from inductor_ext.toolchain.probes.common import (
    Finding,
    Probe,
    loaded_attribute,
    package_folder,
    package_version,
)

CUTLASS_INSTALL = "pip install nvidia-cutlass==4.2.0.0"
"""Installs the release that the templates are written for."""


def _cutlass_inputs() -> tuple[Any, ...]:
    variable = os.environ.get("TORCHINDUCTOR_CUTLASS_DIR")
    torch = loaded_attribute("torch", "__file__")
    # The default of Inductor's settings, a folder that exists in builds from source only.
    unset = torch and os.path.realpath(f"{os.path.dirname(torch)}/../third_party/cutlass/")
    defaults = (None, unset, variable and os.path.realpath(variable))
    for setting in ("cutlass.cutlass_dir", "cuda.cutlass_dir"):
        folder = loaded_attribute("torch._inductor.config", setting)
        if folder not in defaults:
            return (tuple(sys.path), folder, f"torch._inductor.config.{setting}")
    return (tuple(sys.path), variable, "TORCHINDUCTOR_CUTLASS_DIR")


def _examine_cutlass(_path: tuple[str, ...], configured: str | None, setter: str) -> Finding:
    if configured:
        root, version, origin = configured, None, f"from {setter}"
    else:
        folder = package_folder("cutlass_library")
        if folder is None:
            return Finding(
                why="nvidia-cutlass is not installed for this Python, and "
                "TORCHINDUCTOR_CUTLASS_DIR is not set",
                install=CUTLASS_INSTALL,
            )
        root, version = os.path.join(folder, "source"), package_version("nvidia-cutlass")
        origin = "from the package nvidia-cutlass"
    if not os.path.isfile(os.path.join(root, "include", "cutlass", "cutlass.h")):
        return Finding(
            version=version,
            why=f"{root} ({origin}) has no include/cutlass/cutlass.h",
            install=f"unset {setter} or set it to a checkout of CUTLASS"
            if configured
            else CUTLASS_INSTALL.replace("install", "install --force-reinstall", 1),
        )
    return Finding(version=version, path=os.path.abspath(root), detail=origin)


CUTLASS = Probe("CUTLASS", _cutlass_inputs, _examine_cutlass)
