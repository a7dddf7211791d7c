"""The devices that every model is compiled for."""

from __future__ import annotations

import pytest

from test.support.aot_util import DEVICES


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param
