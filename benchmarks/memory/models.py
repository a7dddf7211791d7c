"""The models of the memory benchmarks: real structure, reduced width and depth.

Every model is written in plain torch.nn from its paper, with random weights, so that nothing has to
be downloaded and one compile on a CPU takes seconds. What matters to a memory planner is preserved:
which buffers exist, their relative sizes, and their live ranges. Sizes are chosen so that a call
allocates a few MiB.

    module, inputs = MODELS["bert"].make()
"""

# A module's call returns Any to the type checker.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["MODELS", "QUICK", "Model"]

Inputs = tuple[Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Model:
    """One model of the benchmark."""

    name: str
    build: Callable[[], tuple[nn.Module, Inputs]]
    """Builds the module in training mode and its positional inputs, with torch's global seed."""
    training: bool
    """Whether its training step is measured as well."""

    def make(self) -> tuple[nn.Module, Inputs]:
        """Return the module in eval mode and its inputs; values are equal on every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(self.name.encode()))
            module, inputs = self.build()
        return module.eval(), inputs


MODELS: dict[str, Model] = {}
"""All models by name."""

QUICK = ("gpt2", "ragged_mlp", "mixer", "resnet", "t5")
"""A few models that differ widely, for tests."""

Build = Callable[[], tuple[nn.Module, Inputs]]


def _model(name: str, *, training: bool = True) -> Callable[[Build], Build]:
    def register(build: Build) -> Build:
        MODELS[name] = Model(name, build, training)
        return build

    return register


def _tokens(vocabulary: int, *shape: int) -> Tensor:
    return torch.randint(vocabulary, shape)


# --- shared modules -----------------------------------------------------------------------------


class Attention(nn.Module):
    """Multi-head attention by SDPA; cross-attention if K and V come from another sequence."""

    def __init__(self, width: int, heads: int, *, causal: bool = False, dropout: float = 0) -> None:
        super().__init__()
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(
        self, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        memory = x if memory is None else memory
        query, key, value = (
            layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, y in ((self.query, x), (self.key, memory), (self.value, memory))
        )
        dropout = self.dropout if self.training else 0.0
        output = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=self.causal
        )
        return self.out(output.transpose(1, 2).flatten(2))


def _feed_forward(width: int, *, approximate: str = "none", dropout: float = 0) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, 4 * width),
        nn.GELU(approximate=approximate),
        nn.Linear(4 * width, width),
        nn.Dropout(dropout),
    )


class PreNormBlock(nn.Module):
    """A transformer block with norms before its sublayers, and optional cross-attention."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        causal: bool = False,
        cross: bool = False,
        approximate: str = "none",
        dropout: float = 0,
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=causal, dropout=dropout)
        self.cross_norm = nn.LayerNorm(width) if cross else None
        self.cross = Attention(width, heads) if cross else None
        self.feed_forward = _feed_forward(width, approximate=approximate, dropout=dropout)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x))
        if self.cross is not None and self.cross_norm is not None:
            x = x + self.cross(self.cross_norm(x), memory)
        return x + self.feed_forward(self.norm2(x))


class ConvNorm(nn.Sequential):
    """Convolution, batch norm and, by default, an activation."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        *,
        stride: int = 1,
        groups: int = 1,
        activation: nn.Module | None = None,
    ) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
            nn.BatchNorm2d(outputs),
            nn.Identity() if activation is None else activation,
        )


class RMSNorm(nn.Module):
    """RMSNorm (Zhang and Sennrich 2019), as used by Llama and T5."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


# --- language -----------------------------------------------------------------------------------


class Bert(nn.Module):
    """BERT (Devlin et al. 2018): post-norm encoder with a padding mask."""

    def __init__(self, width: int, heads: int, depth: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.types = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.1)
        self.attention = nn.ModuleList(Attention(width, heads, dropout=0.1) for _ in range(depth))
        self.feed_forward = nn.ModuleList(_feed_forward(width, dropout=0.1) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth))
        self.pooler = nn.Linear(width, width)

    def forward(self, tokens: Tensor, types: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        place = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.words(tokens) + self.positions(place) + self.types(types)
        x = self.dropout(self.norm(x))
        mask = (place < lengths[:, None])[:, None, None, :]
        for i, (attention, feed_forward) in enumerate(
            zip(self.attention, self.feed_forward, strict=True)
        ):
            x = self.norms[2 * i](x + self.dropout(attention(x, mask=mask)))
            x = self.norms[2 * i + 1](x + feed_forward(x))
        return x, self.pooler(x[:, 0]).tanh()


@_model("bert")
def _bert() -> tuple[nn.Module, Inputs]:
    return Bert(192, 6, 3, 500, 96), (
        _tokens(500, 6, 96),
        _tokens(2, 6, 96),
        torch.tensor([96, 90, 50, 7, 64, 96]),
    )


class Gpt2(nn.Module):
    """GPT-2 (Radford et al. 2019): causal decoder; the head is the transposed embedding."""

    def __init__(self, width: int, heads: int, depth: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            PreNormBlock(width, heads, causal=True, approximate="tanh", dropout=0.1)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        place = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.words(tokens) + self.positions(place)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.words.weight)


@_model("gpt2")
def _gpt2() -> tuple[nn.Module, Inputs]:
    return Gpt2(160, 5, 3, 700, 120), (_tokens(700, 4, 120),)


class LlamaAttention(nn.Module):
    """Grouped-query attention with rotary positions and an optional KV cache."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, groups * self.size, bias=False)
        self.value = nn.Linear(width, groups * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def _rotate(self, x: Tensor, start: int) -> Tensor:
        """Apply rotary position embedding (Su et al. 2021) to `[batch, heads, length, size]`."""
        half = self.size // 2
        rates = 10000.0 ** (-torch.arange(half, device=x.device) / half)
        angles = torch.arange(start, start + x.shape[2], device=x.device)[:, None] * rates
        first, second = x.chunk(2, dim=-1)
        cosine, sine = angles.cos(), angles.sin()
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None = None) -> Any:
        query = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key = self.key(x).unflatten(-1, (self.groups, -1)).transpose(1, 2)
        value = self.value(x).unflatten(-1, (self.groups, -1)).transpose(1, 2)
        start = 0 if past is None else past[0].shape[2]
        query, key = self._rotate(query, start), self._rotate(key, start)
        if past is not None:
            key = torch.cat([past[0], key], dim=2)
            value = torch.cat([past[1], value], dim=2)
        share = self.heads // self.groups
        output = F.scaled_dot_product_attention(
            query,
            key.repeat_interleave(share, dim=1),
            value.repeat_interleave(share, dim=1),
            is_causal=past is None,
        )
        return self.out(output.transpose(1, 2).flatten(2)), (key, value)


class Llama(nn.Module):
    """Llama (Touvron et al. 2023): RMSNorm, rotary positions, grouped queries, SwiGLU."""

    def __init__(self, width: int, heads: int, groups: int, depth: int, vocabulary: int) -> None:
        super().__init__()
        hidden = 8 * width // 3 // 8 * 8
        self.words = nn.Embedding(vocabulary, width)
        self.attention = nn.ModuleList(LlamaAttention(width, heads, groups) for _ in range(depth))
        self.gate = nn.ModuleList(nn.Linear(width, hidden, bias=False) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(width, hidden, bias=False) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(hidden, width, bias=False) for _ in range(depth))
        self.norms = nn.ModuleList(RMSNorm(width) for _ in range(2 * depth + 1))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, *past: Tensor) -> Any:
        x = self.words(tokens)
        cache: list[Tensor] = []
        for i, attention in enumerate(self.attention):
            before = (past[2 * i], past[2 * i + 1]) if past else None
            output, keys_and_values = attention(self.norms[2 * i](x), before)
            cache += keys_and_values
            x = x + output
            y = self.norms[2 * i + 1](x)
            x = x + self.down[i](F.silu(self.gate[i](y)) * self.up[i](y))
        logits = self.head(self.norms[-1](x))
        return (logits, *cache) if past else logits


@_model("llama")
def _llama() -> tuple[nn.Module, Inputs]:
    return Llama(192, 6, 2, 3, 800), (_tokens(800, 4, 112),)


@_model("llama_decode", training=False)
def _llama_decode() -> tuple[nn.Module, Inputs]:
    past = [torch.randn(8, 2, 150, 32) for _ in range(6)]
    return Llama(192, 6, 2, 3, 800), (_tokens(800, 8, 1), *past)


class T5Attention(nn.Module):
    """Unscaled attention with an additive bias, without SDPA as in the original."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor | None) -> Tensor:
        query, key, value = (
            layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, y in ((self.query, x), (self.key, memory), (self.value, memory))
        )
        scores = query @ key.transpose(-1, -2)
        if bias is not None:
            scores = scores + bias
        return self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


class T5Bias(nn.Module):
    """Relative position bias in logarithmic buckets, shared by all layers of a stack."""

    def __init__(self, heads: int, buckets: int, *, causal: bool) -> None:
        super().__init__()
        self.buckets, self.causal = buckets, causal
        self.table = nn.Embedding(2 * buckets, heads)

    def forward(self, length: int, device: torch.device) -> Tensor:
        place = torch.arange(length, device=device)
        distance = place[None, :] - place[:, None]
        exact = self.buckets // 2
        far = exact + (
            torch.log(distance.abs().clamp(min=1) / exact) / math.log(128 / exact) * exact
        ).long().clamp(max=self.buckets - exact - 1)
        bucket = torch.where(distance.abs() < exact, distance.abs(), far)
        bucket = bucket + (distance > 0) * self.buckets
        bias = self.table(bucket).permute(2, 0, 1)[None]
        return bias.masked_fill(distance > 0, -1e9) if self.causal else bias


class T5(nn.Module):
    """T5 (Raffel et al. 2020): encoder and decoder with relative position bias."""

    def __init__(self, width: int, heads: int, depth: int, vocabulary: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.bias = nn.ModuleList(T5Bias(heads, 16, causal=causal) for causal in (False, True))
        self.encoder, self.decoder, self.cross = (
            nn.ModuleList(T5Attention(width, heads) for _ in range(depth)) for _ in range(3)
        )
        self.feed_forward = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 4 * width, bias=False),
                nn.ReLU(),
                nn.Linear(4 * width, width, bias=False),
            )
            for _ in range(2 * depth)
        )
        self.norms = nn.ModuleList(RMSNorm(width) for _ in range(5 * depth + 2))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        norms, feed_forward = iter(self.norms), iter(self.feed_forward)
        x = self.words(source)
        bias = self.bias[0](source.shape[1], source.device)
        for attention in self.encoder:
            y = next(norms)(x)
            x = x + attention(y, y, bias)
            x = x + next(feed_forward)(next(norms)(x))
        memory = next(norms)(x)
        x = self.words(target)
        bias = self.bias[1](target.shape[1], target.device)
        for attention, cross in zip(self.decoder, self.cross, strict=True):
            y = next(norms)(x)
            x = x + attention(y, y, bias)
            x = x + cross(next(norms)(x), memory, None)
            x = x + next(feed_forward)(next(norms)(x))
        return F.linear(next(norms)(x), self.words.weight)


@_model("t5")
def _t5() -> tuple[nn.Module, Inputs]:
    return T5(128, 4, 2, 600), (_tokens(600, 4, 128), _tokens(600, 4, 80))


class MixtureOfExperts(nn.Module):
    """Top-2 routing with a static capacity (GShard, Lepikhin et al. 2020): one-hot dispatch."""

    def __init__(self, width: int, experts: int, capacity: int) -> None:
        super().__init__()
        self.experts, self.capacity = experts, capacity
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 4 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, 4 * width, width) / (4 * width) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        expert = F.one_hot(chosen, self.experts).float()
        order = expert.transpose(0, 1).flatten(0, 1).cumsum(0).unflatten(0, (2, -1)).transpose(0, 1)
        place = ((order - 1) * expert).sum(-1).long()
        weights = weights * (place < self.capacity)
        slot = F.one_hot(place.clamp(max=self.capacity - 1), self.capacity).float()
        combine = torch.einsum("tk,tke,tkc->tec", weights, expert, slot)
        dispatch = (combine > 0).to(x.dtype)
        hidden = torch.einsum("tec,td->ecd", dispatch, tokens) @ self.up
        outputs = F.gelu(hidden) @ self.down
        return torch.einsum("tec,ecd->td", combine, outputs).view_as(x)


class MoeTransformer(nn.Module):
    """A decoder whose feed-forward layers are mixtures of experts."""

    def __init__(self, width: int, heads: int, depth: int, experts: int, capacity: int) -> None:
        super().__init__()
        self.attention = nn.ModuleList(Attention(width, heads, causal=True) for _ in range(depth))
        self.mixtures = nn.ModuleList(
            MixtureOfExperts(width, experts, capacity) for _ in range(depth)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth))

    def forward(self, x: Tensor) -> Tensor:
        for i, (attention, mixture) in enumerate(zip(self.attention, self.mixtures, strict=True)):
            x = x + attention(self.norms[2 * i](x))
            x = x + mixture(self.norms[2 * i + 1](x))
        return x


@_model("moe")
def _moe() -> tuple[nn.Module, Inputs]:
    return MoeTransformer(96, 4, 2, 6, 160), (torch.randn(3, 128, 96),)


class NaiveAttention(nn.Module):
    """Attention without SDPA: scores, mask, softmax and the output are separate buffers."""

    def __init__(self, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.heads, self.depth = heads, depth
        self.project = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(depth))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        for project, out in zip(self.project, self.out, strict=True):
            query, key, value = (
                y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                for y in project(x).chunk(3, dim=-1)
            )
            scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
            weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
            x = x + out((weights @ value).transpose(1, 2).flatten(2))
        return x


@_model("naive_attention")
def _naive_attention() -> tuple[nn.Module, Inputs]:
    return NaiveAttention(128, 4, 2), (torch.randn(3, 144, 128),)


class Mamba(nn.Module):
    """Mamba-like blocks (Gu and Dao 2023): gated, causal convolution, unrolled selective scan."""

    def __init__(self, width: int, states: int, depth: int) -> None:
        super().__init__()
        inner = 2 * width
        self.states = states
        self.norms = nn.ModuleList(RMSNorm(width) for _ in range(depth))
        self.enter = nn.ModuleList(nn.Linear(width, 2 * inner, bias=False) for _ in range(depth))
        self.mix = nn.ModuleList(
            nn.Conv1d(inner, inner, 4, padding=3, groups=inner) for _ in range(depth)
        )
        self.select = nn.ModuleList(nn.Linear(inner, 2 * states + 1) for _ in range(depth))
        self.rate = nn.ParameterList(torch.randn(inner, states) for _ in range(depth))
        self.leave = nn.ModuleList(nn.Linear(inner, width, bias=False) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        for norm, enter, mix, select, rate, leave in zip(
            self.norms, self.enter, self.mix, self.select, self.rate, self.leave, strict=True
        ):
            y, gate = enter(norm(x)).chunk(2, dim=-1)
            y = F.silu(mix(y.transpose(1, 2))[..., :length].transpose(1, 2))
            step, write, read = select(y).split([1, self.states, self.states], dim=-1)
            decay = torch.exp(-F.softplus(step)[..., None] * rate.exp())
            update = (F.softplus(step) * y)[..., None] * write[:, :, None, :]
            state = torch.zeros_like(update[:, 0])
            outputs = []
            for t in range(length):
                state = decay[:, t] * state + update[:, t]
                outputs.append((state * read[:, t, None, :]).sum(-1))
            x = x + leave(torch.stack(outputs, dim=1) * F.silu(gate))
        return x


@_model("mamba")
def _mamba() -> tuple[nn.Module, Inputs]:
    return Mamba(96, 8, 1), (torch.randn(8, 20, 96),)


class Lstm(nn.Module):
    """A stack of LSTM cells unrolled over time, and a classifier."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.Linear(2 * width, 4 * width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        steps = list(x.unbind(1))
        for cell in self.cells:
            hidden = memory = torch.zeros_like(steps[0])
            for t, step in enumerate(steps):
                enter, forget, candidate, leave = cell(torch.cat([step, hidden], dim=1)).chunk(4, 1)
                memory = forget.sigmoid() * memory + enter.sigmoid() * candidate.tanh()
                hidden = leave.sigmoid() * memory.tanh()
                steps[t] = hidden
        return self.head(torch.stack(steps, dim=1))


@_model("lstm")
def _lstm() -> tuple[nn.Module, Inputs]:
    return Lstm(160, 2), (torch.randn(192, 10, 160),)


# --- vision -------------------------------------------------------------------------------------


class Vit(nn.Module):
    """ViT (Dosovitskiy et al. 2020): patches, a class token, an encoder."""

    def __init__(self, width: int, heads: int, depth: int, image: int, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.ModuleList(PreNormBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 100)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


@_model("vit")
def _vit() -> tuple[nn.Module, Inputs]:
    return Vit(144, 4, 3, 96, 8), (torch.randn(4, 3, 96, 96),)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            ConvNorm(inputs, width, 1, activation=nn.ReLU()),
            ConvNorm(width, width, 3, stride=stride, activation=nn.ReLU()),
            ConvNorm(width, outputs, 1),
        )
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else ConvNorm(inputs, outputs, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet (He et al. 2015) of bottlenecks."""

    def __init__(self, width: int, depths: tuple[int, ...]) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            ConvNorm(3, width, 7, stride=2, activation=nn.ReLU()), nn.MaxPool2d(3, 2, 1)
        )
        blocks: list[nn.Module] = []
        inputs = width
        for stage, depth in enumerate(depths):
            for i in range(depth):
                inner = width * 2**stage
                blocks.append(Bottleneck(inputs, inner, 2 if stage and i == 0 else 1))
                inputs = 4 * inner
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, 100)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(image)).mean((2, 3)))


@_model("resnet")
def _resnet() -> tuple[nn.Module, Inputs]:
    return ResNet(16, (2, 2, 2)), (torch.randn(4, 3, 96, 96),)


class UNetBlock(nn.Module):
    """A residual block with a time embedding."""

    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, inputs), nn.GroupNorm(8, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs)
        self.skip = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return self.conv2(F.silu(self.norm2(y))) + self.skip(x)


class UNetAttention(nn.Module):
    """Self-attention over the pixels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, width)
        self.attention = Attention(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        return x + self.attention(tokens).transpose(1, 2).view_as(x)


class UNet(nn.Module):
    """U-Net with attention and time embedding, as in diffusion models (Ho et al. 2020)."""

    def __init__(self, width: int, factors: tuple[int, ...]) -> None:
        super().__init__()
        time = 4 * width
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down, self.shrink = nn.ModuleList(), nn.ModuleList()
        self.up, self.grow = nn.ModuleList(), nn.ModuleList()
        inputs, skips = width, [width]
        for factor in factors:
            self.down.append(UNetBlock(inputs, factor * width, time))
            inputs = factor * width
            self.shrink.append(nn.Conv2d(inputs, inputs, 3, 2, 1))
            skips.append(inputs)
        self.middle = nn.ModuleList(UNetBlock(inputs, inputs, time) for _ in range(2))
        self.attention = UNetAttention(inputs)
        for factor in reversed(factors):
            self.grow.append(nn.Conv2d(inputs, inputs, 3, padding=1))
            self.up.append(UNetBlock(inputs + skips.pop(), factor * width, time))
            inputs = factor * width
        self.leave = nn.Sequential(
            nn.GroupNorm(8, inputs), nn.SiLU(), nn.Conv2d(inputs, 3, 3, padding=1)
        )

    def forward(self, image: Tensor, step: Tensor) -> Tensor:
        half = self.width // 2
        rates = torch.exp(-math.log(10000) * torch.arange(half, device=image.device) / half)
        angles = step[:, None] * rates
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=1).to(image.dtype))
        x = self.enter(image)
        skips = []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            x = block(x, time)
            skips.append(x)
            x = shrink(x)
        x = self.middle[0](x, time)
        x = self.middle[1](self.attention(x), time)
        for block, grow in zip(self.up, self.grow, strict=True):
            x = grow(F.interpolate(x, scale_factor=2.0, mode="nearest"))
            x = block(torch.cat([x, skips.pop()], dim=1), time)
        return self.leave(x)


@_model("unet")
def _unet() -> tuple[nn.Module, Inputs]:
    return UNet(24, (1, 2, 2)), (torch.randn(2, 3, 48, 48), torch.tensor([10.0, 500.0]))


class DenseNet(nn.Module):
    """DenseNet (Huang et al. 2016): every layer reads all earlier layers of its block."""

    def __init__(self, growth: int, depths: tuple[int, ...]) -> None:
        super().__init__()
        width = 2 * growth
        self.stem = ConvNorm(3, width, 3, stride=2, activation=nn.ReLU())
        self.blocks, self.transitions = nn.ModuleList(), nn.ModuleList()
        for depth in depths:
            layers = nn.ModuleList()
            for _ in range(depth):
                layers.append(
                    nn.Sequential(
                        nn.BatchNorm2d(width),
                        nn.ReLU(),
                        nn.Conv2d(width, 4 * growth, 1, bias=False),
                        nn.BatchNorm2d(4 * growth),
                        nn.ReLU(),
                        nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
                    )
                )
                width += growth
            self.blocks.append(layers)
            self.transitions.append(
                nn.Sequential(ConvNorm(width, width // 2, 1, activation=nn.ReLU()), nn.AvgPool2d(2))
            )
            width //= 2
        self.head = nn.Linear(width, 100)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        for layers, transition in zip(self.blocks, self.transitions, strict=True):
            features = [x]
            for layer in layers.children():
                features.append(layer(torch.cat(features, dim=1)))
            x = transition(torch.cat(features, dim=1))
        return self.head(x.mean((2, 3)))


@_model("densenet")
def _densenet() -> tuple[nn.Module, Inputs]:
    return DenseNet(12, (4, 4)), (torch.randn(4, 3, 64, 64),)


class Mixer(nn.Module):
    """MLP-Mixer (Tolstikhin et al. 2021)."""

    def __init__(self, width: int, depth: int, image: int, patch: int) -> None:
        super().__init__()
        tokens = (image // patch) ** 2
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth + 1))
        self.across = nn.ModuleList(
            nn.Sequential(nn.Linear(tokens, 2 * width), nn.GELU(), nn.Linear(2 * width, tokens))
            for _ in range(depth)
        )
        self.within = nn.ModuleList(_feed_forward(width) for _ in range(depth))
        self.head = nn.Linear(width, 100)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        for i, (across, within) in enumerate(zip(self.across, self.within, strict=True)):
            x = x + across(self.norms[2 * i](x).transpose(1, 2)).transpose(1, 2)
            x = x + within(self.norms[2 * i + 1](x))
        return self.head(self.norms[-1](x).mean(1))


@_model("mixer")
def _mixer() -> tuple[nn.Module, Inputs]:
    return Mixer(128, 3, 112, 8), (torch.randn(4, 3, 112, 112),)


class ConvNextBlock(nn.Module):
    """Depthwise 7x7 convolution, then a scaled pointwise MLP in channels-last, with a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.body = _feed_forward(width)
        self.scale = nn.Parameter(torch.full((width,), 1e-2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.body(y)).permute(0, 3, 1, 2)


class ConvNext(nn.Module):
    """ConvNeXt (Liu et al. 2022)."""

    def __init__(self, width: int, depths: tuple[int, ...]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, 4)
        stages: list[nn.Module] = []
        for i, depth in enumerate(depths):
            if i:
                stages.append(nn.GroupNorm(1, width))
                stages.append(nn.Conv2d(width, 2 * width, 2, 2))
                width *= 2
            stages += [ConvNextBlock(width) for _ in range(depth)]
        self.stages = nn.Sequential(*stages)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 100))

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(image)).mean((2, 3)))


@_model("convnext")
def _convnext() -> tuple[nn.Module, Inputs]:
    return ConvNext(32, (2, 3)), (torch.randn(4, 3, 112, 112),)


class SqueezeExcite(nn.Module):
    """Channel gates computed from the global mean."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(
            nn.Conv2d(width, inner, 1), nn.SiLU(), nn.Conv2d(inner, width, 1), nn.Sigmoid()
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(x.mean((2, 3), keepdim=True))


class InvertedBottleneck(nn.Module):
    """Expand, depthwise, squeeze-and-excite, project."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int) -> None:
        super().__init__()
        inner = 4 * inputs
        self.shortcut = stride == 1 and inputs == outputs
        self.body = nn.Sequential(
            ConvNorm(inputs, inner, 1, activation=nn.SiLU()),
            ConvNorm(inner, inner, kernel, stride=stride, groups=inner, activation=nn.SiLU()),
            SqueezeExcite(inner, inputs // 4),
            ConvNorm(inner, outputs, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return x + y if self.shortcut else y


@_model("efficientnet")
def _efficientnet() -> tuple[nn.Module, Inputs]:
    """EfficientNet-like (Tan and Le 2019)."""
    model = nn.Sequential(
        ConvNorm(3, 16, 3, stride=2, activation=nn.SiLU()),
        InvertedBottleneck(16, 24, 3, 2),
        InvertedBottleneck(24, 24, 3, 1),
        InvertedBottleneck(24, 40, 5, 2),
        InvertedBottleneck(40, 40, 5, 1),
        ConvNorm(40, 160, 1, activation=nn.SiLU()),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(160, 100),
    )
    return model, (torch.randn(4, 3, 96, 96),)


class SwinBlock(nn.Module):
    """Window attention, shifted in every second block, with relative position bias."""

    def __init__(self, width: int, heads: int, window: int, shift: int) -> None:
        super().__init__()
        self.heads, self.window, self.shift = heads, window, shift
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.randn((2 * window - 1) ** 2, heads) * 0.02)
        self.feed_forward = _feed_forward(width)
        place = torch.cartesian_prod(torch.arange(window), torch.arange(window))
        distance = place[:, None] - place[None] + window - 1
        self.register_buffer("index", distance[..., 0] * (2 * window - 1) + distance[..., 1])

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        w = self.window
        y = self.norm1(x)
        if self.shift:
            y = y.roll((-self.shift, -self.shift), (1, 2))
        y = y.view(batch, height // w, w, width // w, w, channels)
        y = y.transpose(2, 3).reshape(-1, w * w, channels)
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.project(y).chunk(3, dim=-1)
        )
        bias = self.bias[self.get_buffer("index")].permute(2, 0, 1)
        scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5 + bias
        y = self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))
        y = y.view(batch, height // w, width // w, w, w, channels).transpose(2, 3)
        y = y.reshape(batch, height, width, channels)
        if self.shift:
            y = y.roll((self.shift, self.shift), (1, 2))
        x = x + y
        return x + self.feed_forward(self.norm2(x))


class Swin(nn.Module):
    """Swin-like (Liu et al. 2021): two stages with patch merging between them."""

    def __init__(self, width: int, heads: int, window: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.first = nn.Sequential(
            SwinBlock(width, heads, window, 0), SwinBlock(width, heads, window, window // 2)
        )
        self.merge = nn.Sequential(nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width))
        self.second = nn.Sequential(
            SwinBlock(2 * width, heads, window, 0), SwinBlock(2 * width, heads, window, window // 2)
        )
        self.head = nn.Linear(2 * width, 100)

    def forward(self, image: Tensor) -> Tensor:
        x = self.first(self.patches(image).permute(0, 2, 3, 1))
        parts = [x[:, i::2, j::2] for j in range(2) for i in range(2)]
        x = self.second(self.merge(torch.cat(parts, dim=-1)))
        return self.head(x.mean((1, 2)))


@_model("swin")
def _swin() -> tuple[nn.Module, Inputs]:
    return Swin(48, 3, 7), (torch.randn(4, 3, 112, 112),)


class Generator(nn.Module):
    """Generator of a DCGAN (Radford et al. 2015): upsampling by transposed convolutions."""

    def __init__(self, latent: int, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs, outputs = latent, 8 * width
        for i in range(4):
            stride, padding = (1, 0) if i == 0 else (2, 1)
            layers += [
                nn.ConvTranspose2d(inputs, outputs, 4, stride, padding, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(),
            ]
            inputs, outputs = outputs, outputs // 2
        self.layers = nn.Sequential(*layers, nn.ConvTranspose2d(inputs, 3, 4, 2, 1), nn.Tanh())

    def forward(self, latent: Tensor) -> Tensor:
        return self.layers(latent[:, :, None, None])


@_model("gan")
def _gan() -> tuple[nn.Module, Inputs]:
    return Generator(64, 16), (torch.randn(8, 64),)


class DitBlock(nn.Module):
    """A transformer block modulated by the condition (adaLN-Zero)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.attention = Attention(width, heads)
        self.feed_forward = _feed_forward(width, approximate="tanh")
        self.modulate = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulate(F.silu(condition))[
            :, None
        ].chunk(6, dim=-1)
        x = x + gate1 * self.attention(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.feed_forward(self.norm2(x) * (1 + scale2) + shift2)


class Dit(nn.Module):
    """Diffusion transformer (Peebles and Xie 2022)."""

    def __init__(self, width: int, heads: int, depth: int, image: int, patch: int) -> None:
        super().__init__()
        self.patch = patch
        self.patches = nn.Conv2d(4, width, patch, patch)
        self.positions = nn.Parameter(torch.randn(1, (image // patch) ** 2, width) * 0.02)
        self.time = nn.Sequential(nn.Linear(64, width), nn.SiLU(), nn.Linear(width, width))
        self.labels = nn.Embedding(10, width)
        self.blocks = nn.ModuleList(DitBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, patch * patch * 4)

    def forward(self, image: Tensor, step: Tensor, label: Tensor) -> Tensor:
        rates = torch.exp(-math.log(10000) * torch.arange(32, device=image.device) / 32)
        angles = step[:, None] * rates
        condition = self.time(torch.cat([angles.cos(), angles.sin()], dim=1)) + self.labels(label)
        x = self.patches(image).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x, condition)
        side = image.shape[-1] // self.patch
        x = self.out(self.norm(x)).view(len(x), side, side, self.patch, self.patch, 4)
        return x.permute(0, 5, 1, 3, 2, 4).reshape_as(image)


@_model("dit")
def _dit() -> tuple[nn.Module, Inputs]:
    return Dit(128, 4, 2, 32, 2), (
        torch.randn(2, 4, 32, 32),
        torch.tensor([7.0, 800.0]),
        torch.tensor([3, 9]),
    )


# --- other --------------------------------------------------------------------------------------


class Whisper(nn.Module):
    """Whisper (Radford et al. 2022): convolutions, an encoder, a decoder with cross-attention."""

    def __init__(self, width: int, heads: int, depth: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(40, width, 3, padding=1)
        self.conv2 = nn.Conv1d(width, width, 3, stride=2, padding=1)
        self.encoder = nn.ModuleList(PreNormBlock(width, heads) for _ in range(depth))
        self.words = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        self.decoder = nn.ModuleList(
            PreNormBlock(width, heads, causal=True, cross=True) for _ in range(depth)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, sound: Tensor, tokens: Tensor) -> Tensor:
        x = F.gelu(self.conv2(F.gelu(self.conv1(sound)))).transpose(1, 2)
        half = x.shape[-1] // 2
        rates = torch.exp(-math.log(10000) * torch.arange(half, device=x.device) / (half - 1))
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * rates
        x = x + torch.cat([angles.sin(), angles.cos()], dim=1)
        for block in self.encoder:
            x = block(x)
        memory = self.norms[0](x)
        y = self.words(tokens) + self.positions[: tokens.shape[1]]
        for block in self.decoder:
            y = block(y, memory)
        return F.linear(self.norms[1](y), self.words.weight)


@_model("whisper")
def _whisper() -> tuple[nn.Module, Inputs]:
    return Whisper(128, 4, 2, 500, 64), (torch.randn(3, 40, 256), _tokens(500, 3, 48))


class RaggedMlp(nn.Module):
    """An MLP of prime widths, in which layers also read an earlier layer's output."""

    def __init__(self, widths: tuple[int, ...], reach: int) -> None:
        super().__init__()
        self.reach = reach
        self.layers = nn.ModuleList(map(nn.Linear, widths, widths[1:]))
        self.skips = nn.ModuleList(map(nn.Linear, widths, widths[reach:]))

    def forward(self, x: Tensor) -> Tensor:
        outputs = [x]
        for i, layer in enumerate(self.layers):
            y = layer(outputs[-1])
            back = i + 1 - self.reach
            if back >= 0:
                y = y + self.skips[back](outputs[back])
            outputs.append(F.gelu(y))
        return outputs[-1]


@_model("ragged_mlp")
def _ragged_mlp() -> tuple[nn.Module, Inputs]:
    primes = (257, 131, 509, 67, 383, 191, 449, 101, 307, 211, 521, 83, 349, 149, 419, 113, 61)
    return RaggedMlp(primes, 4), (torch.randn(1021, 257),)


class Dlrm(nn.Module):
    """DLRM-like (Naumov et al. 2019): embedding bags, pairwise interactions, two MLPs."""

    def __init__(self, tables: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(300, width, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, width), nn.ReLU())
        self.top = nn.Sequential(
            nn.Linear(tables * (tables + 1) // 2 + width, 256),
            nn.ReLU(),
            nn.Linear(256, 128),
            nn.ReLU(),
            nn.Linear(128, 1),
        )
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x = self.bottom(dense)
        features = [x, *(table(sparse[:, i]) for i, table in enumerate(self.tables))]
        stacked = torch.stack(features, dim=1)
        products = stacked @ stacked.transpose(1, 2)
        first, second = self.get_buffer("pairs")
        chosen = products[:, first, second]
        return self.top(torch.cat([x, chosen], dim=1)).sigmoid()


@_model("dlrm")
def _dlrm() -> tuple[nn.Module, Inputs]:
    return Dlrm(8, 32), (torch.randn(1024, 13), _tokens(300, 1024, 8, 4))


class GraphConvolution(nn.Module):
    """A graph network with attention over edges (Velickovic et al. 2017): gather and scatter."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.project = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.score = nn.ModuleList(nn.Linear(2 * width, 1) for _ in range(depth))

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        for project, score in zip(self.project, self.score, strict=True):
            y = project(x)
            weight = F.leaky_relu(score(torch.cat([y[source], y[target]], dim=1))).exp()
            total = torch.zeros_like(x[:, :1]).index_add(0, target, weight)
            weighted = torch.zeros_like(x).index_add(0, target, weight * y[source])
            x = x + F.elu(weighted / (total + 1e-6))
        return x


@_model("gat")
def _gat() -> tuple[nn.Module, Inputs]:
    nodes, edges = 1500, 6000
    return GraphConvolution(64, 2), (
        torch.randn(nodes, 64),
        _tokens(nodes, edges),
        _tokens(nodes, edges),
    )


class Vae(nn.Module):
    """Autoencoder with the two outputs of a VAE (Kingma and Welling 2013), without sampling."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1), nn.SiLU(), nn.Conv2d(width, 2 * width, 3, 2, 1), nn.SiLU()
        )
        self.mean = nn.Conv2d(2 * width, 8, 1)
        self.spread = nn.Conv2d(2 * width, 8, 1)
        self.decoder = nn.Sequential(
            nn.Conv2d(8, 2 * width, 1),
            nn.SiLU(),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * width, width, 3, 1, 1),
            nn.SiLU(),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(width, 3, 3, 1, 1),
        )

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = self.encoder(image)
        mean, spread = self.mean(features), self.spread(features)
        return self.decoder(mean + F.softplus(spread)), mean, spread


@_model("vae")
def _vae() -> tuple[nn.Module, Inputs]:
    return Vae(24), (torch.randn(4, 3, 64, 64),)
