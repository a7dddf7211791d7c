"""Gradients that depend on buffers and inputs which the forward overwrites."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from test.support.mutating_operators import increment

Program = Callable[[Tensor, Tensor], Tensor]


def scale_and_update(x: Tensor, state: Tensor) -> Tensor:
    y = x * state.tanh()
    state.add_(state * 2)
    return y


def read_a_view(x: Tensor, state: Tensor) -> Tensor:
    y = x * state[:1].exp() + state.t()[1:].sum()
    state[1:] = x.detach()[1:]
    return y.sin()


def read_twice(x: Tensor, state: Tensor) -> Tensor:
    y = x * state.cos()
    state.mul_(0.5)
    y = y * state.cos()
    state.add_(1)
    return y * state.cos()


def write_by_index(x: Tensor, state: Tensor) -> Tensor:
    y = torch.where(state > 0, x, x * 3)
    state.index_put_((torch.tensor([0, 2]),), -state[:2].abs())
    return y


def write_by_an_operator(x: Tensor, state: Tensor) -> Tensor:
    y = x * (state * 2).sigmoid()
    increment(state)
    return y


def average(x: Tensor, state: Tensor) -> Tensor:
    """A running statistic that normalizes before it is updated."""
    y = (x - state.mean(0)) / state.var(0).add(1).sqrt()
    state.lerp_(x.detach(), 0.1)
    return y * y


PROGRAMS = (
    scale_and_update,
    read_a_view,
    read_twice,
    write_by_index,
    write_by_an_operator,
    average,
)


class Model(torch.nn.Module):
    def __init__(self, program: Program, state: Tensor) -> None:
        super().__init__()
        self.program = program
        self.register_buffer("state", state)

    def forward(self, x: Tensor) -> Tensor:
        return self.program(x, self.state)


def _states() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(4, 3), torch.randn(4, 6)[:, ::2], torch.randn(3, 4).t()]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("is_buffer", [True, False], ids=["buffer", "input"])
def test_gradients_use_the_value_that_was_read(program: Program, is_buffer: bool) -> None:
    outcomes = []
    for compiles in (False, True):
        outcome = []
        for state in _states():
            torch._dynamo.reset()
            x = torch.linspace(-1, 1, 12).view(4, 3).requires_grad_()
            function = Model(program, state) if is_buffer else program
            if compiles:
                function = torch.compile(function, backend="inductor_ext")
            for _ in range(2):
                y = function(x) if is_buffer else function(x, state)
                y.sum().backward()
            outcome += [x.grad, state, y]
        outcomes.append(outcome)
    for actual, expected in zip(*outcomes, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("is_view", [False, True], ids=["whole", "view"])
def test_inputs_with_gradients(is_view: bool) -> None:
    """They are overwritten after the forward graph. Inductor's backward raises an error."""

    def program(x: Tensor, weight: Tensor) -> Tensor:
        y = x.tanh() * weight
        (x.t()[1:] if is_view else x).mul_(2)
        return y

    outcomes = []
    for function in (program, torch.compile(program, backend="inductor_ext")):
        leaf, weight = (torch.linspace(a, 2, 12).view(4, 3).requires_grad_() for a in (-1, 1))
        x = leaf * 1
        y = function(x, weight)
        (y.sum() + x.square().sum()).backward()
        outcomes.append((leaf.grad, weight.grad, x, y))
    torch.testing.assert_close(*outcomes)


@pytest.mark.parametrize("options", [{"cpp_wrapper": True}, {}], ids=["cpp", "dynamic"])
def test_other_ways_to_compile(options: dict[str, bool]) -> None:
    outcomes = []
    for compiles in (False, True):
        function: Program = average
        if compiles:
            function = torch.compile(
                average, backend="inductor_ext", options=options, dynamic=not options
            )
        x = torch.linspace(-1, 1, 12).view(4, 3).requires_grad_()
        state = _states()[0]
        for _ in range(2):
            function(x, state).sum().backward()
        outcomes.append((x.grad, state))
    torch.testing.assert_close(*outcomes)


def test_statistics_that_the_backward_does_not_need_are_not_saved() -> None:
    """Nor does the forward graph copy them."""
    graphs: list[torch.fx.GraphModule] = []

    def look(graph: torch.fx.Graph) -> None:
        graphs.append(graph.owning_module)
        copies = graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
        assert not copies

    def model(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return F.batch_norm(x, mean, var, training=True).relu()

    options = {"post_grad_custom_post_pass": look}
    compiled = torch.compile(model, backend="inductor_ext", options=options)
    x, mean, var = torch.randn(8, 3, 4, 4, requires_grad=True), torch.zeros(3), torch.ones(3)
    compiled(x, mean, var).sum().backward()
    assert len(graphs) == 2
    expected = torch.zeros(3), torch.ones(3)
    model(x, *expected)
    torch.testing.assert_close((mean, var), expected)
