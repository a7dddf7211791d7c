"""Matmuls with int8 weights, which Inductor replaces on a GPU, are restored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch.nn import functional as F

pytest.importorskip("triton")

from benchmarks.gemm.models import int8_linear
from inductor_ext import config
from inductor_ext.hooks import scope
from inductor_ext.lowerings.graph import matmul_nodes, undo_woq_int8
from test.support import fake_cuda
from test.support.gemm_graphs import lowered_graph, tensor

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="it stands in for a GPU")

aten = torch.ops.aten


def by_hand(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight.to(x.dtype)) * scales


def batched(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    wide = weight.to(x.dtype).permute(1, 0).expand(x.shape[0], -1, -1)
    return torch.bmm(x.expand(x.shape), wide) * scales


def graph_of(function: Callable[..., Any], x: tuple[int, ...], **rest: Any) -> fx.Graph:
    weights = tensor(24, 32, dtype=torch.int8), tensor(24)
    return lowered_graph(function, tensor(*x), *weights, **rest)


def replaced(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.name.startswith("woq_int8")]


@pytest.mark.parametrize(
    ("function", "x"),
    [
        pytest.param(int8_linear, (4, 32), id="as torchao writes it"),
        pytest.param(int8_linear, (2, 4, 32), id="as torchao writes it, in three dimensions"),
        pytest.param(by_hand, (2, 4, 32), id="by hand"),
        pytest.param(batched, (2, 4, 32), id="a batch"),
    ],
)
def test_a_replaced_matmul_is_written_out(function: Callable[..., Any], x: tuple[int, ...]) -> None:
    graph = graph_of(function, x)
    assert replaced(graph)
    with fake_cuda.device():
        undo_woq_int8.restore_matmuls(graph)
    graph.lint()
    (matmul,) = [node for node in graph.nodes if node.target == aten.mm.default]
    problem = matmul_nodes.problem_of(matmul)
    assert problem is not None
    rows = torch.Size(x[:-1]).numel()
    assert (problem.m, problem.n, problem.k) == (rows, 24, 32)
    inputs = (
        torch.randn(x).bfloat16(),
        torch.randint(-127, 128, (24, 32), dtype=torch.int8),
        torch.rand(24).bfloat16(),
    )
    (result,) = fx.Interpreter(fx.GraphModule({}, graph)).run(*inputs)
    torch.testing.assert_close(result, function(*inputs))


def test_with_rounding_ops_inductors_form_stays() -> None:
    graph = graph_of(by_hand, (2, 4, 32))
    with fake_cuda.device(), inductor_config.patch(emulate_precision_casts=True):
        undo_woq_int8.restore_matmuls(graph)
    assert replaced(graph)


def test_sizes_may_be_symbols() -> None:
    graph = graph_of(by_hand, (2, 4, 32), dynamic=[(0, 1)])
    assert replaced(graph)
    with fake_cuda.device():
        undo_woq_int8.restore_matmuls(graph)
    graph.lint()
    inputs = (
        torch.randn(2, 9, 32).bfloat16(),
        torch.ones(24, 32, dtype=torch.int8),
        torch.ones(24).bfloat16(),
    )
    (result,) = fx.Interpreter(fx.GraphModule({}, graph)).run(*inputs)
    torch.testing.assert_close(result, by_hand(*inputs))


def test_on_a_cpu_inductors_replacement_stays() -> None:
    graph = graph_of(int8_linear, (4, 32))
    (node,) = replaced(graph)
    node.meta["val"] = torch.empty(4, 24)
    undo_woq_int8.restore_matmuls(graph)
    assert replaced(graph) == [node]


REPLACEMENT = "extern_kernels._weight_int8pack_mm("


def code_of(rows: int) -> str:
    """The code that Inductor generates for a layer without tuning."""

    def function(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, weight.permute(1, 0).to(x.dtype)) * scales

    bf16 = torch.bfloat16
    inputs = ((rows, 4096), bf16), ((14336, 4096), torch.int8), ((14336,), bf16)
    # Inductor's pattern needs a graph without dead nodes, as AOTAutograd returns it.
    return fake_cuda.lower(function, *inputs, edit=fx.Graph.eliminate_dead_code).code


@pytest.mark.parametrize("rows", [1, 16, 2048])
def test_matmuls_are_restored_without_tuning(rows: int) -> None:
    assert REPLACEMENT in code_of(rows)
    with scope.compile_scope(config.snapshot({})):
        code = code_of(rows)
    assert REPLACEMENT not in code
    assert ("tl.dot(" in code) == (rows <= 16)
    assert ("extern_kernels.mm(" in code) == (rows > 16)


@pytest.mark.parametrize(
    ("settings", "options"),
    [({"gemm_templates": False}, {}), ({}, {"batch_invariant": True})],
    ids=["without kernels of the extension", "batch invariant"],
)
def test_settings_that_keep_inductors_replacement(
    settings: dict[str, Any], options: dict[str, Any]
) -> None:
    options = {name: value for name, value in options.items() if hasattr(inductor_config, name)}
    if not settings and not options:
        pytest.skip("this torch has no such option")
    with scope.compile_scope(config.snapshot(settings)), inductor_config.patch(options):
        assert REPLACEMENT in code_of(16)
