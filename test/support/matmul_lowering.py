"""Graphs with matmuls, lowered for a simulated GPU with given decisions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from inductor_ext import config
from inductor_ext.autotune import decide
from inductor_ext.hooks import scope
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.triton.config import GemmConfig

pytest.importorskip("triton")

from test.support import fake_cuda

F = torch.nn.functional
HALF = torch.bfloat16
TILE = GemmConfig("splitk", 16, 32, 64, 2, 2)

Given = tuple[Sequence[Any], torch.dtype]


def lower(
    rule: Callable[[GemmProblem], GemmConfig | None],
    function: Callable[..., Any],
    *inputs: Given,
    **options: Any,
) -> tuple[fake_cuda.Lowered, list[GemmProblem]]:
    """The generated code of a function whose kernels `rule` decides, and the decided problems."""
    asked: list[GemmProblem] = []

    def remembered(problem: GemmProblem) -> GemmConfig | None:
        asked.append(problem)
        return rule(problem)

    settings = config.snapshot({})
    with scope.compile_scope(settings), decide.force_config(remembered):
        return fake_cuda.lower(function, *inputs, **options), asked


def matrix(*shape: Any) -> Given:
    return shape, HALF


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def layer(x: Any, g: Any, q: Any, k: Any, v: Any, o: Any, w1: Any, w2: Any, w3: Any) -> Any:
    """A transformer layer with matmuls in place of attention."""
    h = norm(x, g)
    x = x + ((h @ q.t()) * torch.cat([h @ k.t(), h @ v.t()], -1)) @ o.t()
    h = norm(x, g)
    return x + (F.silu(h @ w1.t()) * (h @ w2.t())) @ w3.t()


def layer_inputs(rows: int | str) -> list[Given]:
    sizes = [(256, 256), (128, 256), (128, 256), (256, 256), (512, 256), (512, 256), (256, 512)]
    return [matrix(rows, 256), matrix(256), *(matrix(*size) for size in sizes)]
