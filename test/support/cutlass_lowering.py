"""Graphs with epilogues, lowered with CUTLASS kernels for a simulated GPU."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from torch.nn import functional

from benchmarks.gemm.models import int4_linear
from inductor_ext import config
from inductor_ext.autotune import cutlass_kernels, cutlass_options, decide
from inductor_ext.hooks import scope
from inductor_ext.lowerings import cutlass_call
from inductor_ext.templates import kernels
from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.cutlass.epilogue import Epilogue as Tree
from inductor_ext.templates.problem import GemmProblem
from test.support import fake_cuda
from test.support.gemm_strategies import device

H200 = device("NVIDIA H200")
HALF, F32 = torch.bfloat16, torch.float32
ASKED = {"max_autotune_gemm_backends": "ATEN,cutlass"}
FUSES = {**ASKED, "cutlass__cutlass_epilogue_fusion_enabled": True}

Given = tuple[Sequence[Any], torch.dtype]
Rule = Callable[[GemmProblem], "kernels.Config | None"]


@dataclasses.dataclass
class Call:
    """A lowered launch of a CUTLASS kernel."""

    config: CutlassConfig
    tree: Tree
    a: Any
    b: Any
    inputs: Sequence[Any]
    layouts: Sequence[Any]
    scalars: Sequence[Any]
    ends: Any


def record_calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Record the launches of CUTLASS kernels that are lowered, without building kernels."""
    calls: list[Call] = []
    launch = cutlass_call.add_launch

    def add_launch(
        config: Any, tree: Any, a: Any, b: Any, inputs: Any, layouts: Any, **rest: Any
    ) -> tuple[Any, ...]:
        calls.append(Call(config, tree, a, b, inputs, layouts, **rest))
        return launch(config, tree, a, b, inputs, layouts, **rest)

    monkeypatch.setattr(cutlass_call, "add_launch", add_launch)
    monkeypatch.setattr(cutlass_call.nvcc_build, "build", lambda *_: None)
    kernel = types.SimpleNamespace(workspace_size=lambda *_: 4096)
    monkeypatch.setattr(cutlass_call.runtime, "load", lambda *_, **__: kernel)
    monkeypatch.setattr(cutlass_kernels, "prepare", lambda *_: {})
    monkeypatch.setattr(cutlass_kernels, "find_missing_tools", lambda: None)
    return calls


def best(problem: GemmProblem) -> CutlassConfig | None:
    """The CUTLASS kernel that the model ranks first."""
    if problem.epilogue.tree is None:
        return None
    results = cutlass_options.Options().rank(problem, H200)
    return results[0][0] if results else None


def lower(
    rule: Rule, function: Callable[..., Any], *inputs: Any, **options: Any
) -> tuple[fake_cuda.Lowered, list[GemmProblem]]:
    problems: list[GemmProblem] = []

    def remembered(problem: GemmProblem) -> kernels.Config | None:
        problems.append(problem)
        return rule(problem)

    with scope.compile_scope(config.snapshot({})), decide.force_config(remembered):
        return fake_cuda.lower(function, *inputs, **{**FUSES, **options}), problems


def operations_of(call: Call) -> list[str]:
    return [node.operation for node in call.tree.nodes() if node.arguments]


def matrix(*shape: Any, dtype: torch.dtype = HALF) -> Given:
    return shape, dtype


def linear(*shapes: Any) -> list[Given]:
    return [matrix(*shape) for shape in shapes]


def quantized(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return functional.silu((x @ w.to(x.dtype).t()) * scale)


def packed(x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.relu(b + int4_linear(x, w, scales))


def signed(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Weights in two's complement, the first of two in the lower half, with scales of columns."""
    numbers = torch.stack((w & 15, w >> 4), dim=-1).flatten(-2)
    weight = (numbers.to(torch.int8) ^ 8) - 8
    return functional.silu((x @ weight.to(x.dtype).t()) * scale)


def scaled(a: Any, b: Any, s: Any, t: Any, bias: Any) -> torch.Tensor:
    out = torch._scaled_mm(a, b.t(), s, t, bias=bias, out_dtype=HALF)
    return functional.gelu(out, approximate="tanh")


FP8 = torch.float8_e4m3fn
XW: Any = ((512, 256), (384, 256))

GRAPHS: dict[str, tuple[Callable[..., Any], list[Given], str | None]] = {
    "mm": (lambda x, w: x @ w.t(), linear(*XW), ""),
    "unary": (
        lambda x, w: torch.tanh(torch.exp(-torch.abs(x @ w.t())).sqrt().rsqrt().log()),
        linear(*XW),
        "abs neg exp sqrt rsqrt log tanh",
    ),
    "gelu": (lambda x, w: functional.gelu(x @ w.t()), linear(*XW), "mul mul erf add mul"),
    "gelu tanh": (lambda x, w: functional.gelu(x @ w.t(), approximate="tanh"), linear(*XW), None),
    "clamp": (
        lambda x, w: torch.clamp(functional.relu6(x @ w.t()) / 3.5 - 1.5, -0.5, 0.5),
        linear(*XW),
        None,
    ),
    "where": (
        lambda x, w, r: torch.where(r > 0.25, 1 - x @ w.t(), r * 2.5),
        linear(*XW, (512, 384)),
        None,
    ),
    "sizes": (lambda x, w: (x @ w.t()) / 256 * 384**-0.5 + 512, linear(*XW), None),
    "bias and residual": (
        lambda x, w, b, r: torch.relu(functional.linear(x, w, b)) + r,
        linear(*XW, (384,), (512, 384)),
        "add relu add",
    ),
    "bias of rows": (
        lambda x, w, b: torch.addmm(b, x, w.t(), alpha=2.0, beta=0.4),
        linear(*XW, (512, 1)),
        "mul mul add",
    ),
    "one number": (lambda x, w, s: (x @ w.t()) * s, [*linear(*XW), ((), F32)], "mul"),
    "batch": (
        lambda x, w, r: torch.sigmoid(torch.baddbmm(r, x, w, alpha=0.5)),
        linear((3, 64, 128), (3, 128, 96), (3, 64, 96)),
        "mul add sigmoid",
    ),
    "two outputs": (
        lambda x, w: ((y := x @ w.t()), torch.relu(y) * 1.5),
        linear(*XW),
        "relu mul",
    ),
    "scaled residual": (
        lambda x, w, r: torch.add(torch.relu(x @ w.t()), r, alpha=0.3),
        linear(*XW, (512, 384)),
        "relu mul add",
    ),
    "a value and what is computed of it": (
        lambda x, w: ((y := torch.square(x @ w.t())), y / (torch.abs(y) + 1)),
        linear(*XW),
        "square abs add truediv",
    ),
    "sequence": (
        lambda x, w, b, r: functional.silu(functional.linear(x, w, b)) + r,
        linear((4, 128, 256), (384, 256), (384,), (4, 128, 384)),
        None,
    ),
    "int8": (
        lambda a, b, s: (torch._int_mm(a, b.t()) * s).to(HALF),
        [
            matrix(512, 256, dtype=torch.int8),
            matrix(384, 256, dtype=torch.int8),
            matrix(512, 1, dtype=F32),
        ],
        "mul",
    ),
    "mixed": (
        quantized,
        [matrix(512, 256), matrix(384, 256, dtype=torch.int8), matrix(384)],
        "mul neg exp add truediv",
    ),
    "mixed, scaled before": (
        lambda x, w, s, b: torch.relu(functional.linear(x, w.to(x.dtype) * s, b)),
        [matrix(4, 128, 256), matrix(384, 256, dtype=FP8), matrix(384, 1), matrix(384)],
        "mul add relu",
    ),
    "int4": (
        packed,
        [
            matrix(512, 256),
            matrix(384, 128, dtype=torch.uint8),
            matrix(384, 4),
            matrix(384),
        ],
        "add relu",
    ),
    "int4, signed": (
        signed,
        [matrix(512, 256), matrix(384, 128, dtype=torch.uint8), matrix(384)],
        "mul neg exp add truediv",
    ),
    "fp8 by tensor": (
        lambda a, b, s: torch._scaled_mm(a, b.t(), s, s, out_dtype=F32, use_fast_accum=True),
        [matrix(512, 256, dtype=FP8), matrix(384, 256, dtype=FP8), matrix(dtype=F32)],
        "mul mul",
    ),
    "fp8": (
        scaled,
        [
            matrix(512, 256, dtype=FP8),
            matrix(384, 256, dtype=FP8),
            matrix(512, 1, dtype=F32),
            matrix(1, 384, dtype=F32),
            matrix(384),
        ],
        None,
    ),
    "grouped": (
        lambda a, b, ends: torch.relu(torch._grouped_mm(a, b.transpose(-1, -2), offs=ends)),
        [matrix(512, 256), matrix(4, 384, 256), matrix(4, dtype=torch.int32)],
        "relu",
    ),
}


def plain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w.t())
