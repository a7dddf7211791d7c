"""`inductor_ext.fit_batch`: the largest batch that fits into a budget."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import inductor_ext
from benchmarks.memory import steps
from inductor_ext import exc
from inductor_ext.reports import fit_batch

KIB = 1024


class Model(nn.Module):
    """Its memory at a batch depends on how forward and backward are planned."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(32, 128), nn.LayerNorm(128), nn.Linear(128, 32)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.calls += 1
        hidden = nn.functional.gelu(self.norm(self.up(x))) * scale
        return (x + self.down(hidden)).square().mean()  # type: ignore[no-any-return]


def measure_training(model: Model, batch: int) -> int:
    """Measure weights, inputs and what a step allocates, in bytes."""
    torch._dynamo.reset()
    x = torch.randn(batch, 32)
    run = torch.compile(model, backend="inductor_ext")

    def step() -> None:
        model.zero_grad()
        run(x).backward()

    step()
    model.zero_grad()
    weights = sum(value.nbytes for value in (*model.parameters(), *model.buffers()))
    return weights + x.nbytes + steps.measure_step(step, "cpu").peak


def test_the_batch_fits_and_the_next_does_not() -> None:
    model = Model()
    budget = 512 * KIB
    fit = inductor_ext.fit_batch(model, (torch.randn(4, 32),), budget)
    # The model was not run.
    assert not model.get_buffer("calls").any()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert fit.needed <= budget < fit.next_needed
    needed = measure_training(model, fit.batch)
    # Tensors of a few bytes are rounded differently.
    assert needed <= budget + 64
    assert needed == pytest.approx(fit.needed, rel=0.001)
    assert measure_training(model, fit.batch + 1) > budget
    text = str(fit)
    assert text.startswith(f"A batch of {fit.batch} needs")
    assert f"a batch of {fit.batch + 1} needs" in text


def test_inference_and_reserved_memory() -> None:
    model = Model()
    example = {"x": torch.randn(4, 32), "scale": 2.0}
    with torch.no_grad():
        fits = [
            inductor_ext.fit_batch(torch.compile(model), example, "512KiB", reserved=reserved)
            for reserved in (0, "256 KiB")
        ]
    assert fits[0].batch > fits[1].batch > 1
    assert "reserved 256.00 KiB" in str(fits[1])
    assert dataclasses.replace(fits[1], reserved=0).needed <= 256 * KIB


@pytest.mark.parametrize(
    ("example", "budget", "error", "message"),
    [
        ((torch.ones(4, 32),), None, exc.BadArgumentError, "how much memory is free on cpu"),
        ((torch.ones(4, 32),), "much", exc.BadArgumentError, "budget='much'"),
        (
            (torch.ones(1, 32),),
            "1MiB",
            exc.BadArgumentError,
            r"shapes \(1, 32\)\): expected tensors",
        ),
        ((2.0,), "1MiB", exc.BadArgumentError, r"\(no tensors\)"),
        ((torch.ones(4, 32),), "1KiB", exc.NoBatchFitsError, "A batch of 1 needs"),
    ],
)
def test_errors(example: Any, budget: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        inductor_ext.fit_batch(Model(), example, budget)


@pytest.mark.parametrize(
    "function", [lambda x: x.view(4, -1).sum(), lambda x: x, lambda x: x.sum().item()]
)
def test_models_without_a_dynamic_batch(function: Any) -> None:
    with pytest.raises(exc.BatchNotDynamicError, match="one graph"):
        inductor_ext.fit_batch(function, (torch.ones(4, 32),), "1MiB")


@pytest.mark.parametrize("limit", [0, 9, 10, 17, 1000])
def test_the_largest_batch_is_found(limit: int) -> None:
    def count_needed(batch: int) -> int:
        return 7 + 3 * batch

    expected = max((limit - 7) // 3, 0)
    assert fit_batch._find_largest(count_needed, limit) == expected


def test_memory_that_does_not_grow() -> None:
    assert fit_batch._find_largest(lambda batch: 5, 10) >= fit_batch._LARGEST
