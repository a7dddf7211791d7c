"""The probe for torch itself."""

from __future__ import annotations

import importlib.util
import warnings

from inductor_ext import _compat
from inductor_ext.toolchain.probes.common import (
    Finding,
    Probe,
    first_line,
    import_path,
    package_folder,
    package_version,
)


def _examine_torch(_path: tuple[str, ...]) -> Finding:
    lowest, highest = _compat.SUPPORTED
    major, minor = highest.split(".")
    requirement = f'"torch>={lowest},<{major}.{int(minor) + 1}"'
    if importlib.util.find_spec("torch") is None:
        return Finding(
            why="it is not installed for this Python", install=f"pip install {requirement}"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch
    except Exception as error:
        return Finding(
            version=package_version("torch"),
            path=package_folder("torch"),
            why=f"importing it fails with {type(error).__name__}: {first_line(str(error))}",
            install=f"pip install --force-reinstall {requirement}",
        )
    if torch.version.cuda:
        build = f"built with CUDA {torch.version.cuda}"
    elif torch.version.hip:
        build = f"built with ROCm {torch.version.hip}"
    else:
        build = "built without CUDA"
    return Finding(version=str(torch.__version__), path=package_folder("torch"), detail=build)


TORCH = Probe("torch", import_path, _examine_torch)
