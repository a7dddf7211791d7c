"""The operations after a matmul that its kernel computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from torch import fx
from torch.nn import functional as F

from inductor_ext.lowerings.graph.epilogue_region import add_epilogue, find_region, flatten_epilogue
from inductor_ext.lowerings.graph.matmul_nodes import problem_of
from inductor_ext.templates.fused_ops import Epilogue
from inductor_ext.templates.tensors import EpilogueInput
from test.support import fake_cuda
from test.support.fusion_checks import F32, X3, Tensor, W, X, aten, find, row, values_of
from test.support.gemm_graphs import lowered_graph, tensor

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="traced on a stand-in for a GPU")


@pytest.mark.parametrize(
    ("function", "inputs", "expected"),
    [
        (lambda x, w: F.linear(x, w), (X, W), Epilogue()),
        (lambda x, w: F.linear(x, w).relu(), (X3, W), Epilogue(pointwise=1)),
        # -x, exp, 1 + x and a division.
        (lambda x, w: F.silu(F.linear(x, w)), (X3, W), Epilogue(pointwise=1 + 6 + 1 + 4)),
        (
            lambda x, w, r: F.linear(x, w) + r,
            (X3, W, tensor(2, 16, 48)),
            Epilogue((EpilogueInput("bfloat16", "matrix"),), 1),
        ),
        (
            lambda x, w, b, s: (F.linear(x, w, b).float() * s).to(torch.float16),
            (X, W, tensor(48), tensor(32, 1, dtype=F32)),
            Epilogue((row(), EpilogueInput("float32", "column")), 2, "float16"),
        ),
        (
            lambda x, w, b: (F.linear(x, w) * b.float() + b.float()).relu(),
            (X, W, tensor(48)),
            Epilogue((row(),), 3, "float32"),
        ),
        # Another matmul reads it.
        (
            lambda x, w, v: F.linear(F.linear(x, w).view(2, 16, 48).relu(), v, None),
            (X, W, tensor(48, 48)),
            Epilogue(pointwise=1),
        ),
        # Inductor fuses it into the prologue.
        (lambda x, w: F.linear(x, w).relu().sum(0), (X, W), Epilogue()),
        (
            lambda x, w: F.linear(x, w).relu().view(2, 16, 48).permute(1, 0, 2).sum(0),
            (X, W),
            Epilogue(),
        ),
        (
            lambda x, w, r: F.layer_norm(F.linear(x, w) + r, (48,)),
            (X, W, tensor(32, 48)),
            Epilogue(),
        ),
        (
            lambda x, w, r: (lambda h: (h + r).t() + h.sin())(F.linear(x, w).relu()),
            (tensor(48, 64), W, tensor(48)),
            Epilogue(),
        ),
        # The matmul's output is used as well.
        (lambda x, w: (lambda h: (h, h.relu()))(F.linear(x, w)), (X, W), Epilogue()),
        (lambda x, w: (lambda h: h.relu() + h.sum(0))(F.linear(x, w)), (X, W), Epilogue()),
        (lambda x, w: F.linear(x, w).t().relu(), (X, W), Epilogue()),
        (lambda x, w, r: F.linear(x, w) + r, (X, W, tensor(5, 32, 48)), Epilogue()),
        # Two independent results.
        (lambda x, w: (lambda h: (h.relu(), h.cos()))(F.linear(x, w)), (X, W), Epilogue()),
    ],
)
def test_fused_epilogues(function: Any, inputs: Any, expected: Epilogue) -> None:
    graph = lowered_graph(function, *inputs)
    node = next(n for n in graph.nodes if "mm" in str(n.target))
    problem = problem_of(node)
    assert problem is not None
    assert add_epilogue(node, problem).epilogue == expected


def test_epilogues_after_a_gate() -> None:
    def function(x: Tensor, g: Tensor, u: Tensor, r: Tensor) -> Tensor:
        return F.silu(F.linear(x, g)) * F.linear(x, u) + r

    (match,) = find(function, X, W, W, tensor(32, 48))
    expected = Epilogue((EpilogueInput("bfloat16", "matrix"),), 1, gated=True)
    assert add_epilogue(match.outputs[0], match.problem).epilogue == expected


def test_nodes_of_other_kernels_end_a_region() -> None:
    graph = lowered_graph(lambda x, w: F.linear(x, w).relu().cos(), X, W)
    (node,) = graph.find_nodes(op="call_function", target=aten.mm.default)
    _, relu, cos = find_region(node)
    assert find_region(node, {cos}) == [node, relu]


@pytest.mark.parametrize(
    ("function", "inputs", "flat"),
    [
        (lambda x, w, r: F.linear(x, w) + r, (X3, W, tensor(2, 16, 48)), 1),
        (lambda x, w, r: (F.linear(x, w) * r).relu(), (X3, W, tensor(2, 16, 1)), 2),
        (lambda x, w, b: F.silu(F.linear(x, w) + b), (X3, W, tensor(1, 1, 48)), 7),
        (lambda x, w, b: (F.linear(x, w) * b).view(32, 48) + 1, (X3, W, tensor(48)), 2),
        (lambda x, w, s: F.linear(x, w).relu() * s, (X3, W, tensor()), 2),
        # Its rows do not correspond to the matmul's rows.
        (lambda x, w, r: F.linear(x, w).relu() + r, (X3, W, tensor(16, 48)), 1),
        (
            lambda x, w, r: F.linear(x, w).relu() + r,
            (X3, W, tensor(2, 16, 48, strides=(48, 96, 1))),
            1,
        ),
        (lambda x, w, r: F.linear(x, w).relu() + r, (X, W, tensor(1, 32, 48)), 1),
    ],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_epilogues_are_computed_on_rows(
    function: Any, inputs: Any, flat: int, dynamic: bool
) -> None:
    sequences = [(i, 1) for i, inp in enumerate(inputs) if inp.dim() == 3 and inp.size(1) == 16]
    graph = lowered_graph(function, *inputs, dynamic=sequences if dynamic else ())
    (node,) = graph.find_nodes(op="call_function", target=aten.mm.default)
    problem = problem_of(node)
    assert problem is not None
    expected = add_epilogue(node, problem)
    (last,) = graph.output_node().all_input_nodes
    value = last.meta["val"]
    values = values_of(inputs)
    before = fx.Interpreter(torch.nn.Module(), graph=graph).run(*values)
    with fake_cuda.device():
        flatten_epilogue(graph, node)
    graph.lint()
    assert graph.output_node().all_input_nodes == [last]
    assert last.meta["val"] is value
    rows = [n for n in graph.nodes if torch.Tag.pointwise in getattr(n.target, "tags", ())]
    assert sum(n.meta["val"].dim() == 2 for n in rows) == flat
    assert add_epilogue(node, problem) == expected
    after = fx.Interpreter(torch.nn.Module(), graph=graph).run(*values)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old, new)
