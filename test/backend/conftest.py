"""Fixtures of the backend's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from test.support import compile_util


@pytest.fixture
def every_graph_compiles() -> Iterator[None]:
    with compile_util.every_graph_compiles():
        yield
