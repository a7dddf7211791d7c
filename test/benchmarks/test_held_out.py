"""The held-out models of the end-to-end benchmark."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gemm import models as gemm_models
from benchmarks.gemm.held_out import HELD_OUT

pytest.importorskip("transformers")

_READS_VALUES = {"deberta-v3 16x256", "gpt2 training 8x512"}
"""Models that look at the values of their input when they are not traced."""


@pytest.mark.parametrize(
    "name", [n for n in HELD_OUT if n not in _READS_VALUES and "prefill" not in n]
)
def test_models_run_on_their_inputs(name: str) -> None:
    model = HELD_OUT[name]
    module, inputs = model.make("meta", model.dtype)
    with torch.no_grad():
        result = module(*inputs)
    assert result.dtype == model.dtype
    assert len(result) == len(inputs[0])


def test_decoders_write_into_the_same_place_of_the_cache() -> None:
    model = HELD_OUT["starcoder2-3b decode 1x1"]
    module, inputs = model.make("meta", model.dtype)
    layer = module.cache.layers[0]
    with torch.no_grad():
        module(*inputs)
    assert layer.keys is module.keys0
    assert layer.keys.dtype == torch.bfloat16
    # The weights of four layers and the cache of 1025 positions.
    weights = 4 * (2 * 3072 * 3072 + 2 * 256 * 3072 + 2 * 3072 * 12288)
    cached = 4 * 2 * 1025 * 2 * 128
    read = gemm_models.count_bytes_read(module)
    assert 1 <= read / (2 * (weights + cached)) < 1.001


def test_the_list_is_not_that_of_the_suite() -> None:
    assert HELD_OUT.keys().isdisjoint(gemm_models.MODELS)
    assert len(HELD_OUT) >= 16
