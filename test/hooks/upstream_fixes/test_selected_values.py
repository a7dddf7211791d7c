"""Comparisons of a tensor with values selected from it, and the gradients that depend on them.

The selected values are in eager mode's dtype, and at least one comparison of a row is true: each
selected value gets its gradient, and none is divided by zero.
"""

from __future__ import annotations

import pytest
import torch

from test.support.aot_util import DEVICES

HALVES = (torch.float16, torch.bfloat16)


def _select(*xs: torch.Tensor) -> list[torch.Tensor]:
    a, b, c, d, e, f = xs
    rows = torch.arange(len(a), device=a.device) % 4
    zeros = a.new_zeros(4, a.shape[1])
    return [
        a.abs().sqrt().amax(-1),
        torch.atan2(b, b * 2 + 1).amin(0),
        (torch.exp(c) * c).max(),
        torch.linalg.vector_norm(d / 3, ord=float("inf"), dim=1),
        zeros.index_reduce(0, rows, torch.tanh(e) / 3, "amax", include_self=False),
        zeros.scatter_reduce(0, rows[:, None].expand_as(f), f / 7, "amin", include_self=False),
    ]


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_reach_the_selected_values(device: str) -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(7, 33).to(device, dtype) for dtype in HALVES for _ in range(6)]
    leaves = [leaf.requires_grad_() for leaf in leaves]

    def model(*xs: torch.Tensor) -> list[torch.Tensor]:
        return _select(*xs[:6]) + _select(*xs[6:])

    gradients = []
    for function in (model, torch.compile(model, backend="inductor_ext", fullgraph=True)):
        loss = torch.stack([result.float().sum() for result in function(*leaves)]).sum()
        gradients.append(torch.autograd.grad(loss, leaves))
    for gradient, reference in zip(*reversed(gradients), strict=True):
        # Compiled code rounds less, so that equal values of eager mode may differ.
        torch.testing.assert_close(gradient.sum(), reference.sum(), atol=0.3, rtol=0.1)
        assert torch.equal(gradient != 0, reference != 0)


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_contains_its_maximum(device: str) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(16, 40).to(device, dtype) for dtype in HALVES]

    def model(*xs: torch.Tensor) -> list[torch.Tensor]:
        results = []
        for x in xs:
            quotient, angle = x / 3, torch.atan2(x, x + 2)
            results += [quotient, quotient == quotient.amax(-1, keepdim=True)]
            results += [angle >= angle.amax(0, keepdim=True)]
            results += [quotient > 0.25]
        return results

    results = torch.compile(model, backend="inductor_ext", fullgraph=True)(*inputs)
    for quotient, is_largest, is_largest_angle, is_large in zip(*[iter(results)] * 4, strict=True):
        assert torch.equal(is_largest, quotient == quotient.amax(-1, keepdim=True))
        assert is_largest_angle.any(0).all()
        assert torch.equal(is_large, quotient > 0.25)


def test_both_sides_are_rounded_if_one_is_stored() -> None:
    """A kernel uses the value that it stores without rounding it, and the selected one rounded."""

    def model(x: torch.Tensor) -> torch.Tensor:
        rounded = x.half()
        return rounded.masked_select(rounded == rounded.flatten()[0])

    x = torch.tensor([-0.0446047, 0.0750908, -0.0870976])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(model, backend="inductor_ext", fullgraph=True)
        assert torch.equal(compiled(x), x[:1].half())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cpp_wrapper", [False, True])
def test_gradients_of_converted_inputs(device: str, cpp_wrapper: bool) -> None:
    """The forward graph saves the converted input, which it does not round in registers."""

    def model(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.float16).abs().sqrt().amax(0)

    options = {"cpp_wrapper": cpp_wrapper}
    compiled = torch.compile(model, backend="inductor_ext", dynamic=False, options=options)
    for seed in range(4):
        torch.manual_seed(seed)
        x = (torch.randn(33) * 0.12).to(device).requires_grad_()
        gradient, reference = (
            torch.autograd.grad(function(x), x)[0] for function in (compiled, model)
        )
        torch.testing.assert_close(gradient, reference, atol=0.01, rtol=0.01)
