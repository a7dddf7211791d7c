"""Digests of the package's source."""

from __future__ import annotations

import pathlib
import shutil

import pytest

from inductor_ext.storage import digest


def test_source_key_follows_the_source(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "inductor_ext"
    shutil.copytree(digest.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(digest, "PACKAGE", copy)
    key = digest.source_key.__wrapped__
    keys = [key(), key()]
    (copy / "__pycache__").mkdir()
    (copy / "__pycache__" / "x.pyc").write_text("x")
    keys.append(key())
    assert set(keys) == {digest.source_key()}
    with (copy / "exc.py").open("a") as file:
        file.write("\n")
    keys.append(key())
    (copy / "new.py").write_text("")
    keys.append(key())
    assert len(set(keys)) == 3
