"""Problems of matmuls in FX graphs, and matmuls that are not supported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from torch import fx
from torch._dynamo.source import ConstantSource
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from inductor_ext import numerics
from inductor_ext.lowerings.graph import matmul_nodes
from inductor_ext.templates.fused_ops import Epilogue
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import EpilogueInput, Operand
from test.support import fake_cuda
from test.support.gemm_graphs import lowered_graph, tensor

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="traced on a stand-in for a GPU")

aten = torch.ops.aten
F32, F16, INT8 = torch.float32, torch.float16, torch.int8
FP8 = torch.float8_e4m3fn


def product(graph: fx.Graph) -> fx.Node:
    """The only matmul of a graph."""
    (node,) = (n for n in graph.nodes if "mm" in str(n.target))
    return node


def problem(function: Callable[..., Any], *inputs: torch.Tensor, **rest: Any) -> GemmProblem:
    """The problem of a function's only matmul."""
    node = product(lowered_graph(function, *inputs, **rest))
    result = matmul_nodes.problem_of(node)
    assert result is not None, matmul_nodes.why_unsupported(node)
    assert matmul_nodes.why_unsupported(node) is None
    return result


def epilogue(*inputs: str, pointwise: int, dtype: str = "bfloat16") -> Epilogue:
    return Epilogue(tuple(EpilogueInput(dtype, kind) for kind in inputs), pointwise)  # type: ignore[arg-type]


def test_a_linear_layer_of_three_dimensions() -> None:
    result = problem(torch.nn.functional.linear, tensor(2, 16, 64), tensor(96, 64))
    assert result == GemmProblem.contiguous("mm", 32, 96, 64)


@pytest.mark.parametrize(
    ("bias", "options", "expected"),
    [
        (tensor(96), {}, epilogue("row", pointwise=1)),
        (tensor(1, 96), {}, epilogue("row", pointwise=1)),
        (tensor(32, 1), {}, epilogue("column", pointwise=1)),
        (tensor(32, 96), {"alpha": 2, "beta": 0.5}, epilogue("matrix", pointwise=3)),
        (tensor(32, 96, strides=(0, 1)), {}, epilogue("row", pointwise=1)),
        (tensor(), {"beta": 2}, epilogue("scalar", pointwise=2)),
        (tensor(32, 96), {"beta": 0}, epilogue(pointwise=0)),
    ],
)
def test_biases(bias: torch.Tensor, options: dict[str, float], expected: Epilogue) -> None:
    result = problem(
        lambda c, a, b: aten.addmm.default(c, a, b, **options), bias, tensor(32, 64), tensor(64, 96)
    )
    assert result == GemmProblem.contiguous("addmm", 32, 96, 64, layouts="rr", epilogue=expected)


def test_the_bias_of_one_row_is_a_row() -> None:
    match = problem(torch.nn.functional.linear, tensor(1, 64), tensor(96, 64), tensor(96))
    assert match.epilogue == epilogue("row", pointwise=1)


def test_batches() -> None:
    a, b = tensor(8, 32, 64), tensor(8, 64, 96)
    assert problem(torch.bmm, a, b) == GemmProblem.contiguous(
        "bmm", 32, 96, 64, batch=8, layouts="rr"
    )
    shared = problem(torch.bmm, tensor(8, 32, 64, strides=(0, 64, 1)), b)
    assert shared.a == Operand("bfloat16", (64, 1), 8)
    match = problem(torch.baddbmm, tensor(8, 1, 96), a, b)
    assert match.operation == "baddbmm"
    # A row per matrix is not a separate kind.
    assert match.epilogue == epilogue("matrix", pointwise=1)


def test_int8() -> None:
    result = problem(torch._int_mm, tensor(32, 64, dtype=INT8), tensor(64, 96, dtype=INT8))
    assert result == GemmProblem.contiguous("int_mm", 32, 96, 64, "int8", layouts="rr")


@pytest.mark.parametrize(
    ("scales", "kinds"),
    [(((), ()), ("scalar", "scalar")), (((32, 1), (1, 96)), ("column", "row"))],
)
def test_fp8_with_scales(scales: Any, kinds: Any) -> None:
    a, b = tensor(32, 64, dtype=FP8), tensor(64, 96, dtype=FP8, strides=(1, 64))
    result = problem(
        lambda *args: aten._scaled_mm.default(*args, out_dtype=torch.bfloat16, use_fast_accum=True),
        a,
        b,
        *(tensor(*shape, dtype=F32) for shape in scales),
        tensor(96),
    )
    inputs = (*(EpilogueInput("float32", kind) for kind in kinds), EpilogueInput("bfloat16", "row"))
    assert result == GemmProblem.contiguous(
        "scaled",
        32,
        96,
        64,
        "float8_e4m3fn",
        epilogue=Epilogue(inputs, 3),
        fast_accumulation=True,
    )


def test_groups_of_rows() -> None:
    offsets = tensor(4, dtype=torch.int32)
    result = problem(
        lambda a, b, offs: aten._grouped_mm.default(a, b, offs),
        tensor(128, 64),
        tensor(4, 64, 96, strides=(96 * 64, 1, 64)),
        offsets,
    )
    assert result == GemmProblem.contiguous("grouped", 128, 96, 64, batch=4)
    scaled = problem(
        lambda a, b, x, y, offs: aten._scaled_grouped_mm.default(
            a, b, x, y, offs, out_dtype=torch.bfloat16
        ),
        tensor(128, 64, dtype=FP8),
        tensor(4, 64, 96, dtype=FP8, strides=(96 * 64, 1, 64)),
        tensor(128, dtype=F32),
        tensor(4, 96, dtype=F32),
        offsets,
    )
    assert scaled.operation == "grouped"
    assert scaled.epilogue == epilogue("column", "row", pointwise=2, dtype="float32")


def test_dynamic_sizes_count_as_hints_or_as_requested() -> None:
    graph = lowered_graph(
        torch.nn.functional.linear, tensor(2, 16, 64), tensor(96, 64), dynamic=[(0, 1)]
    )
    node = product(graph)
    assert matmul_nodes.problem_of(node) == GemmProblem.contiguous("mm", 32, 96, 64)
    (symbol,) = node.meta["val"].shape[0].node.expr.free_symbols
    assert matmul_nodes.problem_of(node, {symbol: 128}) == GemmProblem.contiguous("mm", 256, 96, 64)


def test_alignment_is_valid_for_all_sizes() -> None:
    # The leading stride of the size hint, 64, would be aligned.
    a = tensor(32, 64)
    graph = lowered_graph(torch.mm, a, tensor(64, 96), dynamic=[(0, 1), (1, 0)])
    result = matmul_nodes.problem_of(product(graph))
    assert result is not None
    assert (result.a.alignment, result.b.alignment) == (1, 8)
    graph = lowered_graph(
        lambda x, w: torch.mm(x.reshape(-1, 8).t(), w),
        a,
        tensor(256, 96),
        dynamic=[(0, 0), (1, 0)],
    )
    result = matmul_nodes.problem_of(product(graph))
    assert result is not None
    assert result.a == Operand("bfloat16", (1, 8), 8)


def test_a_summed_dimension_that_may_be_empty_is_not_covered() -> None:
    graph = fx.symbolic_trace(lambda a, b: aten.mm.default(a, b)).graph
    with fake_cuda.device(), FakeTensorMode(shape_env=ShapeEnv(specialize_zero_one=False)) as mode:
        source, shape_env = ConstantSource("size"), mode.shape_env
        symbol = shape_env.create_symbol(64, source, positive=None, do_not_specialize_zero_one=True)
        size = shape_env.create_symintnode(symbol, hint=64, source=source)
        values = [torch.empty(*item, device="cuda") for item in ((32, size), (size, 96), (32, 96))]
    for node, value in zip(graph.nodes, values, strict=False):
        node.meta["val"] = value
    assert matmul_nodes.why_unsupported(product(graph)) == "K may be 0"


def test_a_row_of_a_transposed_vector_may_be_scalar() -> None:
    inputs = tensor(32, 64), tensor(64, 1)
    node = product(lowered_graph(torch.mm, *inputs, dynamic=[(0, 0)]))
    symbol = node.meta["val"].shape[0].node.expr
    assert matmul_nodes.problem_of(node, {symbol: 1}) == GemmProblem.contiguous("mm", 1, 1, 64)


@pytest.mark.parametrize(("offset", "alignment"), [(0, 8), (4, 1), (8, 8)])
def test_alignment_of_a_slice(offset: int, alignment: int) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.mm(aten.as_strided.default(x, [32, 64], [80, 1], offset), w)

    assert problem(function, tensor(32, 80), tensor(64, 96)).a.alignment == alignment


def test_user_settings_of_numerics_belong_to_the_problem() -> None:
    graph = lowered_graph(torch.mm, tensor(32, 64, dtype=F32), tensor(64, 96, dtype=F32))
    half = lowered_graph(torch.mm, tensor(32, 64), tensor(64, 96))

    def flags(graph: fx.Graph) -> tuple[bool, bool]:
        result = matmul_nodes.problem_of(product(graph))
        assert result is not None
        return result.tf32, result.deterministic

    assert flags(graph) == (False, False)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert flags(graph) == (True, False)
        assert flags(half) == (False, False)
    finally:
        torch.set_float32_matmul_precision(before)
    with inductor_config.patch(deterministic=True):
        assert flags(half) == (False, True)
    if hasattr(inductor_config, "batch_invariant"):
        with inductor_config.patch(batch_invariant=True):
            assert flags(half) == (False, True)


def test_flags_of_matmul_that_are_set_belong_to_the_problem() -> None:
    half = lowered_graph(torch.mm, tensor(32, 64), tensor(64, 96))
    wide = lowered_graph(torch.mm, tensor(32, 64, dtype=F32), tensor(64, 96, dtype=F32))

    def flags(graph: fx.Graph) -> str | None:
        result = matmul_nodes.problem_of(product(graph))
        assert result is not None
        return result.math_flags

    assert flags(half) is None
    text = "-allow_bf16_reduced_precision_reduction"
    with numerics.with_matmul_flags(f"allow_fp16_accumulation,{text}"):
        dtype = matmul_nodes.dtype_of(product(half).meta["val"])
        assert flags(half) == {"bfloat16": text, "float16": "allow_fp16_accumulation"}[dtype]
        assert flags(wide) is None


@pytest.mark.parametrize(
    ("function", "inputs", "reason"),
    [
        (torch.mm, (tensor(0, 64), tensor(64, 96)), "size 0"),
        (torch.mm, (tensor(1, 64), tensor(64, 1)), "the output has one element"),
        (torch.bmm, (tensor(1, 1, 64), tensor(1, 64, 1)), "the output has one element"),
        (
            torch.mm,
            (tensor(8, 8, dtype=torch.float64), tensor(8, 8, dtype=torch.float64)),
            "operands of float64",
        ),
        (
            lambda a, b: aten.mm.dtype(a, b, torch.float32),
            (tensor(32, 64), tensor(64, 96)),
            "is not a supported matmul",
        ),
        (
            lambda a, b: aten._grouped_mm.default(a, b),
            (tensor(4, 32, 64), tensor(4, 64, 96)),
            "no dimension is grouped",
        ),
    ],
)
def test_unsupported_matmuls_have_no_problem(function: Any, inputs: Any, reason: str) -> None:
    node = product(lowered_graph(function, *inputs))
    assert matmul_nodes.problem_of(node) is None
    assert reason in (matmul_nodes.why_unsupported(node) or "")


def test_matmuls_on_a_cpu_are_unsupported() -> None:
    graph = fx.symbolic_trace(lambda a, b: aten.mm.default(a, b)).graph
    for node in graph.find_nodes(op="placeholder"):
        node.meta["val"] = torch.ones(8, 8)
    node = product(graph)
    assert matmul_nodes.why_unsupported(node) == f"the graph has no metadata for {node}"
    node.meta["val"] = torch.ones(8, 8)
    assert matmul_nodes.why_unsupported(node) == "it runs on cpu"
