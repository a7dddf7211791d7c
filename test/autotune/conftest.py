"""Fixtures of the tests of tuning."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from inductor_ext.autotune.results_db import TuningDatabase


@pytest.fixture
def store(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[TuningDatabase]:
    """An empty database; the test must not cause warnings."""
    (tmp_path / "tables").mkdir()
    yield TuningDatabase(tmp_path / "store", tables=tmp_path / "tables")
    assert caplog.messages == []
