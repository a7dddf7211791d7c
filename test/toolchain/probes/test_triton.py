"""The probe of Triton."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from inductor_ext.toolchain import components
from test.support.fake_toolchain import write_distribution


class TestTriton:
    def install(self, site: Path, version: str = "3.6.0", *, library: bool = True) -> Path:
        package = site / "triton"
        (package / "_C").mkdir(parents=True)
        (package / "__init__.py").write_text("raise AssertionError('a probe imports nothing')")
        if library:
            (package / "_C" / "libtriton.so").touch()
        write_distribution(site, "triton", version)
        return package

    def test_missing(self, site: Path) -> None:
        part = components.probe("triton")
        assert (part.available, part.install) == (False, "pip install triton")

    def test_missing_and_torch_asks_for_a_release(self, site: Path) -> None:
        write_distribution(site, "torch", "2.11.0", 'triton==3.6.0; platform_system == "Linux"')
        assert components.probe("triton").install == "pip install triton==3.6.0"

    def test_there(self, site: Path) -> None:
        package = self.install(site)
        part = components.probe("triton")
        assert (part.available, part.version, part.path) == (True, "3.6.0", str(package))
        assert part.detail is None
        assert "triton" not in sys.modules

    def test_another_release_than_torch_asks_for(self, site: Path) -> None:
        self.install(site, "3.5.1")
        write_distribution(site, "torch", "2.11.0", 'triton==3.6.0; platform_system == "Linux"')
        part = components.probe("triton")
        assert (part.available, part.detail) == (True, "this torch requires 3.6.0")

    @pytest.mark.parametrize(
        ("version", "fits"),
        [("3.8.0", True), ("3.8.2+git1", True), ("3.7.1", False), ("3.9.0", False)],
    )
    def test_a_compatible_release(self, site: Path, version: str, fits: bool) -> None:
        """torch 2.14 requires its Triton by `~=`."""
        self.install(site, version)
        requirement = 'triton~=3.8.0; platform_system == "Linux" and python_version < "3.15"'
        write_distribution(site, "torch", "2.14.1", requirement)
        assert components.probe("triton").detail == (
            None if fits else "this torch requires ~=3.8.0"
        )

    def test_missing_and_torch_asks_for_a_compatible_release(self, site: Path) -> None:
        write_distribution(site, "torch", "2.14.1", 'triton~=3.8.0; platform_system == "Linux"')
        assert components.probe("triton").install == "pip install triton~=3.8.0"

    def test_for_another_python(self, site: Path) -> None:
        package = self.install(site, library=False)
        (package / "_C" / "libtriton.cpython-27-mips.so").touch()
        part = components.probe("triton")
        assert part.why == f"{package / '_C'} has no libtriton that this Python can load"
        assert part.install == "pip install --force-reinstall triton"

    def test_a_folder_of_that_name_is_not_triton(self, site: Path) -> None:
        (site / "triton").mkdir()
        assert not components.probe("triton").available
