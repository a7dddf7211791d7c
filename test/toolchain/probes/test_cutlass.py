"""The probe of CUTLASS."""

from __future__ import annotations

from pathlib import Path

import pytest

from inductor_ext.toolchain import components
from test.support.fake_toolchain import write_distribution


class TestCutlass:
    def headers(self, root: Path) -> None:
        (root / "include" / "cutlass").mkdir(parents=True)
        (root / "include" / "cutlass" / "cutlass.h").touch()

    def install(self, site: Path) -> Path:
        package = site / "cutlass_library"
        package.mkdir()
        (package / "__init__.py").write_text("raise AssertionError('a probe imports nothing')")
        write_distribution(site, "nvidia-cutlass", "4.2.0.0")
        return package / "source"

    def test_missing(self, site: Path) -> None:
        part = components.probe("cutlass")
        assert "nvidia-cutlass is not installed" in (part.why or "")
        assert part.install == "pip install nvidia-cutlass==4.2.0.0"

    def test_the_package(self, site: Path) -> None:
        root = self.install(site)
        self.headers(root)
        part = components.probe("cutlass")
        assert (part.version, part.path) == ("4.2.0.0", str(root))

    def test_the_package_without_its_sources(self, site: Path) -> None:
        root = self.install(site)
        part = components.probe("cutlass")
        assert (part.why or "").startswith(f"{root} ")
        assert part.install == "pip install --force-reinstall nvidia-cutlass==4.2.0.0"

    def test_a_checkout_has_precedence(
        self, site: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        self.headers(self.install(site))
        monkeypatch.setenv("TORCHINDUCTOR_CUTLASS_DIR", str(tmp_path / "checkout"))
        assert "TORCHINDUCTOR_CUTLASS_DIR" in (components.probe("cutlass").install or "")
        components.clear()
        self.headers(tmp_path / "checkout")
        assert components.probe("cutlass").path == str(tmp_path / "checkout")
