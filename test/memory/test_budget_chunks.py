"""`memory_budget` by computing large values in chunks: inference and training steps."""

from __future__ import annotations

import copy
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import inductor_ext
from benchmarks.memory import steps
from inductor_ext import events
from inductor_ext.cpp_wrapper.load.model import Model as LoadedModel
from inductor_ext.memory import budget_search
from inductor_ext.memory.budget_search import MemoryBudgetRecord
from inductor_ext.memory.records import MemoryPlanRecord
from test.support.memory_compiles import compiled, planning

WIDTH, VOCABULARY, BATCH, TOKENS = 16, 512, 3, 21


class Model(nn.Module):
    """A small language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(tokens)))  # type: ignore[no-any-return]


def make_model() -> tuple[Model, Tensor, Tensor]:
    """Return a model, tokens and labels."""
    torch.manual_seed(0)
    tokens, labels = (torch.randint(0, VOCABULARY, (BATCH, TOKENS)) for _ in range(2))
    labels[0, :3] = -100
    return Model(), tokens, labels


def loss_of(model: Model, tokens: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


def probability(model: Model, tokens: Tensor, labels: Tensor) -> Tensor:
    """Log-probability of the labels."""
    logs = F.log_softmax(model(tokens), -1)
    return logs.gather(-1, labels.clamp(min=0).unsqueeze(-1))


def top(model: Model, tokens: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    return tuple(F.softmax(model(tokens), -1).topk(4, -1))


def peak_of(records: list[MemoryPlanRecord]) -> int:
    return max(record.peak for record in records)


def default_peak(run: Callable[[], Any]) -> int:
    with planning() as records:
        run()
    return peak_of(records)


@pytest.mark.parametrize(("function", "share"), [(loss_of, 0.6), (probability, 0.3), (top, 0.6)])
@torch.no_grad()
def test_inference_fits(function: Callable[..., Any], share: float) -> None:
    model, tokens, labels = make_model()
    budget = int(share * default_peak(lambda: compiled(function)(model, tokens, labels)))
    with planning(memory_budget=budget) as records, events.capture(MemoryBudgetRecord) as found:
        run = compiled(function)
        results = run(model, tokens, labels)
    expected = function(copy.deepcopy(model).double(), tokens, labels)
    for value, reference in (
        zip(results, expected, strict=True) if function is top else [(results, expected)]
    ):
        torch.testing.assert_close(value.to(reference.dtype), reference, atol=1e-5, rtol=1e-4)
    (record,) = found
    assert record.chunks >= 1 / share
    assert record.chunked_regions == 1
    assert record.added_operators > 0
    assert record.recomputed_flops == record.share == 0
    assert f"in up to {record.chunks} chunks" in record.describe()
    assert peak_of(records) <= budget
    assert steps.measure_step(lambda: run(model, tokens, labels), "cpu").peak <= budget


class Probability(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return probability(self.model, tokens, labels)


@torch.no_grad()
def test_a_package_fits(tmp_path: pathlib.Path) -> None:
    model, *inputs = make_model()
    budget = int(0.4 * default_peak(lambda: compiled(probability)(model, *inputs)))
    program = torch.export.export(Probability(model), tuple(inputs))
    path = str(tmp_path / "model.pt2")
    options = {
        "memory_budget": budget,
        "artifact_cache": False,
        "aot_inductor.compile_wrapper_opt_level": "O0",
    }
    with events.capture(MemoryBudgetRecord) as found:
        inductor_ext.aoti_compile_and_package(program, package_path=path, inductor_configs=options)
    (record,) = found
    assert record.chunked_regions == 1
    # Without recomputation there is nothing else to try.
    assert record.compiles <= 1 + budget_search._CHUNK_STEPS
    loaded = inductor_ext.load(path)
    assert isinstance(loaded, LoadedModel)
    assert steps.measure_step(lambda: loaded(*inputs), "cpu").peak <= budget
    other = make_model()[0]
    for parameter in other.parameters():
        parameter.normal_()
    for weights in (model, other):
        loaded.load_state_dict(Probability(weights).state_dict())
        expected = probability(copy.deepcopy(weights).double(), *inputs)
        torch.testing.assert_close(loaded(*inputs).double(), expected, atol=1e-5, rtol=1e-4)
    stock = torch._inductor.aoti_load_package(path)
    expected = probability(copy.deepcopy(model).double(), *inputs)
    torch.testing.assert_close(stock(*inputs).double(), expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_without_chunks_inference_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens, labels = make_model()
    budget = int(0.6 * default_peak(lambda: compiled(loss_of)(model, tokens, labels)))
    monkeypatch.setattr(budget_search, "_CHUNK_STEPS", 0)
    with planning(memory_budget=budget), pytest.raises(Exception, match="MemoryBudgetError"):
        compiled(loss_of)(model, tokens, labels)


@torch.no_grad()
def test_a_budget_that_is_too_low_fails_with_the_table() -> None:
    model, tokens, labels = make_model()
    with (
        planning(memory_budget=256),
        events.capture(MemoryBudgetRecord) as found,
        pytest.raises(Exception, match="large values are computed in up to 16 chunks") as caught,
    ):
        compiled(loss_of)(model, tokens, labels)
    assert "MemoryBudgetError" in str(caught.value)
    assert "Live on cpu at the peak" in str(caught.value)
    assert not found


@torch.no_grad()
def test_dynamic_rows_are_not_chunked() -> None:
    model, tokens, labels = make_model()
    with (
        planning(memory_budget=4096),
        pytest.raises(Exception, match=r"above the budget of 4\.00 KiB\. Raise"),
    ):
        compiled(loss_of, dynamic=True)(model, tokens, labels)


def test_a_training_step_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_search, "_LARGE", ())
    model, tokens, labels = make_model()
    exact = copy.deepcopy(model).double()
    loss_of(exact, tokens, labels).backward()
    start = copy.deepcopy(model)
    peak = default_peak(lambda: compiled(loss_of)(start, tokens, labels).backward())
    budget = int(0.75 * peak)
    with planning(memory_budget=budget) as records, events.capture(MemoryBudgetRecord) as found:
        run = compiled(loss_of)

        def step() -> None:
            model.zero_grad()
            run(model, tokens, labels).backward()

        step()
    (record,) = found
    assert record.chunks > 1
    assert record.share == 0
    # The backward computes the logits again: one matmul of four.
    assert 0 < record.recomputed_flops <= record.flops / 4
    assert {plan.kind for plan in records[-2:]} == {"forward", "backward"}
    assert peak_of(records[-2:]) <= budget
    for parameter, reference in zip(model.parameters(), exact.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.double(), reference.grad, atol=1e-6, rtol=1e-4)
    step()
    model.zero_grad()
    assert steps.measure_step(step, "cpu").peak <= budget


def test_attempts_in_chunks_have_cache_keys_of_their_own() -> None:
    key = budget_search.Chunking({"forward": 3, "backward": 4}, {}).key
    assert key == budget_search.Chunking({"backward": 4, "forward": 3}, {}).key
    assert key != budget_search.Chunking({"forward": 34, "backward": 4}, {}).key


@pytest.mark.gpu
@pytest.mark.parametrize("is_training", [False, True])
def test_chunks_on_a_gpu(is_training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_search, "_LARGE", ())
    torch.manual_seed(0)
    logits = nn.Linear(256, 8192, bias=False, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(2048, 256, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(0, 8192, (2048,), device="cuda")

    def compute(module: nn.Module, x: Tensor) -> Tensor:
        return F.cross_entropy(module(x).float(), labels)

    def run(function: Callable[..., Tensor]) -> Tensor:
        logits.zero_grad()
        with torch.set_grad_enabled(is_training):
            loss = function(logits, x)
        if is_training:
            loss.backward()
        return loss

    budget = int(0.6 * default_peak(lambda: run(compiled(compute))))
    with planning(memory_budget=budget) as records, events.capture(MemoryBudgetRecord) as found:
        function = compiled(compute)
        loss = run(function)
    assert found[-1].chunks > 1
    assert peak_of(records[-2:]) <= budget
    exact = copy.deepcopy(logits).double()
    expected = F.cross_entropy(exact(x.double()), labels)
    torch.testing.assert_close(loss.double(), expected, atol=1e-2, rtol=1e-2)
    if is_training:
        expected.backward()
        gradient, reference = logits.weight.grad, exact.weight.grad
        assert gradient is not None
        assert reference is not None
        assert (gradient.double() - reference).norm() <= 1e-2 * reference.norm()
    # Once libraries have their workspaces, nothing else is allocated.
    logits.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run(function)
    assert torch.cuda.max_memory_allocated() - before <= 1.05 * budget
