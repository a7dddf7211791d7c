"""Fake tools, installed packages and imported modules for the probes of the toolchain."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

NVCC_ANSWER = "echo 'Cuda compilation tools, release 12.6, V12.6.85'"


def write_script(path: Path, body: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def write_distribution(site: Path, name: str, version: str, requires: str = "") -> None:
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    fields = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    fields += [f"Requires-Dist: {requires}"] if requires else []
    (folder / "METADATA").write_text("\n".join(fields) + "\n")


def fake_import(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> None:
    """Make it look as if a module with these attributes had been imported."""
    module = types.ModuleType(name)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)
