"""Attention calls of several layers read one mask."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from inductor_ext import config
from inductor_ext.hooks import scope
from inductor_ext.lowerings.graph import shared_masks
from test.support import fake_cuda, gpu_util
from test.support.memory_compiles import compiled, planning

LAYERS, HEADS, LENGTH, SIZE = 6, 4, 36, 16


def masks_of(function: Callable[..., Any], *inputs: torch.Tensor) -> list[fx.Node]:
    """Trace a function, share its masks, and return the mask of each attention call."""
    module = make_fx(function)(*inputs)
    shared_masks.share_masks(module.graph)
    module.graph.lint()
    module.recompile()
    torch.testing.assert_close(module(*inputs), function(*inputs))
    found = [node.kwargs.get("attn_mask") for node in module.graph.nodes]
    return [mask for mask in found if isinstance(mask, fx.Node)]


def attend(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return operator(x, x, x, attn_mask=mask)[0]  # type: ignore[no-any-return]


X = torch.randn(2, HEADS, LENGTH, SIZE)
KEEP = torch.rand(2, 1, LENGTH, LENGTH) < 0.7


def to_bias(keep: torch.Tensor, value: float = -9.0) -> torch.Tensor:
    return torch.where(keep, 0.0, value)


def test_equal_masks_are_one() -> None:
    def layers(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = attend(x, to_bias(keep).expand(-1, HEADS, -1, -1))
        return x

    assert len(set(masks_of(layers, X, KEEP))) == 1


def different_values(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    return attend(attend(x, to_bias(keep, -9.0)), to_bias(keep, -8.0))


def different_sources(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    return attend(attend(x, to_bias(keep)), to_bias(keep.mT))


def overwritten(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    keep = keep.clone()
    x = attend(x, to_bias(keep))
    keep[..., 0] = False
    return attend(x, to_bias(keep))


@pytest.mark.parametrize("function", [different_values, different_sources, overwritten])
def test_unequal_masks_stay(function: Callable[..., Any]) -> None:
    assert len(set(masks_of(function, X, KEEP))) == 2


def test_random_masks_stay() -> None:
    def noisy(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return attend(attend(x, torch.rand_like(x @ x.mT)), torch.rand_like(x @ x.mT))

    module = make_fx(noisy)(X, KEEP)
    shared_masks.share_masks(module.graph)
    found = {node.kwargs.get("attn_mask") for node in module.graph.nodes}
    assert len(found - {None}) == 2


class Model(torch.nn.Module):
    """Layers that add a bias, which belongs to heads, to the scores, as in T5."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.randn(length, length, HEADS))

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        bias = self.bias.permute(2, 0, 1)[None]
        result = x
        for _ in range(LAYERS):
            lowest = torch.finfo(x.dtype).min
            mask = torch.where(keep, bias, lowest)
            query = result.tanh()
            result = x + F.scaled_dot_product_attention(query, x, x, attn_mask=mask, scale=0.3)
        return result


def make(length: int, dtype: torch.dtype, device: str) -> tuple[Model, torch.Tensor, torch.Tensor]:
    torch.manual_seed(length)
    keep = torch.rand(2, 1, length, length, device=device) < 0.7
    keep[..., 0] = True
    x = torch.randn(2, HEADS, length, SIZE, device=device, dtype=dtype)
    return Model(length).to(device=device, dtype=dtype), x, keep


def test_one_mask_is_live() -> None:
    model, x, keep = make(LENGTH, torch.float32, "cpu")
    mask_bytes = 4 * keep.shape[0] * HEADS * LENGTH * LENGTH
    with planning() as plans, torch.no_grad():
        result = compiled(model)(x, keep)
        expected = model.double()(x.double(), keep)
    torch.testing.assert_close(result.double(), expected, atol=1e-4, rtol=1e-4)
    (plan,) = plans
    # One more mask would not fit beside the activations of a layer.
    assert plan.peak < mask_bytes + 6 * x.nbytes


def test_dynamic_lengths() -> None:
    with planning(), torch.no_grad():
        model, *_ = make(LENGTH, torch.float32, "cpu")
        run = compiled(Model.forward, dynamic=True)
        for length in (LENGTH, 50, 21):
            model, x, keep = make(length, torch.float32, "cpu")
            result = run(model, x, keep)
            expected = model.double()(x.double(), keep)
            torch.testing.assert_close(result.double(), expected, atol=1e-4, rtol=1e-4)


def padded_layers(x: torch.Tensor, keep: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Layers as AOTAutograd decomposes them for a GPU: rows of the mask are aligned by padding."""
    aten = torch.ops.aten
    length = x.shape[2]
    for _ in range(3):
        mask = torch.where(keep, bias.permute(2, 0, 1).unsqueeze(0), -9.0)
        padded = aten.constant_pad_nd(mask, [0, -length % 8], 0.0)
        sliced = aten.slice(padded, -1, 0, length).expand(-1, HEADS, -1, -1)
        x = x + aten._scaled_dot_product_efficient_attention(x, x, x, sliced, False)[0]
    return x


@pytest.mark.skipif(torch.cuda.is_available(), reason="it stands in for a GPU")
@pytest.mark.parametrize("length", [40, 36, 33])
def test_one_mask_is_stored_in_code_for_a_gpu(length: int) -> None:
    pytest.importorskip("triton")
    inputs = (
        ((2, HEADS, length, SIZE), torch.float16),
        ((2, 1, length, length), torch.bool),
        ((length, length, HEADS), torch.float16),
    )
    masks = rf"empty_strided_cuda\(\(2, {HEADS}, {length}, (?:{length}|40)\)"
    stock = fake_cuda.lower(padded_layers, *inputs)
    assert len(re.findall(masks, stock.code)) > 1
    with scope.compile_scope(config.snapshot({})):
        code = fake_cuda.lower(padded_layers, *inputs).code
    assert len(re.findall(masks, code)) == 1
    # Attention reads it without a copy.
    (name,) = re.findall(rf"(\w+) = {masks}", code)
    assert len(re.findall(rf"efficient_attention.default\(.*\b{name}\b", code)) == 3


def one_mask_for_all_sequences(
    x: torch.Tensor, bias: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    """Layers as T5's: a causal mask of each sequence, to which the bias of each head is added."""
    aten = torch.ops.aten
    batch, _, length, _ = x.shape
    keep = position.unsqueeze(0) <= position.unsqueeze(1)
    for _ in range(3):
        mask = torch.where(keep.expand(batch, 1, length, length), 0.0, -9.0) + bias
        if pad := -length % 8:
            mask = aten.slice(aten.constant_pad_nd(mask, [0, pad], 0.0), -1, 0, length)
        x = x + aten._scaled_dot_product_efficient_attention(x, x, x, mask, False)[0]
    return x


@pytest.mark.skipif(torch.cuda.is_available(), reason="it stands in for a GPU")
@pytest.mark.parametrize("length", [40, 36, 33])
def test_a_mask_is_stored_for_one_sequence(length: int) -> None:
    pytest.importorskip("triton")
    inputs = (
        ((3, HEADS, length, SIZE), torch.float32),
        ((1, HEADS, length, length), torch.float32),
        ((length,), torch.int64),
    )
    masks = rf"(\w+) = empty_strided_cuda\(\((\d), {HEADS}, {length}, (?:{length}|40)\)"
    inductor = fake_cuda.lower(one_mask_for_all_sequences, *inputs).code
    assert {size for _, size in re.findall(masks, inductor)} == {"3"}
    with scope.compile_scope(config.snapshot({})):
        code = fake_cuda.lower(one_mask_for_all_sequences, *inputs).code
    ((name, size),) = re.findall(masks, code)
    assert size == "1"
    assert len(re.findall(rf"efficient_attention.default\(.*\b{name}, \(3, ", code)) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("length", [64, 36, 33])
def test_masks_on_a_gpu_are_aligned(length: int, dtype: torch.dtype) -> None:
    tolerance = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    model, x, keep = make(length, dtype, "cuda")
    with gpu_util.compiling(), torch.no_grad():
        run = compiled(model)
        results = [run(x, keep) for _ in range(2)]
        expected = model.double()(x.double(), keep)
    for result in results:
        error = (result.double() - expected).abs().max() / expected.abs().max()
        assert float(error) < tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("length", [64, 36, 33])
def test_a_mask_for_all_sequences_on_a_gpu(length: int, dtype: torch.dtype, dynamic: bool) -> None:
    tolerance = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    model, x, _ = make(length, dtype, "cuda")
    keep = torch.ones(length, length, dtype=torch.bool, device="cuda").tril()

    def call(model: Model, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(x, keep.expand(len(x), 1, -1, -1))
        return result

    with gpu_util.compiling(), torch.no_grad():
        run = compiled(call, dynamic=dynamic)
        for inputs in (x, torch.cat([x, -x, x])):
            result = run(model, inputs, keep)
            exact = copy.deepcopy(model).double()
            expected = call(exact, inputs.double(), keep)
            error = (result.double() - expected).abs().max() / expected.abs().max()
            assert float(error) < tolerance
