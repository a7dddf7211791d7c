"""The probe of Python's headers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from inductor_ext.toolchain import components


class TestPythonHeaders:
    def test_missing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sysconfig.get_path", lambda name, **_: str(tmp_path))
        part = components.probe("python_headers")
        assert part.why == f"there is no Python.h in {tmp_path}"
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        assert f"apt-get install python{version}-dev" in (part.install or "")
        (tmp_path / "Python.h").touch()
        components.clear()
        assert components.probe("python_headers").path == str(tmp_path / "Python.h")
