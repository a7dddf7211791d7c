"""Finds matmuls with dequantized weights, applies the fusions, and compares results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from torch import fx
from torch.nn import functional as F

from inductor_ext.lowerings.graph import match_dequantized, undo_woq_int8
from inductor_ext.lowerings.graph.fusion import Fusion, View
from inductor_ext.lowerings.graph.fusion_search import find_fusions
from inductor_ext.lowerings.graph.rewrite import apply
from inductor_ext.settings import Settings
from test.support import fake_cuda
from test.support.gemm_graphs import call_operands, lowered_graph, tensor

Tensor = torch.Tensor

BF16, FP16, F32 = torch.bfloat16, torch.float16, torch.float32
I8, U8 = torch.int8, torch.uint8
PLAIN = Settings()
M, N, K, G = 5, 48, 64, 16

X = tensor(M, K, dtype=BF16)
BYTES, PAIRS = tensor(N, K, dtype=I8), tensor(N, K // 2, dtype=U8)
SCALES, ROWS = tensor(N, K // G, dtype=BF16), tensor(N, dtype=BF16)


def pairs(w: Tensor, first: int = 0) -> Tensor:
    halves = (w & 15, w >> 4)
    result: Tensor = torch.stack((halves[first], halves[1 - first]), -1).reshape(N, K)
    return result


def in_groups(q: Tensor, s: Tensor, z: Any = 0) -> Tensor:
    result: Tensor = ((q.reshape(N, K // G, G) - z) * s.unsqueeze(-1)).reshape(N, K)
    return result


def views(result: Fusion) -> list[View | None]:
    """How the kernel views what B is computed from."""
    return [operand.view for operand in result.operands.a_and_weights[1:]]


def kernel(result: Fusion) -> Callable[..., Any]:
    """The fusion's kernel in plain torch, in float64."""
    problem, constants = result.problem, result.constants
    dequant = problem.dequant
    assert dequant is not None
    parts = problem.parts or (problem.n,)

    def dequantized(b: Tensor, scale: Tensor | None, zero: Tensor | None) -> Tensor:
        if problem.b.dtype in ("int4", "uint4"):
            halves = (
                (b.view(U8) >> 4, b & 15) if constants.high_first else (b & 15, b.view(U8) >> 4)
            )
            b = torch.stack([half.int() & 15 for half in halves], 1).flatten(0, 1)
            b = (b ^ 8) - 8 if problem.b.dtype == "int4" else b
        b = b.double() - (constants.zero or 0)
        if zero is not None:
            b = b - zero.double().repeat_interleave(dequant.group, 0)
        if scale is None:
            return b
        if dequant.scales == "group":
            return b * scale.double().repeat_interleave(dequant.group, 0)
        return b * scale.double()

    def run(a: Tensor, *inputs: Tensor) -> Any:
        operands = call_operands(result, (a, *inputs))
        nothing = (None,) * len(parts)
        scaled = dequant.scales != "none"
        assert (bool(operands.scales), bool(operands.zero_points)) == (scaled, dequant.zero_points)
        weights = [
            dequantized(b, scale, zero)
            for b, scale, zero in zip(
                operands.weights,
                operands.scales or nothing,
                operands.zero_points or nothing,
                strict=True,
            )
        ]
        assert [factor.shape for factor in weights] == [(problem.k, part) for part in parts]
        a = a.double()
        if problem.norm:
            a = a * torch.rsqrt(a.square().mean(-1, keepdim=True) + constants.epsilon)
            assert len(operands.norm_vectors) == problem.norm.vectors
            a = a * (operands.norm_vectors[0].double() if problem.norm.vectors else 1)
        matmuls = [a @ factor for factor in weights]
        biases = operands.biases
        if biases:
            assert problem.epilogue.inputs[0].broadcast == "row"
            matmuls = [matmul + bias for matmul, bias in zip(matmuls, biases, strict=True)]
        if problem.epilogue.gated:
            matmuls = [ACTIVATIONS[constants.activation or ""](matmuls[0]) * matmuls[1]]
        results = tuple(matmul.to(getattr(torch, problem.stored_dtype)) for matmul in matmuls)
        return results if len(results) > 1 else results[0]

    return run


ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu}


def values(inputs: Sequence[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(like: Tensor) -> Tensor:
        if like.dtype in (I8, U8):
            low = -128 if like.dtype is I8 else 0
            result = torch.randint(low, low + 256, like.shape, generator=generator)
        else:
            result = torch.randn(like.shape, generator=generator)
        storage = result.to(like.dtype)
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).copy_(storage)

    return [random(inp) for inp in inputs]


def find(function: Callable[..., Any], *inputs: Tensor, settings: Settings = PLAIN) -> list[Fusion]:
    return match_dequantized.find_dequantized_matmuls(lowered_graph(function, *inputs), settings)


def check(function: Callable[..., Any], *inputs: Tensor) -> Fusion:
    """The only fusion of a function, after which its graph computes the same."""
    graph = lowered_graph(function, *inputs)
    (value,) = match_dequantized.find_dequantized_matmuls(graph, PLAIN)
    assert value.problem.operation == "mixed"
    arguments = values(inputs)
    expected = function(*arguments)
    apply(graph, value, kernel(value))
    graph.lint()
    module = fx.GraphModule(torch.nn.Module(), graph)
    (result,) = module(*arguments)
    assert result.shape == expected.shape
    assert (result - expected).abs().max() <= 0.02 * expected.abs().max()
    return value


def check_several(
    function: Callable[..., Any], *inputs: Tensor, settings: Settings = PLAIN, **rest: Any
) -> Fusion:
    """The first fusion of several products, after which the function's graph computes the same."""
    graph = lowered_graph(function, *inputs, **rest)
    with fake_cuda.device():
        undo_woq_int8.restore_matmuls(graph)
    single = match_dequantized.find_dequantized_matmuls(graph, settings)
    scaled = [match_dequantized.add_scales(item) for item in single]
    value = next(
        case for case in find_fusions(graph, settings, scaled) if case.problem.operation == "mixed"
    )
    arguments = values(inputs)
    expected = function(*arguments)
    apply(graph, value, kernel(value))
    graph.lint()
    results = fx.GraphModule(torch.nn.Module(), graph)(*arguments)
    for result, exact in zip(results, expected if len(results) > 1 else [expected], strict=True):
        assert result.shape == exact.shape
        assert (result - exact).abs().max() <= 0.03 * exact.abs().max()
    return value
