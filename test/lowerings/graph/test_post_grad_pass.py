"""The cache key of the planner: flags on which plans depend."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from inductor_ext import config, numerics
from inductor_ext.lowerings.graph import post_grad_pass

pytest.importorskip("triton")


def test_flags_that_restrict_cublas_are_in_the_cache_key() -> None:
    settings = config.snapshot({})
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        plain = post_grad_pass.cache_key(settings)
        with numerics.with_matmul_flags("allow_fp16_accumulation"):
            assert post_grad_pass.cache_key(settings) != plain
        assert post_grad_pass.cache_key(settings) == plain
