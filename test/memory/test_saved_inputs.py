"""What a forward graph saves of the weights and images that convolutions read."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.harness import measure


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1))
    return nn.Sequential(*layers)


def test_gradients_are_those_of_eager_mode() -> None:
    x = torch.randn(2, 64, 8, 8)
    gradients = []
    for backend in ("eager", "inductor_ext"):
        model = make_model()
        torch.compile(model, backend=backend)(x).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-3)


def test_weights_are_not_copied_until_the_backward() -> None:
    x = torch.randn(2, 64, 8, 8)
    peaks = {}
    for backend in ("inductor", "inductor_ext"):
        model = make_model()
        compiled = torch.compile(model, backend=backend)

        def step() -> None:
            compiled(x).square().sum().backward()  # noqa: B023  called in this iteration
            model.zero_grad()  # noqa: B023

        step()
        peaks[backend] = measure.measure_peak_allocated(step)
    # Two copies of weights, and one that the operator makes of the layer that it differentiates.
    weight = 4 * 64 * 64 * 9
    assert peaks["inductor_ext"] <= peaks["inductor"] - weight


@pytest.mark.parametrize("backend", ["eager", "inductor_ext"])
def test_a_weight_that_is_overwritten_before_the_backward_is_an_error(backend: str) -> None:
    model = make_model()
    loss = torch.compile(model, backend=backend)(torch.randn(2, 64, 8, 8)).square().sum()
    with torch.no_grad():
        model[0].weight.mul_(2)
        model[2].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
