"""Finds fusions in traced graphs, applies them, and compares the results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from inductor_ext.lowerings.graph import rewrite
from inductor_ext.lowerings.graph.fusion import Fusion
from inductor_ext.lowerings.graph.fusion_search import find_fusions
from inductor_ext.settings import Settings
from inductor_ext.templates.fused_ops import Epilogue
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import EpilogueInput
from test.support import fake_cuda
from test.support.gemm_graphs import call_operands, lowered_graph, tensor

aten = torch.ops.aten
F32, F64 = torch.float32, torch.float64
Tensor = torch.Tensor
X, X3 = tensor(32, 64), tensor(2, 16, 64)
W = tensor(48, 64)
NORM = tensor(64)
PLAIN = Settings()


def rms_norm(x: Tensor, weight: Tensor, epsilon: float = 1e-6) -> Tensor:
    """As in models."""
    wide = x.to(torch.float32)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * (wide * scale).to(x.dtype)


def reference(fusion: Fusion) -> Callable[..., Any]:
    """The fusion's kernel in plain torch."""
    problem = fusion.problem
    activations: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "relu": F.relu,
        "sigmoid": torch.sigmoid,
        "identity": lambda x: x,
    }

    def kernel(a: Tensor, *rest: Tensor) -> Any:
        operands = call_operands(fusion, (a, *rest))
        weights, vectors = operands.weights, operands.norm_vectors
        biases = operands.gate_biases or operands.biases
        assert len(weights) == max(1, len(problem.parts))
        assert a.dim() == 2
        if problem.norm is not None:
            assert len(vectors) == problem.norm.vectors
            if problem.norm.kind == "layer":
                a = a - a.mean(-1, keepdim=True)
            a = a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + fusion.constants.epsilon)
            a = (math.prod(vectors[:1], start=a) + sum(vectors[1:])).to(weights[0].dtype)
        matmuls = [a @ factor for factor in weights]
        if biases:
            matmuls = [x + bias for x, bias in zip(matmuls, biases, strict=True)]
        if problem.epilogue.gated:
            gate, up = matmuls
            gated = activations[fusion.constants.activation or ""](gate) * up
            # Graphs of float32 are also run in float64.
            return gated if gated.dtype is F64 else gated.to(getattr(torch, problem.stored_dtype))
        return matmuls[0] if len(matmuls) == 1 else tuple(matmuls)

    return kernel


def find(function: Callable[..., Any], *inputs: Tensor, **options: Any) -> list[Fusion]:
    return find_fusions(lowered_graph(function, *inputs, **options), PLAIN)


def check(
    function: Callable[..., Any],
    *inputs: Tensor,
    count: int = 1,
    tolerance: float | None = None,
    **options: Any,
) -> Fusion:
    """The first fusion of a function, after which its graph computes the same."""
    graph = lowered_graph(function, *inputs, **options)
    fusions = find_fusions(graph, PLAIN)
    assert len(fusions) == count, fusions
    tolerance = tolerance or (1e-5 if inputs[0].dtype is F32 else 0.05)
    apply_and_compare(graph, fusions[:1], values_of(inputs), tolerance)
    return fusions[0]


def values_of(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Values for which matmul results are of the order of 1."""
    generator = torch.Generator().manual_seed(0)
    scales = [1, *(8 if inp.dim() == 2 else 1 for inp in inputs[1:])]
    return [
        (torch.randn(inp.shape, generator=generator) / scale).to(inp.dtype)
        for inp, scale in zip(inputs, scales, strict=True)
    ]


def apply_and_compare(
    graph: fx.Graph, fusions: Sequence[Fusion], inputs: Sequence[Tensor], tolerance: float
) -> None:
    def run() -> list[Tensor]:
        return list(fx.Interpreter(torch.nn.Module(), graph=graph).run(*inputs))

    before = run()
    values = {node.name: node.meta["val"] for item in fusions for node in item.outputs}
    with fake_cuda.device():
        calls = [rewrite.apply(graph, item, reference(item))[0] for item in fusions]
    graph.lint()
    for call, item in zip(calls, fusions, strict=True):
        assert call.target is not None
        whole = (call.meta["val"],) if len(item.outputs) == 1 else call.meta["val"]
        assert [tuple(part.shape)[1] for part in whole] == list(
            item.problem.parts if len(item.outputs) > 1 else [item.problem.columns]
        )
    metadata = {node.name: node.meta.get("val") for node in graph.nodes}
    assert all(metadata[name] is value for name, value in values.items())
    for old, new in zip(before, run(), strict=True):
        assert old.dtype == new.dtype
        assert old.shape == new.shape
        torch.testing.assert_close(new, old, rtol=tolerance, atol=tolerance, equal_nan=True)


# Gates


def gate_and_up(act: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda x, gate, up: act(F.linear(x, gate)) * F.linear(x, up)


BIAS = tensor(48)


def gate_by(act: Callable[[Tensor], Tensor], whole: Tensor) -> Tensor:
    """The second half gates the first."""
    hidden, gate = whole.chunk(2, dim=-1)
    return hidden * act(gate)


def geglu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """As in diffusers."""
    return gate_by(F.gelu, F.linear(x, w, b))


# Shared inputs


def qkv(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    return tuple(F.linear(x, weight) for weight in weights)


# All of them


def layer(x: Tensor, n: Tensor, *weights: Tensor) -> Tensor:
    q, k, gate, up, down = weights
    query, key = F.linear(rms_norm(x, n), q), F.linear(rms_norm(x, n), k)
    mixed = x + query - key
    hidden = rms_norm(mixed, n)
    return mixed + F.linear(F.silu(F.linear(hidden, gate)) * F.linear(hidden, up), down)


# Epilogues


def row(dtype: str = "bfloat16") -> EpilogueInput:
    return EpilogueInput(dtype, "row")


# Measurements


def problem(operation: Any = "mm", *inputs: EpilogueInput, **rest: Any) -> GemmProblem:
    rest = {"m": 32, **rest}
    if inputs:
        rest["epilogue"] = Epilogue(inputs, len(inputs), gated=rest.pop("gated", False))
    elif rest.pop("gated", False):
        rest["epilogue"] = Epilogue(out=rest.pop("stored", None), gated=True)
    return GemmProblem.contiguous(operation, n=96, k=64, **rest)
