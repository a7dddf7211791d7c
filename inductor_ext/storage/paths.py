"""The folders of the extension's caches. Neither imports torch nor creates a folder."""

from __future__ import annotations

import importlib.util
import os
import pathlib


def artifact_folder(override: str | None = None) -> pathlib.Path:
    """Return the folder of artifacts: `override`, or else one in Inductor's cache folder."""
    if override is not None:
        return pathlib.Path(override).absolute()
    inductor = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if inductor is None:
        # Load only the module that knows the path, because importing torch._inductor takes seconds.
        # The module needs nothing else of Inductor.
        torch = importlib.util.find_spec("torch")
        assert torch is not None
        assert torch.origin is not None
        file = pathlib.Path(torch.origin).parent / "_inductor" / "runtime" / "cache_dir_utils.py"
        spec = importlib.util.spec_from_file_location("cache_dir_utils", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        inductor = str(module.default_cache_dir())
    return pathlib.Path(inductor).absolute() / "inductor_ext" / "artifacts"


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
