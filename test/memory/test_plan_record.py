"""The record of a memory plan: modules and operators of its storages."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

import pytest
import torch

import inductor_ext
from benchmarks.memory import steps
from inductor_ext.memory import saved_tensors
from inductor_ext.reports import memory_measure
from inductor_ext.reports.memory_measure import Measured
from test.support.memory_compiles import compiled, planning


def test_the_record_has_modules_and_operators() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Linear(16, 64)
            self.down = torch.nn.Linear(64, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.nn.functional.gelu(self.up(x)))

    model = torch.nn.Sequential(Block(), Block())
    with planning() as records, torch.no_grad():
        x = torch.randn(8, 16)
        torch.testing.assert_close(compiled(model)(x), model(x), atol=1e-5, rtol=1e-4)
    (record,) = records
    modules = {storage.module for storage in record.storages}
    assert {"0.up", "0.down", "1.up", "1.down"} & modules
    assert any("addmm" in storage.operator for storage in record.storages)
    line = record.describe()
    assert re.match(r"memory_plan: call \(inference\) peak [\d.]+ -> [\d.]+ MiB, lower bound", line)


def test_a_buffer_belongs_to_the_module_whose_result_it_is() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.o_proj = torch.nn.Linear(32, 32, bias=False)
            self.norm = torch.nn.LayerNorm(32)
            self.gate = torch.nn.Linear(32, 48, bias=False)
            self.head = torch.nn.Linear(48, 64, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            normed = self.norm(x + self.o_proj(x))
            return self.head(torch.nn.functional.silu(self.gate(normed)))  # type: ignore[no-any-return]

    with planning() as records, torch.no_grad():
        compiled(Block())(torch.randn(8, 32))
    (record,) = records
    modules = {storage.bytes // (8 * 4): storage.module for storage in record.storages}
    # The norm's result overwrites the sum, or is a buffer of its own, of the same size.
    assert {modules[48], modules[64]} == {"gate", "head"}
    assert {s.module for s in record.storages if s.bytes == 8 * 32 * 4} <= {"o_proj", "norm"}


def test_the_peak_of_a_backward_counts_a_reused_input_once() -> None:
    class Gated(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = (torch.nn.Linear(32, 512, bias=False) for _ in range(2))
            self.down = torch.nn.Linear(512, 32, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gated = torch.nn.functional.silu(self.gate(x)) * self.up(x)
            return self.down(gated)  # type: ignore[no-any-return]

    model = torch.nn.Sequential(*(Gated() for _ in range(3)))
    with planning() as records:
        run = compiled(model)
        x = torch.randn(256, 32)

        def step() -> None:
            run(x).square().mean().backward()

        step()
        step()
    donated = [s for s in records[1].storages if s.kind == "input" and s.bytes == 256 * 512 * 4]
    assert donated
    measured = memory_measure.measure(records, step)
    (backward,) = (item for item in measured if item.kind == "backward")
    # Torch 2.11 keeps the gradient of the output, 32 KiB, until the end.
    assert 0 <= backward.measured - backward.predicted <= 256 * 32 * 4


def test_saved_views_count_as_the_memory_that_they_share() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(64, 64) / 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # The backward needs a transposed weight, and two views of a result.
            hidden = torch.mm(x, self.weight).sin()
            return hidden.view(-1, 16).softmax(-1).view(-1, 64) @ hidden.mT @ hidden

    model = torch.nn.Sequential(*(Layer() for _ in range(4)))
    x = torch.randn(48, 64)
    with planning() as records:
        run = compiled(lambda x: model(x).square().mean())

        def step() -> None:
            model.zero_grad()
            run(x).backward()

        step()
    model.zero_grad()
    measured = steps.measure_step(step, "cpu").peak
    assert max(record.peak for record in records) == pytest.approx(measured, rel=0.01)


def measure_graphs(step: Callable[[], object], fn: Callable[..., object]) -> list[Measured]:
    """Return the graphs of a step that has run twice, its backward included."""
    step()
    step()
    return list(inductor_ext.memory_report(fn).measure(step).measured)


def test_a_saved_part_keeps_its_whole_tensor() -> None:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(512, 64), torch.nn.LayerNorm(64))
    head = torch.nn.Linear(64, 8)
    x = torch.randn(4, 8, 512)
    run = compiled(lambda x: head(layers(x)[:, 0]).square().mean())
    graphs = measure_graphs(lambda: run(x).backward(), run)
    assert [graph.kind for graph in graphs] == ["forward", "backward"]
    for graph in graphs:
        assert graph.predicted == pytest.approx(graph.measured, abs=512)


@pytest.mark.parametrize("keeps", [False, True])
def test_an_input_of_the_forward_is_freed_unless_the_caller_keeps_it(keeps: bool) -> None:
    torch.manual_seed(0)
    first, second = torch.nn.Linear(1024, 64), torch.nn.Linear(1024, 64)
    x = torch.randn(128, 1024)
    kept = []

    def run(x: torch.Tensor) -> torch.Tensor:
        hidden = first(x).sin()
        torch._dynamo.graph_break()
        if keeps:
            kept[:] = [hidden.detach()]
        # The first kernel of the backward needs it, before the gradient of the weight.
        return (second(x) * hidden).mean()

    fn = compiled(run)
    graphs = measure_graphs(lambda: fn(x).backward(), fn)
    assert sorted(graph.kind for graph in graphs) == ["backward"] * 2 + ["forward"] * 2
    for graph in graphs:
        assert graph.predicted == pytest.approx(graph.measured, abs=512)


def test_views_of_results() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("primals_1")
    aten = torch.ops.aten
    flat = graph.create_node("call_function", aten.view.default, (x, [-1]), name="flat")
    mean = graph.create_node("call_function", aten.var_mean.correction, (flat, [0]), name="both")
    first = graph.create_node("call_function", operator.getitem, (mean, 0), name="first")
    result = graph.create_node("call_function", aten.sin.default, (flat,), name="result")
    parts = graph.create_node("call_function", aten.split.Tensor, (result, 2), name="parts")
    part = graph.create_node("call_function", operator.getitem, (parts, 1), name="part")
    graph.output((result, flat, first, part))
    memory = saved_tensors.find_memory(graph, static_inputs=(0,))
    bases = {"result": "result", "flat": "primals_1", "first": "first", "part": "result"}
    assert {name: saved.base for name, saved in memory.items()} == bases
    assert [name for name, saved in memory.items() if saved.is_static] == ["flat"]
