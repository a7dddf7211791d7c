"""The cases of the GEMM benchmark: which there are, and that every program is correct."""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gemm import cases as gemm_suite
from benchmarks.gemm import models as gemm_models
from benchmarks.gemm.cases import CASES, Case
from benchmarks.gemm.measurement import compute_error

TOYS = {
    "mm": Case("llama", "toy", "mm", 5, 24, 32),
    "bmm": Case("bmm", "toy", "bmm", 5, 24, 32, 3, "rc"),
    "grouped_m": Case("grouped", "toy", "grouped_m", 32, 24, 64, 4, "rc"),
    "grouped_n": Case("grouped", "toy", "grouped_n", 16, 32, 64, 4, "rr"),
    "grouped_k": Case("grouped", "toy", "grouped_k", 16, 24, 64, 4, "cr"),
    "int8": Case("int8", "toy", "int8", 5, 24, 32),
    "int8_torchao": Case("int8", "toy", "int8_torchao", 5, 24, 32),
    "int4": Case("int4", "toy", "int4", 5, 24, 256),
    "fp8": Case("fp8", "toy", "fp8", 16, 32, 64),
    "int8_qkv": Case("quantized", "toy", "int8_qkv", 5, 32, 32, parts=(16, 8, 8)),
    "int8_swiglu": Case("quantized", "toy", "int8_swiglu", 5, 24, 32),
    "int4_qkv": Case("quantized", "toy", "int4_qkv", 5, 32, 256, parts=(16, 8, 8)),
    "int4_swiglu": Case("quantized", "toy", "int4_swiglu", 5, 24, 256),
    "fp8_qkv": Case("quantized", "toy", "fp8_qkv", 16, 64, 64, parts=(32, 16, 16)),
    "int8_by_int8": Case("quantized", "toy", "int8_by_int8", 24, 32, 64),
    "bias_gelu": Case("fused", "toy", "bias_gelu", 5, 24, 32),
    "residual": Case("fused", "toy", "residual", 5, 24, 32),
    "swiglu": Case("fused", "toy", "swiglu", 5, 24, 32),
    "swiglu_fp8": Case("fused", "toy", "swiglu_fp8", 5, 24, 32),
    "geglu": Case("fused", "toy", "geglu", 5, 24, 32),
    "qkv": Case("fused", "toy", "qkv", 5, 32, 32, parts=(16, 8, 8)),
    "qkv_frozen": Case("frozen", "toy", "qkv_frozen", 5, 32, 32, parts=(16, 8, 8)),
    "rmsnorm": Case("fused", "toy", "rmsnorm", 5, 24, 32),
    "layernorm": Case("fused", "toy", "layernorm", 5, 24, 32),
    "layernorm_qkv": Case("fused", "toy", "layernorm_qkv", 5, 32, 32, parts=(16, 8, 8)),
}


def run(kind: str) -> tuple[Any, gemm_suite.Program]:
    program = TOYS[kind].program("cpu")
    try:
        return program.function(*program.inputs), program
    except RuntimeError as error:
        if kind.startswith("fp8"):
            pytest.skip(f"no row-wise scales on this CPU: {error}")
        raise


@pytest.mark.parametrize("kind", gemm_suite.KINDS)
def test_program_agrees_with_float64(kind: str) -> None:
    result, program = run(kind)
    scaled = kind == "swiglu_fp8"
    # Two roundings to bfloat16, and int4's scaled weights are a third.
    assert compute_error(result, program.reference()) < (2**-5 if scaled else 2**-7)
    results = result if isinstance(result, tuple) else (result,)
    if not scaled:
        assert all(0.2 < float(output.float().std()) < 3 for output in results)
    for alternative in program.alternatives.values():
        other = alternative()
        others = other if isinstance(other, tuple) else (other,)
        assert [other.shape for other in others] == [output.shape for output in results]


@pytest.mark.parametrize(
    "kind", [k for k in gemm_suite.KINDS if not k.startswith(("fp8", "grouped"))]
)
def test_problem_has_the_program_s_flops_and_bytes(kind: str) -> None:
    case = TOYS[kind]
    program = case.program("cpu")
    with FlopCounterMode(display=False) as counter:
        result = program.function(*program.inputs)
    # torch does not count matmuls of integers.
    assert counter.get_total_flops() == (0 if kind == "int8_by_int8" else case.problem.flops)
    results = result if isinstance(result, tuple) else (result,)
    if not program.frozen:
        assert case.problem.bytes_read == sum(inp.nbytes for inp in program.inputs)
    assert case.problem.bytes_written == sum(output.nbytes for output in results)


MATCHED_KINDS = [
    kind
    for kind in TOYS
    if kind.startswith(("int8", "int4", "fp8", "grouped")) and kind != "int8_by_int8"
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="traced on a fake GPU")
@pytest.mark.parametrize("kind", MATCHED_KINDS)
def test_graph_matching_finds_the_problem(kind: str) -> None:
    pytest.importorskip("triton")
    from inductor_ext.lowerings.graph import (
        fusion_search,
        match_dequantized,
        matmul_nodes,
        undo_woq_int8,
    )
    from inductor_ext.settings import Settings
    from test.support import fake_cuda
    from test.support.gemm_graphs import lowered_graph

    case = TOYS[kind]
    program = case.program("cpu")
    graph = lowered_graph(program.function, *(inp.to("meta") for inp in program.inputs))
    with fake_cuda.device():
        undo_woq_int8.restore_matmuls(graph)
    dequantized = match_dequantized.find_dequantized_matmuls(graph, Settings())
    scaled = [match_dequantized.add_scales(item) for item in dequantized]
    fused = fusion_search.find_fusions(graph, Settings(), scaled)
    problems = [matmul.problem for matmul in (*fused, *scaled)]
    problems += filter(None, map(matmul_nodes.problem_of, graph.nodes))
    # Pointwise operations of the epilogue take no bytes.
    plain = [
        dataclasses.replace(item, epilogue=dataclasses.replace(item.epilogue, pointwise=0))
        for item in problems
    ]
    assert case.problem in plain


@pytest.mark.skipif(torch.cuda.is_available(), reason="traced on a fake GPU")
@pytest.mark.parametrize("kind", ["bias_gelu", "residual", "int8_by_int8"])
def test_epilogues_agree_with_graph_matching(kind: str) -> None:
    from inductor_ext.lowerings.graph import epilogue_region, matmul_nodes
    from test.support.gemm_graphs import lowered_graph

    case = TOYS[kind]
    program = case.program("cpu")
    graph = lowered_graph(program.function, *(inp.to("meta") for inp in program.inputs))
    problems = [
        epilogue_region.add_epilogue(node, problem)
        for node in graph.nodes
        if (problem := matmul_nodes.problem_of(node)) is not None
    ]
    assert problems == [case.problem]


def test_inputs_have_the_strides_of_the_problem() -> None:
    for case in (TOYS["bmm"], dataclasses.replace(TOYS["bmm"], layouts="cr"), TOYS["mm"]):
        a, b = case.program("cpu").inputs
        b = b if case.kind == "bmm" else b.t()
        assert a.stride()[-2:] == case.problem.a.strides
        assert b.stride()[-2:] == case.problem.b.strides


def test_suite_has_the_sizes_of_models() -> None:
    counts = collections.Counter(case.group for case in CASES.values())
    assert set(counts) == set(gemm_suite.GROUPS)
    assert counts["llama"] == 70
    assert counts["bmm"] == 8
    llama = [case for case in CASES.values() if case.group == "llama"]
    assert {case.m for case in llama} == {1, 4, 16, 64, 256, 2048, 8192}
    fused = [case for case in CASES.values() if case.group == "fused"]
    for kind in {case.kind for case in fused}:
        rows = {16, 2048} if kind == "swiglu_fp8" else {1, 16, 2048}
        assert {case.m for case in fused if case.kind == kind} == rows
    assert {"bias_gelu", "residual", "swiglu", "qkv", "rmsnorm"} <= {case.kind for case in fused}
    assert {(c.m, c.n, c.k) for c in CASES.values() if c.group == "square"} >= {
        (1024, 1024, 1024),
        (2040, 3584, 3584),
    }
    for case in CASES.values():
        if case.group == "unaligned":
            assert case.n % 8 or case.k % 8
    assert all(case.problem.tma_obstacle is None for case in llama)


def test_quick_cases_cover_all_groups_and_come_first() -> None:
    quick = [case.quick for case in CASES.values()]
    assert sorted(quick, reverse=True) == quick
    assert 25 <= sum(quick) <= 50
    assert {case.group for case in CASES.values() if case.quick} == set(gemm_suite.GROUPS)
    kinds = {case.kind for case in CASES.values() if case.quick}
    assert kinds == set(gemm_suite.KINDS)


def test_int4_linear_unpacks_weights() -> None:
    values = torch.randint(0, 16, (6, 256), dtype=torch.uint8)
    scales = torch.rand(6, 2) + 0.5
    x = torch.randn(3, 256)
    expected = x @ ((values.float() - 8) * scales.repeat_interleave(128, 1)).t()
    packed = gemm_models.pack_int4(values)
    assert packed.shape == (6, 128)
    torch.testing.assert_close(gemm_models.int4_linear(x, packed, scales), expected)


def test_error_covers_all_outputs_and_keeps_nan() -> None:
    exact = (torch.tensor([3.0, 0.0]).double(), torch.tensor([4.0]).double())
    assert compute_error((torch.tensor([3.0, 0.5]), torch.tensor([4.0])), exact) == 0.1
    assert math.isnan(compute_error((torch.tensor([math.nan, 0.0]), torch.tensor([4.0])), exact))


def test_the_error_of_most_rows() -> None:
    exact = torch.ones(5, 4, dtype=torch.float64)
    result = exact.clone()
    result[0] = 100
    result[1:] *= 1.25
    assert compute_error(result, [exact], by_row=True) == 0.25
    result[2] = torch.nan
    assert compute_error(result, [exact], by_row=True) != 0.25
