"""Gradients of average pools whose last windows are cut off."""

from __future__ import annotations

import torch
from torch.nn import functional

SHAPES = ((2, 3, 7, 9), (1, 3, 8, 8), (2, 3, 8), (1, 2, 3, 5, 5), (1, 2, 6, 4), (2, 2, 7, 7))


def program(a, b, c, d, e, f):  # type: ignore[no-untyped-def]
    return (
        functional.avg_pool2d(a, 2, ceil_mode=True),
        functional.avg_pool2d(b, 3, 2, 1, ceil_mode=True),
        functional.avg_pool1d(c, 3, 2, ceil_mode=True),
        functional.avg_pool3d(d, 2, ceil_mode=True),
        # All windows are whole.
        functional.avg_pool2d(e, 2, ceil_mode=True),
        functional.avg_pool2d(f, 2, ceil_mode=True, count_include_pad=False),
    )


def test_gradients_are_those_of_the_elements_that_are_left() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(shape, requires_grad=True) for shape in SHAPES]
    expected = program(*inputs)
    weights = [torch.randn_like(value) for value in expected]
    compiled = torch.compile(program, backend="inductor_ext", fullgraph=True)(*inputs)
    torch.testing.assert_close(compiled, expected)
    actual = torch.autograd.grad(compiled, inputs, weights)
    torch.testing.assert_close(actual, torch.autograd.grad(expected, inputs, weights))
