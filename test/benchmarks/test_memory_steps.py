"""The benchmark of the memory of whole calls and training steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.memory import step_models, steps


class Model(nn.Module):
    """A model like those of transformers: keyword arguments and an object with logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.layers(x),)


def build(scale: step_models.Scale) -> tuple[nn.Module, step_models.Inputs]:
    return Model(), {"x": torch.randn(scale.batch, 8)}


def test_peak_and_allocations_of_a_step() -> None:
    def step() -> None:
        first = torch.empty(1000, dtype=torch.uint8)
        del first
        second, third = torch.empty(64, dtype=torch.uint8), torch.empty(2000, dtype=torch.uint8)
        del second, third

    # 2,000 bytes are rounded up to 2,048.
    assert steps.measure_step(step, "cpu") == steps.Footprint(peak=64 + 2048, calls=3)


@pytest.mark.parametrize("kind", ["training", "accumulation", "autocast"])
def test_all_variants_do_the_same(kind: str) -> None:
    weights = []
    for backend in steps.VARIANTS.values():
        step = steps._Step(build, step_models.SMALL, steps.KINDS[kind], backend, "cpu")
        step()
        step()
        assert all(parameter.grad is None for parameter in step.module.parameters())
        weights.append(torch.cat([p.detach().flatten() for p in step.module.parameters()]))
    for other in weights[1:]:
        # Gradients near 0 make AdamW's step depend on their last bits.
        torch.testing.assert_close(
            other, weights[0], rtol=0, atol=2e-3 if kind == "autocast" else 1e-5
        )
    assert not torch.equal(weights[0], torch.cat([p.flatten() for p in Model().parameters()]))


def test_rows_have_a_column_for_each_variant() -> None:
    footprints = {
        "eager": steps.Footprint(4 << 20, 9),
        "stock": steps.Footprint(3 << 20, 5),
        "ours": steps.Footprint(2 << 20, 4),
    }
    rows = steps.make_rows("bert, training", footprints, {"eager": [0.2], "ours": [0.1]})
    values = {row["metric"]: (row["eager"], row["stock"], row["ours"]) for row in rows}
    assert values == {
        "peak": (4.0, 3.0, 2.0),
        "allocator calls": (9, 5, 4),
        "time": (200.0, None, 100.0),
    }


def test_cases_that_are_measured_are_left_out() -> None:
    cases = steps._list_cases(["bert", "vit"], ["inference"], frozenset({"bert, inference"}))
    assert cases == [("vit", "inference")]
