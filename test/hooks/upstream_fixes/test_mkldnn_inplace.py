"""Fused additions of oneDNN kernels: what a kernel must not overwrite is kept.

The quantized layers are written as the x86 quantizer of PT2E exports them. Every residual is used
in one addition only, since Inductor does not fuse additions of a residual that has more users.
"""

from __future__ import annotations

import copy
import pathlib
from collections.abc import Callable

import pytest
import torch
import torch._dynamo
import torch._inductor
import torch._inductor.config
import torch.ao.quantization.fx._decomposed
from torch import nn
from torch._dynamo.utils import counters

import inductor_ext
from test.support import compile_util

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")

_ops = torch.ops.quantized_decomposed
_INT8 = (-128, 127, torch.int8)
_UINT8 = (0.05, 128, 0, 255, torch.uint8)

has_quantized_patterns = compile_util.TORCH < (2, 14)
"""torch 2.14 moved the patterns to torchao."""

Tensors = tuple[torch.Tensor, ...]


def quantize(x: torch.Tensor) -> torch.Tensor:
    return _ops.quantize_per_tensor.default(x, *_UINT8)


def dequantize(x: torch.Tensor) -> torch.Tensor:
    return _ops.dequantize_per_tensor.default(x, *_UINT8)


class Quantized(nn.Module):
    """A linear layer or convolution with a weight of 7 bits, and its input rounded to uint8.

    With 8 bits the accumulation of oneDNN's kernels for CPUs without VNNI saturates.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor

    def __init__(self, apply: Callable[..., torch.Tensor], *shape: int) -> None:
        super().__init__()
        weight = torch.randn(shape)
        scale = weight.abs().flatten(1).amax(1) / 63
        rows = scale.view(-1, *(1 for _ in shape[1:]))
        self.register_buffer("weight", (weight / rows).round().clamp(-64, 63).to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("zero", torch.zeros(shape[0], dtype=torch.int64))
        self.apply_layer = apply

    def forward(self, x: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        x = dequantize(quantize(x.float())).to(dtype)
        weight = _ops.dequantize_per_channel.default(self.weight, self.scale, self.zero, 0, *_INT8)
        return self.apply_layer(x, weight.to(dtype))


class QuantizedResiduals(nn.Module):
    """Residuals of quantized linear layers and convolutions: inputs, state and views."""

    buffer: torch.Tensor
    image: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        linear = nn.functional.linear
        self.linear = nn.ModuleList(Quantized(linear, 16, 16) for _ in range(7))
        self.conv = nn.ModuleList(Quantized(nn.functional.conv2d, 8, 8, 1, 1) for _ in range(4))
        self.parameter = nn.Parameter(torch.randn(4, 16))
        self.register_buffer("buffer", torch.randn(4, 16))
        self.register_buffer("image", _image().to(torch.uint8))

    def forward(self, x: torch.Tensor, *residuals: torch.Tensor) -> Tensors:
        a, b, c, d, image, images = residuals
        once = a + self.linear[0](x)
        twice = b + self.linear[1](x)  # two users, so no pattern applies to the fused call
        reshaped = c.view(2, 2, 16)
        later = torch.sin(x + 1)
        view = later.reshape(2, 32)
        cosine = torch.cos(view).reshape(4, 16)
        quantized = quantize(torch.sin(image))
        permuted = quantized.permute(0, 2, 3, 1)
        path = dequantize(permuted).cos().permute(0, 3, 1, 2)
        return (
            once,
            twice,
            twice * 2,
            torch.relu(reshaped + self.linear[2](reshaped)),
            d + self.linear[3](d, torch.bfloat16),
            self.buffer + self.linear[4](x),
            self.parameter + self.linear[5](x),
            # Every user of the residual is computed before the layer, but a view of it is not.
            later + self.linear[6](cosine),
            view * 3,
            quantize(self.conv[0](image) + dequantize(images[0])),
            quantize(self.conv[1](image) + dequantize(images[1][:2])),
            quantize(self.conv[2](image) + dequantize(self.image)),
            quantize(self.conv[3](path) + dequantize(quantized)),
            permuted.int() + 1,
        )


class FloatResiduals(nn.Module):
    """Residuals of float convolutions: an input, a buffer and a tensor that is viewed."""

    buffer: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(4))
        self.register_buffer("buffer", _image())

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> Tensors:
        sine = torch.sin(x + 1)
        permuted = sine.permute(0, 2, 3, 1)
        path = torch.cos(permuted).permute(0, 3, 1, 2)
        square = torch.sin(x + 2)
        return (
            residual + self.conv[0](x),
            self.buffer + self.conv[1](x),
            torch.relu(sine + self.conv[2](path)),
            permuted * 3,
            square + self.conv[3](square.transpose(2, 3)),  # reads what it would overwrite
        )


def _image() -> torch.Tensor:
    return (torch.randn(2, 8, 6, 6) * 50 + 128).clamp(0, 255).to(memory_format=torch.channels_last)


def _quantized_inputs() -> list[torch.Tensor]:
    images = torch.stack([_image(), _image()]).to(torch.uint8)
    images = images.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    rows = [torch.randn(4, 16) for _ in range(5)]
    rows[4] = rows[4].bfloat16()
    return [*rows, _image() / 255, images]


def _check(model: nn.Module, inputs: list[torch.Tensor], call: Callable[..., Tensors]) -> None:
    """Call twice, since state that the first call overwrites is wrong in the second."""
    before = copy.deepcopy(inputs)
    expected = model(*before)
    for _ in range(2):
        results = call(*inputs)
        for index, (result, right) in enumerate(zip(results, expected, strict=True)):
            # Values at .5 may be rounded to either side; bfloat16 is rounded at other places.
            tolerance = {torch.bfloat16: 0.15, torch.uint8: 1.0, torch.int32: 1.0}
            atol = tolerance.get(right.dtype, 1e-4)
            message = f"result {index}"
            torch.testing.assert_close(result, right, rtol=0, atol=atol, msg=message)
    for value, right in zip(inputs, before, strict=True):
        assert torch.equal(value, right)


@pytest.mark.parametrize("way", ["compile", "package"])
@pytest.mark.parametrize("kind", ["quantized", "float"])
def test_fused_additions_overwrite_nothing(way: str, kind: str, tmp_path: pathlib.Path) -> None:
    if kind == "quantized" and not has_quantized_patterns:
        pytest.skip("the patterns are in torchao")
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model: nn.Module = QuantizedResiduals() if kind == "quantized" else FloatResiduals()
    inputs = _quantized_inputs() if kind == "quantized" else [_image(), _image()]
    with torch.no_grad(), torch._inductor.config.patch(freezing=True):
        call = model.eval()
        if way == "compile":
            call = torch.compile(copy.deepcopy(model), backend="inductor_ext")
        else:
            program = torch.export.export(model, tuple(inputs))
            path = inductor_ext.aoti_compile_and_package(
                program, package_path=str(tmp_path / "model.pt2")
            )
            call = inductor_ext.load(path)
        _check(model, inputs, call)
    counts = counters["inductor"]  # of a package's compile, the counters are reset
    if way == "package":
        return
    if kind == "quantized":
        assert counts["qlinear_binary_matcher_count"] == 7
        assert counts["qconv2d_binary_matcher_count"] == 4
    else:
        assert counts["mkldnn_conv_binary_unary_fusion_matcher_count"] == 4
