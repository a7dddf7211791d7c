"""Epilogues of CUTLASS kernels, read from graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.nn import functional

pytest.importorskip("triton")

from inductor_ext.lowerings.graph.cutlass_epilogue import GraphEpilogue, read_epilogue
from inductor_ext.lowerings.graph.epilogue_region import find_region
from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.cutlass.epilogue import Epilogue, NotExpressible, Tensor, identity
from inductor_ext.templates.cutlass.evt import render
from test.support.gemm_graphs import lowered_graph, tensor

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="traced on a stand-in for a GPU")

F32, BF16 = torch.float32, torch.bfloat16
PINGPONG = CutlassConfig(90, "warpspecialized_pingpong", (128, 128, 64), *("bfloat16",) * 3)

A, B = tensor(32, 64), tensor(64, 96)


def fused(function: Callable[..., Any], *inputs: torch.Tensor, **rest: Any) -> GraphEpilogue:
    graph = lowered_graph(function, *inputs, **rest)
    (matmul,) = (node for node in graph.nodes if "mm" in str(node.target))
    region = find_region(matmul)
    return read_epilogue(region, region[-1:])


CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], tuple[Tensor, ...]]] = {
    "relu": (lambda a, b: torch.relu(a @ b), (), ()),
    "relu6": (lambda a, b: functional.relu6(a @ b), (), ()),
    "gelu": (lambda a, b: functional.gelu(a @ b), (), ()),
    "gelu_tanh": (lambda a, b: functional.gelu(a @ b, approximate="tanh"), (), ()),
    "silu": (lambda a, b: functional.silu(a @ b), (), ()),
    "tanh_sigmoid": (lambda a, b: torch.tanh(a @ b) * torch.sigmoid(a @ b), (), ()),
    "clamp": (lambda a, b: torch.clamp(a @ b, -0.5, 0.75), (), ()),
    "scale_shift": (lambda a, b: (a @ b) * 0.125 - 3, (), ()),
    "leaky": (lambda a, b: functional.leaky_relu(a @ b, 0.1), (), ()),
    "square": (lambda a, b: torch.relu(a @ b) ** 2, (), ()),
    "by_size": (lambda a, b: (a @ b) / b.shape[1], (), ()),
    "bias": (
        lambda a, b, x: functional.gelu(a @ b + x),
        (tensor(96),),
        (Tensor("bfloat16", "row", 8),),
    ),
    "residual": (
        lambda a, b, x, y: torch.add(x, torch.relu(a @ b + y), alpha=2),
        (tensor(32, 96), tensor(32, 1, dtype=F32)),
        (Tensor("bfloat16", "matrix", 8), Tensor("float32", "column")),
    ),
    "scalar": (lambda a, b, x: (a @ b) * x, (tensor(1, 1),), (Tensor("bfloat16", "scalar"),)),
    "padded_rows": (
        lambda a, b, x: a @ b + x,
        (tensor(32, 96, strides=(100, 1)),),
        (Tensor("bfloat16", "matrix", 4),),
    ),
    "addmm": (
        lambda a, b, x: torch.relu(torch.addmm(x, a, b, alpha=2.0, beta=0.4)),
        (tensor(32, 96),),
        (Tensor("bfloat16", "matrix", 8),),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_epilogue_equals_the_graph(name: str) -> None:
    function, others, expected = CASES[name]
    match = fused(function, A, B, *others)
    assert sorted(match.epilogue.inputs, key=str) == sorted(expected, key=str)
    torch.manual_seed(0)
    a, b, *rest = (torch.randn(other.shape, dtype=F32) for other in (A, B, *others))
    placeholders = match.inputs and match.inputs[0].graph.find_nodes(op="placeholder")
    values = tuple((a, b, *rest)[placeholders.index(node)] for node in match.inputs)
    scalars = [scalar for scalar in match.scalars if isinstance(scalar, float)]
    (result,) = Epilogue(
        (("float32", match.epilogue.outputs[0][1]),), match.epilogue.inputs
    ).evaluate(a @ b, values, scalars)
    torch.testing.assert_close(result, function(a, b, *rest), rtol=1e-4, atol=1e-5)
    assert match.epilogue.outputs[0][0] in ("bfloat16", "float32")
    if match.epilogue.outputs[0][0] == "bfloat16":
        assert render(match.epilogue, PINGPONG).definitions


def test_the_matmul_alone() -> None:
    assert fused(torch.mm, A, B) == GraphEpilogue(identity("bfloat16"), (), ())
    int8 = fused(torch._int_mm, *(tensor(64, 64, dtype=torch.int8),) * 2)
    assert int8.epilogue.outputs == identity("int32").outputs


def test_sizes_are_launch_arguments() -> None:
    """Static and dynamic sizes."""
    static = fused(CASES["by_size"][0], A, B)
    assert static.scalars == (96.0,)
    dynamic = fused(CASES["by_size"][0], A, B, dynamic=[(1, 1)])
    (size,) = dynamic.scalars
    assert isinstance(size, fx.Node)
    assert static.epilogue.outputs[0][1] == dynamic.epilogue.outputs[0][1]
    # So is its square root, but a constant of the model is compiled in.
    attention = fused(lambda a, b: (a @ b) * 128**-0.5 + 0.5, A, B)
    assert attention.scalars == (128**-0.5,)


def test_alpha_and_beta_are_launch_arguments() -> None:
    result = fused(lambda x, a, b: torch.addmm(x, a, b, alpha=2.0, beta=0.4), tensor(96), A, B)
    assert result.scalars == (2.0, 0.4)
    assert fused(torch.addmm, tensor(96), A, B).scalars == ()


def test_a_batch() -> None:
    batch = tensor(4, 32, 64), tensor(4, 64, 96)
    match = fused(lambda a, b, x, y: (a @ b + x) * y, *batch, tensor(4, 32, 96), tensor(96))
    assert set(match.epilogue.inputs) == {
        Tensor("bfloat16", "matrix", 8),
        Tensor("bfloat16", "row", 8),
    }
    match = fused(torch.baddbmm, tensor(4, 1, 96), *batch)
    assert match.epilogue.inputs == (Tensor("bfloat16", "row", 8),)


def test_three_dimensions_of_a_linear_layer() -> None:
    match = fused(
        lambda a, b, x: functional.linear(a, b) + x,
        tensor(2, 16, 64),
        tensor(96, 64),
        tensor(2, 16, 96),
    )
    assert match.epilogue.inputs == (Tensor("bfloat16", "matrix", 8),)


def test_scales_of_fp8() -> None:
    a, b = (tensor(32, 64, dtype=torch.float8_e4m3fn, strides=(64, 1)) for _ in range(2))
    match = fused(
        lambda a, b, x, y: torch._scaled_mm(a, b.t(), x, y, out_dtype=BF16),
        a,
        b,
        tensor(32, 1, dtype=F32),
        tensor(1, 32, dtype=F32),
    )
    assert [inp.broadcast for inp in match.epilogue.inputs] == ["column", "row"]
    assert render(match.epilogue, PINGPONG).source is None


@pytest.mark.parametrize(
    ("function", "others", "reason"),
    [
        (lambda a, b: torch.sin(a @ b), (), "do not support .*sin"),
        (lambda a, b: (a @ b) ** 3, (), "a power other than"),
        (lambda a, b: (a @ b).double() + 1, (), "float64"),
        (lambda a, b, x: a @ b + x, (tensor(32, 96, strides=(1, 32)),), "strides"),
        (lambda a, b, x: a @ b + x.double(), (tensor(96),), "float64"),
    ],
)
def test_inexpressible_epilogues_are_refused_with_the_reason(
    function: Callable[..., Any], others: tuple[torch.Tensor, ...], reason: str
) -> None:
    with pytest.raises(NotExpressible, match=reason):
        fused(function, A, B, *others)
