"""Results that are views of changed inputs, with dynamic sizes or of inputs that share memory.

Compared with eager mode are results, inputs, and that later writes to an input reach the results.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from inductor_ext.hooks.upstream_fixes import returned_views

Values = tuple[torch.Tensor, ...]

FIRST = torch.tensor([0])


def halves(x: torch.Tensor) -> Values:
    x.mul_(2)
    return x[x.shape[0] // 2 :], x[:, x.shape[1] // 2 :].t(), x[x.shape[0] // 2]


def other_strides(x: torch.Tensor) -> Values:
    x[FIRST] = 5
    return x.view_as(x), x.diagonal(), x.unflatten(1, (2, -1)), x.t()[::2]


def lists(x: torch.Tensor) -> Values:
    x.copy_(torch.cumsum(x, 0))
    return *x.split(x.shape[0] // 2), *x.unbind(0)[:1], x.expand(2, -1, -1)[1]


def views_that_are_written(x: torch.Tensor) -> Values:
    y = x[x.shape[0] // 2 :]
    y[FIRST] = 9
    x.add_(1)
    return y, y.t(), x[: x.shape[0] // 2], x.narrow(0, x.shape[0] - 2, 2)


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: torch.arange(24.0).reshape(4, 6),
    "offset": lambda: torch.arange(60.0).reshape(10, 6)[3:7],
    "strided": lambda: torch.arange(96.0).reshape(8, 12)[::2, ::2],
    "transposed": lambda: torch.arange(48.0).reshape(6, 8).t()[2:6],
}


@pytest.mark.parametrize("program", [halves, other_strides, lists, views_that_are_written])
def test_the_input_is_viewed(program: Callable[[torch.Tensor], Values]) -> None:
    for name, make in LAYOUTS.items():
        torch._dynamo.reset()
        compiled = torch.compile(program, backend="inductor_ext", fullgraph=True, dynamic=True)
        actual_input, expected_input = make(), make()
        with torch.no_grad():
            actual, expected = compiled(actual_input), program(expected_input)
        for when in ("at once", "after a write"):
            pairs = zip((*actual, actual_input), (*expected, expected_input), strict=True)
            for index, (value, reference) in enumerate(pairs):
                assert torch.equal(value, reference), (name, when, index)
            actual_input.add_(100)
            expected_input.add_(100)


def test_gradients_reach_the_views() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(y)
        return x[x.shape[0] // 2 :]

    gradients = []
    compiled = torch.compile(program, backend="inductor_ext", fullgraph=True, dynamic=True)
    for function in (program, compiled):
        leaf, y = torch.arange(60.0).reshape(10, 6), torch.arange(6.0) + 1
        leaf.requires_grad_()
        y.requires_grad_()
        result = function((leaf * 2)[3:7], y)
        (result * result).sum().backward()
        assert leaf.grad is not None
        assert y.grad is not None
        gradients.append((result.detach(), leaf.grad, y.grad))
    for value, reference in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(value, reference)


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
def test_inputs_that_share_memory(dynamic: bool) -> None:
    def program(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Values:
        x.mul_(2)
        y[FIRST] = 3
        w = z * 3
        return x[x.shape[0] // 2 :], y[0].view(2, -1), x.t(), y.view_as(y), x[0, 0], w[1:], w.t(), x

    compiled = torch.compile(program, backend="inductor_ext", fullgraph=True, dynamic=dynamic)
    results = []
    with torch.no_grad():
        for function in (program, compiled):
            base = torch.arange(60.0).reshape(10, 6)
            values = function(base[2:7], base[3:9], torch.ones(3, 4))
            base.add_(1)
            results.append((*values, base))
    for index, (value, reference) in enumerate(zip(results[1], results[0], strict=True)):
        assert torch.equal(value, reference), index


@pytest.mark.parametrize("is_copy", [True, False], ids=["copy", "input"])
def test_the_offset_of_the_input_counts_if_a_copy_is_viewed(is_copy: bool) -> None:
    source = torch.arange(60.0).reshape(10, 6)[3:8]
    expected = source[2:].t()
    viewed = source.clone() if is_copy else source
    view = returned_views._add_offset(viewed[2:].t(), source)
    assert torch.equal(view, expected)
    assert view.data_ptr() == expected.data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"triton.cudagraphs": True}], ids=["plain", "cudagraphs"])
@pytest.mark.parametrize("start", [12, 1], ids=["aligned", "unaligned"])
def test_views_of_inputs_that_are_copied(options: dict[str, bool], start: int) -> None:
    """CUDA graphs copy inputs, and kernels read copies of inputs that are not aligned."""

    def program(x: torch.Tensor) -> Values:
        return x[x.shape[0] // 2 :], x[:, x.shape[1] // 2 :].t(), x * 2

    compiled = torch.compile(program, backend="inductor_ext", dynamic=True, options=options)
    base = torch.arange(200.0, device="cuda")
    for rows in (5, 5, 5, 7, 7, 7):
        x = base[start : start + 6 * rows].view(rows, 6)
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            for value, reference in zip(compiled(x), program(x), strict=True):
                assert torch.equal(value, reference)
