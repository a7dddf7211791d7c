"""The memory of a whole step over time, compiled and in eager mode."""

from __future__ import annotations

import copy
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._profiler import _EventType

import inductor_ext
from benchmarks.memory import steps
from inductor_ext import exc
from inductor_ext.reports import memory_measure
from inductor_ext.reports.memory_report import MemoryReport
from inductor_ext.reports.step_timeline import StepTimeline


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(32, 128), nn.LayerNorm(128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(self.norm(self.up(x)))
        return (x + self.down(hidden)).square().mean()  # type: ignore[no-any-return]


class Step:
    """A step of training, with a number of micro-batches."""

    def __init__(self, model: nn.Module, *, compiled: bool, micro_batches: int = 1) -> None:
        self.model, self.micro_batches = model, micro_batches
        self.run = torch.compile(model, backend="inductor_ext") if compiled else model
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.x = torch.randn(64, 32)

    def __call__(self) -> None:
        for _ in range(self.micro_batches):
            self.run(self.x).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def make(*, micro_batches: int = 1) -> tuple[Step, Step, MemoryReport]:
    """A compiled and an eager step that have run, and the report."""
    model = Model()
    eager = Step(copy.deepcopy(model), compiled=False, micro_batches=micro_batches)
    compiled = Step(model, compiled=True, micro_batches=micro_batches)
    for _ in range(2):
        compiled()
        eager()
    report = inductor_ext.memory_report(compiled.run, optimizer=compiled.optimizer)
    return compiled, eager, report


def raw_peak(timeline: StepTimeline, granule: int) -> int:
    """The peak with allocations rounded up, as `steps.measure_step` counts them."""
    level = highest = 0
    for before, after in zip(timeline.levels, timeline.levels[1:], strict=False):
        change = after - before
        size = -(-abs(change) // granule) * granule
        level += size if change > 0 else -size
        highest = max(highest, level)
    return highest


def test_a_training_step() -> None:
    compiled, eager, report = make()
    weights = copy.deepcopy(compiled.model.state_dict())
    eager_weights = copy.deepcopy(eager.model.state_dict())
    report = report.measure_step(compiled, eager=eager)
    with_graphs, in_eager = report.steps
    assert [(step.mode, step.device) for step in report.steps] == [
        ("compiled", "cpu"),
        ("eager", "cpu"),
    ]
    # Each callable ran.
    assert any(not torch.equal(weights[k], v) for k, v in compiled.model.state_dict().items())
    assert any(not torch.equal(eager_weights[k], v) for k, v in eager.model.state_dict().items())
    for timeline, step in ((with_graphs, compiled), (in_eager, eager)):
        assert raw_peak(timeline, 64) == steps.measure_step(step, "cpu").peak
        assert timeline.levels[0] == timeline.levels[-1] == 0
        assert timeline.peak == max(timeline.levels)
        assert timeline.times == tuple(sorted(timeline.times))
        assert 0 <= timeline.times[-1] <= timeline.duration
        assert [span.name for span in timeline.optimizer_steps] == ["AdamW.step"]
    assert in_eager.calls == ()
    assert with_graphs.peak < in_eager.peak
    assert with_graphs.find_peak_owner() == "2. backward"
    assert in_eager.find_peak_owner() == "eager mode"


def test_planned_and_measured_peaks_of_the_graphs() -> None:
    compiled, _, report = make()
    report = report.measure(compiled).measure_step(compiled)
    (timeline,) = report.steps
    assert [call.label for call in timeline.calls] == ["1. forward", "2. backward"]
    for call, measured in zip(timeline.calls, report.measured, strict=True):
        assert call.planned == measured.predicted
        assert call.measured == measured.measured
        assert call.planned == pytest.approx(call.measured, rel=0.01)
    forward, backward = timeline.calls
    assert forward.base == 0
    # What the forward has saved: the activations, and the loss.
    assert backward.base > 64 * 128 * 4
    assert timeline.peak == max(call.base + call.measured for call in timeline.calls)
    assert forward.start < forward.end <= backward.start < backward.end
    assert backward.end <= timeline.optimizer_steps[0].start


def test_micro_batches_call_graphs_several_times() -> None:
    compiled, _, report = make(micro_batches=2)
    (timeline,) = report.measure_step(compiled).steps
    assert [call.number for call in timeline.calls] == [1, 2, 1, 2]
    # The gradients of the first micro-batch are in memory in the second one.
    gradients = report.state[0].gradients
    assert timeline.calls[2].base == pytest.approx(gradients, abs=64)


def test_inference_and_freed_memory() -> None:
    model = Model()
    compiled = torch.compile(model, backend="inductor_ext")
    kept: list[torch.Tensor] = []

    def step() -> None:
        with torch.no_grad():
            kept.clear()
            compiled(torch.empty(64, 32).normal_())
            kept.append(torch.empty(1000))

    step()
    report = inductor_ext.memory_report(compiled)
    (timeline,) = report.measure_step(step).steps
    assert timeline.lowest == -4000
    assert timeline.levels[-1] == 0
    assert timeline.calls[0].base == 64 * 32 * 4 - 4000
    assert [call.kind for call in timeline.calls] == ["inference"]


def test_gradients_that_the_next_step_frees() -> None:
    compiled, _, report = make()

    def step() -> None:
        compiled.optimizer.zero_grad()
        compiled.run(compiled.x).backward()
        compiled.optimizer.step()

    (timeline,) = report.measure_step(step).steps
    gradients = report.state[0].gradients
    assert timeline.lowest == -gradients
    assert timeline.levels[-1] == 0
    assert timeline.calls[0].base == -gradients


def test_graphs_that_the_report_does_not_have() -> None:
    compiled, _, report = make()
    partial = dataclasses.replace(report, records=report.records[:1])
    (timeline,) = partial.measure_step(compiled).steps
    assert [(call.label, call.planned is None) for call in timeline.calls] == [
        ("1. forward", False),
        ("unknown", True),
    ]
    assert "unknown: begins at" in str(dataclasses.replace(partial, steps=(timeline,)))
    assert "planned peak not known" in str(dataclasses.replace(partial, steps=(timeline,)))


def test_errors() -> None:
    compiled, eager, report = make()
    with pytest.raises(exc.NotMeasurableError, match=r"eager step cannot .* ran a compiled graph"):
        report.measure_step(compiled, eager=compiled)
    with pytest.raises(exc.NothingMeasuredError):
        report.measure_step(eager)

    sizes = iter((8, 9, 10))

    def other() -> None:
        fixed = torch.compile(lambda x: (x @ x).sin(), backend="inductor_ext", dynamic=False)
        fixed(torch.ones(next(sizes), 8)[:8])
        torch._dynamo.reset()

    with pytest.raises(exc.NotMeasurableError, match="it compiled a graph"):
        report.measure_step(other)
    with pytest.raises(ZeroDivisionError):
        report.measure_step(lambda: 1 // 0)


@pytest.mark.gpu
def test_a_training_step_on_a_gpu() -> None:
    model = Model().cuda()
    x = torch.randn(4096, 32, device="cuda")
    compiled = Step(model, compiled=True)
    eager = Step(copy.deepcopy(model), compiled=False)
    for step in (compiled, eager):
        step.x = x
        step()
        step()
    report = inductor_ext.memory_report(compiled.run, optimizer=compiled.optimizer)
    report = report.measure_step(compiled, eager=eager)
    timelines = [timeline for timeline in report.steps if timeline.device == "cuda:0"]
    assert [timeline.mode for timeline in timelines] == ["compiled", "eager"]
    for timeline, step in zip(timelines, (compiled, eager), strict=True):
        assert timeline.peak == pytest.approx(steps.measure_step(step, "cuda").peak, rel=0.01)
        assert timeline.levels[-1] == 0
    assert [call.label for call in timelines[0].calls] == ["1. forward", "2. backward"]
    for call in timelines[0].calls:
        assert call.planned == pytest.approx(call.measured, rel=0.01)
    assert timelines[0].peak < timelines[1].peak
    assert {state.device for state in report.state} >= {"cuda:0"}


def event(name: str, tag: Any, start: int, end: int, *children: Any, **fields: Any) -> Any:
    return SimpleNamespace(
        name=name,
        tag=tag,
        start_time_ns=start,
        end_time_ns=end,
        children=list(children),
        extra_fields=SimpleNamespace(**fields),
    )


def test_ranges_of_a_gpu_do_not_count() -> None:
    """On a GPU, every range has a second event that begins with its first kernel."""
    allocation = event(
        "[memory]", _EventType.Allocation, 12, 12, device="cuda:0", ptr=1, alloc_size=512
    )
    call = "## Call CompiledFxGraph fkey ##"
    events = [
        event(
            "inductor_ext.memory_report",
            _EventType.TorchOp,
            10,
            40,
            event(call, _EventType.TorchOp, 11, 30, allocation),
        ),
        event("inductor_ext.memory_report", _EventType.Kineto, 20, 50),
        event(call, _EventType.Kineto, 21, 45),
    ]
    results = SimpleNamespace(experimental_event_tree=lambda: events)
    profiler = SimpleNamespace(profiler=SimpleNamespace(kineto_results=results))
    profile = memory_measure._read_events(profiler)
    assert (profile.start, profile.end) == (10, 40)
    assert profile.calls == [("fkey", 11, 30)]
    assert [found.bytes for found in profile.allocations] == [512]
