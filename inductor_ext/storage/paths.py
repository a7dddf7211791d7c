"""The folders of the extension's caches. Neither imports torch nor creates a folder."""

from __future__ import annotations

import importlib.util
import os
import pathlib

from inductor_ext import _compat


def artifact_folder(override: str | None = None) -> pathlib.Path:
    """Return the folder of artifacts: `override`, or else one in Inductor's cache folder."""
    if override is not None:
        return pathlib.Path(override).absolute()
    inductor = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if inductor is None:
        inductor = default_inductor_folder()
    return pathlib.Path(inductor).absolute() / "inductor_ext" / "artifacts"


def default_inductor_folder() -> str:
    """Return the folder that Inductor uses for its caches unless an environment variable names one.

    Raises:
        ImportError: torch is not installed.
        KeyError, OSError: the user has no name, which some torch releases do not support.
    """
    # Importing torch._inductor takes seconds, creates the folder and sets the environment variable
    # that names it. The module that computes the path needs nothing else of Inductor.
    file = _compat.torch_folder() / "_inductor" / "runtime" / "cache_dir_utils.py"
    spec = importlib.util.spec_from_file_location("cache_dir_utils", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.default_cache_dir())


def kernel_folder(override: str | None = None) -> pathlib.Path:
    """Return the folder of CUTLASS kernels, apart from artifacts, which would otherwise evict them.

    Args:
        override: as for `artifact_folder`; the result is a subfolder of it.
    """
    artifacts = artifact_folder(override)
    return (artifacts.parent if override is None else artifacts) / "kernels"


def tuning_folder(override: str | None = None) -> pathlib.Path:
    """Return the folder of tuning results: `override`, or else one in Inductor's cache folder."""
    if override is not None:
        return pathlib.Path(override).absolute()
    return artifact_folder().parent / "tuning"
