"""Kernels of the templates in Triton's interpreter, against float64.

All cases run in one process. Sizes are drawn, the same in every run, from what an operand's layout
and a template allow: few are multiples of a tile.
"""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from inductor_ext.templates.fused_ops import Dequant, Epilogue, Prologue, RowNorm
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import EpilogueInput, Operand
from inductor_ext.templates.triton.config import GemmConfig
from inductor_ext.templates.triton.constraints import legal
from test.support import kernel_cases, kernel_interpreter
from test.support.gemm_strategies import device
from test.support.kernel_cases import Case

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU instead")

H200 = device("NVIDIA H200")

TILE = GemmConfig("splitk", 16, 32, 32, 2, 4)
CP_ASYNC = GemmConfig("cp_async", 32, 32, 32, 2, 4)
GEMV = GemmConfig("gemv", 4, 16, 64, 1, 2)
TMA = GemmConfig("persistent_tma", 64, 32, 32, 2, 4, group_m=2, tma=True, flatten=True)
SHARED = GemmConfig("persistent_tma", 64, 16, 32, 2, 4, group_m=2, tma=True, stream_k=True)
SPECIALIZED = GemmConfig("persistent_tma_ws", 128, 32, 32, 2, 4, tma=True, warp_specialize=True)
BATCH = GemmConfig("bmm_persistent", 64, 32, 32, 2, 4, tma=True, flatten=True)
GROUPED = GemmConfig("grouped", 64, 32, 32, 2, 4, group_m=2, tma=True)
SWAPPED = {"block_m": 16, "block_n": 64, "swap_ab": True}

SILU = {"ACTIVATION": "'silu'"}
EPSILON = {"EPSILON": 1e-5}


def mm(m: int, n: int, k: int, **rest: Any) -> GemmProblem:
    rest.setdefault("dtype", "float16")
    if rest["dtype"] == "float32":
        rest["tf32"] = True
    return GemmProblem.contiguous(rest.pop("operation", "mm"), m, n, k, **rest)


def gated(m: int, n: int, k: int, **rest: Any) -> GemmProblem:
    rest.setdefault("epilogue", Epilogue(gated=True))
    return mm(m, 2 * n, k, parts=(n, n), **rest)


def drawn() -> dict[str, Case]:
    """Every kernel with every layout and its own sizes."""
    values: dict[str, Case] = {}
    for name, config, operation in (
        ("tile", TILE, "mm"),
        ("gemv", GEMV, "mm"),
        ("tma", TMA, "mm"),
        ("specialized", SPECIALIZED, "mm"),
        ("batch", BATCH, "bmm"),
        ("batch by plain loads", CP_ASYNC, "bmm"),
        ("batch of few rows", GEMV, "bmm"),
    ):
        for layouts, dtype in (
            ("rr", "float16"),
            ("rc", "float32"),
            ("cr", "float16"),
            ("cc", "float16"),
        ):
            title = f"{name}, {layouts}, {dtype}"
            sizes = random.Random(title)
            multiple = 8 if config.tma else 1
            few = config.template == "gemv"
            half = config.block_m // 2
            m = sizes.randint(3, 4) if few else sizes.randint(half + 1, 3 * half)
            if layouts[0] == "c":
                m = -(-m // multiple) * multiple
            n, k = (sizes.randint(34, 80) // multiple * multiple for _ in "nk")
            rest = {"batch": 3} if operation == "bmm" else {}
            problem = mm(m, n, k, operation=operation, dtype=dtype, layouts=layouts, **rest)
            after = sizes.choice((torch.relu, None))
            values[title] = Case(problem, config, after=after)
    return values


def strided(m: int, config: GemmConfig) -> Case:
    """Odd numbers of elements from row to row and from column to column, and an odd offset.

    Rows are contiguous: Inductor copies anything else.
    """
    a = Operand.of("float16", (m, 45), (101, 1), offset=3)
    b = Operand.of("float16", (45, 37), (1, 51), offset=3)
    return Case(GemmProblem("mm", m, 37, 45, a, b, "float16"), config, offset=3)


def apart(config: GemmConfig, operation: str, m: int, b_stride: int) -> Case:
    """Rows of a larger matrix, at an offset that TMA allows; a batch may share its b."""
    batch = 3 if operation == "bmm" else 1
    a = Operand.of("float16", (m, 40), (64, 1), batch=batch, batch_stride=64 * m, offset=8)
    b = Operand.of("float16", (40, 72), (1, 56), batch=batch, batch_stride=b_stride, offset=8)
    problem = GemmProblem(operation, m, 72, 40, a, b, "float16", batch)  # type: ignore[arg-type]
    return Case(problem, config, offset=8)


def grouped(m: int, n: int, k: int, ends: tuple[int, ...], **rest: Any) -> Case:
    config = replace(GROUPED, **rest.pop("config", {}))
    problem = mm(m, n, k, operation="grouped", batch=len(ends), **rest)
    return Case(problem, config, offsets=ends)


NORMALIZED = Prologue(RowNorm("rms", 1))
LAYER_NORM = Prologue(RowNorm("layer", 2))
AUTOCAST = {"dtype": "float32", "b_dtype": "float16", "out": "float16", "prologue": LAYER_NORM}
ROW = EpilogueInput("float16", "row")
BIASES = {"operation": "addmm", "epilogue": Epilogue((ROW,), 1, gated=True)}
INT8 = {"operation": "mixed", "b_dtype": "int8"}

CASES: dict[str, Case] = {
    **drawn(),
    "tile, strides": strided(19, TILE),
    "gemv, strides": strided(7, replace(GEMV, block_m=8)),
    "tma, rows apart": apart(TMA, "mm", 70, 0),
    "batch, rows apart": apart(BATCH, "bmm", 70, 72 * 56),
    "batch, one b": apart(BATCH, "bmm", 70, 0),
    "batch by plain loads, one b": apart(CP_ASYNC, "bmm", 37, 0),
    "tma, one row": Case(mm(1, 72, 40), replace(TMA, **SWAPPED)),
    "tma, one column": Case(mm(70, 1, 40), replace(TMA, block_n=16)),
    "tile, exchanged": Case(
        mm(5, 70, 61), replace(TILE, block_n=64, swap_ab=True), after=torch.relu
    ),
    "tile, split": Case(mm(9, 43, 300), replace(TILE, split_k=3)),
    "tile, split and exchanged": Case(
        mm(9, 70, 300), replace(TILE, block_n=64, swap_ab=True, split_k=4)
    ),
    "gemv, split": Case(mm(3, 43, 300), replace(GEMV, split_k=3)),
    "tma, split": Case(mm(40, 72, 296), replace(TILE, block_m=64, tma=True, split_k=3)),
    "tma, split and exchanged": Case(mm(3, 72, 296), replace(TILE, **SWAPPED, tma=True, split_k=5)),
    **{
        f"{name}, in one launch": Case(problem, replace(config, fused_split_k=True), **rest)
        for name, problem, config, rest in (
            ("tile, split", mm(9, 43, 300), replace(TILE, split_k=3), {"after": torch.relu}),
            ("tile, many splits", mm(9, 43, 530), replace(TILE, split_k=17, num_warps=1), {}),
            (
                "tile, split and exchanged",
                mm(9, 70, 300),
                replace(TILE, block_n=64, swap_ab=True, split_k=4),
                {"bias": "row"},
            ),
            (
                "tile, split, parts",
                mm(17, 100, 200, parts=(59, 24, 17)),
                replace(TILE, split_k=2),
                {},
            ),
            ("gemv, split", mm(3, 43, 300), replace(GEMV, split_k=3), {"after": torch.relu}),
            ("tma, split", mm(40, 72, 296), replace(TILE, block_m=64, tma=True, split_k=3), {}),
            (
                "tma, split and exchanged",
                mm(3, 72, 296),
                replace(TILE, **SWAPPED, tma=True, split_k=5),
                {"bias": "matrix", "after": torch.relu},
            ),
            ("gemv, int8 weights, split", mm(3, 43, 300, **INT8), replace(GEMV, split_k=3), {}),
        )
    },
    "tma, exchanged": Case(mm(13, 136, 72), replace(TMA, **SWAPPED), after=torch.relu),
    "tma, one loop in another": Case(mm(200, 136, 72), replace(TMA, flatten=False)),
    # With 7 multiprocessors: 12 tiles, 30, 7, 14; of 3 steps and of 5.
    **{
        f"tma, shared tiles, {name}": Case(problem, config, multiprocessors=7, **rest)
        for name, problem, config, rest in (
            ("two rounds", mm(150, 56, 72), replace(SHARED, group_m=8), {}),
            ("five rounds", mm(300, 88, 136), SHARED, {"after": torch.relu}),
            ("one whole round", mm(40, 112, 72), SHARED, {}),
            ("two whole rounds", mm(100, 112, 72), SHARED, {}),
            ("less than a round", mm(100, 32, 72), SHARED, {}),
            ("parts", mm(150, 136, 136, parts=(72, 40, 24)), SHARED, {"bias": "row"}),
            (
                "exchanged",
                mm(40, 264, 104),
                replace(SHARED, **SWAPPED),
                {"bias": "matrix", "after": torch.relu},
            ),
        )
    },
    **{
        f"{name}, stored by TMA": Case(problem, replace(config, tma_store=True), **rest)
        for name, problem, config, rest in (
            ("tma", mm(150, 136, 72), TMA, {"after": torch.relu}),
            ("tma, gated", gated(70, 40, 64), TMA, {"options": {"ACTIVATION": "'silu'"}}),
            ("tma, a row is added", mm(70, 72, 64), replace(TMA, flatten=False), {"bias": "row"}),
            ("batch", mm(70, 72, 40, operation="bmm", batch=3), BATCH, {"bias": "matrix"}),
            ("tma, shared tiles", mm(150, 56, 72), SHARED, {"multiprocessors": 7}),
        )
    },
    "batch, exchanged": Case(mm(13, 72, 40, operation="bmm", batch=5), replace(BATCH, **SWAPPED)),
    "tile, parts": Case(mm(17, 100, 61, parts=(59, 24, 17)), TILE, after=torch.relu),
    "tile, parts in rows": Case(mm(17, 100, 61, parts=(59, 24, 17), layouts="rr"), TILE),
    "gemv, parts in rows": Case(mm(3, 100, 61, parts=(59, 24, 17), layouts="rr"), GEMV),
    "tma, parts": Case(mm(70, 136, 64, parts=(72, 40, 24)), TMA, after=torch.relu),
    "specialized, parts in rows": Case(mm(70, 136, 64, parts=(72, 64), layouts="rr"), SPECIALIZED),
    "tile, gated": Case(gated(17, 43, 61), TILE, SILU),
    "tile, gated and exchanged": Case(
        gated(5, 43, 61), replace(TILE, block_n=128, swap_ab=True), SILU
    ),
    "gemv, gated": Case(gated(3, 43, 61), GEMV, {"ACTIVATION": "'gelu'"}),
    "tma, gated": Case(gated(70, 40, 64), TMA, {"ACTIVATION": "'gelu_tanh'"}),
    "tma, gated in two loops": Case(gated(150, 104, 64), replace(TMA, flatten=False), SILU),
    "tma, gated in rows": Case(gated(70, 40, 64, layouts="rr"), TMA, SILU),
    "tma, gated and exchanged": Case(
        gated(5, 72, 64), replace(TMA, **{**SWAPPED, "block_n": 128}), {"ACTIVATION": "'relu'"}
    ),
    "tile, gated with biases": Case(gated(17, 43, 61, **BIASES), TILE, SILU),
    "tile, gated with biases and exchanged": Case(
        gated(5, 43, 61, **BIASES), replace(TILE, block_n=128, swap_ab=True), SILU
    ),
    "gemv, gated with biases": Case(gated(3, 43, 61, **BIASES), GEMV, SILU),
    "tma, gated with biases": Case(gated(70, 40, 64, **BIASES), TMA, SILU),
    "tma, gated with biases and exchanged": Case(
        gated(5, 72, 64, **BIASES), replace(TMA, **{**SWAPPED, "block_n": 128}), SILU
    ),
    "tile, gated by sigmoid": Case(gated(5, 24, 40), TILE, {"ACTIVATION": "'sigmoid'"}),
    "tile, gated by itself": Case(gated(5, 24, 40), TILE, {"ACTIVATION": "'identity'"}),
    "tile, normalised": Case(mm(7, 43, 61, prologue=NORMALIZED), TILE, EPSILON),
    "tile, normalised and exchanged": Case(
        mm(7, 43, 61, prologue=Prologue(RowNorm("rms"))),
        replace(TILE, block_n=64, swap_ab=True),
        EPSILON,
    ),
    "gemv, normalised": Case(mm(3, 43, 61, prologue=NORMALIZED), GEMV, EPSILON),
    "gemv, normalised and gated": Case(
        gated(3, 43, 61, prologue=NORMALIZED), GEMV, {**EPSILON, **SILU}
    ),
    "tile, standardised": Case(mm(7, 43, 61, prologue=LAYER_NORM), TILE, EPSILON),
    "tile, standardised and exchanged": Case(
        mm(7, 43, 700, prologue=Prologue(RowNorm("layer"))),
        replace(TILE, block_n=64, swap_ab=True),
        EPSILON,
    ),
    "tile, standardised and split": Case(
        mm(9, 43, 700, prologue=Prologue(RowNorm("layer", 1))), replace(TILE, split_k=3), EPSILON
    ),
    "tile, standardised far from zero": Case(
        mm(7, 43, 700, prologue=LAYER_NORM), TILE, EPSILON, mean=100.0
    ),
    "gemv, standardised far from zero": Case(
        mm(3, 43, 700, prologue=LAYER_NORM), GEMV, EPSILON, mean=100.0
    ),
    "tile, standardised and rounded": Case(mm(7, 43, 61, **AUTOCAST), TILE, EPSILON),
    "gemv, standardised and rounded": Case(mm(3, 43, 61, **AUTOCAST), GEMV, EPSILON),
    "tile, standardised in float32": Case(
        mm(9, 43, 512, prologue=LAYER_NORM, dtype="float32"), TILE, EPSILON
    ),
    "gemv, standardised": Case(mm(3, 43, 561, prologue=LAYER_NORM), GEMV, EPSILON),
    "gemv, standardised and gated": Case(
        gated(3, 43, 61, prologue=LAYER_NORM, **BIASES), GEMV, {**EPSILON, **SILU}
    ),
    "gemv, int8 weights": Case(mm(3, 43, 61, **INT8), GEMV),
    "gemv, int8 weights, one scale": Case(
        mm(3, 43, 61, **INT8, prologue=Prologue(dequant=Dequant("tensor", scale_dtype="float16"))),
        GEMV,
    ),
    "tile, int8": Case(
        GemmProblem.contiguous("int_mm", 17, 43, 61, "int8"), replace(CP_ASYNC, block_m=16)
    ),
    "tma, int8": Case(GemmProblem.contiguous("int_mm", 70, 48, 64, "int8"), TMA),
    "tile, a row is added": Case(mm(17, 43, 61), TILE, bias="row", after=torch.relu),
    "tma, a matrix is added": Case(mm(70, 72, 64), TMA, bias="matrix"),
    "batch, a matrix is added": Case(
        mm(70, 72, 64, operation="bmm", batch=2), BATCH, bias="matrix"
    ),
    "groups of rows": grouped(200, 72, 64, (8, 8, 104, 168, 200)),
    "groups of rows, rr": grouped(200, 72, 72, (9, 70, 200), layouts="rr"),
    "groups of few rows": grouped(20, 136, 64, (3, 5, 20), config=SWAPPED),
    "one group of rows": grouped(70, 72, 64, (70,)),
    "groups of columns": grouped(72, 200, 64, (8, 72, 200), divided="n", layouts="rr"),
    "groups along k": grouped(72, 40, 200, (8, 72, 72, 200), divided="k", layouts="rr"),
    "groups along k, cr": grouped(72, 40, 200, (64, 72, 168, 200), divided="k", layouts="cr"),
    "groups along k, exchanged": grouped(
        16, 136, 200, (8, 72, 72, 200), divided="k", layouts="cc", config=SWAPPED
    ),
}


@functools.cache
def results() -> dict[str, torch.Tensor]:
    return kernel_interpreter.interpret(CASES)


@pytest.mark.parametrize("name", CASES)
def test_results_equal_float64(name: str) -> None:
    case = CASES[name]
    assert legal(kernel_cases.as_bfloat16(case.problem), case.config, H200)
    expected = kernel_cases.reference(case, kernel_cases.inputs(case))
    result = results()[name]
    assert result.shape == expected.shape
    rounding = {torch.float16: 2e-3, torch.float32: 2e-6, torch.int32: 0}[result.dtype]
    if case.problem.prologue is not None and case.config.template != "gemv":
        rounding = 4e-3  # Operands are rounded once more in between.
    assert (result.double() - expected).abs().max() <= rounding * expected.abs().max()
