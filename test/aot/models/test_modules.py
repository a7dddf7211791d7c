"""AOT artifacts of modules: linear, convolutions, embeddings, attention, quantized, frozen."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional

from test.support import aot_util
from test.support.aot_util import Bundle, Case, Cases

MODULES = Cases()
FROZEN = Cases()
QUANTIZED = Cases()


class Residual(nn.Module):
    """Two inputs, a linear layer and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + self.linear(y)


@MODULES
def simple() -> Case:
    return Case(Residual(), (torch.randn(10, 10), torch.randn(10, 10)))


@MODULES
def sequential() -> Case:
    layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 4))
    return Case(layers, (torch.randn(3, 8),), calls=((torch.zeros(3, 8),),))


@MODULES
def dropout_and_batch_norm_in_evaluation() -> Case:
    layers = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Softmax(-1))
    layers[1].running_mean.uniform_()
    return Case(layers.eval(), (torch.randn(3, 6),))


@MODULES
def addmm() -> Case:
    args = torch.randn(7, 5), torch.randn(7, 9), torch.randn(9, 5)
    return Case(lambda b, x, y: torch.addmm(b, x, y, beta=0.5, alpha=2.0), args)


@MODULES
def addmm_of_a_broadcast_bias_and_a_transposed_weight() -> Case:
    args = torch.randn(5), torch.randn(7, 9), torch.randn(5, 9)
    return Case(lambda b, x, w: torch.addmm(b, x, w.t()), args)


@MODULES
def bmm_and_baddbmm() -> Case:
    args = torch.randn(2, 3, 5), torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    return Case(lambda c, x, y: (torch.bmm(x, y), torch.baddbmm(c, x, y)), args)


@MODULES
def conv_1d() -> Case:
    return Case(nn.Conv1d(4, 6, 3, stride=2, padding=1), (torch.randn(2, 4, 11),))


@MODULES
def conv_2d() -> Case:
    layers = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1, groups=2), nn.ReLU(), nn.MaxPool2d(2))
    return Case(layers, (torch.randn(2, 4, 8, 8),))


@MODULES
def conv_2d_without_bias_of_channels_last() -> Case:
    layer = nn.Conv2d(3, 5, 3, dilation=2, bias=False)
    return Case(layer, (torch.randn(2, 3, 9, 9).to(memory_format=torch.channels_last),))


@MODULES
def conv_3d() -> Case:
    return Case(nn.Conv3d(2, 3, 2), (torch.randn(1, 2, 4, 4, 4),))


@MODULES
def conv_transposed() -> Case:
    layer = nn.ConvTranspose2d(4, 3, 3, stride=2, padding=1, output_padding=1)
    return Case(layer, (torch.randn(2, 4, 5, 5),))


@MODULES
def conv_1d_transposed() -> Case:
    return Case(nn.ConvTranspose1d(4, 3, 3, stride=2), (torch.randn(2, 4, 5),))


class Embeddings(nn.Module):
    """Token and position embeddings and a tied output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 8, padding_idx=0)
        self.positions = nn.Embedding(6, 8)
        self.output = nn.Linear(8, 20, bias=False)
        self.output.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        return self.output(self.tokens(ids) + self.positions(places))


@MODULES
def embeddings() -> Case:
    return Case(
        Embeddings(),
        (torch.randint(20, (2, 6)),),
        calls=((torch.zeros(2, 6, dtype=torch.int64),),),
    )


@MODULES
def attention() -> Case:
    args = tuple(torch.randn(2, 4, 8, 16) for _ in range(3))
    return Case(functional.scaled_dot_product_attention, args)


@MODULES
def attention_with_a_mask() -> Case:
    args = tuple(torch.randn(2, 4, 8, 16) for _ in range(3))
    mask = torch.rand(2, 1, 8, 8) > 0.3
    mask[..., 0] = True
    return Case(
        lambda q, k, v, m: functional.scaled_dot_product_attention(q, k, v, m),
        (*args, mask),
    )


@MODULES
def causal_attention_with_dynamic_length() -> Case:
    def inputs(length: int) -> tuple[torch.Tensor, ...]:
        return tuple(torch.randn(1, 2, length, 16) for _ in range(3))

    length = torch.export.Dim("length", min=2, max=64)
    return Case(
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
        inputs(8),
        dynamic=({2: length},) * 3,
        calls=(inputs(2), inputs(13), inputs(64)),
    )


@MODULES
def multi_head_attention() -> Case:
    layer = nn.MultiheadAttention(16, 4, batch_first=True).eval()
    # Contiguous, because eager mode's fast path returns another layout.
    return Case(
        lambda x: layer(x, x, x, need_weights=False)[0].contiguous(), (torch.randn(2, 5, 16),)
    )


@MODULES
def encoder_layer() -> Case:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=True).eval()
    return Case(layer, (torch.randn(2, 5, 16),))


@MODULES
def norms_and_pools() -> Case:
    layers = nn.Sequential(
        nn.GroupNorm(2, 4), nn.AvgPool2d(2), nn.InstanceNorm2d(4), nn.AdaptiveAvgPool2d(1)
    )
    return Case(layers.eval(), (torch.randn(2, 4, 8, 8),))


@MODULES
def recurrent() -> Case:
    return Case(nn.GRUCell(6, 5), (torch.randn(3, 6), torch.randn(3, 5)))


@MODULES
def upsampled() -> Case:
    return Case(
        lambda x: functional.interpolate(x, scale_factor=2.0, mode="bilinear"),
        (torch.randn(1, 2, 4, 5),),
    )


@MODULES
def weight_only_int8() -> Case:
    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.randint(-127, 127, (8, 16), dtype=torch.int8))
            self.register_buffer("scale", torch.rand(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.linear(x, self.weight.to(x.dtype)) * self.scale

    return Case(Quantized(), (torch.randn(4, 16),))


@pytest.fixture(scope="module")
def modules(device: str) -> Bundle:
    return MODULES.compile(device)


def test_modules_compile_together(modules: Bundle) -> None:
    modules.check_whole()


@pytest.mark.parametrize("name", MODULES)
def test_module(modules: Bundle, name: str) -> None:
    modules.check(name)


@FROZEN
def frozen_linear() -> Case:
    return Case(
        nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)), (torch.randn(4, 16),)
    )


@FROZEN
def frozen_linears_of_one_input() -> Case:
    class Projections(nn.Module):
        """Linear layers that freezing may merge into one matmul."""

        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(16, 8), nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.q(x), self.k(x)

    return Case(Projections(), (torch.randn(4, 16),))


@FROZEN
def frozen_conv() -> Case:
    layers = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    layers[1].running_var.uniform_(0.5, 2)
    return Case(layers.eval(), (torch.randn(2, 3, 8, 8),))


@FROZEN
def frozen_deconv() -> Case:
    return Case(nn.ConvTranspose2d(4, 8, 3, stride=2), (torch.randn(2, 4, 5, 5),))


@FROZEN
def frozen_folds_constants() -> Case:
    class Folded(nn.Module):
        """A weight that is computed from other constants."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 16))
            self.register_buffer("scale", torch.rand(8, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.linear(x, self.weight * self.scale.exp())

    return Case(Folded(), (torch.randn(4, 16),))


@pytest.fixture(scope="module")
def frozen(device: str) -> Bundle:
    return FROZEN.compile(device, freezing=True)


def test_frozen_modules_compile_together(frozen: Bundle) -> None:
    frozen.check_whole()


@pytest.mark.parametrize("name", FROZEN)
def test_frozen_module(frozen: Bundle, name: str) -> None:
    frozen.check(name)


@QUANTIZED
def linear_of_dynamically_quantized_fp16() -> Case:
    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.randn(8, 16))
            self.register_buffer("bias", torch.randn(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            linear = torch.ops.quantized.linear_dynamic_fp16_unpacked_weight
            return linear(x, self.weight, self.bias)

    return Case(Quantized(), (torch.randn(4, 16),), tolerance=1e-3)


@QUANTIZED
def linear_of_int8() -> Case:
    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.randint(-127, 127, (8, 16)).float() / 100)
            self.register_buffer("bias", torch.randn(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale, zero = torch.tensor(0.02), torch.tensor(0)
            return torch.ops._quantized.wrapped_quantized_linear(
                x, scale, zero, self.weight, scale, zero, self.bias, scale, zero, 8
            )

    return Case(Quantized(), (torch.randn(4, 16),), tolerance=1e-3)


@pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="torch without FBGEMM"
)
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_linear(name: str) -> None:
    case = QUANTIZED[name]()
    artifact = aot_util.compile_model(case.model, case.args, tolerance=case.tolerance)
    artifact.check(*case.args)
    artifact.check(torch.zeros_like(case.args[0]))


REUSED = """
from test.support import aot_util
from test.aot.models import test_modules as test_aot_modules
cases = aot_util.Cases()
cases(test_aot_modules.weight_only_int8)
cases(test_aot_modules.linear_of_int8)
bundle = cases.compile("cpu")
bundle.check_whole()
for name in cases:
    bundle.check(name)
"""


@pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="torch without FBGEMM"
)
def test_a_packed_weight_is_not_reused_as_memory() -> None:
    """Its tensor's memory holds an object, whose destructor runs when the tensor goes.

    In a separate process, because overwriting the object causes a segmentation fault.
    """
    root = pathlib.Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", REUSED], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
