"""Run a model on batches of the requests that arrive at about the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import torch


class Batcher:
    """Collects samples for a model that takes a batch, and returns each sample's own result.

    Args:
        model: takes float32 [batch, features] and returns [batch, 1].
        size: the largest batch.
        wait: seconds that the first sample of a batch waits for others.
    """

    def __init__(
        self, model: Callable[[torch.Tensor], torch.Tensor], size: int, wait: float
    ) -> None:
        self.model, self.size, self.wait = model, size, wait
        self.samples = self.batches = 0
        self._queue: asyncio.Queue[tuple[list[float], asyncio.Future[float]]] = asyncio.Queue()

    async def __call__(self, features: list[float]) -> float:
        """Wait for the result of one sample. Raises what the model raises."""
        result: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        await self._queue.put((features, result))
        return await result

    async def run(self) -> None:
        """Run batches until the task is cancelled."""
        while True:
            batch = [await self._queue.get()]
            await asyncio.sleep(self.wait)
            while len(batch) < self.size and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            x = torch.tensor([features for features, _ in batch])
            self.batches += 1
            self.samples += len(batch)
            try:
                # Another thread, so that requests are accepted meanwhile.
                results = (await asyncio.to_thread(self.model, x)).flatten().tolist()
            except Exception as error:
                results = [error] * len(batch)
            for (_, waiting), value in zip(batch, results, strict=True):
                if waiting.cancelled():  # The client has gone.
                    continue
                if isinstance(value, Exception):
                    waiting.set_exception(value)
                else:
                    waiting.set_result(value)
