"""Train a compiled module with Lightning.

Compile the network inside of the LightningModule: Lightning's own methods then stay uncompiled,
and a checkpoint has the names of the network's parameters. It prints the losses of eager and of
compiled training:

    eager     16.5107 6.2412 15.7392 14.9394
    compiled  16.5107 6.2412 15.7392 14.9394
"""

from __future__ import annotations

import logging
import tempfile
import warnings

import pytorch_lightning as lightning
import torch


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 64), torch.nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)))


class Regression(lightning.LightningModule):
    """A small network that learns to add the elements of its input."""

    def __init__(self, compile_network: bool) -> None:
        super().__init__()
        self.network = Network()
        if compile_network:
            self.network.compile(backend="inductor_ext")
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        (x,) = batch
        loss = torch.nn.functional.mse_loss(self.network(x), x.sum(1, keepdim=True))
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train(compile_network: bool) -> list[float]:
    """Return the losses of four steps."""
    lightning.seed_everything(0, verbose=False)
    module = Regression(compile_network)
    data = torch.utils.data.TensorDataset(torch.randn(32, 16))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_steps=4,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        trainer.fit(module, loader)
    return module.losses


def main() -> tuple[list[float], list[float]]:
    """Return the losses of eager and of compiled training."""
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    eager, compiled = train(compile_network=False), train(compile_network=True)
    print("eager    ", *(f"{loss:.4f}" for loss in eager))
    print("compiled ", *(f"{loss:.4f}" for loss in compiled))
    return eager, compiled


if __name__ == "__main__":
    main()
