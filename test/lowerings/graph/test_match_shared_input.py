"""Matmuls that share an input: which become one kernel, and that it computes the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from torch.nn import functional as F

from inductor_ext.lowerings.graph import match_shared_input
from inductor_ext.lowerings.graph.fusion_search import find_fusions
from inductor_ext.lowerings.operands import KernelConstants
from inductor_ext.templates.fused_ops import Epilogue
from inductor_ext.templates.tensors import EpilogueInput
from test.support.fusion_checks import PLAIN, X3, Tensor, W, X, aten, check, find, qkv
from test.support.gemm_graphs import lowered_graph, operand_count, tensor

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="traced on a stand-in for a GPU")


def test_a_shared_input_of_weights_of_several_widths() -> None:
    match = check(qkv, X3, W, tensor(16, 64), tensor(8, 64))
    problem = match.problem
    assert (problem.m, problem.n, problem.k, problem.parts) == (32, 72, 64, (48, 16, 8))
    assert not problem.epilogue.gated
    assert match.constants == KernelConstants()
    assert operand_count(match) == 4


def test_each_part_may_have_a_bias() -> None:
    def function(x: Tensor, q: Tensor, k: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        return F.linear(x, q, b), F.linear(x, k, c)

    match = check(function, X, W, tensor(16, 64), tensor(48), tensor(16))
    assert match.problem.operation == "addmm"
    assert match.problem.epilogue == Epilogue((EpilogueInput("bfloat16", "row"),), 1)
    assert match.constants == KernelConstants()
    assert operand_count(match) == 3
    assert len(match.inputs) == 5


def test_a_part_without_a_bias_goes_with_those_without() -> None:
    def function(x: Tensor, q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return F.linear(x, q), F.linear(x, k, b), F.linear(x, v)

    (match,) = find(function, X, W, W, W, tensor(48))
    assert [node.name for node in match.nodes] == ["mm", "mm_1"]


def test_weights_computed_later_move_before_the_call() -> None:
    def function(x: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        query = F.linear(x, q).relu()
        return query * 2, F.linear(x, k * 2 + 1)

    check(function, X, W, W)


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        # The second weight is computed from the first matmul.
        (lambda x, w: x @ torch.relu(x @ w), (tensor(64, 64), tensor(64, 64))),
        (lambda x, q, k: (F.linear(x, q), x @ k), (X, W, tensor(64, 48))),
        (lambda x, q, k: (x @ q, x @ k), (X, tensor(64, 48), tensor(64, 16))),
        (
            lambda x, q, k: (F.linear(x, q), F.linear(x.float(), k.float())),
            (X, W, W),
        ),
        (lambda x, q, k: (F.linear(x, q), F.linear(x.narrow(0, 0, 16), k)), (X, W, W)),
        (
            lambda x, q, k, b: (F.linear(x, q, b), aten.addmm(b, x, k.t(), beta=2)),
            (X, W, W, tensor(48)),
        ),
        # A result is read by as_strided.
        (
            lambda x, q, k: (
                F.linear(x, q).view(4, 8, 48).as_strided((31, 2, 48), (48, 48, 1)),
                F.linear(x, k).chunk(2, -1)[1].as_strided((4, 4), (2, 1), 48),
            ),
            (X, W, W),
        ),
        # The stride between columns is 1, which is not a multiple of 16 bytes.
        (lambda x, q, k: (x @ q, x @ k), (X, tensor(64, 1), tensor(64, 1))),
        (lambda x, q, k: F.silu(x @ q) * (x @ k), (X, tensor(64, 1), tensor(64, 1))),
    ],
)
def test_dependent_matmuls_are_not_joined(function: Any, inputs: Any) -> None:
    assert find(function, *inputs) == []


def test_two_pairs_that_depend_on_each_other() -> None:
    def function(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        first = x @ w
        second = y @ torch.relu(first)
        third = y @ w
        return second, x @ torch.relu(third)

    # Joined, (first, fourth) would depend on third, and (second, third) on first.
    matches = find(function, *(tensor(64, 64) for _ in range(3)))
    assert [[node.name for node in item.nodes] for item in matches] == [["mm", "mm_3"]]


def test_the_number_of_parts_is_limited() -> None:
    matches = find(qkv, X, *[W] * 10)
    assert [len(case.problem.parts) for case in matches] == [match_shared_input.MOST_PARTS, 2]


@pytest.mark.parametrize("written", ["the input", "a cache"])
def test_only_reads_of_written_memory_stay_after_a_write(written: str) -> None:
    def function(x: Tensor, q: Tensor, k: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        return F.linear(x, q), F.linear(x, k), cache

    graph = lowered_graph(function, X, W, W, X)
    _, second = graph.find_nodes(op="call_function", target=aten.mm.default)
    x, *_, cache = graph.find_nodes(op="placeholder")
    node = {"the input": x, "a cache": cache}[written]
    with graph.inserting_before(second):
        graph.call_function(aten.add_.Scalar, (node, 1)).meta["val"] = node.meta["val"]
    assert len(find_fusions(graph, PLAIN)) == (written == "a cache")
