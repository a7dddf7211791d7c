"""Norms before matmuls: which are fused, and that the kernel computes the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from torch.nn import functional as F

from inductor_ext.templates.fused_ops import Prologue, RowNorm
from inductor_ext.templates.tensors import Operand
from test.support.fusion_checks import (
    BIAS,
    F32,
    NORM,
    X3,
    Tensor,
    W,
    X,
    aten,
    check,
    find,
    gate_and_up,
    geglu,
    qkv,
    rms_norm,
)
from test.support.gemm_graphs import operand_count, tensor

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="traced on a stand-in for a GPU")


# Norms


@pytest.mark.parametrize("dtype", [torch.bfloat16, F32])
@pytest.mark.parametrize(
    "norm",
    [
        rms_norm,
        lambda x, w: F.rms_norm(x, (64,), w, 1e-6),
        lambda x, w: rms_norm(x, 1 + w),
        lambda x, w: (
            (x.float() / torch.sqrt((x.float() ** 2).mean(-1, True) + 1e-6)).to(x.dtype) * w
        ),
    ],
)
def test_norms(norm: Any, dtype: torch.dtype) -> None:
    inputs = [item.to(dtype) for item in (X3, NORM, W)]
    match = check(lambda x, n, w: F.linear(norm(x, n), w), *inputs)
    name = str(dtype).removeprefix("torch.")
    assert match.problem.prologue == Prologue(RowNorm("rms", 1, name))
    assert match.problem.a == Operand.of(name, (32, 64), (64, 1))
    assert match.constants.epsilon == pytest.approx(1e-6)


def by_hand(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    wide = x.float()
    away = wide - wide.mean(-1, keepdim=True)
    variance = away.pow(2).mean(-1, keepdim=True)
    return (weight * (away * torch.rsqrt(variance + 1e-5)) + bias).to(x.dtype)


def by_moments(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A form without a stored difference."""
    wide = x.float()
    mean = wide.mean(-1, keepdim=True)
    scale = weight * torch.rsqrt(wide.square().mean(-1, keepdim=True) - mean**2 + 1e-5)
    return (wide * scale + (bias - mean * scale)).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, F32])
@pytest.mark.parametrize(
    "norm",
    [
        lambda x, w, b: F.layer_norm(x, (64,), w, b),
        lambda x, w, b: F.layer_norm(x, (64,), 1 + w, b * 2),
        lambda x, w, b: (
            (x - x.mean(-1, True)) / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5) * w
            + b
        ),
        by_hand,
        by_moments,
    ],
)
def test_layer_norms(norm: Any, dtype: torch.dtype) -> None:
    inputs = [item.to(dtype) for item in (X3, NORM, NORM, W)]
    match = check(lambda x, n, b, w: F.linear(norm(x, n, b), w), *inputs)
    name = str(dtype).removeprefix("torch.")
    assert match.problem.prologue == Prologue(RowNorm("layer", 2, name))
    assert match.problem.a == Operand.of(name, (32, 64), (64, 1))
    assert match.constants.constexprs() == {"EPSILON": pytest.approx(1e-5)}
    assert operand_count(match) == 4


def test_a_norm_without_a_weight() -> None:
    match = check(lambda x, w: F.linear(F.rms_norm(x, (64,), None, 1e-6), w), X, W)
    assert match.problem.prologue == Prologue(RowNorm("rms"))
    assert operand_count(match) == 2
    match = check(lambda x, w: F.linear(F.layer_norm(x, (64,)), w), X, W)
    assert match.problem.prologue == Prologue(RowNorm("layer"))
    match = check(lambda x, n, w: F.linear(F.layer_norm(x, (64,), n), w), X, NORM, W)
    assert match.problem.prologue == Prologue(RowNorm("layer", 1))
    assert operand_count(match) == 3


def test_vectors_of_a_norm_may_have_another_dtype() -> None:
    def function(x: Tensor, n: Tensor, b: Tensor, w: Tensor) -> Tensor:
        return F.linear(F.layer_norm(x.float(), (64,), n, b).to(x.dtype), w)

    wide = tensor(64, dtype=F32)
    match = check(function, X, wide, wide, W)
    assert match.problem.prologue == Prologue(RowNorm("layer", 2, "float32"))


def test_a_layer_norm_of_float32_under_autocast() -> None:
    def function(x: Tensor, n: Tensor, b: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return F.linear(F.layer_norm(x, (64,), n, b), w)

    match = check(function, *(item.to(F32) for item in (X3, NORM, NORM, W)), tolerance=0.05)
    problem = match.problem
    assert problem.prologue == Prologue(RowNorm("layer", 2, "float32"))
    assert (problem.a.dtype, problem.b.dtype, problem.out) == ("float32", "bfloat16", "bfloat16")
    assert (problem.multiply_dtype, problem.arithmetic) == ("bfloat16", "half")


def test_a_layer_norm_before_parts_with_biases() -> None:
    def function(x: Tensor, n: Tensor, m: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        q, k, b, c = rest
        y = F.layer_norm(x, (64,), n, m)
        return F.linear(y, q, b), F.linear(y, k, c)

    inputs = X3, NORM, NORM, W, tensor(16, 64), tensor(48), tensor(16)
    match = check(function, *inputs, count=2)
    assert (match.problem.operation, match.problem.parts) == ("addmm", (48, 16))
    assert match.problem.prologue == Prologue(RowNorm("layer", 2))
    assert (operand_count(match), len(match.inputs)) == (5, 7)


def test_a_norm_before_parts_and_before_a_gate() -> None:
    match = check(lambda x, n, *w: qkv(rms_norm(x, n), *w), X3, NORM, W, tensor(8, 64), count=2)
    assert (match.problem.parts, operand_count(match)) == ((48, 8), 4)
    gated = gate_and_up(F.silu)
    match = check(lambda x, n, g, u: gated(rms_norm(x, n), g, u), X3, NORM, W, W, count=2)
    assert match.problem.epilogue.gated
    assert match.problem.prologue is not None

    def halves(x: Tensor, n: Tensor, w: Tensor) -> Tensor:
        a, b = F.linear(rms_norm(x, n), w).chunk(2, dim=-1)
        return F.silu(a) * b

    match = check(halves, X3, NORM, W, count=2)
    assert (match.halves, operand_count(match)) == ((0, 24), 4)

    def biased(x: Tensor, n: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return geglu(F.layer_norm(x, (64,), n, n), w, b)

    match = check(biased, X3, NORM, W, BIAS, count=2)
    assert (match.halves, operand_count(match)) == ((24, 0), 7)

    def written(x: Tensor, n: Tensor, g: Tensor, u: Tensor, b: Tensor) -> Tensor:
        y = rms_norm(x, n)
        return F.silu(F.linear(y, g) + b) * (F.linear(y, u) + b)

    match = check(written, X3, NORM, W, W, BIAS, count=2)
    assert match.problem.prologue == Prologue(RowNorm("rms", 1))
    assert (match.problem.operation, operand_count(match)) == ("addmm", 6)


def test_a_norm_before_a_bias() -> None:
    match = check(lambda x, n, w, b: F.linear(rms_norm(x, n), w, b), X, NORM, W, tensor(48))
    assert [inp.name for inp in match.inputs] == ["arg0_1", "permute", "arg1_1", "arg3_1"]


def test_the_input_of_a_norm_may_be_used_again() -> None:
    def layer(x: Tensor, y: Tensor, n: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        residual = x + y
        return F.linear(rms_norm(residual, n), w), residual.float() * 2

    check(layer, X3, X3, NORM, W)


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda x, n, w: (lambda y: (F.linear(y, w), y))(rms_norm(x, n)), (X, NORM, W)),
        (
            lambda x, n, w: (lambda y: (F.linear(y, w), w @ y.t()))(rms_norm(x, n)),
            (X, NORM, W),
        ),
        # A norm of heads instead of the matmul's input.
        (
            lambda x, n, w: F.linear(rms_norm(x.view(32, 4, 16), n).view(32, 64), w),
            (X, tensor(16), W),
        ),
        # Only a bias, and the unbiased variance.
        (lambda x, n, w: F.linear(F.layer_norm(x, (64,), None, n), w), (X, NORM, W)),
        (lambda x, n, w: F.linear(F.rms_norm(x, (64,), n) + n, w), (X, NORM, W)),
        (
            lambda x, n, w: F.linear(n * (x - x.mean(-1, True)) / x.std(-1, keepdim=True), w),
            (X, NORM, W),
        ),
        # Values that are saved for a backward.
        (
            lambda x, n, w: (lambda y, m, r: (F.linear(y, w), m, r))(
                *aten.native_layer_norm(x, (64,), n, n, 1e-5)
            ),
            (X, NORM, W),
        ),
        (lambda x, n, w: F.linear(rms_norm(x, n).relu(), w), (X, NORM, W)),
        # Mean squares of values that are shifted by a constant instead of the mean.
        (
            lambda x, n, w: F.linear(n * (x - (x - 1.0).square().mean(0, keepdim=True)), w),
            (X, NORM, W),
        ),
        (
            lambda x, n, w: F.linear(n * x * ((x - 0.5) ** 2).mean(-1, True).rsqrt(), w),
            (X, NORM, W),
        ),
        (
            lambda x, n, w: F.linear(n * x * ((1 - x.mean(-1, True)) ** 2).mean(-1, True), w),
            (X, NORM, W),
        ),
        (lambda x, n, w: F.linear(rms_norm(x.t(), n), w), (tensor(64, 32), NORM, W)),
        (lambda x, n, w: F.linear(rms_norm(x, n).to(torch.bfloat16), w), (X.to(F32), NORM, W)),
    ],
)
def test_other_patterns_are_no_norms(function: Any, inputs: Any) -> None:
    assert all(case.problem.prologue is None for case in find(function, *inputs))
