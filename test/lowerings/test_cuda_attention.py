"""Attention of few queries on a CUDA device: the kernels alone, and compiled models."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.nn import functional as F

import inductor_ext
from inductor_ext.templates.triton.decode_attention import DecodeAttention
from test.support import attention_cases, gpu_util
from test.support.attention_cases import Case

pytestmark = pytest.mark.gpu

ERROR = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-2}
"""Float32 is multiplied as tf32."""

LARGE = {
    "32 sequences": Case(DecodeAttention(32, 8, 4, 1, 1025, 128, 128), 2, "keys"),
    "one sequence": Case(DecodeAttention(1, 2, 12, 1, 4099, 128, 128), 32, "keys"),
    "odd heads": Case(DecodeAttention(3, 5, 7, 3, 513, 96, 80), 5, "rows", excluded=True),
    "64 rows": Case(DecodeAttention(2, 1, 16, 4, 300, 256, 256), 3, "heads"),
}


@pytest.fixture(autouse=True)
def uncached() -> Iterator[None]:
    torch.manual_seed(0)
    with gpu_util.compiling():
        yield


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", [*attention_cases.CASES, *LARGE])
def test_kernels_equal_float64(name: str, dtype: torch.dtype) -> None:
    case = {**attention_cases.CASES, **LARGE}[name]
    case = dataclasses.replace(case, dtype=dtype)
    assert attention_cases.find_error(case, "cuda") < ERROR[dtype]


class Layer(torch.nn.Module):
    """A decode step of one layer with a static cache of `length` positions."""

    def __init__(self, batch: int, heads: int, group: int, length: int, size: int) -> None:
        super().__init__()
        self.heads, self.group, self.size = heads, group, size
        width = heads * group * size
        self.q, self.o = (torch.nn.Linear(width, width, bias=False) for _ in "qo")
        self.k, self.v = (torch.nn.Linear(width, heads * size, bias=False) for _ in "kv")
        self.register_buffer("keys", torch.randn(batch, heads, length, size))
        self.register_buffer("values", torch.randn(batch, heads, length, size))

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        keys, values = self.get_buffer("keys"), self.get_buffer("values")
        keys.index_copy_(2, position, key)
        values.index_copy_(2, position, value)
        mask = torch.arange(keys.shape[2], device=x.device) <= position[:, None]
        repeated = (
            t[:, :, None].expand(-1, -1, self.group, -1, -1).flatten(1, 2) for t in (keys, values)
        )
        result = F.scaled_dot_product_attention(query, *repeated, attn_mask=mask[None, None])
        return self.o(result.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


ON = {"decode_attention": True}

SHAPES = {
    "grouped": (2, 2, 4, 1030, 64),
    "one sequence": (1, 8, 4, 515, 128),
    "no groups": (3, 6, 1, 200, 96),
}


def _make(name: str, dtype: torch.dtype) -> tuple[Layer, tuple[torch.Tensor, torch.Tensor]]:
    layer = Layer(*SHAPES[name]).to(device="cuda", dtype=dtype)
    width = layer.q.in_features
    position = torch.tensor([layer.get_buffer("keys").shape[2] - 5], device="cuda")
    return layer, (torch.randn(SHAPES[name][0], 1, width, device="cuda", dtype=dtype), position)


def _expect(layer: Layer, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    exact = Layer(*next(s for s in SHAPES.values() if s[0] == len(inputs[0])))
    exact.load_state_dict(layer.state_dict())
    exact = exact.double().cuda()
    return exact(inputs[0].double(), inputs[1])  # type: ignore[no-any-return]


def _error(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(
    "options", [{}, {"cpp_wrapper": True}, {"triton.cudagraphs": True}], ids=str
)
@pytest.mark.parametrize("name", SHAPES)
def test_a_compiled_layer(name: str, options: dict[str, Any]) -> None:
    dtype = torch.bfloat16
    with torch.no_grad():
        layer, inputs = _make(name, dtype)
        expected = _expect(layer, inputs)
        compiled = torch.compile(layer, backend="inductor_ext", options={**ON, **options})
        result, codes = run_and_get_code(compiled, *inputs)
        assert any(re.search(r"\battend", code) for code in codes)
        for _ in range(3):
            assert _error(result, expected) < ERROR[dtype]
            result = compiled(*inputs)


@pytest.mark.parametrize("name", SHAPES)
def test_a_package(name: str, tmp_path: Path) -> None:
    dtype = torch.float16
    with torch.no_grad():
        layer, inputs = _make(name, dtype)
        expected = _expect(layer, inputs)
        program = torch.export.export(layer, inputs)
        path = str(tmp_path / "layer.pt2")
        inductor_ext.aoti_compile_and_package(program, package_path=path, inductor_configs=ON)
        model = inductor_ext.load(path)
        assert _error(model(*inputs), expected) < ERROR[dtype]


def test_the_cache_is_updated_before_it_is_read() -> None:
    with torch.no_grad():
        layer, (x, position) = _make("grouped", torch.bfloat16)
        eager = Layer(*SHAPES["grouped"]).to(device="cuda", dtype=torch.bfloat16)
        eager.load_state_dict(layer.state_dict())
        compiled = torch.compile(layer, backend="inductor_ext", options=ON)
        for step in range(3):
            difference = compiled(x * step, position + step) - eager(x * step, position + step)
            assert difference.abs().max() < 1e-2
            assert torch.equal(layer.get_buffer("keys"), eager.get_buffer("keys"))
