"""Models that no tuning table, no fit of the cost model and no choice of candidates has seen.

Headline numbers come from these models. The decoder LLMs, the encoders and the image models are
transformers' own classes with published sizes and random weights; of deep models a few layers are
kept, and vocabularies are small, because embeddings are only looked up. Decoders write into
transformers' `StaticCache`, which is full but for the new tokens. Diffusion models and DLRM follow
their papers.

    model = HELD_OUT["qwen3-4b decode 8x1"]
    module, inputs = model.make("cuda", model.dtype)

Building needs transformers (`requirements/demo.txt`); importing this module does not.
"""

# A module's call returns Any to the type checker.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gemm.models import Inputs, Model

__all__ = ["HELD_OUT"]

DEPTH = 4
"""Layers that are kept of a deep model."""

VOCABULARY = 1024

PAST = 1024
"""Positions in the cache before a decode step."""

_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "vocab_size": VOCABULARY}


# Decoders.


class Decoder(nn.Module):
    """A decoder of transformers with a static cache, from token ids to hidden states.

    Args:
        config: of the model.
        batch: sequences.
        length: new tokens of each sequence.
        past: positions of the cache that are filled before a call.
    """

    def __init__(self, config: Any, batch: int, length: int, past: int) -> None:
        import transformers

        super().__init__()
        self.model = transformers.AutoModel.from_config(config)
        self.past = past
        self.cache = transformers.StaticCache(config, max_cache_len=past + length)
        heads = config.num_key_value_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.cache.early_initialization(
            batch, heads, size, torch.float32, torch.get_default_device()
        )
        for index, layer in enumerate(self.cache.layers):
            self.register_buffer(f"keys{index}", layer.keys.normal_())
            self.register_buffer(f"values{index}", layer.values.normal_())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Convert the cache as well."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for index, layer in enumerate(self.cache.layers):
            layer.keys, layer.values = (
                self.get_buffer(f"keys{index}"),
                self.get_buffer(f"values{index}"),
            )
            layer.cumulative_length = layer.cumulative_length.to(layer.keys.device)
            for tensor in (layer.keys, layer.values, layer.cumulative_length):
                # CUDA graphs may then write to it.
                torch._dynamo.mark_static_address(tensor)
        return self

    def forward(self, tokens: Tensor) -> Tensor:
        for layer in self.cache.layers:
            # Each call decodes the same position.
            layer.cumulative_length.fill_(self.past)
            layer.cumulative_length_int = self.past
        output = self.model(tokens, past_key_values=self.cache, use_cache=True)
        return output.last_hidden_state


_DECODERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen3-4b": (
        "Qwen3Config",
        {
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
    ),
    "phi3-mini": (
        "Phi3Config",
        {
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
        },
    ),
    "gemma2-2b": (
        "Gemma2Config",
        {
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
        },
    ),
    "olmo2-7b": (
        "Olmo2Config",
        {
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
        },
    ),
    "starcoder2-3b": (
        "Starcoder2Config",
        {
            "hidden_size": 3072,
            "intermediate_size": 12288,
            "num_attention_heads": 24,
            "num_key_value_heads": 2,
        },
    ),
}
"""Classes of configurations in transformers, and published sizes."""

_MOE = (
    "Qwen3MoeConfig",
    {
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_hidden_layers": 2,
        "experts_implementation": "grouped_mm",
    },
)


def _make_decoder(
    config: tuple[str, Mapping[str, Any]], batch: int, length: int, past: int
) -> Callable[[], tuple[nn.Module, Inputs]]:
    def build() -> tuple[nn.Module, Inputs]:
        import transformers

        name, sizes = config
        made = getattr(transformers, name)(**{"num_hidden_layers": DEPTH, **_TOKENS, **sizes})
        return Decoder(made, batch, length, past), (_draw_tokens(batch, length),)

    return build


def _yield_decoders() -> Iterator[Model]:
    for name, config in _DECODERS.items():
        for batch in (1, 8, 32):
            build = _make_decoder(config, batch, 1, PAST)
            yield Model(f"{name} decode {batch}x1", build, weight_bound=True)
        yield Model(f"{name} prefill 1x1024", _make_decoder(config, 1, 1024, 0))
    yield Model("qwen3-moe decode 16x1", _make_decoder(_MOE, 16, 1, PAST), selects_experts=True)


# Encoders.


class FirstOutput(nn.Module):
    """A model of transformers that returns only its first output.

    Args:
        module: the model.
        name: the parameter that gets the input.
    """

    def __init__(self, module: nn.Module, name: str = "input_ids") -> None:
        super().__init__()
        self.module, self.name = module, name

    def forward(self, value: Tensor) -> Tensor:
        return self.module(**{self.name: value})[0]


def _draw_tokens(batch: int, length: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length))


def _make_modernbert() -> tuple[nn.Module, Inputs]:
    from transformers import ModernBertConfig, ModernBertModel

    special = {"cls_token_id": 1, "sep_token_id": 2}
    config = ModernBertConfig(num_hidden_layers=8, **special, **_TOKENS)
    return FirstOutput(ModernBertModel(config)), (_draw_tokens(16, 512),)


def _make_deberta() -> tuple[nn.Module, Inputs]:
    from transformers import DebertaV2Config, DebertaV2Model

    config = DebertaV2Config(
        hidden_size=768,
        intermediate_size=3072,
        num_attention_heads=12,
        num_hidden_layers=DEPTH,
        relative_attention=True,
        position_buckets=256,
        pos_att_type=["p2c", "c2p"],
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        position_biased_input=False,
        vocab_size=VOCABULARY,
    )
    return FirstOutput(DebertaV2Model(config)), (_draw_tokens(16, 256),)


def _make_t5() -> tuple[nn.Module, Inputs]:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        d_model=768,
        d_ff=2048,
        num_heads=12,
        num_layers=DEPTH,
        feed_forward_proj="gated-gelu",
        vocab_size=VOCABULARY,
    )
    return FirstOutput(T5EncoderModel(config)), (_draw_tokens(8, 512),)


def _make_whisper() -> tuple[nn.Module, Inputs]:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(
        d_model=768,
        encoder_attention_heads=12,
        encoder_ffn_dim=3072,
        encoder_layers=DEPTH,
        vocab_size=VOCABULARY,
        pad_token_id=0,
    )
    return FirstOutput(WhisperEncoder(config), "input_features"), (torch.randn(8, 80, 3000),)


def _make_vit() -> tuple[nn.Module, Inputs]:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_attention_heads=16,
        num_hidden_layers=DEPTH,
        image_size=384,
    )
    model = ViTModel(config, add_pooling_layer=False)
    return FirstOutput(model, "pixel_values"), (torch.randn(16, 3, 384, 384),)


def _make_swin() -> tuple[nn.Module, Inputs]:
    from transformers import SwinConfig, SwinModel

    model = SwinModel(SwinConfig(), add_pooling_layer=False)
    return FirstOutput(model, "pixel_values"), (torch.randn(32, 3, 224, 224),)


def _make_convnext() -> tuple[nn.Module, Inputs]:
    from transformers import ConvNextConfig, ConvNextModel

    return FirstOutput(ConvNextModel(ConvNextConfig()), "pixel_values"), (
        torch.randn(32, 3, 224, 224),
    )


def _make_efficientnet() -> tuple[nn.Module, Inputs]:
    from transformers import EfficientNetConfig, EfficientNetModel

    config = EfficientNetConfig(
        width_coefficient=1.0, depth_coefficient=1.0, image_size=224, hidden_dim=1280
    )
    model, images = EfficientNetModel(config), torch.randn(32, 3, 224, 224)
    # The model initializes the scales of batch norms near zero, and so its results.
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.BatchNorm2d)):
            module.reset_parameters()
        if isinstance(module, nn.BatchNorm2d):
            # The statistics become those of the next batch.
            module.momentum = 1.0
    model.train()(pixel_values=images[:8])
    return FirstOutput(model, "pixel_values"), (images,)


# Diffusion models.


class DitBlock(nn.Module):
    """A transformer block whose norms are modulated (adaLN-Zero, Peebles and Xie 2023)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.modulation = nn.Linear(width, 6 * width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = (
            self.modulation(F.silu(condition)).unsqueeze(1).chunk(6, dim=-1)
        )
        width = (x.shape[-1],)
        y = F.layer_norm(x, width) * (1 + scale1) + shift1
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(y).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(query, key, value)
        x = x + gate1 * self.project(attended.transpose(1, 2).flatten(2))
        y = F.layer_norm(x, width) * (1 + scale2) + shift2
        return x + gate2 * self.down(F.gelu(self.up(y), approximate="tanh"))


class Dit(nn.Module):
    """Blocks of a diffusion transformer, from patches and a condition to patches."""

    def __init__(self, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DitBlock(width, heads) for _ in range(depth))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, condition)
        return x


def _make_dit() -> tuple[nn.Module, Inputs]:
    return Dit(1024, 16, DEPTH), (torch.randn(16, 256, 1024), torch.randn(16, 1024))


class ResidualBlock(nn.Module):
    """Two convolutions with group norms; the time embedding is added between them."""

    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs)
        self.norm2, self.conv2 = (
            nn.GroupNorm(32, outputs),
            nn.Conv2d(outputs, outputs, 3, padding=1),
        )
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(y)))


class Attention(nn.Module):
    """Attention to the image itself, or to a text."""

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.key, self.value = (nn.Linear(context, width, bias=False) for _ in range(2))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query(x), self.key(context), self.value(context))
        )
        attended = F.scaled_dot_product_attention(query, key, value)
        return self.out(attended.transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """Self-attention, cross-attention to the text, and a GEGLU, at each pixel."""

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.itself = Attention(width, heads, width)
        self.text = Attention(width, heads, context)
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        y = self.norm(x).flatten(2).transpose(1, 2)
        z = self.norms[0](y)
        y = y + self.itself(z, z)
        y = y + self.text(self.norms[1](y), text)
        up, gate = self.up(self.norms[2](y)).chunk(2, dim=-1)
        y = y + self.down(up * F.gelu(gate))
        return x + y.transpose(1, 2).unflatten(2, x.shape[2:])


class LatentUnet(nn.Module):
    """The two outer levels of a latent diffusion U-Net (Rombach et al. 2022)."""

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        time = 4 * width
        self.enter = nn.Conv2d(4, width, 3, padding=1)
        self.down1, self.attend1 = (
            ResidualBlock(width, width, time),
            TransformerBlock(width, heads, context),
        )
        self.shrink = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.down2, self.attend2 = (
            ResidualBlock(width, 2 * width, time),
            TransformerBlock(2 * width, heads, context),
        )
        self.grow = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.up, self.attend3 = (
            ResidualBlock(3 * width, width, time),
            TransformerBlock(width, heads, context),
        )
        self.norm, self.leave = nn.GroupNorm(32, width), nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        x = self.enter(x)
        skip = self.attend1(self.down1(x, time), text)
        y = self.attend2(self.down2(self.shrink(skip), time), text)
        y = self.grow(F.interpolate(y, scale_factor=2.0, mode="nearest"))
        y = self.attend3(self.up(torch.cat([y, skip], dim=1), time), text)
        return self.leave(F.silu(self.norm(y)))


def _make_latent_unet() -> tuple[nn.Module, Inputs]:
    inputs = (torch.randn(4, 4, 64, 64), torch.randn(4, 1280), torch.randn(4, 77, 768))
    return LatentUnet(320, 8, 768), inputs


# Recommendation, and small networks.


class Dlrm(nn.Module):
    """Embeddings and dense features, the dots of their pairs, and an MLP (Naumov et al. 2019).

    All widths are odd, as after a search over architectures.
    """

    def __init__(self, dense: int, tables: int, rows: int, width: int) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = _make_mlp(dense, 491, 253, width)
        pairs = tables * (tables + 1) // 2
        self.top = _make_mlp(pairs + width, 1021, 509, 1)
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1))

    def forward(self, dense: Tensor, indices: Tensor) -> Tensor:
        x = self.bottom(dense)
        looked_up = [table(indices[:, i]) for i, table in enumerate(self.embeddings)]
        features = torch.stack([x, *looked_up], dim=1)
        dots = features @ features.transpose(1, 2)
        pairs: Any = self.pairs
        return self.top(torch.cat([x, dots[:, pairs[0], pairs[1]]], dim=1))


def _make_mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _make_dlrm() -> tuple[nn.Module, Inputs]:
    return Dlrm(13, 26, 1000, 35), (torch.randn(2047, 13), torch.randint(1000, (2047, 26)))


def _make_small_mlp() -> tuple[nn.Module, Inputs]:
    return _make_mlp(784, 1500, 1500, 10), (torch.randn(256, 784),)


class LanguageModelLoss(nn.Module):
    """The loss of a causal language model of transformers."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.module(input_ids=tokens, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def _make_gpt2_loss() -> tuple[nn.Module, Inputs]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=DEPTH, vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2)
    return LanguageModelLoss(GPT2LMHeadModel(config)), (_draw_tokens(8, 512),)


HELD_OUT: Mapping[str, Model] = {
    model.name: model
    for model in (
        *_yield_decoders(),
        Model("modernbert 16x512", _make_modernbert),
        Model("deberta-v3 16x256", _make_deberta),
        Model("t5 encoder 8x512", _make_t5),
        Model("whisper encoder 8x3000", _make_whisper),
        Model("vit-large 16x384", _make_vit),
        Model("swin-tiny 32x224", _make_swin),
        Model("convnext-tiny 32x224", _make_convnext),
        Model("efficientnet-b0 32x224", _make_efficientnet),
        Model("dit-large 16x256", _make_dit),
        Model("latent unet 4x64", _make_latent_unet),
        Model("dlrm 2047", _make_dlrm, dtype=torch.float16),
        Model("mlp tf32 256", _make_small_mlp, dtype=torch.float32),
        Model("gpt2 training 8x512", _make_gpt2_loss, training=True),
    )
}
"""By name."""
