"""The templates' kernels on a GPU, against float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from inductor_ext.templates.fused_ops import Epilogue, Prologue, RowNorm
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import EpilogueInput, Operand
from inductor_ext.templates.triton.config import GemmConfig
from inductor_ext.templates.triton.constraints import legal
from inductor_ext.templates.triton.kernels import persistent_tma
from test.support import gpu_util, kernel_cases
from test.support.gpu_util import device
from test.support.kernel_cases import Case

pytestmark = pytest.mark.gpu

TILE = GemmConfig("cp_async", 64, 64, 32, 3, 4)
SKINNY = GemmConfig("splitk", 16, 64, 64, 3, 4, swap_ab=True)
GEMV = GemmConfig("gemv", 4, 4, 512, 1, 2)
TMA = GemmConfig("persistent_tma", 128, 128, 32, 4, 8, tma=True, flatten=True)
SPECIALIZED = GemmConfig("persistent_tma_ws", 128, 64, 32, 4, 4, tma=True, warp_specialize=True)
SPECIALIZED_PARAM = pytest.param(
    SPECIALIZED,
    id="persistent_tma_ws",
    marks=pytest.mark.xfail(
        reason="Triton 3.6 leaves out the stores of one of the two groups of warps that multiply",
        strict=False,
    ),
)
BATCH = GemmConfig("bmm_persistent", 64, 64, 32, 4, 4, tma=True, flatten=True)
GROUPED = GemmConfig("grouped", 64, 64, 32, 4, 4, tma=True)

TOLERANCE = {"bfloat16": 8e-3, "float16": 1e-3, "float32": 2e-6, "tf32": 2e-3}
"""Relative error of the whole result; random operands of K up to some hundreds."""

LAYOUTS = ("rr", "rc", "cr", "cc")


@pytest.fixture(autouse=True)
def uncached() -> Iterator[None]:
    with gpu_util.compiling():
        yield


def mm(m: int, n: int, k: int, dtype: str = "bfloat16", **rest: Any) -> GemmProblem:
    if dtype == "tf32":
        rest["tf32"] = True
    name = "float32" if dtype == "tf32" else dtype
    return GemmProblem.contiguous(rest.pop("operation", "mm"), m, n, k, name, **rest)


def error(case: Case, values: list[torch.Tensor] | None = None) -> float:
    """The relative error of a case's kernel; skipped where the GPU cannot run it.

    Its operands are `values`, where they are given.
    """
    if case.config.tma and device().capability < (9, 0):
        pytest.skip("TMA needs compute capability 9.0")
    assert legal(case.problem, case.config, device())
    values = kernel_cases.inputs(case, "cuda") if values is None else values
    with kernel_cases.lowering_of(case) as function:
        result = torch.compile(function, fullgraph=True)(*values)
    if case.config.split_k > 1 and not case.config.fused_split_k:
        result = result.unflatten(-2, (case.config.split_k, -1)).sum(-3)
    expected = kernel_cases.reference(case, values)
    assert result.shape == expected.shape
    assert torch.isfinite(result).all()
    difference = torch.linalg.vector_norm(result.double() - expected)
    return (difference / torch.linalg.vector_norm(expected)).item()


@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        pytest.param(config, dtype, id=f"{config.template}-{dtype}")
        for config in (TILE, SKINNY, GEMV)
        for dtype in TOLERANCE
        # It multiplies in float32.
        if config is not GEMV or dtype != "tf32"
    ],
)
def test_plain_loads(config: GemmConfig, dtype: str, layouts: str) -> None:
    m = {"cp_async": 131, "splitk": 13, "gemv": 3}[config.template]
    case = Case(mm(m, 203, 333, dtype, layouts=layouts), config, after=torch.relu)
    assert error(case) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("dtype", "layouts"),
    # wgmma reads tf32 with K contiguous only.
    [*itertools.product(("bfloat16", "float16"), LAYOUTS), ("tf32", "rc")],
)
@pytest.mark.parametrize(
    "config",
    [
        TMA,
        replace(TMA, flatten=False),
        SPECIALIZED_PARAM,
        replace(TMA, block_m=32, num_warps=4, swap_ab=True),
    ],
    ids=("flattened", "loops", None, "exchanged"),
)
def test_tma(config: GemmConfig, dtype: str, layouts: str) -> None:
    m = 24 if config.swap_ab else 1096
    case = Case(mm(m, 2056, 328, dtype, layouts=layouts), config, after=torch.relu)
    assert error(case) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    "rest", [{}, {"after": torch.relu}, {"bias": "row"}], ids=("alone", "relu", "row")
)
@pytest.mark.parametrize(
    "config",
    [TMA, replace(TMA, flatten=False), BATCH, replace(TMA, flatten=False, stream_k=True)],
    ids=("flattened", "loops", "batch", "shared"),
)
def test_tma_stores(config: GemmConfig, rest: dict[str, Any]) -> None:
    batch = {"operation": "bmm", "batch": 11} if config is BATCH else {}
    case = Case(mm(1096, 456, 328, **batch), replace(config, tma_store=True), **rest)
    assert error(case) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize(
    "config", [BATCH, replace(BATCH, flatten=False), TILE, GEMV], ids=lambda x: x.template
)
def test_batches(config: GemmConfig, layouts: str) -> None:
    sizes = (3, 205, 333) if config is GEMV else (136, 200, 328)
    case = Case(mm(*sizes, operation="bmm", batch=11, layouts=layouts), config, after=torch.relu)
    assert error(case) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize("config", [BATCH, TILE], ids=lambda x: x.template)
def test_a_batch_shares_one_matrix(config: GemmConfig) -> None:
    a = Operand.of("bfloat16", (136, 328), (336, 1), batch=5, batch_stride=336 * 136, offset=8)
    b = Operand.of("bfloat16", (328, 200), (1, 328), batch=5, offset=8)
    problem = GemmProblem("bmm", 136, 200, 328, a, b, "bfloat16", 5)
    assert error(Case(problem, config, offset=8, bias="matrix")) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize("config", [TMA, SPECIALIZED_PARAM, TILE], ids=lambda x: x.template)
@pytest.mark.parametrize("bias", ["row", "matrix"])
def test_addends(config: GemmConfig, bias: Any) -> None:
    case = Case(mm(264, 328, 200), config, bias=bias, after=torch.relu)
    assert error(case) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize(
    "config",
    [
        replace(SKINNY, split_k=3),
        replace(SKINNY, split_k=3, pdl=True),
        replace(SKINNY, split_k=4, tma=True, pdl=True),
        replace(GEMV, split_k=3, block_m=8, block_n=2),
        replace(TILE, template="splitk", split_k=5),
    ],
    ids=("plain", "dependent", "tma", "gemv", "tile"),
)
def test_splits(config: GemmConfig) -> None:
    if config.pdl and device().capability < (9, 0):
        pytest.skip("dependent launches need compute capability 9.0")
    m = {"gemv": 7}.get(config.template, config.block_m - 3)
    assert error(Case(mm(m, 200, 4096, "float16"), config)) < 1e-5


ADDED_UP = {
    name: replace(config, fused_split_k=True)
    for name, config in {
        "plain": replace(SKINNY, split_k=3),
        "many": replace(SKINNY, split_k=16),
        "dependent": replace(SKINNY, split_k=3, pdl=True),
        "tma": replace(SKINNY, split_k=4, tma=True, pdl=True),
        "gemv": replace(GEMV, split_k=3, block_m=8, block_n=2),
        "tile": replace(TILE, template="splitk", split_k=5),
    }.items()
}
ADDED_UP["shared"] = replace(TMA, flatten=False, stream_k=True)
ADDED_UP["exchanged"] = replace(
    TMA, block_m=32, num_warps=4, swap_ab=True, flatten=False, stream_k=True
)


def added_up(name: str) -> Case:
    """A matmul of several hundred tiles, whose CTAs reduce their partial sums in one launch."""
    config = ADDED_UP[name]
    if (config.pdl or config.tma) and device().capability < (9, 0):
        pytest.skip("needs compute capability 9.0")
    m = {"gemv": 7, "shared": 2176, "exchanged": 500}.get(name, 3 * config.block_m - 3)
    return Case(mm(m, 2008, 4096, "float16"), config, after=torch.relu, bias="row")


@pytest.mark.parametrize("name", ADDED_UP)
def test_fused_split_k(name: str) -> None:
    assert error(added_up(name)) < TOLERANCE["float16"]


@pytest.fixture(scope="module", params=ADDED_UP)
def product(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A compiled matmul, two sets of operands, and their results."""
    case = added_up(request.param)
    operands = [kernel_cases.inputs(case, "cuda", seed) for seed in range(2)]
    with kernel_cases.lowering_of(case) as function, gpu_util.compiling():
        compiled = torch.compile(function, fullgraph=True)
        yield compiled, operands, [compiled(*operand).clone() for operand in operands]


class TestLaunches:
    """Fused split-K is bitwise reproducible, whichever CTA is last, and resets its counters."""

    def test_one_after_the_other(self, product: Any) -> None:
        compiled, operands, expected = product
        for _ in range(100):
            for values, known in zip(operands, expected, strict=True):
                assert torch.equal(compiled(*values), known)

    def test_in_streams_side_by_side(self, product: Any) -> None:
        compiled, operands, expected = product
        streams = [torch.cuda.Stream() for _ in range(4)]
        values: list[list[torch.Tensor]] = [[] for _ in streams]
        torch.cuda.synchronize()
        for _ in range(50):
            for index, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    values[index].append(compiled(*operands[index % 2]))
        torch.cuda.synchronize()
        for index, results in enumerate(values):
            assert all(torch.equal(result, expected[index % 2]) for result in results)

    def test_replayed_side_by_side(self, product: Any) -> None:
        compiled, operands, expected = product
        graphs, results = [], []
        for values in operands:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                # Three launches of one graph, with separate counters.
                results.append([compiled(*values) for _ in range(3)])
            graphs.append(graph)
        streams = [torch.cuda.Stream() for _ in graphs]
        for _ in range(50):
            for graph, stream in zip(graphs, streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
            torch.cuda.synchronize()
            for known, outputs in zip(expected, results, strict=True):
                assert all(torch.equal(item, known) for item in outputs)
                for item in outputs:
                    item.fill_(-1)
            torch.cuda.synchronize()


@pytest.mark.parametrize("config", [TMA, SPECIALIZED_PARAM, TILE, GEMV], ids=lambda x: x.template)
@pytest.mark.parametrize("layouts", ["rr", "rc"])
def test_several_weights(config: GemmConfig, layouts: str) -> None:
    m = 3 if config is GEMV else 264
    problem = mm(m, 424, 328, parts=(200, 128, 96), layouts=layouts)
    assert error(Case(problem, config)) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize("config", [TMA, TILE, GEMV], ids=lambda x: x.template)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_gates(config: GemmConfig, activation: str) -> None:
    m = 3 if config is GEMV else 264
    problem = mm(m, 400, 328, "float16", parts=(200, 200), epilogue=Epilogue(gated=True))
    options = {"ACTIVATION": repr(activation)}
    assert error(Case(problem, config, options)) < TOLERANCE["float16"]


@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize("reach", [persistent_tma.REACH, 1025])
def test_gates_far_from_up_projections(reach: int, flipped: bool) -> None:
    problem = mm(264, 400, 328, "float16", parts=(200, 200), epilogue=Epilogue(gated=True))
    case = Case(problem, TMA, {"ACTIVATION": "'silu'"})
    assert TMA.joins(problem)
    a, *weights = kernel_cases.inputs(case, "cuda")
    space = torch.empty(2**30, dtype=torch.float16, device="cuda")
    begins = [8, 2**30 - weights[1].numel()]
    for i, begin in enumerate(reversed(begins) if flipped else begins):
        moved = space.as_strided(weights[i].shape, weights[i].stride(), begin)
        weights[i] = moved.copy_(weights[i])
    with mock.patch.object(persistent_tma, "REACH", reach):
        assert error(case, [a, *weights]) < TOLERANCE["float16"]


@pytest.mark.parametrize(
    "config",
    [TMA, replace(TMA, block_m=32, num_warps=4, swap_ab=True), TILE, SKINNY, GEMV],
    ids=("tma", "tma, exchanged", "tile", "exchanged", "vector"),
)
def test_gates_with_biases(config: GemmConfig) -> None:
    m = {"gemv": 3, "splitk": 13}.get(config.template, 24 if config.swap_ab else 264)
    epilogue = Epilogue((EpilogueInput("float16", "row"),), 1, gated=True)
    problem = mm(m, 400, 328, "float16", operation="addmm", parts=(200, 200), epilogue=epilogue)
    assert error(Case(problem, config, {"ACTIVATION": "'gelu'"})) < TOLERANCE["float16"]


@pytest.mark.parametrize(
    ("config", "dtype"),
    # Weighted elements overflow float16 before normalization.
    [(SKINNY, "bfloat16"), (GEMV, "bfloat16"), (GEMV, "float16")],
    ids=("tile", "vector", "vector, float16"),
)
def test_normalized_rows(config: GemmConfig, dtype: str) -> None:
    problem = mm(3, 200, 328, dtype, prologue=Prologue(RowNorm("rms", 1)))
    assert error(Case(problem, config, {"EPSILON": 1e-6})) < 2 * TOLERANCE[dtype]


STANDARDISED = {
    "exchanged": SKINNY,
    "split": replace(SKINNY, split_k=3),
    "few": replace(SKINNY, swap_ab=False, block_n=32),
    "vector": GEMV,
    "tile": TILE,
}


@pytest.mark.parametrize("mean", [0.0, 100.0])
@pytest.mark.parametrize(
    ("name", "dtype"),
    # Vectors are multiplied in float32.
    [
        item
        for item in itertools.product(STANDARDISED, ("bfloat16", "float16", "tf32"))
        if item != ("vector", "tf32")
    ],
)
def test_layer_norm_rows(name: str, dtype: str, mean: float) -> None:
    config = STANDARDISED[name]
    m = {"cp_async": 131, "splitk": 13, "gemv": 3}[config.template]
    problem = mm(m, 200, 1032, dtype, prologue=Prologue(RowNorm("layer", 2)))
    case = Case(problem, config, {"EPSILON": 1e-6}, mean=mean)
    assert error(case) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("config", [SKINNY, GEMV, TILE], ids=lambda x: x.template)
def test_layer_norm_rows_are_rounded(config: GemmConfig) -> None:
    m = {"cp_async": 131, "splitk": 13, "gemv": 3}[config.template]
    prologue = Prologue(RowNorm("layer", 2, "float32"))
    problem = mm(m, 200, 1032, "float32", b_dtype="bfloat16", out="bfloat16", prologue=prologue)
    case = Case(problem, config, {"EPSILON": 1e-6}, mean=100.0)
    assert error(case) < 2 * TOLERANCE["bfloat16"]


def test_bytes_by_vectors() -> None:
    problem = mm(3, 200, 328, operation="mixed", b_dtype="int8")
    assert error(Case(problem, GEMV)) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize("fast", [False, True])
def test_fp8(fast: bool) -> None:
    if device().capability < (9, 0):
        pytest.skip("fp8 needs compute capability 9.0")
    problem = mm(264, 208, 352, "float8_e4m3fn", operation="scaled", fast_accumulation=fast)
    assert error(Case(problem, TMA)) < 2 * TOLERANCE["bfloat16"]


def test_integers_are_exact() -> None:
    assert error(Case(mm(264, 208, 352, "int8", operation="int_mm"), TMA)) == 0


@pytest.mark.parametrize(
    ("divided", "layouts", "sizes", "ends"),
    [
        ("m", "rc", (500, 200, 328), (8, 8, 240, 500)),
        ("m", "rr", (500, 200, 328), (3, 140, 500)),
        ("n", "rr", (136, 504, 328), (8, 240, 504)),
        ("k", "cr", (136, 200, 504), (8, 72, 72, 504)),
        ("k", "rr", (136, 200, 504), (80, 240, 504)),
    ],
)
def test_groups(
    divided: Any, layouts: str, sizes: tuple[int, int, int], ends: tuple[int, ...]
) -> None:
    problem = mm(*sizes, operation="grouped", batch=len(ends), layouts=layouts, divided=divided)
    assert error(Case(problem, GROUPED, offsets=ends)) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize(
    ("divided", "sizes", "ends"),
    [
        ("m", (500, 208, 352), (16, 240, 500)),
        ("n", (136, 496, 352), (8, 240, 496)),
        ("k", (136, 208, 496), (80, 80, 496)),
    ],
)
def test_groups_of_fp8_with_scales(
    divided: Any, sizes: tuple[int, int, int], ends: tuple[int, ...]
) -> None:
    problem = mm(*sizes, "float8_e4m3fn", operation="grouped", batch=3, divided=divided)
    case = Case(problem, GROUPED, offsets=ends)
    assert error(case) < 2 * TOLERANCE["bfloat16"]


def test_indices_beyond_32_bits() -> None:
    """An output of more than 2**31 elements."""
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GiB")
    for config in (replace(TMA, index64=True), replace(TILE, index64=True)):
        case = Case(
            mm((1 << 15) + 8, 1 << 16, 16, "float16"), replace(config, block_k=16, num_stages=2)
        )
        values = kernel_cases.inputs(case, "cuda")
        assert legal(case.problem, case.config, device())
        with kernel_cases.lowering_of(case) as function:
            results = torch.compile(function, fullgraph=True)(*values)
        a, b = values
        for rows in (slice(0, 8), slice(-8, None)):
            torch.testing.assert_close(results[rows], a[rows] @ b, rtol=1e-2, atol=1e-2)
