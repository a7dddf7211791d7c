"""Patterns of products in FX graphs: found or not, and the same numbers after the replacement."""

from __future__ import annotations

import dataclasses
import math
import operator
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from hypothesis import given
from hypothesis import strategies as st
from torch import fx
from torch.nn import functional as F

from inductor_ext.autotune.reference import program
from inductor_ext.lowerings.graph import match_shared_input, rewrite
from inductor_ext.lowerings.graph.epilogue_region import add_epilogue, find_region, flatten_epilogue
from inductor_ext.lowerings.graph.fusion import Fusion
from inductor_ext.lowerings.graph.fusion_search import find_fusions
from inductor_ext.lowerings.graph.matmul_nodes import problem_of
from inductor_ext.lowerings.operands import KernelConstants
from inductor_ext.settings import Settings
from inductor_ext.templates.problem import (
    Epilogue,
    EpilogueInput,
    GemmProblem,
    Operand,
    Prologue,
    RowNorm,
)
from test.support import fake_cuda
from test.support.gemm_graphs import call_operands, lowered_graph, operand_count, tensor
from test.support.gemm_strategies import examples

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="traced on a stand-in for a GPU")

aten = torch.ops.aten
F32, F64 = torch.float32, torch.float64
Tensor = torch.Tensor

X, X3 = tensor(32, 64), tensor(2, 16, 64)
W = tensor(48, 64)
NORM = tensor(64)
PLAIN = Settings()


def rms_norm(x: Tensor, weight: Tensor, epsilon: float = 1e-6) -> Tensor:
    """As models write it."""
    wide = x.to(torch.float32)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * (wide * scale).to(x.dtype)


def reference(found: Fusion) -> Callable[..., Any]:
    """The fusion's kernel in plain torch."""
    problem = found.problem
    activations: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "relu": F.relu,
        "sigmoid": torch.sigmoid,
        "identity": lambda x: x,
    }

    def kernel(a: Tensor, *rest: Tensor) -> Any:
        operands = call_operands(found, (a, *rest))
        factors, vectors = operands.weights, operands.norm_vectors
        biases = operands.gate_biases or operands.biases
        assert len(factors) == max(1, len(problem.parts))
        assert a.dim() == 2
        if problem.norm is not None:
            assert len(vectors) == problem.norm.vectors
            if problem.norm.kind == "layer":
                a = a - a.mean(-1, keepdim=True)
            a = a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + found.constants.epsilon)
            a = (math.prod(vectors[:1], start=a) + sum(vectors[1:])).to(factors[0].dtype)
        products = [a @ factor for factor in factors]
        if biases:
            products = [x + bias for x, bias in zip(products, biases, strict=True)]
        if problem.epilogue.gated:
            gate, up = products
            gated = activations[found.constants.activation or ""](gate) * up
            # Graphs of float32 are also run in float64.
            return gated if gated.dtype is F64 else gated.to(getattr(torch, problem.stored))
        return products[0] if len(products) == 1 else tuple(products)

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
    found = find_fusions(graph, PLAIN)
    assert len(found) == count, found
    tolerance = tolerance or (1e-5 if inputs[0].dtype is F32 else 0.05)
    apply_and_compare(graph, found[:1], values_of(inputs), tolerance)
    return found[0]


def values_of(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Values for which products are of the order of 1."""
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
    kept = {node.name: node.meta.get("val") for node in graph.nodes}
    assert all(kept[name] is value for name, value in values.items())
    for old, new in zip(before, run(), strict=True):
        assert old.dtype == new.dtype
        assert old.shape == new.shape
        torch.testing.assert_close(new, old, rtol=tolerance, atol=tolerance, equal_nan=True)


# Gates


def gate_and_up(act: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda x, gate, up: act(F.linear(x, gate)) * F.linear(x, up)


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
    found = check(gate_and_up(act), *inputs)
    assert found.constants == KernelConstants(activation=name)
    assert operand_count(found) == 3
    problem = found.problem
    assert (problem.operation, problem.m, problem.n, problem.k) == ("mm", 32, 96, 64)
    assert problem.parts == (48, 48)
    assert problem.epilogue == Epilogue(gated=True)


def test_the_order_of_gate_and_up_is_found() -> None:
    def function(x: Tensor, up: Tensor, gate: Tensor) -> Tensor:
        return F.linear(x, up) * F.silu(F.linear(x, gate))

    found = check(function, X, W, W)
    weights = [inp.args[0].name for inp in found.inputs[1:]]  # type: ignore[union-attr]
    assert weights == ["arg2_1", "arg1_1"]


def test_a_gate_in_float32_is_cast_by_the_kernel() -> None:
    def function(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(F.linear(x, gate).float()) * F.linear(x, up).float()

    found = check(lambda *args: function(*args).to(torch.bfloat16), X, W, W)
    assert found.problem.stored == "bfloat16"
    found = check(function, X, W, W)
    assert (found.problem.out, found.problem.stored) == ("bfloat16", "float32")


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    "halve",
    [
        lambda h: h.chunk(2, dim=-1),
        lambda h: h.split([24, 24], dim=-1),
        lambda h: (h.narrow(-1, 0, 24), h.narrow(-1, 24, 24)),
        # As frozen weights are joined.
        lambda h: [half.reshape(2, 16, 24) for half in h.reshape(32, 48).chunk(2, dim=-1)],
    ],
)
def test_a_gate_by_halves_of_one_weight(halve: Any, first: bool) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        a, b = halve(F.linear(x, w))
        return F.silu(a) * b if first else a * F.silu(b)

    found = check(function, X3, W)
    assert found.halves == ((0, 24) if first else (24, 0))
    assert found.problem.parts == (24, 24)
    assert found.problem.b == Operand("bfloat16", (1, 64), 8)


BIAS = tensor(48)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, g, u, b, c: F.silu(F.linear(x, g, b)) * F.linear(x, u, c),
        # As it is written here, Inductor makes no aten.addmm of it.
        lambda x, g, u, b, c: F.silu(F.linear(x, g) + b) * (c + F.linear(x, u)),
    ],
)
def test_a_gate_with_biases(function: Any) -> None:
    found = check(function, X3, W, W, BIAS, BIAS)
    assert found.problem.operation == "addmm"
    assert found.problem.epilogue == Epilogue((EpilogueInput("bfloat16", "row"),), 1, gated=True)
    assert found.constants.constexprs() == {"ACTIVATION": "'silu'"}
    assert operand_count(found) == 5
    assert [inp.name for inp in found.inputs[-2:]] == ["arg3_1", "arg4_1"]


def gate_by(act: Callable[[Tensor], Tensor], whole: Tensor) -> Tensor:
    """The second half gates the first."""
    hidden, gate = whole.chunk(2, dim=-1)
    return hidden * act(gate)


def geglu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """As in diffusers."""
    return gate_by(F.gelu, F.linear(x, w, b))


@pytest.mark.parametrize("x", [X, X3])
def test_a_gate_by_halves_with_a_bias(x: Tensor) -> None:
    found = check(geglu, x, W, BIAS)
    assert (found.halves, operand_count(found)) == ((24, 0), 5)
    assert found.problem.parts == (24, 24)
    assert [inp.name for inp in found.inputs[1:]] == ["permute", "arg2_1"]
    check(lambda x, w, b: geglu(x, w, b), X3.to(F32), W.to(F32), BIAS.to(F32))


def test_halves_that_begin_anywhere_are_less_aligned() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        a, b = (x @ w).chunk(2, dim=-1)
        return F.silu(a) * b

    found = check(function, X, tensor(64, 40))
    assert found.problem.b == Operand("bfloat16", (40, 1), 4)


PAIR = tensor(96, 64)


def half_and_middle(h: Tensor) -> Tensor:
    return F.silu(h.narrow(-1, 0, 48)) * h.split([24, 48, 24], -1)[1]


def quarter(h: Tensor) -> Tensor:
    a, b, c, d = h.chunk(4, dim=-1)
    return F.silu(a) * b + c + d


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        # What is saved for a backward is needed outside.
        (
            lambda x, g, u: (lambda a, b: (F.silu(a) * b, a))(F.linear(x, g), F.linear(x, u)),
            (X, W, W),
        ),
        (lambda x, g, u: (lambda s: (s * F.linear(x, u), s))(F.silu(F.linear(x, g))), (X, W, W)),
        (lambda x, y, g, u: F.silu(F.linear(x, g)) * F.linear(y, u), (X, X, W, W)),
        # A bias of one of them, of every row its own, and of one half alone.
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
        # Rows of one are not rows of the other.
        (
            lambda x, g, u: F.silu(F.linear(x, g)).view(32, 1, 48) * F.linear(x, u).view(1, 32, 48),
            (X, W, W),
        ),
        (
            lambda x, g, u: F.silu(F.linear(x, g)).view(48, 32) * F.linear(x, u).view(48, 32),
            (X, W, W),
        ),
        # One whole product and half of another; a part that is no half, of the size of one.
        (lambda x, g, u: F.silu(F.linear(x, g)) * F.linear(x, u).chunk(2, -1)[1], (X, W, PAIR)),
        (lambda x, w: half_and_middle(F.linear(x, w)), (X, PAIR)),
        # A product of one number, seen as one; powers that are none of any formula.
        (
            lambda x, w, c: (F.linear(x, w).reshape(()) + c) * c,
            (tensor(1, 64), tensor(1, 64), tensor()),
        ),
        (lambda x, g, u: F.linear(x, g).pow(math.inf) * F.linear(x, u), (X, W, W)),
        (lambda x, g, u: F.linear(x, g).pow(math.nan) * F.linear(x, u), (X, W, W)),
        # Rounded on the way on purpose.
        (
            lambda x, g, u: (
                F.silu(F.linear(x, g)).to(torch.float8_e4m3fn).to(torch.bfloat16) * F.linear(x, u)
            ),
            (X, W, W),
        ),
    ],
)
def test_what_is_no_gate(function: Any, inputs: Any) -> None:
    assert all(not case.problem.epilogue.gated for case in find(function, *inputs))


def test_gates_of_weights_in_different_layouts_are_left_alone() -> None:
    def function(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(F.linear(x, gate)) * (x @ up)

    assert find(function, X, W, tensor(64, 48)) == []


# Shared inputs


def qkv(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    return tuple(F.linear(x, weight) for weight in weights)


def test_a_shared_input_of_weights_of_several_widths() -> None:
    found = check(qkv, X3, W, tensor(16, 64), tensor(8, 64))
    problem = found.problem
    assert (problem.m, problem.n, problem.k, problem.parts) == (32, 72, 64, (48, 16, 8))
    assert not problem.epilogue.gated
    assert found.constants == KernelConstants()
    assert operand_count(found) == 4


def test_each_part_may_have_a_bias() -> None:
    def function(x: Tensor, q: Tensor, k: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        return F.linear(x, q, b), F.linear(x, k, c)

    found = check(function, X, W, tensor(16, 64), tensor(48), tensor(16))
    assert found.problem.operation == "addmm"
    assert found.problem.epilogue == Epilogue((EpilogueInput("bfloat16", "row"),), 1)
    assert found.constants == KernelConstants()
    assert operand_count(found) == 3
    assert len(found.inputs) == 5


def test_a_part_without_a_bias_goes_with_those_without() -> None:
    def function(x: Tensor, q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return F.linear(x, q), F.linear(x, k, b), F.linear(x, v)

    (found,) = find(function, X, W, W, W, tensor(48))
    assert [node.name for node in found.nodes] == ["mm", "mm_1"]


def test_weights_computed_later_move_before_the_call() -> None:
    def function(x: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        query = F.linear(x, q).relu()
        return query * 2, F.linear(x, k * 2 + 1)

    check(function, X, W, W)


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        # The second weight is computed from the first product.
        (lambda x, w: x @ torch.relu(x @ w), (tensor(64, 64), tensor(64, 64))),
        (lambda x, q, k: (F.linear(x, q), x @ k), (X, W, tensor(64, 48))),
        (lambda x, q, k: (x @ q, x @ k), (X, tensor(64, 48), tensor(64, 16))),
        (
            lambda x, q, k: (F.linear(x, q), F.linear(x.float(), k.float())),
            (X, W, W),
        ),
        (lambda x, q, k: (F.linear(x, q), F.linear(x.narrow(0, 0, 16), k)), (X, W, W)),
        (
            lambda x, q, k, b: (F.linear(x, q, b), aten.addmm(b, x, k.t(), beta=2)),
            (X, W, W, tensor(48)),
        ),
        # Windows over a result are read by their places in memory.
        (
            lambda x, q, k: (
                F.linear(x, q).view(4, 8, 48).as_strided((31, 2, 48), (48, 48, 1)),
                F.linear(x, k).chunk(2, -1)[1].as_strided((4, 4), (2, 1), 48),
            ),
            (X, W, W),
        ),
        # A column's stride to the next one is 1 here, and no number of 16 bytes.
        (lambda x, q, k: (x @ q, x @ k), (X, tensor(64, 1), tensor(64, 1))),
        (lambda x, q, k: F.silu(x @ q) * (x @ k), (X, tensor(64, 1), tensor(64, 1))),
    ],
)
def test_what_is_not_computed_side_by_side(function: Any, inputs: Any) -> None:
    assert find(function, *inputs) == []


def test_two_pairs_that_depend_on_each_other() -> None:
    def function(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        first = x @ w
        second = y @ torch.relu(first)
        third = y @ w
        return second, x @ torch.relu(third)

    # Together, (first, fourth) would wait for third and (second, third) for first.
    found = find(function, *(tensor(64, 64) for _ in range(3)))
    assert [[node.name for node in item.nodes] for item in found] == [["mm", "mm_3"]]


def test_there_is_a_most_of_parts() -> None:
    found = find(qkv, X, *[W] * 10)
    assert [len(case.problem.parts) for case in found] == [match_shared_input.MOST_PARTS, 2]


@pytest.mark.parametrize("written", ["the input", "a cache"])
def test_only_what_reads_what_is_written_stays_behind_a_write(written: str) -> None:
    def function(x: Tensor, q: Tensor, k: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        return F.linear(x, q), F.linear(x, k), cache

    graph = lowered_graph(function, X, W, W, X)
    _, second = graph.find_nodes(op="call_function", target=aten.mm.default)
    x, *_, cache = graph.find_nodes(op="placeholder")
    node = {"the input": x, "a cache": cache}[written]
    with graph.inserting_before(second):
        graph.call_function(aten.add_.Scalar, (node, 1)).meta["val"] = node.meta["val"]
    assert len(find_fusions(graph, PLAIN)) == (written == "a cache")


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
    found = check(lambda x, n, w: F.linear(norm(x, n), w), *inputs)
    name = str(dtype).removeprefix("torch.")
    assert found.problem.prologue == Prologue(RowNorm("rms", 1, name))
    assert found.problem.a == Operand.of(name, (32, 64), (64, 1))
    assert found.constants.epsilon == pytest.approx(1e-6)


def by_hand(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    wide = x.float()
    away = wide - wide.mean(-1, keepdim=True)
    variance = away.pow(2).mean(-1, keepdim=True)
    return (weight * (away * torch.rsqrt(variance + 1e-5)) + bias).to(x.dtype)


def by_moments(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """As some write it who store no difference."""
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
    found = check(lambda x, n, b, w: F.linear(norm(x, n, b), w), *inputs)
    name = str(dtype).removeprefix("torch.")
    assert found.problem.prologue == Prologue(RowNorm("layer", 2, name))
    assert found.problem.a == Operand.of(name, (32, 64), (64, 1))
    assert found.constants.constexprs() == {"EPSILON": pytest.approx(1e-5)}
    assert operand_count(found) == 4


def test_a_norm_without_a_weight() -> None:
    found = check(lambda x, w: F.linear(F.rms_norm(x, (64,), None, 1e-6), w), X, W)
    assert found.problem.prologue == Prologue(RowNorm("rms"))
    assert operand_count(found) == 2
    found = check(lambda x, w: F.linear(F.layer_norm(x, (64,)), w), X, W)
    assert found.problem.prologue == Prologue(RowNorm("layer"))
    found = check(lambda x, n, w: F.linear(F.layer_norm(x, (64,), n), w), X, NORM, W)
    assert found.problem.prologue == Prologue(RowNorm("layer", 1))
    assert operand_count(found) == 3


def test_vectors_of_a_norm_may_have_another_dtype() -> None:
    def function(x: Tensor, n: Tensor, b: Tensor, w: Tensor) -> Tensor:
        return F.linear(F.layer_norm(x.float(), (64,), n, b).to(x.dtype), w)

    wide = tensor(64, dtype=F32)
    found = check(function, X, wide, wide, W)
    assert found.problem.prologue == Prologue(RowNorm("layer", 2, "float32"))


def test_a_layer_norm_of_float32_under_autocast() -> None:
    def function(x: Tensor, n: Tensor, b: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return F.linear(F.layer_norm(x, (64,), n, b), w)

    found = check(function, *(item.to(F32) for item in (X3, NORM, NORM, W)), tolerance=0.05)
    problem = found.problem
    assert problem.prologue == Prologue(RowNorm("layer", 2, "float32"))
    assert (problem.a.dtype, problem.b.dtype, problem.out) == ("float32", "bfloat16", "bfloat16")
    assert (problem.multiplied, problem.arithmetic) == ("bfloat16", "half")


def test_a_layer_norm_before_parts_with_biases() -> None:
    def function(x: Tensor, n: Tensor, m: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        q, k, b, c = rest
        y = F.layer_norm(x, (64,), n, m)
        return F.linear(y, q, b), F.linear(y, k, c)

    inputs = X3, NORM, NORM, W, tensor(16, 64), tensor(48), tensor(16)
    found = check(function, *inputs, count=2)
    assert (found.problem.operation, found.problem.parts) == ("addmm", (48, 16))
    assert found.problem.prologue == Prologue(RowNorm("layer", 2))
    assert (operand_count(found), len(found.inputs)) == (5, 7)


def test_a_norm_before_parts_and_before_a_gate() -> None:
    found = check(lambda x, n, *w: qkv(rms_norm(x, n), *w), X3, NORM, W, tensor(8, 64), count=2)
    assert (found.problem.parts, operand_count(found)) == ((48, 8), 4)
    gated = gate_and_up(F.silu)
    found = check(lambda x, n, g, u: gated(rms_norm(x, n), g, u), X3, NORM, W, W, count=2)
    assert found.problem.epilogue.gated
    assert found.problem.prologue is not None

    def halves(x: Tensor, n: Tensor, w: Tensor) -> Tensor:
        a, b = F.linear(rms_norm(x, n), w).chunk(2, dim=-1)
        return F.silu(a) * b

    found = check(halves, X3, NORM, W, count=2)
    assert (found.halves, operand_count(found)) == ((0, 24), 4)

    def biased(x: Tensor, n: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return geglu(F.layer_norm(x, (64,), n, n), w, b)

    found = check(biased, X3, NORM, W, BIAS, count=2)
    assert (found.halves, operand_count(found)) == ((24, 0), 7)

    def written(x: Tensor, n: Tensor, g: Tensor, u: Tensor, b: Tensor) -> Tensor:
        y = rms_norm(x, n)
        return F.silu(F.linear(y, g) + b) * (F.linear(y, u) + b)

    found = check(written, X3, NORM, W, W, BIAS, count=2)
    assert found.problem.prologue == Prologue(RowNorm("rms", 1))
    assert (found.problem.operation, operand_count(found)) == ("addmm", 6)


def test_a_norm_before_a_bias() -> None:
    found = check(lambda x, n, w, b: F.linear(rms_norm(x, n), w, b), X, NORM, W, tensor(48))
    assert [inp.name for inp in found.inputs] == ["arg0_1", "permute", "arg1_1", "arg3_1"]


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
        # Of heads, and not of what is multiplied.
        (
            lambda x, n, w: F.linear(rms_norm(x.view(32, 4, 16), n).view(32, 64), w),
            (X, tensor(16), W),
        ),
        # A bias alone, and the variance of a sample.
        (lambda x, n, w: F.linear(F.layer_norm(x, (64,), None, n), w), (X, NORM, W)),
        (lambda x, n, w: F.linear(F.rms_norm(x, (64,), n) + n, w), (X, NORM, W)),
        (
            lambda x, n, w: F.linear(n * (x - x.mean(-1, True)) / x.std(-1, keepdim=True), w),
            (X, NORM, W),
        ),
        # What a backward needs.
        (
            lambda x, n, w: (lambda y, m, r: (F.linear(y, w), m, r))(
                *aten.native_layer_norm(x, (64,), n, n, 1e-5)
            ),
            (X, NORM, W),
        ),
        (lambda x, n, w: F.linear(rms_norm(x, n).relu(), w), (X, NORM, W)),
        # Means of squares of what is shifted by a number, on either side, and not by a mean.
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
def test_what_is_no_norm(function: Any, inputs: Any) -> None:
    assert all(case.problem.prologue is None for case in find(function, *inputs))


# All of them


def layer(x: Tensor, n: Tensor, *weights: Tensor) -> Tensor:
    q, k, gate, up, down = weights
    query, key = F.linear(rms_norm(x, n), q), F.linear(rms_norm(x, n), k)
    mixed = x + query - key
    hidden = rms_norm(mixed, n)
    return mixed + F.linear(F.silu(F.linear(hidden, gate)) * F.linear(hidden, up), down)


LAYER = (NORM, tensor(64, 64), tensor(64, 64), W, W, tensor(64, 48))


def kinds_of(found: Sequence[Fusion]) -> list[tuple[bool, bool]]:
    """Whether each begins with a norm, and whether it is a gate."""
    return [(case.problem.prologue is not None, case.problem.epilogue.gated) for case in found]


@pytest.mark.parametrize("dynamic", [(), [(0, 1)]])
def test_a_layer_with_all_of_them(dynamic: Any) -> None:
    graph = lowered_graph(layer, X3, *LAYER, dynamic=dynamic)
    found = find_fusions(graph, PLAIN)
    assert kinds_of(found) == [(True, True), (True, False), (False, True), (False, False)]
    apply_and_compare(graph, found[:2], values_of((X3, *LAYER)), 0.05)
    assert find_fusions(graph, PLAIN) == []


@pytest.mark.parametrize(
    ("switch", "kinds"),
    [
        ("gated", [(True, False), (True, False), (False, False), (False, False)]),
        ("shared_input", [(True, True), (False, True)]),
        ("norm", [(False, True), (False, False)]),
    ],
)
def test_each_can_be_switched_off(switch: str, kinds: list[tuple[bool, bool]]) -> None:
    settings = dataclasses.replace(PLAIN, **{f"gemm_fuse_{switch}": False})  # type: ignore[arg-type]
    assert kinds_of(find_fusions(lowered_graph(layer, X3, *LAYER), settings)) == kinds


def test_casts_that_the_user_wants_are_kept() -> None:
    graph = lowered_graph(layer, X3, *LAYER)
    with torch._inductor.config.patch(emulate_precision_casts=True):
        found = find_fusions(graph, PLAIN)
    assert [case.problem.epilogue for case in found] == [Epilogue(), Epilogue()]
    assert [case.problem.prologue for case in found] == [None, None]


SIDE = 8


class Builder:
    """A random graph of square matrices, any of which can be a factor of any other's product."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.fake = torch._subclasses.fake_tensor.FakeTensorMode()
        with self.fake:
            value = torch.empty(SIDE, SIDE, dtype=F32, device="cuda")
            vector = torch.empty(SIDE, dtype=F32, device="cuda")
        self.values = [self.placeholder(value) for _ in range(4)]
        self.weight = self.placeholder(vector)

    def placeholder(self, value: Tensor) -> fx.Node:
        node = self.graph.placeholder(f"p{len(self.graph.nodes)}")
        node.meta["val"] = value
        return node

    def call(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        values = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args]
        with self.fake:
            node.meta["val"] = target(*values)
        return node

    def product(self, a: fx.Node, b: fx.Node) -> fx.Node:
        return self.call(aten.mm.default, a, b)

    def silu(self, a: fx.Node) -> fx.Node:
        return self.call(aten.mul.Tensor, a, self.call(aten.sigmoid.default, a))

    def biased_gate(self, a: fx.Node, b: fx.Node, c: fx.Node) -> fx.Node:
        products = [self.call(aten.addmm.default, self.weight, a, item) for item in (b, c)]
        return self.call(aten.mul.Tensor, self.silu(products[0]), products[1])

    def standardized(self, a: fx.Node) -> fx.Node:
        with self.fake:
            moments = aten.var_mean.correction(a.meta["val"], [1], correction=0, keepdim=True)
        options = {"correction": 0, "keepdim": True}
        both = self.graph.call_function(aten.var_mean.correction, (a, [1]), options)
        both.meta["val"] = moments
        variance, mean = (self.call(operator.getitem, both, index) for index in range(2))
        scale = self.call(aten.rsqrt.default, self.call(aten.add.Tensor, variance, 1e-3))
        away = self.call(aten.mul.Tensor, self.call(aten.sub.Tensor, a, mean), scale)
        return self.call(
            aten.add.Tensor, self.call(aten.mul.Tensor, away, self.weight), self.weight
        )

    def norm(self, a: fx.Node) -> fx.Node:
        square = self.call(aten.pow.Tensor_Scalar, a, 2)
        mean = self.call(aten.mean.dim, square, [-1], True)
        scale = self.call(aten.rsqrt.default, self.call(aten.add.Tensor, mean, 1e-3))
        return self.call(aten.mul.Tensor, self.call(aten.mul.Tensor, a, scale), self.weight)

    def step(self, kind: str, a: fx.Node, b: fx.Node, c: fx.Node) -> None:
        made = {
            "product": lambda: [self.product(a, b)],
            "pair": lambda: [self.product(a, b), self.product(a, c)],
            "biased gate": lambda: [self.biased_gate(a, b, c)],
            "gate": lambda: [
                self.call(aten.mul.Tensor, self.silu(self.product(a, b)), self.product(a, c))
            ],
            "norm": lambda: [self.norm(a)],
            "normed": lambda: [self.product(self.norm(a), b)],
            "standardized": lambda: [self.product(self.standardized(a), b)],
            "add": lambda: [self.call(aten.add.Tensor, a, b)],
            "transpose": lambda: [self.call(aten.permute.default, a, [1, 0])],
        }[kind]()
        self.values.extend(made)


@pytest.fixture(scope="module")
def fake_device() -> Iterator[None]:
    with fake_cuda.device():
        yield


KINDS = (
    "product",
    "pair",
    "gate",
    "biased gate",
    "norm",
    "normed",
    "standardized",
    "add",
    "transpose",
)


@examples(60)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(KINDS), *(st.integers(0, 5) for _ in "abc")),
        min_size=3,
        max_size=10,
    ),
    outputs=st.integers(1, 4),
    seed=st.integers(0, 2**16),
)
def test_random_graphs_compute_the_same(
    fake_device: None, steps: list[Any], outputs: int, seed: int
) -> None:
    builder = Builder()
    for kind, *picks in steps:
        # Mostly of what was made last.
        builder.step(kind, *(builder.values[-1 - pick % len(builder.values)] for pick in picks))
    builder.graph.output(tuple(builder.values[-outputs:]))
    graph = builder.graph
    found = find_fusions(graph, PLAIN)
    choose = random.Random(seed)
    choose.shuffle(found)
    chosen: list[Fusion] = []
    for item in found:
        if not any(set(item.nodes) & set(other.nodes) for other in chosen):
            chosen.append(item)
    generator = torch.Generator().manual_seed(seed)
    inputs = [
        torch.randn(*node.meta["val"].shape, dtype=F64, generator=generator) / 4
        for node in graph.find_nodes(op="placeholder")
    ]
    apply_and_compare(graph, chosen, inputs, 1e-6)


# Epilogues


def row(dtype: str = "bfloat16") -> EpilogueInput:
    return EpilogueInput(dtype, "row")


@pytest.mark.parametrize(
    ("function", "inputs", "expected"),
    [
        (lambda x, w: F.linear(x, w), (X, W), Epilogue()),
        (lambda x, w: F.linear(x, w).relu(), (X3, W), Epilogue(pointwise=1)),
        # -x, exp, 1 + x and a division.
        (lambda x, w: F.silu(F.linear(x, w)), (X3, W), Epilogue(pointwise=1 + 6 + 1 + 4)),
        (
            lambda x, w, r: F.linear(x, w) + r,
            (X3, W, tensor(2, 16, 48)),
            Epilogue((EpilogueInput("bfloat16", "matrix"),), 1),
        ),
        (
            lambda x, w, b, s: (F.linear(x, w, b).float() * s).to(torch.float16),
            (X, W, tensor(48), tensor(32, 1, dtype=F32)),
            Epilogue((row(), EpilogueInput("float32", "column")), 2, "float16"),
        ),
        (
            lambda x, w, b: (F.linear(x, w) * b.float() + b.float()).relu(),
            (X, W, tensor(48)),
            Epilogue((row(),), 3, "float32"),
        ),
        # Another product reads it.
        (
            lambda x, w, v: F.linear(F.linear(x, w).view(2, 16, 48).relu(), v, None),
            (X, W, tensor(48, 48)),
            Epilogue(pointwise=1),
        ),
        # A kernel of Inductor's computes it on the way.
        (lambda x, w: F.linear(x, w).relu().sum(0), (X, W), Epilogue()),
        (
            lambda x, w: F.linear(x, w).relu().view(2, 16, 48).permute(1, 0, 2).sum(0),
            (X, W),
            Epilogue(),
        ),
        (
            lambda x, w, r: F.layer_norm(F.linear(x, w) + r, (48,)),
            (X, W, tensor(32, 48)),
            Epilogue(),
        ),
        (
            lambda x, w, r: (lambda h: (h + r).t() + h.sin())(F.linear(x, w).relu()),
            (tensor(48, 64), W, tensor(48)),
            Epilogue(),
        ),
        # The product is used as it is, too.
        (lambda x, w: (lambda h: (h, h.relu()))(F.linear(x, w)), (X, W), Epilogue()),
        (lambda x, w: (lambda h: h.relu() + h.sum(0))(F.linear(x, w)), (X, W), Epilogue()),
        (lambda x, w: F.linear(x, w).t().relu(), (X, W), Epilogue()),
        (lambda x, w, r: F.linear(x, w) + r, (X, W, tensor(5, 32, 48)), Epilogue()),
        # Two results of which none follows from the other.
        (lambda x, w: (lambda h: (h.relu(), h.cos()))(F.linear(x, w)), (X, W), Epilogue()),
    ],
)
def test_fused_epilogues(function: Any, inputs: Any, expected: Epilogue) -> None:
    graph = lowered_graph(function, *inputs)
    node = next(n for n in graph.nodes if "mm" in str(n.target))
    problem = problem_of(node)
    assert problem is not None
    assert add_epilogue(node, problem).epilogue == expected


def test_what_is_fused_behind_a_gate() -> None:
    def function(x: Tensor, g: Tensor, u: Tensor, r: Tensor) -> Tensor:
        return F.silu(F.linear(x, g)) * F.linear(x, u) + r

    (found,) = find(function, X, W, W, tensor(32, 48))
    expected = Epilogue((EpilogueInput("bfloat16", "matrix"),), 1, gated=True)
    assert add_epilogue(found.outputs[0], found.problem).epilogue == expected


def test_what_belongs_elsewhere_ends_a_region() -> None:
    graph = lowered_graph(lambda x, w: F.linear(x, w).relu().cos(), X, W)
    (node,) = graph.find_nodes(op="call_function", target=aten.mm.default)
    _, relu, cos = find_region(node)
    assert find_region(node, {cos}) == [node, relu]


@pytest.mark.parametrize(
    ("function", "inputs", "flat"),
    [
        (lambda x, w, r: F.linear(x, w) + r, (X3, W, tensor(2, 16, 48)), 1),
        (lambda x, w, r: (F.linear(x, w) * r).relu(), (X3, W, tensor(2, 16, 1)), 2),
        (lambda x, w, b: F.silu(F.linear(x, w) + b), (X3, W, tensor(1, 1, 48)), 7),
        (lambda x, w, b: (F.linear(x, w) * b).view(32, 48) + 1, (X3, W, tensor(48)), 2),
        (lambda x, w, s: F.linear(x, w).relu() * s, (X3, W, tensor()), 2),
        # What has no rows of its own for each of the product's.
        (lambda x, w, r: F.linear(x, w).relu() + r, (X3, W, tensor(16, 48)), 1),
        (
            lambda x, w, r: F.linear(x, w).relu() + r,
            (X3, W, tensor(2, 16, 48, strides=(48, 96, 1))),
            1,
        ),
        (lambda x, w, r: F.linear(x, w).relu() + r, (X, W, tensor(1, 32, 48)), 1),
    ],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_epilogues_are_computed_on_rows(
    function: Any, inputs: Any, flat: int, dynamic: bool
) -> None:
    sequences = [(i, 1) for i, inp in enumerate(inputs) if inp.dim() == 3 and inp.size(1) == 16]
    graph = lowered_graph(function, *inputs, dynamic=sequences if dynamic else ())
    (node,) = graph.find_nodes(op="call_function", target=aten.mm.default)
    problem = problem_of(node)
    assert problem is not None
    expected = add_epilogue(node, problem)
    (last,) = graph.output_node().all_input_nodes
    value = last.meta["val"]
    values = values_of(inputs)
    before = fx.Interpreter(torch.nn.Module(), graph=graph).run(*values)
    with fake_cuda.device():
        flatten_epilogue(graph, node)
    graph.lint()
    assert graph.output_node().all_input_nodes == [last]
    assert last.meta["val"] is value
    rows = [n for n in graph.nodes if torch.Tag.pointwise in getattr(n.target, "tags", ())]
    assert sum(n.meta["val"].dim() == 2 for n in rows) == flat
    assert add_epilogue(node, problem) == expected
    after = fx.Interpreter(torch.nn.Module(), graph=graph).run(*values)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old, new)


# What is measured


def problem(operation: Any = "mm", *inputs: EpilogueInput, **rest: Any) -> GemmProblem:
    rest = {"m": 32, **rest}
    if inputs:
        rest["epilogue"] = Epilogue(inputs, len(inputs), gated=rest.pop("gated", False))
    elif rest.pop("gated", False):
        rest["epilogue"] = Epilogue(out=rest.pop("stored", None), gated=True)
    return GemmProblem.contiguous(operation, n=96, k=64, **rest)


RMS = Prologue(RowNorm("rms", 1))
LAYER_NORM = Prologue(RowNorm("layer", 2))
MATRIX = EpilogueInput("bfloat16", "matrix")
HALVES = {"parts": (48, 48), "gated": True}


@pytest.mark.parametrize(
    "given",
    [
        problem(),
        problem(m=1, layouts="rr"),
        problem("addmm", row()),
        problem("bmm", batch=4),
        problem(**HALVES),
        problem(m=1, **HALVES),
        problem(**HALVES, stored="float32"),
        problem(**HALVES, dtype="float32"),
        problem("mm", MATRIX, **HALVES),
        problem("addmm", row(), **HALVES),
        problem("addmm", row(), prologue=LAYER_NORM, **HALVES),
        problem(parts=(64, 16, 16)),
        problem("addmm", row(), parts=(64, 16, 16)),
        problem(prologue=RMS),
        problem(m=1, prologue=Prologue(RowNorm("rms"))),
        problem("addmm", row(), prologue=RMS),
        problem(prologue=RMS, parts=(64, 16, 16)),
        problem(prologue=RMS, **HALVES),
        problem(prologue=LAYER_NORM),
        problem(m=1, prologue=Prologue(RowNorm("layer"))),
        problem(dtype="float32", b_dtype="bfloat16", out="bfloat16", prologue=LAYER_NORM),
        problem("addmm", row(), prologue=LAYER_NORM, parts=(64, 16, 16)),
        problem(prologue=LAYER_NORM, **HALVES),
    ],
    ids=str,
)
def test_the_program_of_a_problem_is_found_to_be_the_problem(given: GemmProblem) -> None:
    canonical = program(given)
    inputs = canonical.empty_inputs("meta")
    graph = lowered_graph(canonical.function, *inputs)
    found = find_fusions(graph, PLAIN)
    if found:
        described, outputs = found[0].problem, found[0].outputs
    else:
        (node,) = (n for n in graph.nodes if "mm" in str(n.target))
        described, outputs = problem_of(node), (node,)  # type: ignore[assignment]
    if len(outputs) == 1:
        described = add_epilogue(outputs[0], described)
    assert described == given
