"""Fixtures of the tests of graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from test.support.cutlass_lowering import Call


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Launches of CUTLASS kernels that are lowered during the test; no kernel is built."""
    # Needs Triton, which not every test of this folder does.
    from test.support.cutlass_lowering import record_calls

    return record_calls(monkeypatch)
