"""FLOPs of nodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from inductor_ext.flops import count_flops

aten = torch.ops.aten


def flops(graph: fx.Graph) -> dict[str, int]:
    return {node.name: count_flops(node) for node in graph.nodes if count_flops(node)}


def test_matmuls_and_convolutions() -> None:
    def program(x: torch.Tensor, weight: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        y = aten.mm(x, weight).relu()
        kernel = image[:, :, :3, :3]
        z = aten.convolution(image, kernel, None, [1, 1], [0, 0], [1, 1], False, [0], 1)
        total: torch.Tensor = y.sum() + z.sum()
        return total

    arguments = torch.randn(7, 3), torch.randn(3, 8), torch.randn(2, 5, 6, 6)
    graph = make_fx(program, tracing_mode="fake")(*arguments).graph
    # The convolution has 2 x 2 x 4 x 4 results, which are sums over 5 x 3 x 3 elements.
    assert flops(graph) == {"mm": 2 * 7 * 3 * 8, "convolution": 2 * (2 * 2 * 16) * (5 * 9)}


def test_attention() -> None:
    graph = fx.Graph()
    query, key = graph.placeholder("query"), graph.placeholder("key")
    query.meta["val"], key.meta["val"] = torch.empty(2, 3, 7, 4), torch.empty(2, 3, 5, 4)
    operator = aten._scaled_dot_product_efficient_attention.default
    node = graph.call_function(operator, (query, key, key, None, False))
    node.meta["val"] = (query.meta["val"], torch.empty(2, 3, 32))
    assert count_flops(node) == 2 * 2 * (2 * 3 * 7 * 5 * 4)


def test_dynamic_sizes_are_read_without_guards() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = aten.bmm(x, y)
        return result

    gm = make_fx(program, tracing_mode="symbolic")(torch.randn(5, 7, 3), torch.randn(5, 3, 4))
    shape_env: ShapeEnv = gm.shape_env  # type: ignore[assignment]
    before = len(shape_env.guards)
    assert flops(gm.graph) == {"bmm": 2 * 5 * 7 * 3 * 4}
    assert len(shape_env.guards) == before


@pytest.mark.parametrize("value", [None, "a tuple"])
def test_unknown_sizes_count_nothing(value: Any) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = value
    node = graph.call_function(aten.mm.default, (x, x))
    assert count_flops(node) == 0
    node.meta["val"] = torch.empty(3, 3)
    assert count_flops(node) == 0
