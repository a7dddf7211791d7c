"""Models of transformers with random weights, for whole calls and training steps.

Each model is built from its own configuration class with the widths of a `Scale`: `SMALL` ones
compile on a CPU in seconds and allocate a few MiB, `LARGE` ones fill a GPU. What a configuration
does not set is what transformers publishes, dropout included.

    module, inputs = MODELS["bert"](SMALL)
    loss = module(**inputs).logits.square().mean()

Building needs transformers (`requirements/demo.txt`); importing this module does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "LARGE",
    "MODELS",
    "SMALL",
    "TOKENS",
    "VOCABULARY",
    "Build",
    "Inputs",
    "Scale",
    "extract_output",
    "list_encoder_decoder_widths",
    "list_widths",
    "make_decoder",
    "make_image",
    "make_images",
    "make_text",
    "make_tokens",
]

Inputs = dict[str, Tensor]
"""Keyword arguments of a module."""


@dataclass(frozen=True)
class Scale:
    """Sizes that the models share."""

    width: int
    layers: int
    heads: int
    tokens: int
    """Tokens of a sequence."""
    image: int
    """Pixels of a side of an image."""
    channels: int
    """Channels of the first stage of a convolutional network."""
    batch: int


SMALL = Scale(width=128, layers=4, heads=4, tokens=128, image=64, channels=16, batch=4)
LARGE = Scale(width=1024, layers=8, heads=16, tokens=1024, image=256, channels=64, batch=8)

Build = Callable[[Scale], tuple[nn.Module, Inputs]]

VOCABULARY = 1000

TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
"""Arguments that configurations of models of text have."""


def extract_output(output: Any) -> Tensor:
    """Return the tensor that a loss is computed of: the logits, or the first output."""
    for name in ("logits", "last_hidden_state", "logits_per_image"):
        value = getattr(output, name, None)
        if value is not None:
            return value  # type: ignore[no-any-return]
    return output[0]  # type: ignore[no-any-return]


def make_tokens(scale: Scale) -> Tensor:
    """Return random tokens of sequences."""
    return torch.randint(3, VOCABULARY, (scale.batch, scale.tokens))


def make_images(scale: Scale, batch: int | None = None) -> Inputs:
    """Return random images."""
    return {"pixel_values": torch.randn(batch or scale.batch, 3, scale.image, scale.image)}


def list_widths(scale: Scale) -> dict[str, int]:
    """Return the arguments that most configurations of transformers have."""
    return {
        "hidden_size": scale.width,
        "num_hidden_layers": scale.layers,
        "num_attention_heads": scale.heads,
        "intermediate_size": 4 * scale.width,
    }


def list_encoder_decoder_widths(scale: Scale) -> dict[str, int]:
    """Return the arguments of configurations with an encoder and a decoder, without cache."""
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (
            ("layers", scale.layers),
            ("attention_heads", scale.heads),
            ("ffn_dim", 4 * scale.width),
        )
    }
    return {**sides, "d_model": scale.width, "decoder_start_token_id": 2, "use_cache": False}


def make_text(model: str, config: str, **options: Any) -> Build:
    """Return a builder of a model from token ids, an encoder or a decoder."""

    def build(scale: Scale) -> tuple[nn.Module, Inputs]:
        import transformers

        positions = {"max_position_embeddings": max(scale.tokens, 512)}
        values = {**TOKENS, **list_widths(scale), **positions, **options}
        made = getattr(transformers, config)(**values)
        return getattr(transformers, model)(made), {"input_ids": make_tokens(scale)}

    return build


def make_decoder(family: str, **options: Any) -> Build:
    """Return a builder of a decoder with half as many heads of keys and values, without cache."""

    def build(scale: Scale) -> tuple[nn.Module, Inputs]:
        grouped = {"num_key_value_heads": scale.heads // 2, "use_cache": False, **options}
        return make_text(f"{family}ForCausalLM", f"{family}Config", **grouped)(scale)

    return build


def make_image(model: str, config: str, **options: Any) -> Build:
    """Return a builder of a vision transformer."""

    def build(scale: Scale) -> tuple[nn.Module, Inputs]:
        import transformers

        widths = {**list_widths(scale), "image_size": scale.image, **options}
        made = getattr(transformers, config)(**widths)
        return getattr(transformers, model)(made), make_images(scale)

    return build


def _make_gpt2(scale: Scale) -> tuple[nn.Module, Inputs]:
    import transformers

    config = transformers.GPT2Config(
        **TOKENS,
        n_embd=scale.width,
        n_layer=scale.layers,
        n_head=scale.heads,
        n_positions=scale.tokens,
        use_cache=False,
    )
    return transformers.GPT2LMHeadModel(config), {"input_ids": make_tokens(scale)}


def _make_t5(scale: Scale) -> tuple[nn.Module, Inputs]:
    import transformers

    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=scale.width,
        d_kv=scale.width // scale.heads,
        d_ff=4 * scale.width,
        num_layers=scale.layers,
        num_heads=scale.heads,
        use_cache=False,
    )
    inputs = {"input_ids": make_tokens(scale), "decoder_input_ids": make_tokens(scale)}
    return transformers.T5ForConditionalGeneration(config), inputs


def _make_bart(scale: Scale) -> tuple[nn.Module, Inputs]:
    import transformers

    config = transformers.BartConfig(
        **TOKENS, **list_encoder_decoder_widths(scale), max_position_embeddings=scale.tokens
    )
    inputs = {"input_ids": make_tokens(scale), "decoder_input_ids": make_tokens(scale)}
    return transformers.BartForConditionalGeneration(config), inputs


def _make_whisper(scale: Scale) -> tuple[nn.Module, Inputs]:
    import transformers

    config = transformers.WhisperConfig(
        **TOKENS,
        **list_encoder_decoder_widths(scale),
        max_source_positions=scale.tokens,
        max_target_positions=scale.tokens,
    )
    features = torch.randn(scale.batch, config.num_mel_bins, 2 * scale.tokens)
    inputs = {"input_features": features, "decoder_input_ids": make_tokens(scale)}
    return transformers.WhisperForConditionalGeneration(config), inputs


def _make_wav2vec2(scale: Scale) -> tuple[nn.Module, Inputs]:
    import transformers

    config = transformers.Wav2Vec2Config(
        **list_widths(scale), conv_dim=(scale.width,) * 7, layerdrop=0.0, mask_time_prob=0.0
    )
    # The convolutions turn 320 samples into a token.
    samples = torch.randn(scale.batch, 320 * scale.tokens)
    return transformers.Wav2Vec2Model(config), {"input_values": samples}


def _make_clip(scale: Scale) -> tuple[nn.Module, Inputs]:
    import transformers

    text = {**TOKENS, **list_widths(scale), "max_position_embeddings": scale.tokens}
    vision = {**list_widths(scale), "image_size": scale.image, "patch_size": 8}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision)
    return transformers.CLIPModel(config), {"input_ids": make_tokens(scale), **make_images(scale)}


def _make_swin(scale: Scale) -> tuple[nn.Module, Inputs]:
    import transformers

    config = transformers.SwinConfig(
        image_size=scale.image,
        embed_dim=2 * scale.channels,
        depths=[2, 2, 2],
        num_heads=[2, 4, 8],
        window_size=scale.image // 16,
    )
    return transformers.SwinForImageClassification(config), make_images(scale)


def _make_segformer(scale: Scale) -> tuple[nn.Module, Inputs]:
    import transformers

    config = transformers.SegformerConfig()
    return transformers.SegformerForSemanticSegmentation(config), make_images(scale)


def _make_convnext(scale: Scale) -> tuple[nn.Module, Inputs]:
    import transformers

    widths = [scale.channels * 2**stage for stage in range(4)]
    config = transformers.ConvNextConfig(hidden_sizes=widths, depths=[1, 1, 2, 1])
    return transformers.ConvNextForImageClassification(config), make_images(scale)


def _make_resnet(scale: Scale) -> tuple[nn.Module, Inputs]:
    import transformers

    widths = [scale.channels * 4 * 2**stage for stage in range(4)]
    config = transformers.ResNetConfig(
        embedding_size=scale.channels, hidden_sizes=widths, depths=[1, 2, 2, 1]
    )
    return transformers.ResNetForImageClassification(config), make_images(scale)


def _make_mobilenet(scale: Scale) -> tuple[nn.Module, Inputs]:
    import transformers

    config = transformers.MobileNetV2Config(image_size=scale.image)
    return transformers.MobileNetV2ForImageClassification(config), make_images(scale)


MODELS: Mapping[str, Build] = {
    "bert": make_text("BertForMaskedLM", "BertConfig"),
    "deberta": make_text("DebertaV2ForMaskedLM", "DebertaV2Config"),
    "modernbert": make_text(
        "ModernBertForMaskedLM", "ModernBertConfig", cls_token_id=1, sep_token_id=2
    ),
    "gpt2": _make_gpt2,
    "gpt-neox": make_text("GPTNeoXForCausalLM", "GPTNeoXConfig", use_cache=False),
    "llama": make_decoder("Llama"),
    "qwen3": make_decoder("Qwen3", head_dim=32),
    "gemma2": make_decoder("Gemma2", head_dim=32),
    "phi3": make_decoder("Phi3"),
    "olmo2": make_decoder("Olmo2"),
    "t5": _make_t5,
    "bart": _make_bart,
    "whisper": _make_whisper,
    "wav2vec2": _make_wav2vec2,
    "clip": _make_clip,
    "vit": make_image("ViTForImageClassification", "ViTConfig", patch_size=8),
    "dinov2": make_image("Dinov2ForImageClassification", "Dinov2Config", patch_size=8),
    "swin": _make_swin,
    "segformer": _make_segformer,
    "convnext": _make_convnext,
    "resnet": _make_resnet,
    "mobilenet": _make_mobilenet,
}
"""Builders by name. Parameters are float32, in training mode."""
