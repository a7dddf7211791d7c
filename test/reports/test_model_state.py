"""The memory of parameters, buffers, gradients and optimizer state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import inductor_ext
from inductor_ext import exc
from inductor_ext.reports import model_state
from inductor_ext.reports.model_state import ModelState


class Tied(nn.Module):
    """Two layers with one weight, a frozen layer, and buffers that share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(8, 4).requires_grad_(False)
        self.register_buffer("steps", torch.zeros(16, dtype=torch.int64))
        self.register_buffer("last", self.get_buffer("steps")[8:], persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.second(self.first(x).relu())).sum()  # type: ignore[no-any-return]


TRAINED = (64 + 8 + 8) * 4
FROZEN = (32 + 4) * 4


def test_storages_count_once() -> None:
    model = Tied()
    state = model_state.read_state([model, model], None)
    assert state == (ModelState("cpu", TRAINED + FROZEN, 16 * 8, TRAINED, 0, None),)
    assert state[0].total == 2 * TRAINED + FROZEN + 16 * 8


def test_the_optimizer_has_state_after_its_first_step() -> None:
    model = Tied()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    (before,) = model_state.read_state([model], optimizer)
    assert (before.gradients_now, before.optimizer) == (0, None)
    assert before.cells()[4] == "not known"
    model(torch.randn(2, 8)).backward()
    optimizer.step()
    (after,) = model_state.read_state([model], optimizer)
    # Two moments for each element, and a step for each of the three parameters.
    assert (after.gradients_now, after.optimizer) == (TRAINED, 2 * TRAINED + 3 * 4)
    assert after.gradients == before.gradients == TRAINED


def test_gradients_have_their_own_dtype() -> None:
    model = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
    assert model_state.read_state([model], None)[0].gradients == 128
    if not hasattr(model.weight, "grad_dtype"):
        pytest.skip("gradients have the dtype of their parameter in this torch")
    model.weight.grad_dtype = torch.float32
    assert model_state.read_state([model], None)[0].gradients == 256


def test_sparse_gradients_and_shared_gradient_memory() -> None:
    model = nn.Embedding(1000, 4, sparse=True)
    assert model_state.read_state([model], None)[0].gradients == 16_000
    model(torch.tensor([1, 2])).sum().backward()
    # Two rows of four values, and their two indices.
    assert model_state.read_state([model], None)[0].gradients == 2 * 4 * 4 + 2 * 8
    pair = nn.ParameterList([nn.Parameter(torch.zeros(4)) for _ in range(2)])
    flat = torch.zeros(8)
    for index, parameter in enumerate(pair):
        parameter.grad = flat[4 * index : 4 * index + 4]
    assert model_state.read_state([pair], None)[0].gradients_now == 32


def test_tensor_subclasses_and_devices() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    model = nn.Module()
    model.weight = nn.Parameter(TwoTensor(torch.zeros(4, 4), torch.zeros(4, 4)))
    model.register_buffer("table", torch.zeros(4, device="meta"))
    assert model_state.read_state([model], None) == (
        ModelState("cpu", 128, 0, 128, 0, None),
        ModelState("meta", 0, 16, 0, 0, None),
    )


def test_reports_have_the_state_of_their_module() -> None:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    compiled = torch.compile(model, backend="inductor_ext")

    def step() -> None:
        compiled(torch.randn(2, 8)).backward()
        optimizer.step()

    step()
    expected = (ModelState("cpu", TRAINED + FROZEN, 128, TRAINED, TRAINED, TRAINED),)
    assert inductor_ext.memory_report(compiled, optimizer=optimizer).state == expected
    assert inductor_ext.memory_report(model, optimizer=optimizer).state == expected
    text = str(inductor_ext.memory_report(compiled))
    assert "parameters  buffers  gradients  gradients now  optimizer state  device" in text
    assert "320 B          320 B        not known  cpu" in text


def test_functions_need_the_module() -> None:
    model = nn.Linear(4, 4)
    compiled = torch.compile(lambda x: model(x).sin(), backend="inductor_ext")
    compiled(torch.randn(2, 4)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters())
    assert inductor_ext.memory_report(compiled).state == ()
    with pytest.raises(exc.BadArgumentError, match="model=None: expected the module that"):
        inductor_ext.memory_report(compiled, optimizer=optimizer)
    report = inductor_ext.memory_report(compiled, model=model, optimizer=optimizer)
    assert report.state == (ModelState("cpu", 80, 0, 80, 80, None),)


def test_exported_programs() -> None:
    program = torch.export.export(Tied(), (torch.randn(2, 8),))
    report = inductor_ext.memory_report(program)
    assert report.state == (ModelState("cpu", TRAINED + FROZEN, 128, 0, 0, None),)
    arguments: dict[str, Any] = {"model": Tied()}
    with pytest.raises(exc.NotReportableError, match="with model or optimizer"):
        inductor_ext.memory_report(program, **arguments)
