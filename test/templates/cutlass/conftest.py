"""Fixtures of the tests of CUTLASS kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from test.support.scripted_nvcc import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)
