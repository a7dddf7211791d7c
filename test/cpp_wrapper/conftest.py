"""A compiled package with tied weights, which the tests of its parts share."""

from __future__ import annotations

import pytest
import torch
import torch._inductor

from test.support.built_models import Built, Tied


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(tmp_path_factory.mktemp("tied"), Tied().eval(), torch.randn(3, 16))
