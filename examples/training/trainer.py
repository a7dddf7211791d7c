"""Train with the Trainer of transformers, or with accelerate, which it uses.

accelerate accepts the names of its own list of backends only, and `inductor_ext` is not among
them. `inductor_ext.install()` lets the extension compile whatever is compiled with
`backend="inductor"`, in the whole process; call it before training starts. The same line serves
`Accelerator(dynamo_backend="inductor")` and `accelerate launch --dynamo_backend inductor`.

It trains a small BERT with random weights, with Inductor and with the extension, and prints the
loss of the last step of both:

    loss after 8 steps: 0.6943 with Inductor, 0.6943 with inductor_ext
"""

from __future__ import annotations

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import inductor_ext


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """64 random sentences of 16 tokens, with two labels."""

    def __init__(self) -> None:
        self.tokens = torch.randint(512, (64, 16))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index]
        return {"input_ids": tokens, "labels": (tokens.sum() % 2).long()}


def train(folder: str) -> list[float]:
    """Return the losses of eight steps."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    config = BertConfig(
        **sizes,
        vocab_size=512,
        num_hidden_layers=1,
        # Random numbers of compiled code differ from those of eager mode.
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=8,
        max_steps=8,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        torch_compile_backend="inductor",
    )
    trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=Sentences())
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> tuple[list[float], list[float]]:
    """Return the losses with Inductor and those with the extension."""
    with tempfile.TemporaryDirectory() as folder:
        inductor = train(folder)
        torch._dynamo.reset()
        inductor_ext.install()
        try:
            ours = train(folder)
        finally:
            inductor_ext.uninstall()
    print(f"loss after 8 steps: {inductor[-1]:.4f} with Inductor, {ours[-1]:.4f} with inductor_ext")
    return inductor, ours


if __name__ == "__main__":
    main()
