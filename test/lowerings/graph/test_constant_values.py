"""Values that depend on no input, in graphs as dynamo and torch.export make them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from inductor_ext.lowerings.graph.constant_values import evaluate, fake_value


def _capture(program: Callable[..., Any], *inputs: torch.Tensor, dynamic: bool = False) -> fx.Graph:
    """Return dynamo's graph of a program that returns a tuple."""
    graphs = []

    def backend(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(gm.graph)
        # dynamo removes the fake tensors after the compile.
        for node in gm.graph.nodes:
            if fake_value(node) is not None:
                node.meta["val"] = fake_value(node)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(program, backend=backend, dynamic=dynamic, fullgraph=True)(*inputs)
    (graph,) = graphs
    return graph


def _first_result(graph: fx.Graph) -> fx.Node:
    results: Any = graph.output_node().args[0]
    node = results[0]
    assert isinstance(node, fx.Node)
    return node


def ranges(x: torch.Tensor) -> torch.Tensor:
    rows, columns = torch.arange(4, device=x.device), torch.arange(6, device=x.device) + 0
    return (columns[None, :] <= rows[:, None]).expand(2, -1, -1)


def packed(x: torch.Tensor) -> torch.Tensor:
    """As transformers looks for sequences that are packed into one."""
    positions = torch.arange(5).unsqueeze(0).expand(2, -1)
    starts = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1
    number = starts.cumsum(-1)
    rows, batch = torch.arange(5)[None, :, None], torch.arange(2)[:, None, None]
    same = number[batch, rows] == number[batch, torch.arange(5)[None, None, :]]
    return same & same.new_ones((), dtype=torch.bool)


def filled(x: torch.Tensor) -> torch.Tensor:
    hidden = torch.ones(3, 3, dtype=torch.bool).triu(1)
    return torch.zeros(3, 3).masked_fill(hidden, -torch.inf).to(torch.float16)


def like_an_input(x: torch.Tensor) -> torch.Tensor:
    return x.new_full((2, 2), 3) + torch.ones_like(x[:2])


@pytest.mark.parametrize("program", [ranges, packed, filled, like_an_input])
@pytest.mark.parametrize("exported", [False, True])
def test_values(program: Callable[..., torch.Tensor], exported: bool) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return program(x), x + 1

    x = torch.randn(3)
    graph = torch.export.export(Model(), (x,)).graph if exported else _capture(Model(), x)
    value = evaluate(_first_result(graph))
    assert value is not None
    assert torch.equal(value, program(x))
    assert value.dtype == program(x).dtype


def input_value(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(3) <= x


def like_a_written_value(x: torch.Tensor) -> torch.Tensor:
    ones = torch.ones_like(x)
    ones.mul_(x)
    return ones.view(1, 3)


def written(x: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(3, 3, dtype=torch.bool)
    mask[1] = False
    return mask.clone()


def written_later(x: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(3, dtype=torch.bool)
    expanded = mask.expand(3, 3)
    mask.logical_and_(x > 0)
    return expanded


def written_by_out(x: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(3)
    torch.add(x, 1, out=mask)
    return mask.view(1, 3)


def added_in_place(x: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(3)
    view = mask[None]
    mask += x
    return view


def random(x: torch.Tensor) -> torch.Tensor:
    return torch.rand(3) > 0.5


def summed(x: torch.Tensor) -> torch.Tensor:
    """The order of summation differs between devices."""
    return torch.full((3,), 0.1).cumsum(0)


def large(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(2**28, dtype=torch.bool)[:3]


@pytest.mark.parametrize(
    "program",
    [
        input_value,
        like_a_written_value,
        written,
        written_later,
        written_by_out,
        added_in_place,
        random,
        summed,
        large,
    ],
)
def test_values_that_are_not_constant(program: Callable[..., torch.Tensor]) -> None:
    graph = _capture(lambda x: (program(x), x + 1), torch.randn(3))
    assert evaluate(_first_result(graph)) is None


def test_symbolic_sizes_are_inputs() -> None:
    graph = _capture(lambda x: (torch.arange(x.shape[0]) >= 0,), torch.randn(3), dynamic=True)
    assert evaluate(_first_result(graph)) is None


def test_graphs_without_fake_tensors() -> None:
    graph = fx.Graph()
    assert evaluate(graph.call_function(torch.arange, (3,))) is None
