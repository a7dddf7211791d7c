"""Benches of a CUDA device on which some kernels fail; tuning's worker imports them by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from inductor_ext.autotune.candidate_run import Candidate, Compiled
from inductor_ext.autotune.inductor_benchmark import InductorBench, cuda_bench

__all__ = ["faulty_bench", "wrong_bench"]


class _Bench(InductorBench):
    """`meddle` replaces the first candidate of each problem."""

    def __init__(
        self, device: str, meddle: Callable[[Compiled], Callable[..., Any]], least: int = 1
    ) -> None:
        super().__init__(device)
        self._meddle = meddle
        self._least = least
        """Below so many candidates nothing is replaced."""

    def compile(
        self, variants: Sequence[Candidate], starting: Callable[[int], None]
    ) -> Iterator[Compiled | Exception]:
        compiled = list(super().compile(variants, starting))
        for index, item in enumerate(compiled):
            if len(compiled) <= self._least:
                break
            after_stock = index > 0 and variants[index - 1][1] is None
            if after_stock and isinstance(item, Compiled):
                compiled[index] = Compiled(self._meddle(item), item.key)
        yield from compiled


def _wrong(compiled: Compiled) -> Callable[..., Any]:
    def call(*tensors: Any) -> Any:
        outputs = compiled.call(*tensors)
        outputs[0][-1, -1] += 0.5
        return outputs

    return call


def _faulty(compiled: Compiled) -> Callable[..., Any]:
    def call(*tensors: Any) -> Any:
        import torch

        # The kernel that reads it asserts, and the device cannot be used by this process again.
        beyond = torch.full((1,), 1 << 40, device=tensors[0].device)
        return [tensors[0].flatten()[beyond]]

    return call


def wrong_bench(index: int) -> InductorBench:
    """The first candidate has one wrong element."""
    return _Bench(cuda_bench(index).device, _wrong)


def faulty_bench(index: int) -> InductorBench:
    """The first of two candidates breaks the device for its process."""
    return _Bench(cuda_bench(index).device, _faulty, 2)
