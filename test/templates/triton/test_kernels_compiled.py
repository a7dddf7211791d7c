"""Kernels compiled by Triton and ptxas, and the code that Inductor generates from templates."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch._inductor.codegen.triton

pytest.importorskip("triton")


from inductor_ext.templates.device import Device
from inductor_ext.templates.fused_ops import Dequant, Epilogue, Prologue, RowNorm
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import EpilogueInput
from inductor_ext.templates.triton.config import GemmConfig
from inductor_ext.templates.triton.constraints import legal
from test.support import kernel_cases, kernel_compiler
from test.support.gemm_strategies import device
from test.support.goldens import assert_matches_golden
from test.support.kernel_cases import Case
from test.support.kernel_compiler import Compiled

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU instead")

H200 = device("NVIDIA H200")
A100 = device("NVIDIA A100-SXM4-80GB")

LINEAR = GemmProblem.contiguous("mm", 4096, 4096, 4096)
WIDE = GemmConfig("persistent_tma", 128, 256, 64, 4, 8, tma=True, flatten=True)
SPECIALIZED = GemmConfig("persistent_tma_ws", 128, 256, 64, 4, 4, tma=True, warp_specialize=True)
TILE = GemmConfig("cp_async", 128, 128, 64, 4, 8)
SKINNY = GemmConfig("splitk", 16, 128, 64, 4, 4, swap_ab=True, tma=True, split_k=4, pdl=True)
GEMV = GemmConfig("gemv", 1, 4, 1024, 1, 4)
BATCH = GemmConfig("bmm_persistent", 128, 128, 64, 4, 8, tma=True, flatten=True)
GROUPED = GemmConfig("grouped", 128, 128, 64, 4, 8, tma=True)


def mm(m: int, n: int, k: int, **rest: Any) -> GemmProblem:
    return GemmProblem.contiguous(rest.pop("operation", "mm"), m, n, k, **rest)


PARTS = mm(4096, 6144, 4096, parts=(4096, 1024, 1024))
GATED = mm(4096, 8192, 4096, parts=(4096, 4096), epilogue=Epilogue(gated=True))
BIASED = replace(
    GATED,
    operation="addmm",
    epilogue=Epilogue((EpilogueInput("bfloat16", "row"),), 1, gated=True),
)
ENDS = tuple(range(512, 4097, 512))
EPSILON = {"EPSILON": 1e-5}


def compiled(case: Case, on: Device = H200) -> Compiled:
    """A legal case, compiled: its shared memory is as predicted, and it does not spill."""
    assert legal(case.problem, case.config, on)
    result = kernel_compiler.compiled(case, on.capability)
    assert result.spills == 0
    # The reduction over warps takes less than a kilobyte.
    assert result.shared <= max(1024, case.config.shared_memory(case.problem))
    return result


LARGE = mm((1 << 15) + 8, 1 << 16, 64)
"""Its output has more than 2**31 elements."""


FROM_REGISTERS = r"wgmma\.mma_async\S+\s*\{[^}]*\},\s*\{"
"""Accumulators are followed by registers with an operand, not by a shared memory address."""


def count(pattern: str, result: Compiled) -> int:
    return len(re.findall(pattern, result.ptx))


@pytest.mark.parametrize("problem", [GATED, BIASED])
def test_gate_and_up_are_one_matmul(problem: GemmProblem) -> None:
    result = compiled(Case(problem, replace(WIDE, num_stages=4), {"ACTIVATION": "'silu'"}))
    assert set(re.findall(r"wgmma\.mma_async\S*(m64n\d+k16)", result.ptx)) == {"m64n256k16"}
    # Both tiles come at once, and are parted in registers: nothing but the result is in shared
    # memory, on its way out.
    assert count(r"ld\.shared", result) == 0


@pytest.mark.parametrize(
    "case",
    [
        Case(LINEAR, WIDE, after=torch.relu),
        Case(LINEAR, replace(WIDE, flatten=False), bias="row"),
        Case(PARTS, WIDE),
        Case(GATED, replace(WIDE, num_stages=3), {"ACTIVATION": "'silu'"}),
        Case(BIASED, replace(WIDE, num_stages=3, flatten=False), {"ACTIVATION": "'gelu'"}),
        Case(mm(512, 512, 512, layouts="cr"), replace(WIDE, block_n=128)),
        Case(mm(512, 512, 512, dtype="float32", tf32=True), replace(WIDE, block_n=128, block_k=32)),
        Case(mm(16, 4096, 4096), replace(SKINNY, pdl=False)),
        Case(mm(512, 512, 512, operation="bmm", batch=64), BATCH),
        Case(mm(4096, 512, 512, operation="grouped", batch=8), GROUPED, offsets=ENDS),
        Case(LARGE, replace(WIDE, block_k=32, num_stages=2, index64=True)),
        Case(mm(512, 515, 512), replace(WIDE, block_m=256, block_n=128, num_stages=3)),
    ],
    ids=(
        "relu",
        "loops",
        "parts",
        "gated",
        "biased",
        "cr",
        "tf32",
        "skinny",
        "batch",
        "grouped",
        "large",
        "odd rows",
    ),
)
def test_tma_feeds_warpgroup_instructions(case: Case) -> None:
    result = compiled(case)
    assert count(r"cp\.async\.bulk\.tensor", result) >= 2 * (case.config.num_stages - 1)
    assert count(r"wgmma\.mma_async", result) >= case.config.block_k // 32
    assert count(FROM_REGISTERS, result) == 0
    # The scratch memory of each CTA, see test/lowerings/test_cpp_wrapper.py.
    joined = case.config.joins(case.problem)
    weights = 1 if joined else max(1, len(case.problem.parts))
    assert result.scratch == 128 * (1 + weights)


def test_only_masked_steps_along_k_go_through_registers() -> None:
    problem = mm(1 << 15, 1 << 14, 4096, operation="grouped", batch=8, divided="k", layouts="cr")
    result = compiled(Case(problem, replace(GROUPED, index64=True), offsets=ENDS))
    assert count(r"wgmma\.mma_async", result) == 2 * count(FROM_REGISTERS, result) == 8


@pytest.mark.parametrize("problem", [LINEAR, PARTS], ids=("one", "parts"))
def test_warps_are_specialized(problem: GemmProblem) -> None:
    result = compiled(Case(problem, SPECIALIZED))
    assert count("setmaxnreg", result) > 0
    assert count(r"\.reqntid 384", result) == 1
    assert count(r"wgmma\.mma_async", result) > 0
    assert count(r"cp\.async\.bulk\.tensor", result) > 0


@pytest.mark.parametrize("on", [H200, A100], ids=("sm_90", "sm_80"))
@pytest.mark.parametrize("operation", ["mm", "bmm"])
def test_tiles_are_loaded_by_threads_asynchronously(on: Device, operation: str) -> None:
    batch = 4 if operation == "bmm" else 1
    result = compiled(Case(mm(4096, 4096, 4096, operation=operation, batch=batch), TILE), on)
    assert count(r"cp\.async\.cg\.shared\.global", result) > 0
    assert count(r"wgmma\.mma_async" if on is H200 else r"mma\.sync", result) > 0


RESIDUAL = mm(
    512,
    512,
    64,
    operation="bmm",
    batch=64,
    epilogue=Epilogue((EpilogueInput("bfloat16", "matrix"),), 1),
)


@pytest.mark.parametrize(
    "case",
    [
        Case(LINEAR, replace(WIDE, num_stages=3), after=torch.relu),
        Case(RESIDUAL, BATCH, bias="matrix"),
    ],
    ids=("mm", "batch"),
)
def test_tma_stores_all_of_the_output(case: Case) -> None:
    result = compiled(replace(case, config=replace(case.config, tma_store=True)))
    assert count(r"cp\.async\.bulk\.tensor\S*\.global\.shared", result) == 1
    assert count(r"st\.global\.", result) == 0
    # All descriptors are created before the loop over tiles.
    last = result.ptx.rindex("tensormap.cp_fenceproxy")
    assert last < result.ptx.index("wgmma.mma_async")


def test_stream_k_reads_partials_after_their_release() -> None:
    config = replace(WIDE, block_n=128, flatten=False, stream_k=True)
    result = compiled(Case(mm(2176, 4096, 4096), config, after=torch.relu))
    assert count(r"wgmma\.mma_async", result) > 0
    fragment = result.ptx[: result.ptx.index("atom.global.gpu.acq_rel.add.u32")]
    last_stored = fragment.rindex("st.global")
    assert "bar.sync" in fragment[last_stored:]
    # The kernel also checks whether the other CTA was first.
    assert count(r"(?:ld|atom)\.global\.gpu\.acquire", result) == 1
    after = result.ptx[len(fragment) :]
    assert after.index("bar.sync") < after.index("ld.global.cg")
    assert "ld.global.cg" not in fragment


def test_a_dependent_launch_waits_and_lets_the_next_one_begin() -> None:
    result = compiled(Case(mm(16, 4096, 4096), SKINNY))
    assert count(r"griddepcontrol\.wait", result) == 1
    assert count(r"griddepcontrol\.launch_dependents", result) == 1
    # Inductor's dependent launches assume that earlier kernels than the previous one have ended.
    assert count(r"griddepcontrol\.wait[\s\S]*griddepcontrol\.launch_dependents", result) == 1


ADDED_UP = (
    Case(mm(16, 4096, 4096), replace(SKINNY, pdl=False, fused_split_k=True), after=torch.relu),
    Case(mm(64, 256, 4096), replace(SKINNY, block_m=64, tma=False, pdl=False, fused_split_k=True)),
    Case(mm(1, 4096, 4096), replace(GEMV, split_k=2, fused_split_k=True)),
)


@pytest.mark.parametrize("on", [H200, A100], ids=("sm_90", "sm_80"))
@pytest.mark.parametrize("case", ADDED_UP, ids=("tma", "tile", "gemv"))
def test_the_last_split_reads_released_partial_sums(case: Case, on: Device) -> None:
    if on is A100 and case.config.tma:
        pytest.skip("TMA needs compute capability 9.0")
    result = compiled(case, on)
    letters = {
        r"st\.global\.b32": "0",  # Reset, narrow partial sums or narrow output.
        r"st\.global": "s",
        r"ld\.global\.cg": "l",
        r"bar\.sync": "b",
        r"atom\.global\.gpu\.acq_rel\.add\.u32": "a",
    }
    seen = "".join(
        next(letter for pattern, letter in letters.items() if re.fullmatch(pattern, match))
        for match in re.findall("|".join(letters), result.ptx)
    )
    # Before it, the output is not written and no partial sums are read.
    assert re.fullmatch("[sb0]*[s0]bab+0l[lb]*[s0]+", seen)


@pytest.mark.parametrize("on", [H200, A100], ids=("sm_90", "sm_80"))
@pytest.mark.parametrize("rows", [1, 4])
def test_vectors_have_wide_loads_and_no_waits_in_the_loop(on: Device, rows: int) -> None:
    result = compiled(Case(mm(rows, 4096, 14336), replace(GEMV, block_m=rows)), on)
    (loop,) = re.findall(r"\$L__BB0_1:.*?bra", result.ptx, re.S)
    loads = re.findall(r"ld\.global\S*", loop)
    # Four columns of b, and the rows of a.
    assert len(loads) == 4 + rows
    assert all(".v4.b32" in load for load in loads)
    assert "bar.sync" not in loop
    assert "mma" not in result.ptx


def kernel(case: Case) -> str:
    """A kernel's body as generated, without its constants."""
    (source,) = kernel_cases.render(case).kernels().values()
    return re.sub(r" +\w+ : tl\.constexpr = .*\n", "", source)


@pytest.mark.parametrize(
    ("config", "on"),
    [
        (GemmConfig("splitk", 16, 64, 128, 4, 4, pdl=True), H200),
        (GemmConfig("splitk", 16, 64, 128, 4, 4, split_k=4, swap_ab=True), H200),
        (GEMV, H200),
        (TILE, H200),
        (replace(TILE, num_stages=3), A100),
    ],
    ids=("few rows", "exchanged", "vector", "many rows", "sm_80"),
)
def test_layer_norm_is_in_registers(config: GemmConfig, on: Device) -> None:
    prologue = Prologue(RowNorm("layer", 2))
    case = Case(mm(min(config.block_m, 2048), 4096, 4096, prologue=prologue), config, EPSILON)
    result = compiled(case, on)
    # The first pass prefetches the next tiles of rows, unless there is only one.
    options = count(r"cp\.async\.c[ag]\.shared\.global", result)
    assert options >= 8 if config.template != "gemv" else options == 0
    assert count(r"rsqrt\.approx", result) > 0


INT8 = mm(
    16,
    4096,
    4096,
    operation="mixed",
    b_dtype="int8",
    prologue=Prologue(dequant=Dequant("column", scale_dtype="bfloat16")),
)


@pytest.mark.parametrize(
    "case",
    [
        Case(LINEAR, WIDE),
        Case(LINEAR, TILE),
        Case(mm(1, 4096, 4096), GEMV),
        Case(INT8, GemmConfig("direct", 16, 16, 512, 1, 4)),
        Case(mm(4096, 4096, 512, operation="grouped", batch=8), GROUPED, offsets=ENDS),
    ],
    ids=("persistent", "tile", "vector", "direct", "grouped"),
)
def test_the_module_has_the_text_that_was_compiled_ahead(case: Case) -> None:
    ahead: list[str] = []
    pool = mock.Mock(use_process_pool=lambda: True, triton=lambda name, text: ahead.append(text))
    with mock.patch.object(torch._inductor.codegen.triton, "async_compile", pool):
        code = kernel_cases.render(case).code
    (text,) = ahead
    assert "\n\n" in text
    results = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant))
    assert text in {node.value for node in results}


class TestGolden:
    """`EXPECTTEST_ACCEPT=1` writes the generated code into test/goldens/triton/."""

    def test_persistent(self) -> None:
        small = mm(200, 64, 96, dtype="float16")
        config = replace(WIDE, block_n=64, num_stages=2)
        assert_matches_golden(kernel(Case(small, config)), "triton", "persistent_tma")

    def test_tile(self) -> None:
        small = mm(200, 64, 96, dtype="float16")
        assert_matches_golden(kernel(Case(small, replace(TILE, block_n=64))), "triton", "tile")

    def test_gemv(self) -> None:
        assert_matches_golden(kernel(Case(mm(1, 64, 2048), GEMV)), "triton", "gemv")

    def test_grouped(self) -> None:
        small = mm(200, 64, 96, operation="grouped", batch=2)
        config = replace(GROUPED, block_n=64)
        assert_matches_golden(kernel(Case(small, config, offsets=(80, 200))), "triton", "grouped")
