"""The probe of torch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from inductor_ext.toolchain import components
from test.support.fake_toolchain import write_distribution


class TestTorch:
    def test_this_one(self) -> None:
        import torch

        part = components.probe("torch")
        assert part.version == torch.__version__
        assert part.path == str(Path(torch.__file__).parent)
        built = f"built with CUDA {torch.version.cuda}"
        assert part.detail == (built if torch.version.cuda else "built without CUDA")

    def test_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "torch", None)
        part = components.probe("torch")
        assert part.why == "it is not installed for this Python"
        assert part.install == 'pip install "torch>=2.11,<2.16"'
        assert components.probe("cuda").install == part.install

    def test_broken(self, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (site / "torch").mkdir()
        (site / "torch" / "__init__.py").write_text("raise OSError('libcudart.so: no such file')")
        write_distribution(site, "torch", "2.12.1")
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        part = components.probe("torch")
        assert part.why == "importing it fails with OSError: libcudart.so: no such file"
        assert part.version == "2.12.1"
        assert (part.install or "").startswith("pip install --force-reinstall")
