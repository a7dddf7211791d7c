"""Dimensions along which tensors repeat are found in the graph, and need not be computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_ext.lowerings.graph import repeated_values

X = torch.randn(1, 3, 5, 7)
ROWS = torch.arange(5).reshape(5, 1)


class Values(fx.Interpreter):
    """Keeps the value of every node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.values[n] = super().run_node(n)
        return self.values[n]


def expanded(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return x.expand(4, -1, -1, -1)


def bias_added(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    keep = (rows > 2).expand(4, 1, 5, 7)
    bias = torch.where(keep, x, -9.0)
    return torch.ops.prims.convert_element_type(bias, torch.float16)  # type: ignore[no-any-return]


def only_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return torch.where(rows > 2, torch.full((2, 3, 5, 7), 0.5), torch.tensor(-1.0))


def padded(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    bias = torch.ops.aten.constant_pad_nd(x.expand(2, 3, 5, 7) + 1, [0, 1], 0.0)
    return torch.ops.aten.slice(bias, -1, 0, 7).exp()


def padded_where_it_repeats(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.constant_pad_nd(rows.expand(5, 6) * 1.5, [1, 0], 0.0)


def sliced_where_it_repeats(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.slice((rows * 2).expand(5, 6) * 1.5, 1, 2, 6)


def moved(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return (rows * 2).expand(5, 6).permute(1, 0).unsqueeze(-2).select(1, 0).unsqueeze(0)


def random_values(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return torch.bernoulli(torch.full((3, 4), 0.5)) + torch.rand_like(torch.full((3, 4), 0.5))


def counted(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return torch.full((3, 4), 1.0).cumsum(0) * 2


def reshaped(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return rows.expand(5, 6).reshape(6, 5) * 2


CASES: list[tuple[Callable[..., torch.Tensor], set[int]]] = [
    (expanded, {0}),
    (bias_added, {0}),
    (only_rows, {0, 1, 3}),
    (padded, {0}),
    (padded_where_it_repeats, set()),
    (sliced_where_it_repeats, {1}),
    (moved, {1}),
    (random_values, set()),
    (counted, set()),
    (reshaped, set()),
]


@pytest.mark.parametrize(("function", "dims"), CASES, ids=[case[0].__name__ for case in CASES])
def test_repeated_dims(function: Callable[..., torch.Tensor], dims: set[int]) -> None:
    module = make_fx(function)(X, ROWS)
    found = repeated_values.find_repeated_dims(module.graph)
    interpreter = Values(module)
    interpreter.run(X, ROWS)
    for node, of_node in found.items():
        for dim in of_node:
            value = interpreter.values[node]
            assert (value == value.narrow(dim, 0, 1)).all(), (node, dim)
    (result,) = module.graph.output_node().all_input_nodes
    assert found.get(result, frozenset()) == dims


@pytest.mark.parametrize(("function", "dims"), CASES, ids=[case[0].__name__ for case in CASES])
@pytest.mark.parametrize("tracing_mode", ["fake", "symbolic"])
def test_computed_without_repeats(
    function: Callable[..., torch.Tensor], dims: set[int], tracing_mode: str
) -> None:
    module = make_fx(function, tracing_mode=tracing_mode)(X, ROWS)
    graph = module.graph
    output = graph.output_node()
    (result,) = output.all_input_nodes
    sizes = result.meta["val"].shape
    from_last = frozenset(dim - len(sizes) for dim in dims)
    with graph.inserting_before(output):
        compact = repeated_values.add_without_repeats(graph, result, from_last)
    output.args = (compact,)
    graph.lint()
    module.recompile()
    expected = function(X, ROWS)
    for dim in dims:
        expected = expected.narrow(dim, 0, 1)
    if function is not random_values:
        assert torch.equal(module(X, ROWS), expected)
    assert tuple(compact.meta["val"].shape) == tuple(expected.shape)


def test_only_the_small_tensor_is_computed() -> None:
    module = make_fx(bias_added, tracing_mode="fake")(X, ROWS)
    graph = module.graph
    output = graph.output_node()
    (result,) = output.all_input_nodes
    with graph.inserting_before(output):
        compact = repeated_values.add_without_repeats(graph, result, frozenset({-4}))
    output.args = (compact,)
    graph.eliminate_dead_code()
    sizes = [node.meta["val"].numel() for node in graph.nodes if "val" in node.meta]
    assert max(sizes) == X.numel()
