"""Graphs that mutate memory between matmuls that one kernel could compute.

Fused kernels must use the values from before the write, as eager mode does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from torch import fx
from torch.nn import functional as F

from inductor_ext.lowerings.graph.fusion import is_closed, is_written_between
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.triton.config import GemmConfig
from test.support import kernel_interpreter
from test.support.gemm_graphs import lowered_graph, tensor
from test.support.matmul_lowering import lower

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="lowered on a stand-in for a GPU")

Tensor = torch.Tensor
HALF = torch.float16
aten = torch.ops.aten

CONFIGS = {
    "mixed": GemmConfig("mixed", 16, 16, 32, 2, 2),
    "int_mm": GemmConfig("cp_async", 32, 32, 64, 2, 2),
}
TILE = GemmConfig("splitk", 16, 32, 64, 2, 2)


def layer_norm(x: Tensor, n: Tensor, w: Tensor, i: Tensor, v: Tensor) -> Tensor:
    h = F.layer_norm(x, (64,), n)
    x.index_put_((i,), v)
    return F.linear(h, w)


def layer_norm_before_parts(
    x: Tensor, n: Tensor, w: Tensor, u: Tensor, i: Tensor, v: Tensor
) -> tuple[Tensor, ...]:
    h = F.layer_norm(x, (64,), n)
    x.index_put_((i,), v)
    return F.linear(h, w), F.linear(h, u)


def gate_by(act: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def function(x: Tensor, w: Tensor, i: Tensor, v: Tensor) -> Tensor:
        gate, up = F.linear(x, w).chunk(2, -1)
        x.index_put_((i,), v)
        return act(gate) * up

    return function


def quantized_gate(x: Tensor, q: Tensor, i: Tensor, v: Tensor) -> Tensor:
    gate, up = F.linear(x, q.to(x.dtype)).chunk(2, -1)
    x.index_put_((i,), v)
    return torch.relu(gate) * up


def sequence(x: Tensor, w: Tensor, r: Tensor, i: Tensor, v: Tensor) -> Tensor:
    h = F.linear(x, w) + r
    r.index_put_((i,), v)
    return torch.relu(h) * 2


def integers(a: Tensor, b: Tensor, rows: Tensor, columns: Tensor, i: Tensor, v: Tensor) -> Tensor:
    sums = torch._int_mm(a, b.t()).float() * rows
    rows.index_put_((i,), v)
    return sums * columns


def several_sizes(x: Tensor, w: Tensor, r: Tensor, i: Tensor, v: Tensor) -> Tensor:
    h = F.linear(x, w)
    x.index_put_((i,), v)
    return h + r


def values(*shapes: tuple[int, ...], dtype: torch.dtype = HALF) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(map(len, shapes)))
    if dtype is torch.int8:
        return [torch.randint(-127, 128, shape, generator=generator).to(dtype) for shape in shapes]
    return [(torch.randn(shape, generator=generator) / 4).to(dtype) for shape in shapes]


PLACES = torch.tensor([0, 3, 5, 9])
X, W, WIDE, NEW = values((32, 64), (48, 64), (96, 64), (4, 64))
NORM = torch.ones(64, dtype=HALF)
X3, RESIDUAL, NEW3 = values((2, 16, 64), (2, 16, 48), (1, 16, 48))
A, B = values((32, 64), (48, 64), dtype=torch.int8)
ROWS, COLUMNS, NEW_ROWS = values((32, 1), (1, 48), (4, 1), dtype=torch.float32)

CASES: dict[str, tuple[Callable[..., Any], list[Tensor], set[int]]] = {
    "norm": (layer_norm, [X, NORM, W, PLACES, NEW], set()),
    "norm before parts": (layer_norm_before_parts, [X, NORM, W, WIDE, PLACES, NEW], set()),
    "gate": (gate_by(F.silu), [X, WIDE, PLACES, NEW], set()),
    "relu gate": (gate_by(torch.relu), [X, WIDE, PLACES, NEW], set()),
    "quantized gate": (
        quantized_gate,
        [X / 64, *values((96, 64), dtype=torch.int8), PLACES, NEW / 64],
        set(),
    ),
    "sequence": (sequence, [X3, W, RESIDUAL, torch.tensor([1]), NEW3], set()),
    "integers": (integers, [A, B, ROWS, COLUMNS, PLACES, NEW_ROWS], set()),
    "several sizes": (several_sizes, [X, W, RESIDUAL.flatten(0, 1), PLACES, NEW], {0, 2}),
}
"""A function that mutates its first or third input, its inputs, and those with dynamic rows."""


def rule(problem: GemmProblem) -> GemmConfig | None:
    """An extension kernel wherever one exists; with dynamic rows only for many rows."""
    return CONFIGS.get(problem.operation, TILE) if problem.m > 16 else None


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    jobs = {}
    for name, (function, arguments, unknown) in CASES.items():
        inputs = [
            (("rows", *item.shape[1:]) if index in unknown else tuple(item.shape), item.dtype)
            for index, item in enumerate(arguments)
        ]
        for reorder in (False, True):
            with kernel_interpreter.interpretable():
                lowered, problems = lower(
                    rule, function, *inputs, reorder_for_locality=reorder, triton__max_tiles=1
                )
            assert problems
            jobs[f"{name}, {reorder}"] = lowered.code, [item.clone() for item in arguments]
    return kernel_interpreter.interpret_modules(jobs)


@pytest.mark.parametrize("reorder", [False, True], ids=["", "reordered"])
@pytest.mark.parametrize("name", CASES)
def test_values_read_before_a_write_are_used(
    name: str, reorder: bool, results: dict[str, Any]
) -> None:
    function, inputs, _ = CASES[name]
    wide = [item.double() if item.is_floating_point() else item.clone() for item in inputs]
    if name == "integers":
        # torch multiplies these only as integers.
        expected: Any = (A.double() @ B.double().t()) * ROWS.double() * COLUMNS.double()
    else:
        expected = function(*wide)
    outputs = results[f"{name}, {reorder}"]
    pairs = (
        [(outputs, expected)]
        if isinstance(expected, Tensor)
        else zip(outputs, expected, strict=True)
    )
    for extension, exact in pairs:
        error = (extension.double() - exact).abs().max() / exact.abs().max()
        assert error < 4e-3


def between(*targets: Any) -> tuple[fx.Graph, list[fx.Node]]:
    """A graph of two matmuls of one input with calls between them, and the matmuls."""
    graph = lowered_graph(lambda x, w, u, c: (x @ w, x @ u, c), *[tensor(64, 64)] * 4)
    matmuls = graph.find_nodes(op="call_function", target=aten.mm.default)
    with graph.inserting_before(matmuls[1]):
        for target, name in targets:
            (node,) = (node for node in graph.nodes if node.name == name)
            arguments = (node, 1) if target is aten.add_.Scalar else (node,)
            graph.call_function(target, arguments).meta["val"] = node.meta["val"]
    return graph, matmuls


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ([], False),
        ([(aten.cos.default, "arg0_1")], False),
        ([(aten.add_.Scalar, "arg3_1")], False),
        ([(aten.add_.Scalar, "arg0_1")], True),
        ([(aten.cos.default, "arg0_1"), (aten.relu_.default, "arg2_1")], True),
        # It may write anything.
        ([(torch.ops.higher_order.triton_kernel_wrapper_mutation, "arg3_1")], True),
    ],
    ids=["nothing", "pure", "elsewhere", "the input", "a later weight", "unknown"],
)
def test_writes_between_matmuls_prevent_the_fusion(targets: list[Any], expected: bool) -> None:
    _, matmuls = between(*targets)
    assert is_written_between(matmuls) is expected
    assert is_closed(matmuls, matmuls, ()) is not expected
    # Separate matmuls can stay where they are.
    assert not any(is_written_between([matmul]) for matmul in matmuls)


def test_branches_that_write_nothing_are_no_obstacle() -> None:
    graph, matmuls = between()
    branch = fx.GraphModule({}, fx.Graph())
    argument = branch.graph.placeholder("x")
    branch.graph.output((branch.graph.call_function(aten.cos.default, (argument,)),))
    owner = graph.owning_module
    assert owner is not None
    owner.branch = branch
    x = next(iter(graph.nodes))
    with graph.inserting_before(matmuls[1]):
        name = graph.get_attr("branch")
        graph.call_function(torch.ops.higher_order.cond, (True, name, name, (x,)))
    assert not is_written_between(matmuls)
    with branch.graph.inserting_before(branch.graph.output_node()):
        branch.graph.call_function(aten.add_.Scalar, (argument, 1))
    assert is_written_between(matmuls)


def test_scaled_rows_of_unknown_number_are_one_region() -> None:
    # The cast precedes the row amax, and is read after it as well.
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        wide = F.linear(x, w).float()
        scales = wide.abs().amax(-1, keepdim=True) / 127
        return (wide / scales).to(torch.int8), scales

    inputs = (("rows", 64), HALF), ((48, 64), HALF)
    lowered, problems = lower(rule, function, *inputs)
    assert any(item.epilogue.reductions for item in problems)
    x = values((40, 64))[0]
    outputs = kernel_interpreter.interpret_modules({"all": (lowered.code, [x, W])})["all"]
    numbers, scales = function(x.double(), W.double())
    assert (outputs[0].double() - numbers).abs().max() <= 1
    assert torch.allclose(outputs[1].double(), scales.double(), rtol=2e-3)
