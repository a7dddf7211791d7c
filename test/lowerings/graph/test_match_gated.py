"""Gated matmuls in FX graphs: which match, and that the replacement computes the same."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from torch.nn import functional as F

from inductor_ext.lowerings.operands import KernelConstants
from inductor_ext.templates.fused_ops import Epilogue
from inductor_ext.templates.tensors import EpilogueInput, Operand
from test.support.fusion_checks import (
    BIAS,
    F32,
    X3,
    Tensor,
    W,
    X,
    aten,
    check,
    find,
    gate_and_up,
    gate_by,
    geglu,
)
from test.support.gemm_graphs import operand_count, tensor

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="traced on a stand-in for a GPU")


@pytest.mark.parametrize("dtype", [torch.bfloat16, F32])
@pytest.mark.parametrize(
    ("act", "name"),
    [
        (F.silu, "silu"),
        (lambda x: x * torch.sigmoid(x), "silu"),
        (F.gelu, "gelu"),
        (lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))), "gelu"),
        (lambda x: F.gelu(x, approximate="tanh"), "gelu_tanh"),
        (
            lambda x: (
                x
                / 2
                * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
            ),
            "gelu_tanh",
        ),
        (F.relu, "relu"),
        (torch.sigmoid, "sigmoid"),
        (lambda x: x, "identity"),
    ],
)
def test_gates(act: Any, name: str, dtype: torch.dtype) -> None:
    inputs = [item.to(dtype) for item in (X3, W, W)]
    match = check(gate_and_up(act), *inputs)
    assert match.constants == KernelConstants(activation=name)
    assert operand_count(match) == 3
    problem = match.problem
    assert (problem.operation, problem.m, problem.n, problem.k) == ("mm", 32, 96, 64)
    assert problem.parts == (48, 48)
    assert problem.epilogue == Epilogue(gated=True)


def test_the_order_of_gate_and_up_is_found() -> None:
    def function(x: Tensor, up: Tensor, gate: Tensor) -> Tensor:
        return F.linear(x, up) * F.silu(F.linear(x, gate))

    match = check(function, X, W, W)
    weights = [inp.args[0].name for inp in match.inputs[1:]]  # type: ignore[union-attr]
    assert weights == ["arg2_1", "arg1_1"]


def test_a_gate_in_float32_is_cast_by_the_kernel() -> None:
    def function(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(F.linear(x, gate).float()) * F.linear(x, up).float()

    match = check(lambda *args: function(*args).to(torch.bfloat16), X, W, W)
    assert match.problem.stored_dtype == "bfloat16"
    match = check(function, X, W, W)
    assert (match.problem.out, match.problem.stored_dtype) == ("bfloat16", "float32")


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    "halve",
    [
        lambda h: h.chunk(2, dim=-1),
        lambda h: h.split([24, 24], dim=-1),
        lambda h: (h.narrow(-1, 0, 24), h.narrow(-1, 24, 24)),
        # Joined frozen weights.
        lambda h: [half.reshape(2, 16, 24) for half in h.reshape(32, 48).chunk(2, dim=-1)],
    ],
)
def test_a_gate_by_halves_of_one_weight(halve: Any, first: bool) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        a, b = halve(F.linear(x, w))
        return F.silu(a) * b if first else a * F.silu(b)

    match = check(function, X3, W)
    assert match.halves == ((0, 24) if first else (24, 0))
    assert match.problem.parts == (24, 24)
    assert match.problem.b == Operand("bfloat16", (1, 64), 8)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, g, u, b, c: F.silu(F.linear(x, g, b)) * F.linear(x, u, c),
        # Inductor does not convert it to aten.addmm in this form.
        lambda x, g, u, b, c: F.silu(F.linear(x, g) + b) * (c + F.linear(x, u)),
    ],
)
def test_a_gate_with_biases(function: Any) -> None:
    match = check(function, X3, W, W, BIAS, BIAS)
    assert match.problem.operation == "addmm"
    assert match.problem.epilogue == Epilogue((EpilogueInput("bfloat16", "row"),), 1, gated=True)
    assert match.constants.constexprs() == {"ACTIVATION": "'silu'"}
    assert operand_count(match) == 5
    assert [inp.name for inp in match.inputs[-2:]] == ["arg3_1", "arg4_1"]


@pytest.mark.parametrize("x", [X, X3])
def test_a_gate_by_halves_with_a_bias(x: Tensor) -> None:
    match = check(geglu, x, W, BIAS)
    assert (match.halves, operand_count(match)) == ((24, 0), 5)
    assert match.problem.parts == (24, 24)
    assert [inp.name for inp in match.inputs[1:]] == ["permute", "arg2_1"]
    check(lambda x, w, b: geglu(x, w, b), X3.to(F32), W.to(F32), BIAS.to(F32))


def test_halves_at_other_offsets_are_less_aligned() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        a, b = (x @ w).chunk(2, dim=-1)
        return F.silu(a) * b

    match = check(function, X, tensor(64, 40))
    assert match.problem.b == Operand("bfloat16", (40, 1), 4)


PAIR = tensor(96, 64)


def half_and_middle(h: Tensor) -> Tensor:
    return F.silu(h.narrow(-1, 0, 48)) * h.split([24, 48, 24], -1)[1]


def quarter(h: Tensor) -> Tensor:
    a, b, c, d = h.chunk(4, dim=-1)
    return F.silu(a) * b + c + d


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        # A value that is saved for a backward is used outside.
        (
            lambda x, g, u: (lambda a, b: (F.silu(a) * b, a))(F.linear(x, g), F.linear(x, u)),
            (X, W, W),
        ),
        (lambda x, g, u: (lambda s: (s * F.linear(x, u), s))(F.silu(F.linear(x, g))), (X, W, W)),
        (lambda x, y, g, u: F.silu(F.linear(x, g)) * F.linear(y, u), (X, X, W, W)),
        # A bias of only one matmul, a bias per row, and a bias of only one half.
        (lambda x, g, u, c: F.silu(F.linear(x, g, c)) * F.linear(x, u), (X, W, W, tensor(48))),
        (
            lambda x, g, u, c: F.silu(aten.addmm(c, x, g.t())) * aten.addmm(c, x, u.t()),
            (X, W, W, tensor(32, 48)),
        ),
        (
            lambda x, g, u, c: (
                F.silu(aten.addmm(c, x, g.t(), beta=2)) * aten.addmm(c, x, u.t(), beta=2)
            ),
            (X, W, W, tensor(48)),
        ),
        (
            lambda x, g, b: (lambda h, i: F.silu(h.narrow(-1, 0, 24)) * i.narrow(-1, 24, 24))(
                F.linear(x, g), F.linear(x, g) + b
            ),
            (X3, W, tensor(48)),
        ),
        (
            lambda x, g, b: (lambda h: (gate_by(F.gelu, h), h))(F.linear(x, g, b)),
            (X, W, tensor(48)),
        ),
        (lambda x, g, u: torch.clamp(F.silu(F.linear(x, g)), max=7) * F.linear(x, u), (X, W, W)),
        (lambda x, g, u: torch.cos(F.linear(x, g)) * F.linear(x, u), (X, W, W)),
        (lambda x, g: F.silu(F.linear(x, g)) * F.linear(x, g), (X, W)),
        (lambda x, g: quarter(F.linear(x, g)), (X, W)),
        # The rows of the two matmuls differ.
        (
            lambda x, g, u: F.silu(F.linear(x, g)).view(32, 1, 48) * F.linear(x, u).view(1, 32, 48),
            (X, W, W),
        ),
        (
            lambda x, g, u: F.silu(F.linear(x, g)).view(48, 32) * F.linear(x, u).view(48, 32),
            (X, W, W),
        ),
        # A whole matmul and half of another; a slice of the size of a half that is not one.
        (lambda x, g, u: F.silu(F.linear(x, g)) * F.linear(x, u).chunk(2, -1)[1], (X, W, PAIR)),
        (lambda x, w: half_and_middle(F.linear(x, w)), (X, PAIR)),
        # A matmul with one output, used as a scalar; powers without a formula.
        (
            lambda x, w, c: (F.linear(x, w).reshape(()) + c) * c,
            (tensor(1, 64), tensor(1, 64), tensor()),
        ),
        (lambda x, g, u: F.linear(x, g).pow(math.inf) * F.linear(x, u), (X, W, W)),
        (lambda x, g, u: F.linear(x, g).pow(math.nan) * F.linear(x, u), (X, W, W)),
        # An explicit cast in between.
        (
            lambda x, g, u: (
                F.silu(F.linear(x, g)).to(torch.float8_e4m3fn).to(torch.bfloat16) * F.linear(x, u)
            ),
            (X, W, W),
        ),
    ],
)
def test_other_patterns_are_no_gates(function: Any, inputs: Any) -> None:
    assert all(not case.problem.epilogue.gated for case in find(function, *inputs))


def test_gates_need_weights_of_one_layout() -> None:
    def function(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(F.linear(x, gate)) * (x @ up)

    assert find(function, X, W, tensor(64, 48)) == []
