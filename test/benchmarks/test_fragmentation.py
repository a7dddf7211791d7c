"""The benchmark of fragmentation: its shapes, its rows, and steps that all variants do alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.harness import results
from benchmarks.memory import fragmentation
from benchmarks.memory.fragmentation import SCALE, Fragmentation

TINY = replace(SCALE, width=32, layers=1, heads=2, vocabulary=64, batch=4, length=24)


def test_shapes_are_those_of_the_seed() -> None:
    shapes = fragmentation.make_shapes(SCALE, 200)
    assert shapes == fragmentation.make_shapes(SCALE, 200)
    assert shapes[:50] == fragmentation.make_shapes(SCALE, 50)
    assert shapes != fragmentation.make_shapes(SCALE, 200, seed=1)
    batches, lengths = zip(*shapes, strict=True)
    # torch compiles sizes of 0 and 1 separately.
    assert min(batches) >= 2
    assert max(batches) <= SCALE.batch
    assert min(lengths) >= 16
    assert max(lengths) <= SCALE.length
    assert len(set(shapes)) > 150


def test_counts_between_two_statistics() -> None:
    before = {
        "segment.all.current": 3,
        "segment.all.allocated": 10,
        "num_alloc_retries": 1,
    }
    after = {
        "reserved_bytes.all.peak": 600,
        "allocated_bytes.all.peak": 400,
        "reserved_bytes.all.current": 500,
        "allocated_bytes.all.current": 100,
        "segment.all.allocated": 17,
        "num_alloc_retries": 3,
    }
    found = fragmentation.make_fragmentation(before, after, 0)
    assert found == Fragmentation(600, 400, 500, 100, segments=10, retries=2)
    assert (found.peak_ratio, found.end_ratio) == (1.5, 5.0)


def test_rows_have_a_column_for_each_variant() -> None:
    first = Fragmentation(8 << 20, 4 << 20, 6 << 20, 2 << 20, segments=5, retries=0)
    second = replace(first, reserved=4 << 20, segments=2, graphs=1)
    rows = fragmentation.make_rows("transformer, training", {"stock": first, "ours": second})
    values = {row["metric"]: (row["eager"], row["stock"], row["ours"]) for row in rows}
    assert values == {
        "peak reserved": (None, 8.0, 4.0),
        "peak allocated": (None, 4.0, 4.0),
        "reserved/allocated, peaks": (None, 2.0, 1.0),
        "reserved/allocated, end": (None, 3.0, 3.0),
        "segments": (None, 5, 2),
        "retries": (None, 0, 0),
    }
    assert rows[0]["note"] == "graphs compiled during the steps: stock 0, ours 1"
    header = results.collect_header("memory-fragmentation", "python x.py", "some-gpu")
    document: results.Document = {**header, "rows": rows}
    results.validate(document)
    text = fragmentation._format("transformer, training", rows, ["  eager: Error"])
    assert text.splitlines()[0] == "transformer, training"
    assert text.splitlines()[-1] == "  eager: Error"


def run_steps(
    kind: str, backend: str | None, shapes: list[tuple[int, int]], **options: Any
) -> torch.Tensor:
    torch._dynamo.reset()
    return fragmentation.run_steps(
        TINY, kind, backend, shapes, device="cpu", dtype=torch.float32, **options
    )


@torch.no_grad()
def test_inference_compiles_once_for_all_shapes() -> None:
    shapes = fragmentation.make_shapes(TINY, 5)
    graphs = torch._dynamo.utils.counters["stats"]
    counts: list[int] = []
    sums = run_steps(
        "inference", "inductor_ext", shapes, start=lambda: counts.append(graphs["unique_graphs"])
    )
    assert counts == [graphs["unique_graphs"]]
    step = fragmentation._Step(TINY, "inference", None, "cpu", torch.float32)
    for (batch, length), value in zip(shapes, sums, strict=True):
        logits = step.model(step.tokens[:batch, :length])
        assert logits.shape == (batch, length, TINY.vocabulary)
        torch.testing.assert_close(value, logits.sum(), rtol=1e-4, atol=1e-2)


def test_training_lowers_the_loss() -> None:
    losses = run_steps("training", None, [(4, 24)] * 30)
    assert losses[-1] < losses[0]


def test_the_command_line_says_that_it_needs_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        fragmentation.main([])
    assert "needs a CUDA device" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        fragmentation.main(["--steps", "0"])
    assert "--steps is 0" in capsys.readouterr().err
