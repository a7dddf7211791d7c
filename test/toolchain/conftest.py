"""Fixtures of the toolchain's tests: a machine and a site-packages folder with nothing in them.

The fakes replace what a probe reads (PATH, environment variables, `sys.path`, the CUDA driver's
library), so that the whole probe runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from inductor_ext.toolchain import components
from inductor_ext.toolchain.probes import cuda

VARIABLES = (
    "CC",
    "CONDA_EXE",
    "CUDACXX",
    "CUDA_HOME",
    "CUDA_PATH",
    "CUDA_VISIBLE_DEVICES",
    "CXX",
    "TORCHINDUCTOR_CUTLASS_DIR",
    "TORCH_INDUCTOR_INSTALL_GXX",
)


@pytest.fixture(autouse=True)
def forget_components() -> Iterator[None]:
    components.clear()
    yield
    components.clear()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without tools: PATH is the empty folder <result>/bin, and no variable is set."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(cuda, "DEFAULT_CUDA_HOME", str(tmp_path / "no-cuda"))
    # Modules imported by this test process must not count.
    monkeypatch.delitem(sys.modules, "torch._inductor.config", raising=False)
    monkeypatch.delitem(sys.modules, "torch.utils.cpp_extension", raising=False)
    return tmp_path


@pytest.fixture
def site(machine: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty site-packages folder in place of the real ones."""
    folder = machine / "site"
    folder.mkdir()
    # Packages may also be installed in a folder of PYTHONPATH.
    without_packages = [
        path for path in sys.path if path and not any(Path(path).glob("*.dist-info"))
    ]
    monkeypatch.setattr(sys, "path", [str(folder), *without_packages])
    for module in ("triton", "cutlass_library"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return folder
