"""`memory_budget` of a training step: activations are recomputed until the step fits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import nn
from torch._inductor.utils import fresh_cache
from torch.nn import functional as F

import inductor_ext
from benchmarks.memory import steps
from inductor_ext import events, exc
from inductor_ext.memory import budget_search
from inductor_ext.memory.budget_search import MemoryBudgetRecord
from inductor_ext.memory.records import MemoryPlanRecord
from test.support import quick_compiler
from test.support.memory_compiles import compiled, planning

WIDTH, TOKENS = 32, 24


@pytest.fixture(autouse=True)
def few_compiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few attempts; the kernels of those that are not called are not compiled."""
    monkeypatch.setattr(budget_search, "_STEPS", 1)
    with quick_compiler.quick_compiles():
        yield


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + F.dropout(attention, self.dropout)
        return x + self.down(F.gelu(self.up(self.norms[1](x))))  # type: ignore[no-any-return]


def transformer() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(3)))


class Convolutions(nn.Module):
    """Layers with running statistics, which must be updated once."""

    def __init__(self) -> None:
        super().__init__()
        layers = [
            nn.Sequential(
                nn.Conv2d(4, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 1)
            )
            for _ in range(5)
        ]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x.unflatten(-1, (4, 8)).transpose(1, 2)).transpose(1, 2).flatten(2)
        return x


Step = Callable[[], None]


def make_step(model: nn.Module, x: torch.Tensor) -> Step:
    run = compiled(lambda x: model(x).square().mean())

    def step() -> None:
        model.zero_grad()
        run(x).backward()

    return step


def plan_peak(records: Sequence[MemoryPlanRecord]) -> int:
    return max(record.peak for record in records)


def measure_peak(model: nn.Module, step: Step) -> int:
    """Measure the bytes above the level before a step, as the plans count them."""
    model.zero_grad()
    return steps.measure_step(step, "cpu").peak


@pytest.mark.parametrize("make", [transformer, Convolutions])
def test_a_step_fits_with_the_same_gradients(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    exact = copy.deepcopy(model).double()
    x = torch.randn(3, TOKENS, WIDTH)
    with planning() as records:
        make_step(copy.deepcopy(model), x)()
    budget = int(0.7 * plan_peak(records))
    with planning(memory_budget=budget) as records, events.capture(MemoryBudgetRecord) as found:
        step = make_step(model, x)
        step()
    exact(x.double()).square().mean().backward()
    for (name, parameter), reference in zip(
        model.named_parameters(), exact.parameters(), strict=True
    ):
        assert parameter.grad is not None
        assert reference.grad is not None
        error = (parameter.grad.double() - reference.grad).abs().max()
        assert error <= 1e-4 * reference.grad.abs().max() + 1e-7, name
    for value, reference in zip(model.buffers(), exact.buffers(), strict=True):
        torch.testing.assert_close(value.double(), reference.double(), atol=1e-4, rtol=1e-4)
    (record,) = found
    assert 0 < record.share <= 1
    assert 0 < record.recomputed_flops < record.flops
    assert "are recomputation" in record.describe()
    forward, backward = records[-2:]
    assert (forward.kind, backward.kind) == ("forward", "backward")
    # The backward's plan counts what the forward saved.
    assert plan_peak([forward, backward]) <= budget
    if make is transformer:
        # The workspace of a convolution is not known to its plan.
        assert measure_peak(model, step) <= budget


def test_dropout_has_the_same_mask_again() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, 8 * WIDTH, bias=False)
            self.down = nn.Linear(8 * WIDTH, WIDTH, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = F.dropout(F.relu(self.up(F.dropout(x, 0.3))), 0.4)
            return x + self.down(hidden)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(5)))
    x = torch.randn(512, WIDTH, requires_grad=True)
    with planning() as records:
        compiled(model)(x).sum().backward()
    budget = int(0.7 * plan_peak(records))
    x.grad = None
    with planning(memory_budget=budget), events.capture(MemoryBudgetRecord) as found:
        result = compiled(model)(x).sum()
        result.backward()
    assert found
    assert x.grad is not None
    # A function with f(a x) = a f(x), which it is for one mask: x f'(x) = f(x).
    torch.testing.assert_close((x * x.grad).sum(), result, atol=1e-3, rtol=1e-4)


def test_a_step_that_cannot_fit_fails_and_leaves_nothing() -> None:
    model = Convolutions()
    run = compiled(model)
    x = torch.randn(3, TOKENS, WIDTH)
    with planning(memory_budget=1024):
        with pytest.raises(Exception, match="although the backward recomputes") as caught:
            run(x)
        assert "MemoryBudgetError" in str(caught.value)
        assert "Live on cpu at the peak" in str(caught.value)
        with pytest.raises(exc.NothingCompiledError):
            inductor_ext.memory_report(model)


@torch.no_grad()
def test_inference_that_fits_is_compiled_once() -> None:
    with (
        planning(memory_budget="1GiB") as plans,
        events.capture(MemoryBudgetRecord) as found,
    ):
        compiled(transformer())(torch.randn(3, TOKENS, WIDTH))
    assert len(plans) == 1
    assert not found


def test_attempts_are_not_mixed_up_in_a_cache() -> None:
    torch.manual_seed(0)
    model = transformer()
    x = torch.randn(3, TOKENS, WIDTH)
    with fresh_cache():
        with planning(fx_graph_cache=True) as records:
            make_step(model, x)()
        budget = int(0.7 * plan_peak(records))
        shares = []
        for _ in range(2):
            with (
                planning(memory_budget=budget, fx_graph_cache=True),
                events.capture(MemoryBudgetRecord) as found,
            ):
                step = make_step(model, x)
                step()
            assert measure_peak(model, step) <= budget
            shares += [record.share for record in found]
    assert shares[0] == shares[1]
