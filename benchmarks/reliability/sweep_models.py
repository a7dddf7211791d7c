"""Models of transformers that the extension was not developed with, small, with random weights.

    module, inputs = MODELS["falcon"](step_models.SMALL)
    output = step_models.extract_output(module(**inputs))

Building needs transformers (`requirements/demo.txt`); importing this module does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from benchmarks.memory.step_models import (
    TOKENS,
    Build,
    Inputs,
    Scale,
    list_encoder_decoder_widths,
    list_widths,
    make_decoder,
    make_image,
    make_images,
    make_text,
    make_tokens,
)

__all__ = ["MODELS"]

_Options = Callable[[Scale], dict[str, Any]]

_SAMPLES = 8000
"""Samples of a sound."""


def _make(
    model: str, config: str, draw: Callable[[Scale], Inputs], options: _Options | dict[str, Any]
) -> Build:
    """Return a builder of a model from its configuration.

    Args:
        model: name of the class.
        config: name of the configuration's class.
        draw: draws the inputs.
        options: arguments of the configuration, or a function that returns them.
    """

    def build(scale: Scale) -> tuple[nn.Module, Inputs]:
        import transformers

        values = options(scale) if callable(options) else options
        made = getattr(transformers, config)(**values)
        return getattr(transformers, model)(made), draw(scale)

    return build


def _draw_text(scale: Scale) -> Inputs:
    return {"input_ids": make_tokens(scale)}


def _draw_pair(scale: Scale) -> Inputs:
    return {"input_ids": make_tokens(scale), "decoder_input_ids": make_tokens(scale)}


def _draw_sound(scale: Scale) -> Inputs:
    return {"input_values": torch.randn(scale.batch, _SAMPLES)}


def _make_translator(family: str, model: str = "ForConditionalGeneration") -> Build:
    """Return a builder of an encoder with a decoder."""
    return _make(
        f"{family}{model}",
        f"{family}Config",
        _draw_pair,
        lambda scale: {**TOKENS, **list_encoder_decoder_widths(scale)},
    )


def _make_stages(family: str, **options: Any) -> Build:
    """Return a builder of an image classifier with four stages."""
    stages = {"hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 2, 1], **options}
    return _make(f"{family}ForImageClassification", f"{family}Config", make_images, stages)


def _make_sound(family: str) -> Build:
    """Return a builder of an encoder of sounds."""
    return _make(
        f"{family}Model",
        f"{family}Config",
        _draw_sound,
        lambda scale: {
            **list_widths(scale),
            "conv_dim": (32,) * 7,
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
            "apply_spec_augment": False,
        },
    )


def _name_widths(**names: str) -> _Options:
    """Return the widths of a scale under the names of a configuration.

    Args:
        names: the configuration's name by the name in `list_widths`.
    """

    def options(scale: Scale) -> dict[str, Any]:
        widths = {names[name]: value for name, value in list_widths(scale).items() if name in names}
        return {**TOKENS, "use_cache": False, **widths}

    return options


_FEW = {
    "hidden_size": "hidden_size",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
}

MODELS: Mapping[str, Build] = {
    # Decoders.
    "mistral": make_decoder("Mistral", sliding_window=64),
    "qwen2": make_decoder("Qwen2"),
    "granite": make_decoder("Granite"),
    "glm": make_decoder("Glm", head_dim=32),
    "stablelm": make_decoder("StableLm"),
    "cohere": make_decoder("Cohere"),
    "gemma3": _make(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        _draw_text,
        lambda scale: {
            **TOKENS,
            **list_widths(scale),
            "num_key_value_heads": scale.heads // 2,
            "head_dim": 32,
            "sliding_window": 64,
            "use_cache": False,
        },
    ),
    "smollm3": make_decoder("SmolLM3"),
    "mixtral": make_decoder("Mixtral", num_local_experts=4),
    "phi": make_decoder("Phi"),
    "bloom": _make("BloomForCausalLM", "BloomConfig", _draw_text, _name_widths(**_FEW)),
    "gptj": _make(
        "GPTJForCausalLM",
        "GPTJConfig",
        _draw_text,
        lambda scale: {
            **_name_widths(**{**_FEW, "hidden_size": "n_embd"})(scale),
            "rotary_dim": 16,
        },
    ),
    "falcon": make_text("FalconForCausalLM", "FalconConfig", use_cache=False),
    "opt": make_text(
        "OPTForCausalLM", "OPTConfig", ffn_dim=512, word_embed_proj_dim=128, use_cache=False
    ),
    # Encoders of text.
    "albert": make_text("AlbertForMaskedLM", "AlbertConfig", embedding_size=64),
    "convbert": make_text("ConvBertForMaskedLM", "ConvBertConfig", embedding_size=64),
    "distilbert": _make(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        _draw_text,
        lambda scale: {
            "vocab_size": TOKENS["vocab_size"],
            "dim": scale.width,
            "n_layers": scale.layers,
            "n_heads": scale.heads,
            "hidden_dim": 4 * scale.width,
        },
    ),
    "electra": make_text("ElectraForMaskedLM", "ElectraConfig", embedding_size=64),
    "fnet": make_text("FNetForMaskedLM", "FNetConfig"),
    "mpnet": make_text("MPNetForMaskedLM", "MPNetConfig"),
    "roberta": make_text("RobertaForMaskedLM", "RobertaConfig"),
    "squeezebert": make_text("SqueezeBertForMaskedLM", "SqueezeBertConfig", embedding_size=128),
    "xlnet": _make(
        "XLNetLMHeadModel",
        "XLNetConfig",
        _draw_text,
        lambda scale: {
            "vocab_size": TOKENS["vocab_size"],
            "d_model": scale.width,
            "n_layer": scale.layers,
            "n_head": scale.heads,
            "d_inner": 4 * scale.width,
        },
    ),
    # Encoders with decoders.
    "marian": _make_translator("Marian", "MTModel"),
    "mbart": _make_translator("MBart"),
    "pegasus": _make_translator("Pegasus"),
    # Images.
    "beit": make_image("BeitForImageClassification", "BeitConfig", patch_size=8),
    "convnextv2": _make_stages("ConvNextV2"),
    "data2vec": make_image(
        "Data2VecVisionForImageClassification", "Data2VecVisionConfig", patch_size=8
    ),
    "deit": make_image("DeiTForImageClassification", "DeiTConfig", patch_size=8),
    "dpt": _make(
        "DPTForDepthEstimation",
        "DPTConfig",
        make_images,
        lambda scale: {
            **list_widths(scale),
            "image_size": scale.image,
            "patch_size": 8,
            "fusion_hidden_size": 32,
            "neck_hidden_sizes": [16, 32, 64, 64],
            "backbone_out_indices": [0, 1, 2, 3],
        },
    ),
    "focalnet": _make_stages(
        "FocalNet", image_size=64, embed_dim=16, focal_levels=[2] * 4, focal_windows=[3] * 4
    ),
    "mobilevit": _make(
        "MobileViTForImageClassification",
        "MobileViTConfig",
        make_images,
        {
            "image_size": 64,
            "hidden_sizes": [32, 48, 64],
            "neck_hidden_sizes": [8, 16, 24, 32, 48, 64, 128],
            # By default, its results are too small for float32.
            "initializer_range": 0.3,
        },
    ),
    "poolformer": _make_stages("PoolFormer"),
    "regnet": _make_stages("RegNet", embedding_size=16, groups_width=16),
    "siglip": make_image("SiglipVisionModel", "SiglipVisionConfig", patch_size=8),
    "yolos": _make(
        "YolosModel",
        "YolosConfig",
        make_images,
        lambda scale: {
            **list_widths(scale),
            "image_size": [scale.image, scale.image],
            "patch_size": 8,
            "num_detection_tokens": 10,
        },
    ),
    # Sounds.
    "hubert": _make_sound("Hubert"),
    "wavlm": _make_sound("WavLM"),
}
"""Builders by name. Parameters are float32, in training mode."""
