"""Models of the end-to-end benchmark, at their published sizes, with random weights.

All models are plain torch.nn, so that nothing has to be downloaded. Llama is a stack of the 8B's
layers without embedding and head, whose weights would hide those of the layers. It decodes with a
KV cache of fixed length, as servers do. Of the quantized layers, `int8_linear` does what torchao
0.18 does for Int8WeightOnlyConfig on a GPU; `int4_linear` dequantizes per group weights that
torchao packs two to a byte.

    model = MODELS["llama decode 16x1"]
    module, inputs = model.make("cuda", torch.bfloat16)
"""

# A module's call returns Any to the type checker.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.memory import models as memory_models

__all__ = [
    "MODELS",
    "Inputs",
    "Llama",
    "Model",
    "count_bytes_read",
    "int4_linear",
    "int8_linear",
    "pack_int4",
    "quantize_int8",
]

Inputs = tuple[Tensor, ...]


# int8 and int4 weights.


def int8_linear(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Compute a linear layer with int8 weights [N, K] and one scale per output channel [N]."""
    output = torch.mm(x.reshape(-1, x.shape[-1]), weight.t().to(x.dtype))
    return (output * scales.to(output.dtype).flatten()).reshape(*x.shape[:-1], weight.shape[0])


def pack_int4(values: Tensor) -> Tensor:
    """Pack uint8 [N, K] with values below 16 into [N, K / 2]: even columns in the high nibbles."""
    return values[:, ::2] << 4 | values[:, 1::2]


def int4_linear(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Compute a linear layer: packed weights [N, K / 2], scales [N, K / group], zero point 8."""
    values = torch.stack((weight >> 4, weight & 15), dim=-1).flatten(-2)
    groups = (values.to(x.dtype) - 8).unflatten(-1, (scales.shape[1], -1))
    return F.linear(x, (groups * scales.unsqueeze(-1).to(x.dtype)).flatten(-2))


class Int8Linear(nn.Module):
    """A linear layer without bias, with its weight rounded to int8 per row."""

    weight: Tensor
    scales: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        scales = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (weight / scales).round().to(torch.int8))
        self.register_buffer("scales", scales)

    def forward(self, x: Tensor) -> Tensor:
        return int8_linear(x, self.weight, self.scales)


def quantize_int8(module: nn.Module) -> nn.Module:
    """Replace every nn.Linear within `module` by an `Int8Linear`; return the module."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, Int8Linear(child.weight.detach()))
        else:
            quantize_int8(child)
    return module


# Llama.


class RMSNorm(nn.Module):
    """RMSNorm computed in float32, as in Llama's published code."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        return self.weight * normal.to(x.dtype)


class LlamaLayer(nn.Module):
    """Grouped-query attention with rotary positions, followed by SwiGLU.

    Args:
        past: positions in the KV cache, of which the call writes the last one; 0 for no cache.
        batch: batch size of the cache.
    """

    keys: Tensor
    values: Tensor

    def __init__(
        self, width: int, hidden: int, heads: int, groups: int, past: int, batch: int
    ) -> None:
        super().__init__()
        self.heads, self.groups, self.size, self.past = heads, groups, width // heads, past
        self.query, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, groups * self.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        if past:
            for name in ("keys", "values"):
                self.register_buffer(name, torch.randn(batch, groups, past, self.size))

    def split_heads(self, x: Tensor, count: int) -> Tensor:
        """Reshape [batch, length, count * size] to [batch, count, length, size]."""
        return x.unflatten(-1, (count, self.size)).transpose(1, 2)

    def attend(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Return the output [batch, length, width]; cosine and sine are [length, size / 2]."""
        query = rotate(self.split_heads(self.query(x), self.heads), cosine, sine)
        key = rotate(self.split_heads(self.key(x), self.groups), cosine, sine)
        value = self.split_heads(self.value(x), self.groups)
        if self.past:
            place = slice(self.past - x.shape[1], self.past)
            self.keys[:, :, place] = key
            self.values[:, :, place] = value
            key, value = self.keys, self.values
        output = F.scaled_dot_product_attention(
            query, key, value, is_causal=not self.past, enable_gqa=True
        )
        return self.out(output.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x), cosine, sine)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Apply rotary position embedding (Su et al. 2021) to `[batch, heads, length, size]`."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


class Llama(nn.Module):
    """A stack of layers, from hidden states to hidden states."""

    def __init__(
        self,
        width: int,
        hidden: int,
        heads: int,
        groups: int,
        depth: int,
        past: int = 0,
        batch: int = 1,
    ) -> None:
        super().__init__()
        self.size, self.past = width // heads, past
        self.layers = nn.ModuleList(
            LlamaLayer(width, hidden, heads, groups, past, batch) for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        length, half = x.shape[1], self.size // 2
        start = self.past - length if self.past else 0
        rates = 500000.0 ** (-torch.arange(half, device=x.device) / half)
        angles = torch.arange(start, start + length, device=x.device)[:, None] * rates
        cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cosine, sine)
        return x


class Logits(nn.Module):
    """A wrapper that returns only BERT's sequence output."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.bert(*inputs)[0]


# The list.


@dataclasses.dataclass(frozen=True)
class Model:
    """One model of the benchmark."""

    name: str
    build: Callable[[], tuple[nn.Module, Inputs]]
    """Builds the module in float32 and its inputs, on the default device."""
    weight_bound: bool = False
    """Whether reading the weights and the cache limits the speed of a call."""
    int8: bool = False
    """Whether the linear layers have int8 weights."""
    dtype: torch.dtype = torch.bfloat16
    training: bool = False
    """Whether the module returns a loss, whose gradients belong to a call."""
    selects_experts: bool = False
    """Whether rounding may change which experts compute a row, see `compute_error`."""

    def make(self, device: str | torch.device, dtype: torch.dtype) -> tuple[nn.Module, Inputs]:
        """Return the module in eval mode and its inputs; dtypes differ only by rounding."""
        with torch.random.fork_rng(), torch.device(device), torch.no_grad():
            torch.manual_seed(0)
            module, inputs = self.build()
            # Round first, so that a float32 reference has the same weights.
            module = module.to(self.dtype)
            if self.int8:
                module = quantize_int8(module)
            inputs = tuple(
                inp.to(self.dtype).to(dtype) if inp.is_floating_point() else inp for inp in inputs
            )
            return module.to(dtype).eval(), inputs


def count_bytes_read(module: nn.Module) -> int:
    """Return the bytes of weights and caches that a call reads: all but those of embeddings."""
    looked_up = {
        id(embedding.weight)
        for embedding in module.modules()
        if isinstance(embedding, nn.Embedding)
    }
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}
    return sum(t.nbytes for key, t in tensors.items() if key not in looked_up)


LLAMA = (4096, 14336, 32, 8, 4)
"""Llama-3 8B: hidden size, MLP size, heads, KV heads, and 4 of its 32 layers."""

PAST = 1024


def _make_prefill() -> tuple[nn.Module, Inputs]:
    return Llama(*LLAMA), (torch.randn(1, 2048, LLAMA[0]),)


def _make_decode(batch: int) -> Callable[[], tuple[nn.Module, Inputs]]:
    def build() -> tuple[nn.Module, Inputs]:
        return Llama(*LLAMA, past=PAST, batch=batch), (torch.randn(batch, 1, LLAMA[0]),)

    return build


def _make_bert() -> tuple[nn.Module, Inputs]:
    tokens, types = torch.randint(30522, (32, 128)), torch.zeros(32, 128, dtype=torch.int64)
    lengths = torch.full((32,), 128)
    return Logits(memory_models.Bert(768, 12, 12, 30522, 512)), (tokens, types, lengths)


def _make_vit() -> tuple[nn.Module, Inputs]:
    return memory_models.Vit(768, 12, 12, 224, 16), (torch.randn(64, 3, 224, 224),)


class UNet(nn.Module):
    """A U-Net of pairs of convolutions that keep the image size (Ronneberger et al. 2015)."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        self.down = nn.ModuleList(
            _make_convolutions(inputs, outputs)
            for inputs, outputs in zip([3, *widths[:-1]], widths, strict=True)
        )
        self.grow = nn.ModuleList(
            nn.ConvTranspose2d(2 * outputs, outputs, 2, 2) for outputs in reversed(widths[:-1])
        )
        self.up = nn.ModuleList(
            _make_convolutions(2 * outputs, outputs) for outputs in reversed(widths[:-1])
        )
        self.leave = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        *downs, deepest = self.down
        skips = []
        for block in downs:
            skips.append(block(x))
            x = F.max_pool2d(skips[-1], 2)
        x = deepest(x)
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat([skips.pop(), grow(x)], dim=1))
        return self.leave(x)


def _make_convolutions(inputs: int, outputs: int) -> nn.Module:
    first, second = (
        memory_models.ConvNorm(channels, outputs, 3, activation=nn.ReLU())
        for channels in (inputs, outputs)
    )
    return nn.Sequential(first, second)


def _make_unet() -> tuple[nn.Module, Inputs]:
    return UNet(64, 4), (torch.randn(4, 3, 256, 256),)


MODELS: Mapping[str, Model] = {
    model.name: model
    for model in (
        Model("llama decode 16x1", _make_decode(16), weight_bound=True),
        Model("llama decode 1x1", _make_decode(1), weight_bound=True),
        Model("llama prefill 1x2048", _make_prefill),
        Model("llama int8 decode 16x1", _make_decode(16), weight_bound=True, int8=True),
        Model("llama int8 decode 1x1", _make_decode(1), weight_bound=True, int8=True),
        Model("bert 32x128", _make_bert),
        Model("vit 64x224", _make_vit),
        Model("unet 4x256", _make_unet),
    )
}
"""By name, most important models first."""
