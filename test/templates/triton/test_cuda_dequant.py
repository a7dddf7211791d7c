"""Quantized and low-precision matmuls on a CUDA device, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from inductor_ext import events
from inductor_ext.autotune import decide
from inductor_ext.autotune.reference import program
from inductor_ext.templates.fused_ops import Dequant, Epilogue, Prologue, RowNorm
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.records import MatmulRecord
from inductor_ext.templates.tensors import EpilogueInput
from inductor_ext.templates.triton import search_space
from inductor_ext.templates.triton.config import GemmConfig
from test.support import gpu_util
from test.support.gpu_util import device

pytestmark = pytest.mark.gpu

ERROR = {"bfloat16": 1e-2, "float16": 2e-3}
"""Relative error of the whole result: weights, and the result, are rounded once."""


@pytest.fixture(autouse=True)
def uncached() -> Iterator[None]:
    with gpu_util.compiling():
        yield


def check(problem: GemmProblem, template: str, count: int = 3) -> None:
    """Some of a template's candidates, far apart in its space, against float64."""
    values = [
        candidate
        for candidate in search_space.candidates(problem, device())
        if candidate.template == template
    ]
    assert values
    canonical = program(problem)
    inputs = canonical.make_inputs("cuda")
    expected = canonical.reference(inputs, torch.arange(problem.m, device="cuda"))
    for config in dict.fromkeys(
        values[index * (len(values) - 1) // count] for index in range(count)
    ):
        results, taken = run(problem, config, inputs)
        assert taken == [config]
        for result, exact in zip(results, expected, strict=True):
            difference = torch.linalg.vector_norm(result.double() - exact)
            limit = ERROR.get(problem.stored_dtype, 1e-6) * torch.linalg.vector_norm(exact)
            assert difference <= limit, config


def run(
    problem: GemmProblem, config: GemmConfig, inputs: list[torch.Tensor]
) -> tuple[tuple[torch.Tensor, ...], list[GemmConfig | None]]:
    def what(options: GemmProblem) -> tuple[object, ...]:
        norm = options.norm and options.norm.kind
        return options.operation, options.parts, options.epilogue.gated, norm

    def rule(options: GemmProblem) -> GemmConfig | None:
        return config if what(options) == what(problem) else None

    torch._dynamo.reset()
    with torch.no_grad(), decide.force_config(rule), events.capture() as records:
        compiled = torch.compile(program(problem).function, backend="inductor_ext", dynamic=False)
        results = compiled(*inputs)
    taken = [record.chosen for record in records if isinstance(record, MatmulRecord)]
    return results, taken


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("m", [1, 50, 300])
@pytest.mark.parametrize("b_dtype", ["int8", "uint8"])
@pytest.mark.parametrize("scales", ["none", "column"])
def test_bytes(scales: Any, b_dtype: str, m: int, dtype: str) -> None:
    prologue = Prologue(dequant=Dequant(scales, scale_dtype=dtype))
    problem = GemmProblem.contiguous(
        "mixed", m, 200, 328, dtype, b_dtype=b_dtype, prologue=prologue
    )
    # Column scales follow the matmul in the graph, and are in its epilogue.
    check(problem, "mixed", 2 if scales == "none" else 1)


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize(
    ("template", "m", "k", "count"),
    [
        ("direct", 1, 2048, 3),
        ("direct", 7, 2048, 3),
        ("stationary", 7, 6144, 2),
        ("stationary", 16, 6144, 2),
    ],
)
@pytest.mark.parametrize(
    ("b_dtype", "scales", "group"),
    [
        ("int8", "tensor", 0),
        ("uint8", "column", 0),
        ("int8", "group", 128),
        ("uint4", "group", 128),
        ("int4", "group", 256),
    ],
)
@pytest.mark.parametrize("parts", [(), (200, 72, 40), (200, 200)], ids=["one", "parts", "gated"])
def test_words(
    parts: tuple[int, ...],
    b_dtype: str,
    scales: Any,
    group: int,
    template: str,
    m: int,
    k: int,
    count: int,
    dtype: str,
) -> None:
    problem = GemmProblem.contiguous(
        "mixed",
        m,
        sum(parts) or 200,
        k,
        dtype,
        b_dtype=b_dtype,
        prologue=Prologue(dequant=Dequant(scales, group, scale_dtype=dtype)),
        parts=parts,
        epilogue=Epilogue(gated=len(parts) == 2),
    )
    check(problem, template, count)


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("m", [1, 16, 300])
@pytest.mark.parametrize(
    ("b_dtype", "group", "zeros"),
    [
        ("uint4", 128, False),
        ("uint4", 64, True),
        ("int4", 32, False),
        ("int8", 32, True),
        ("int8", 128, False),
    ],
)
def test_groups(b_dtype: str, group: int, zeros: bool, m: int, dtype: str) -> None:
    prologue = Prologue(dequant=Dequant("group", group, zero_points=zeros, scale_dtype=dtype))
    problem = GemmProblem.contiguous(
        "mixed", m, 200, 512, dtype, b_dtype=b_dtype, prologue=prologue
    )
    check(problem, "mixed", 2)


@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
@pytest.mark.parametrize("parts", [(200, 72, 40), (200, 200)], ids=["parts", "gated"])
@pytest.mark.parametrize(("b_dtype", "group"), [("int8", 0), ("uint4", 64), ("int8", 32)])
@pytest.mark.parametrize("m", [1, 50])
def test_several(m: int, b_dtype: str, group: int, parts: tuple[int, ...], norm: bool) -> None:
    prologue = Prologue(
        RowNorm("rms", 1) if norm else None,
        Dequant("group" if group else "column", group),
    )
    problem = GemmProblem.contiguous(
        "mixed",
        m,
        sum(parts),
        512,
        b_dtype=b_dtype,
        prologue=prologue,
        parts=parts,
        epilogue=Epilogue(gated=len(parts) == 2),
    )
    check(problem, "mixed", 2)
    if m == 1 and not group:
        check(problem, "gemv", 1)


@pytest.mark.parametrize("m", [32, 304])
@pytest.mark.parametrize(("a", "b"), [("column", "row"), ("scalar", "scalar")])
def test_several_in_fp8(m: int, a: Any, b: Any) -> None:
    if device().capability < (8, 9):
        pytest.skip("needs tensor cores for fp8")
    problem = GemmProblem.contiguous(
        "scaled",
        m,
        224,
        256,
        "float8_e4m3fn",
        parts=(128, 64, 32),
        epilogue=Epilogue((EpilogueInput("float32", a), EpilogueInput("float32", b)), 2),
        fast_accumulation=True,
    )
    check(problem, "splitk" if m == 32 else "cp_async", 2)
    if device().capability >= (9, 0):
        check(problem, "persistent_tma", 2)


def test_pairs_without_scales_and_a_tail_of_k() -> None:
    problem = GemmProblem.contiguous(
        "mixed", 7, 120, 328, b_dtype="int4", prologue=Prologue(dequant=Dequant())
    )
    check(problem, "mixed")


@pytest.mark.parametrize("m", [32, 300])
def test_integers(m: int) -> None:
    problem = GemmProblem.contiguous("int_mm", m, 128, 256, "int8")
    check(problem, "splitk" if m == 32 else "cp_async")


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("biases", [0, 1], ids=["", "biases"])
@pytest.mark.parametrize(("m", "n", "k"), [(32, 128, 256), (300, 200, 336), (1000, 1304, 528)])
def test_integers_with_scales(m: int, n: int, k: int, biases: int, dtype: str) -> None:
    """Column scales in the result's dtype, row scales in float32, and biases."""
    scales = (EpilogueInput("float32", "column"), EpilogueInput(dtype, "row"))
    inputs = (*scales, *(EpilogueInput(dtype, "row"),) * biases)
    epilogue = Epilogue(inputs, len(inputs), out=dtype)
    problem = GemmProblem.contiguous("int_mm", m, n, k, "int8", epilogue=epilogue)
    check(problem, "splitk" if m == 32 else "cp_async", 2)
    if m > 32 and device().capability >= (9, 0):
        check(problem, "persistent_tma", 4)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(("a", "b"), [("column", "row"), ("scalar", "scalar")])
@pytest.mark.parametrize("m", [32, 304])
def test_fp8(m: int, a: Any, b: Any, fast: bool) -> None:
    if device().capability < (8, 9):
        pytest.skip("needs tensor cores for fp8")
    scales = (EpilogueInput("float32", a), EpilogueInput("float32", b))
    problem = GemmProblem.contiguous(
        "scaled",
        m,
        128,
        256,
        "float8_e4m3fn",
        epilogue=Epilogue(scales, 2),
        fast_accumulation=fast,
    )
    check(problem, "splitk" if m == 32 else "cp_async")
