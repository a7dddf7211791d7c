"""Matmuls and the nodes after them that one CUTLASS kernel computes, from the graph to the call."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch._inductor.config as inductor_config

pytest.importorskip("triton")

from torch._dynamo.utils import counters
from torch.nn import functional

from inductor_ext import config
from inductor_ext.autotune import accuracy, inductor_benchmark, reference
from inductor_ext.hooks import scope
from test.support import fake_cuda, generated_code
from test.support.cutlass_lowering import (
    GRAPHS,
    XW,
    Call,
    best,
    linear,
    lower,
    matrix,
    operations_of,
    plain,
)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="lowered on a stand-in for a GPU")


def test_epilogues_are_in_the_kernel(calls: list[Call]) -> None:
    before = counters["inductor"]["cutlass_epilogue_fusion_counter"]
    lowered, _ = lower(
        best,
        lambda x, w, b, r: torch.relu(functional.linear(x, w, b)) + r,
        matrix(512, 256),
        matrix(384, 256),
        matrix(384),
        matrix(512, 384),
    )
    (call,) = calls
    assert [node.operation for node in call.tree.nodes() if node.arguments] == [
        "add",
        "relu",
        "add",
    ]
    assert not lowered.kernels()
    assert counters["inductor"]["cutlass_epilogue_fusion_counter"] == before + 1


def test_emulated_rounding_disables_epilogues(calls: list[Call]) -> None:
    with inductor_config.patch(emulate_precision_casts=True):
        lower(best, lambda x, w: torch.relu(x @ w) * 3, matrix(512, 256), matrix(256, 384))
    (call,) = calls
    assert operations_of(call) == []


@pytest.mark.parametrize("fuses", [True, False])
@pytest.mark.parametrize("name", GRAPHS)
def test_tuned_kernels_are_the_kernels_of_the_model(
    name: str, fuses: bool, calls: list[Call]
) -> None:
    """The reference program of a problem and the model's graph use the same kernel."""
    function, inputs, operations = GRAPHS[name]
    _, problems = lower(best, function, *inputs, cutlass__cutlass_epilogue_fusion_enabled=fuses)
    (used,) = calls
    if fuses and operations is not None:
        assert [
            node.operation for node in used.tree.nodes() if node.arguments
        ] == operations.split()
    problem = next(item for item in problems if item.epilogue.tree == used.tree)
    bench = inductor_benchmark.InductorBench("cuda:0")
    with (
        fake_cuda.device(),
        scope.compile_scope(config.snapshot({})),
        mock.patch.object(inductor_benchmark, "load_code", lambda code, _: code),
        inductor_config.patch(compile_threads=1),
        inductor_benchmark.restore_counters(),
    ):
        (code,) = bench.compile([(problem, used.config)], lambda index: None)
    assert "extern_kernels." not in code
    measured = calls[1]
    assert (measured.config, measured.tree) == (used.config, used.tree)


@pytest.mark.skipif(
    not generated_code.takes_strided_offsets(), reason="this torch takes no other offsets"
)
def test_offsets_of_groups_are_contiguous(calls: list[Call]) -> None:
    function, (a, b, _), _ = GRAPHS["grouped"]
    apart = torch.empty_strided((4,), (2,), dtype=torch.int32, device="meta")
    lower(best, function, a, b, apart)
    (call,) = calls
    assert [*call.ends.get_stride()] == [1]


@pytest.mark.parametrize("name", GRAPHS)
def test_the_program_of_a_tree_equals_float64(name: str, calls: list[Call]) -> None:
    if name == "grouped" or name.startswith("fp8"):
        pytest.skip("the CPU has no such operator")
    function, inputs, _ = GRAPHS[name]
    _, problems = lower(best, function, *inputs)
    problem = next(item for item in problems if item.epilogue.tree == calls[0].tree)
    program = reference.program(problem)
    tensors = program.make_inputs("cpu")
    verifier = accuracy.Verifier(program, tensors)
    outputs = program.function(*tensors)
    verifier.set_stock(outputs)
    assert verifier.check(lambda: outputs) is None
    assert [str(output.dtype).removeprefix("torch.") for output in outputs] == [
        dtype for dtype, _ in calls[0].tree.outputs
    ]


def test_a_shared_epilogue_belongs_to_one_matmul(calls: list[Call]) -> None:
    lowered, _ = lower(
        best, lambda x, w, y, v: torch.relu(x @ w.t() + y @ v.t()), *linear(*XW, *XW)
    )
    assert [operations_of(call) for call in calls] == [[], ["add", "relu"]]
    assert not lowered.kernels()


def test_nodes_follow_their_operands(calls: list[Call]) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x @ w.t())
        return y + torch.softmax(y, -1)

    lower(best, function, *linear(*XW))
    assert [operations_of(call) for call in calls] == [["relu"]]


def test_a_matmul_and_its_epilogue_are_both_stored(calls: list[Call]) -> None:
    before = counters["inductor"]["cutlass_epilogue_fusion_counter"]
    lowered, _ = lower(best, GRAPHS["two outputs"][0], *linear(*XW))
    (call,) = calls
    assert [str(layout.dtype) for layout in call.layouts] == ["torch.bfloat16"] * 2
    assert counters["inductor"]["cutlass_epilogue_fusion_counter"] == before + 1
    assert not lowered.kernels()


def test_inexpressible_nodes_are_not_fused(calls: list[Call]) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x @ w.t()
        z = torch.relu(y)
        return y, z, torch.sin(z * torch.sigmoid(z)) + y

    lower(best, function, *linear(*XW))
    (call,) = calls
    assert operations_of(call) == ["relu"]
    # Inner values of the sine's argument are not stored.
    assert len(call.layouts) == 2

    calls.clear()
    lower(best, lambda x, w: torch.sin(y := torch.relu(x @ w.t())) * y, *linear(*XW))
    (call,) = calls
    assert operations_of(call) == ["relu"]
    assert len(call.layouts) == 1


def test_a_sequence_is_computed_as_rows(calls: list[Call]) -> None:
    lowered, _ = lower(best, GRAPHS["sequence"][0], *GRAPHS["sequence"][1])
    (call,) = calls
    assert [list(layout.size) for layout in call.layouts] == [[512, 384]]
    assert [list(inp.get_size()) for inp in call.inputs] == [[384], [512, 384]]
    assert "(4, 128, 384)" in lowered.code


def test_scalars_known_at_the_call_are_arguments(calls: list[Call]) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w.t()) / x.shape[0] + 0.5

    lower(best, function, *linear(("rows", 256), (384, 256)))
    assert {call.tree.parameters for call in calls} == {1}
    assert all(not call.scalars[0].is_number for call in calls)


def test_without_fusion_epilogues_have_own_kernels(calls: list[Call]) -> None:
    lowered, _ = lower(best, plain, *linear(*XW), cutlass__cutlass_epilogue_fusion_enabled=False)
    (call,) = calls
    assert operations_of(call) == []
    assert len(lowered.kernels()) == 1
