"""The benchmark of peak memory: its arithmetic, and its results for a few models."""

from __future__ import annotations

import pytest
import torch

from benchmarks.harness import measure, results
from benchmarks.memory import models as memory_models
from benchmarks.memory import peak as memory_peak

PREDICTED = {
    # Workspace of the flash kernel, its row sums, and masks that are expanded for it.
    "gpt2": 0.97,
    # The convolution of the patches temporarily copies its input.
    "mixer": 0.85,
    # Convolutions allocate reordered copies of their inputs and outputs.
    "resnet": 0.45,
    # Kernels that compute the buckets allocate temporaries.
    "t5": 0.95,
}
"""Minimum share of the measured peak that the plan predicts; 1 for other models."""


def test_allocator_events_of_three_tensors() -> None:
    """Three tensors, of which two are alive at once twice: sizes are rounded up to 64 bytes."""

    def call() -> None:
        a = torch.empty(100, dtype=torch.uint8)
        b = torch.empty(1000, dtype=torch.uint8)
        del a
        c = torch.empty(1, dtype=torch.uint8)
        del b, c

    changes = memory_peak.record_allocations(call)
    assert changes == [128, 1024, -128, 64, -1024, -64]
    assert measure.find_peak(changes) == 1152


def test_models_are_deterministic() -> None:
    for name in memory_models.QUICK:
        first, second = (memory_models.MODELS[name].make() for _ in range(2))
        assert not first[0].training
        pairs = [*zip(first[1], second[1], strict=True)]
        pairs += zip(first[0].parameters(), second[0].parameters(), strict=True)
        assert all(torch.equal(left, right) for left, right in pairs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "inductor_modes"),
    [
        # The modes of Inductor with the lowest peak; all of them for the smallest model.
        ("gpt2", ["no reuse"]),
        ("ragged_mlp", ["default", "pools", "no reuse"]),
        ("resnet", ["no reuse"]),
    ],
)
@pytest.mark.usefixtures("two_threads")  # Some kernels have temporaries per thread.
def test_inference_peak(name: str, inductor_modes: list[str]) -> None:
    """The peak is at most Inductor's lowest, and the plan is at its lower bound."""
    (graph,) = memory_peak.measure_model(name, training=False, modes=[*inductor_modes, "ours"])
    assert memory_peak.find_regressions([graph]) == []
    plan = graph.plans["ours"]
    assert plan.peak == plan.lower_bound
    assert PREDICTED.get(name, 1) <= plan.peak / graph.peaks["ours"] <= 1


def test_rows_of_two_graphs() -> None:
    """The rows follow the schema, and include a summary."""
    plan = memory_peak.Plan(150, 100, 200, None, 3, 4, 5, ((60, 50), (30, 30)), "arenas", 0.25)
    peaks = {"eager": 400, "default": 300, "pools": 250, "no reuse": 200, "ours": 200}
    graphs = [
        memory_peak.Graph("a", "inference", peaks, {"ours": plan}, {"pools": 0.5}),
        memory_peak.Graph("b", "forward", {**peaks, "default": 200, "ours": 400}),
    ]
    rows = memory_peak.make_rows(graphs)
    results.validate(
        {**results.collect_header("memory-peak", "python"), "rows": [dict(row) for row in rows]}
    )
    table = {(row["case"], row["metric"]): row for row in rows}
    mean = table["all, geometric mean", "runtime peak over no reuse"]
    assert mean["ours"] == pytest.approx(2**0.5)
    assert mean["stock"] == pytest.approx(1.5**0.5)
    assert table["a inference", "plan over lower bound"]["ours"] == 1.5
    assert table["a inference", "planning"]["stock"] == 500
    assert memory_peak.find_regressions(graphs) == [
        "b forward: 200 bytes above Inductor's lowest peak"
    ]
