"""All fusions together: layers, settings, random graphs, and the programs of problems."""

from __future__ import annotations

import dataclasses
import operator
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from inductor_ext import config
from inductor_ext.autotune import decide
from inductor_ext.autotune.reference import program
from inductor_ext.hooks import scope
from inductor_ext.lowerings.graph.epilogue_region import add_epilogue
from inductor_ext.lowerings.graph.fusion import Fusion
from inductor_ext.lowerings.graph.fusion_search import find_fusions
from inductor_ext.lowerings.graph.matmul_nodes import problem_of
from inductor_ext.templates.fused_ops import Epilogue, Prologue, RowNorm
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import EpilogueInput
from inductor_ext.templates.triton.config import GemmConfig
from test.support import fake_cuda
from test.support.dequant_checks import BF16, BYTES, I8, ROWS, K, N
from test.support.fusion_checks import (
    F32,
    F64,
    NORM,
    PLAIN,
    X3,
    Tensor,
    W,
    apply_and_compare,
    aten,
    layer,
    problem,
    row,
    values_of,
)
from test.support.gemm_graphs import lowered_graph, tensor
from test.support.gemm_strategies import examples

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="traced on a stand-in for a GPU")


LAYER = (NORM, tensor(64, 64), tensor(64, 64), W, W, tensor(64, 48))


def kinds_of(matches: Sequence[Fusion]) -> list[tuple[bool, bool]]:
    """Whether each fusion has a norm, and whether it is a gate."""
    return [(case.problem.prologue is not None, case.problem.epilogue.gated) for case in matches]


@pytest.mark.parametrize("dynamic", [(), [(0, 1)]])
def test_a_layer_with_all_fusions(dynamic: Any) -> None:
    graph = lowered_graph(layer, X3, *LAYER, dynamic=dynamic)
    matches = find_fusions(graph, PLAIN)
    assert kinds_of(matches) == [(True, True), (True, False), (False, True), (False, False)]
    apply_and_compare(graph, matches[:2], values_of((X3, *LAYER)), 0.05)
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


def test_emulated_casts_are_kept() -> None:
    graph = lowered_graph(layer, X3, *LAYER)
    with torch._inductor.config.patch(emulate_precision_casts=True):
        matches = find_fusions(graph, PLAIN)
    assert [case.problem.epilogue for case in matches] == [Epilogue(), Epilogue()]
    assert [case.problem.prologue for case in matches] == [None, None]


SIDE = 8


class Builder:
    """A random graph of square matrices, so that any can be multiplied by any other."""

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
        matmuls = [self.call(aten.addmm.default, self.weight, a, item) for item in (b, c)]
        return self.call(aten.mul.Tensor, self.silu(matmuls[0]), matmuls[1])

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
        result = {
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
        self.values.extend(result)


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
        # Mostly recent values.
        builder.step(kind, *(builder.values[-1 - pick % len(builder.values)] for pick in picks))
    builder.graph.output(tuple(builder.values[-outputs:]))
    graph = builder.graph
    matches = find_fusions(graph, PLAIN)
    choose = random.Random(seed)
    choose.shuffle(matches)
    chosen: list[Fusion] = []
    for item in matches:
        if not any(set(item.nodes) & set(other.nodes) for other in chosen):
            chosen.append(item)
    generator = torch.Generator().manual_seed(seed)
    inputs = [
        torch.randn(*node.meta["val"].shape, dtype=F64, generator=generator) / 4
        for node in graph.find_nodes(op="placeholder")
    ]
    apply_and_compare(graph, chosen, inputs, 1e-6)


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
def test_the_program_of_a_problem_matches_the_problem(given: GemmProblem) -> None:
    canonical = program(given)
    inputs = canonical.empty_inputs("meta")
    graph = lowered_graph(canonical.function, *inputs)
    matches = find_fusions(graph, PLAIN)
    if matches:
        described, outputs = matches[0].problem, matches[0].outputs
    else:
        (node,) = (n for n in graph.nodes if "mm" in str(n.target))
        described, outputs = problem_of(node), (node,)  # type: ignore[assignment]
    if len(outputs) == 1:
        described = add_epilogue(outputs[0], described)
    assert described == given


pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="traced on a stand-in for a GPU")


class TestLowPrecision:
    """Matmuls of integers and of fp8, whose scales are in the epilogue."""

    def lower(self, function: Callable[..., Any], *inputs: Any) -> str:
        def rule(problem: GemmProblem) -> GemmConfig | None:
            return GemmConfig("splitk", 16, 32, 64, 2, 2)

        with scope.compile_scope(config.snapshot({})), decide.force_config(rule):
            return fake_cuda.lower(function, *inputs).code

    def test_integers_scaled_by_rows_and_columns(self) -> None:
        code = self.lower(
            lambda x, w, s, t: ((torch._int_mm(x, w.t()).float() * s) * t).to(BF16),
            tensor(32, K, dtype=I8),
            BYTES,
            tensor(32, 1, dtype=F32),
            tensor(N, dtype=F32),
        )
        assert len(re.findall(r"async_compile.triton\('(\w+)'", code)) == 1
        assert "ACC_TYPE : tl.constexpr = tl.int32" in code

    @pytest.mark.parametrize("by_row", [False, True], ids=["tensors", "rows"])
    @pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
    def test_fp8_of_a_shared_input_is_one_kernel(self, by_row: bool, bias: bool) -> None:
        fp8 = torch.float8_e4m3fn
        rows = tensor(32, 1, dtype=F32) if by_row else tensor(dtype=F32)

        def function(x: Tensor, s: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
            return tuple(
                torch._scaled_mm(x, w.t(), s, t, bias=b if bias else None, out_dtype=BF16)
                for w, t, b in zip(weights[::3], weights[1::3], weights[2::3], strict=True)
            )

        weights = [
            item
            for n in (48, 32, 32)
            for item in (
                tensor(n, K, dtype=fp8),
                tensor(1, n, dtype=F32) if by_row else tensor(dtype=F32),
                tensor(n, dtype=BF16),
            )
        ]
        code = self.lower(function, tensor(32, K, dtype=fp8), rows, *weights)
        (kernel,) = re.findall(r"def triton_\w+\((.*)\)", code)
        # Operands, then scales, then biases; unscaled accumulators are never stored.
        assert kernel.count(",") == (4 + 4 + 3 * bias)
        assert "PARTS : tl.constexpr = 3" in code
        assert re.findall(r"empty_strided_cuda\((.*?\)), .* torch.(\w+)\)", code) == [
            ("(32, 112)", "bfloat16")
        ]

    @pytest.mark.parametrize("other", ["scale", "fast", "dtype"])
    def test_fp8_that_differs_is_not_merged(self, other: str) -> None:
        fp8 = torch.float8_e4m3fn

        def function(x: Tensor, s: Tensor, t: Tensor, w: Tensor, v: Tensor) -> Any:
            return torch._scaled_mm(x, w.t(), s, t, out_dtype=BF16), torch._scaled_mm(
                x,
                v.t(),
                t if other == "scale" else s,
                t,
                out_dtype=F32 if other == "dtype" else BF16,
                use_fast_accum=other == "fast",
            )

        graph = lowered_graph(
            function,
            tensor(32, K, dtype=fp8),
            *(tensor(dtype=F32),) * 2,
            *(tensor(N, K, dtype=fp8),) * 2,
        )
        assert find_fusions(graph, PLAIN) == []

    @pytest.mark.parametrize("by_row", [False, True])
    def test_the_canonical_program_of_several_in_fp8(self, by_row: bool) -> None:
        kinds = ("column", "row") if by_row else ("scalar", "scalar")
        scales = tuple(EpilogueInput("float32", kind) for kind in kinds)
        problem = GemmProblem.contiguous(
            "scaled",
            32,
            N + 32,
            K,
            "float8_e4m3fn",
            parts=(N, 32),
            epilogue=Epilogue(scales, 2),
        )
        canonical = program(problem)
        graph = lowered_graph(canonical.function, *canonical.empty_inputs("meta"))
        (match,) = find_fusions(graph, PLAIN)
        assert match.problem == problem
        given = [torch.ones(inp.shape, dtype=BF16) for inp in canonical.inputs]
        exact = canonical.reference(given, torch.arange(32))
        assert [item.shape for item in exact] == [(32, N), (32, 32)]

    @pytest.mark.parametrize("fast", [False, True])
    def test_fp8_scaled_by_rows_with_a_bias(self, fast: bool) -> None:
        fp8 = torch.float8_e4m3fn
        code = self.lower(
            lambda x, w, s, t, b: torch._scaled_mm(
                x, w.t(), s, t, bias=b, out_dtype=BF16, use_fast_accum=fast
            ),
            tensor(32, K, dtype=fp8),
            tensor(N, K, dtype=fp8),
            tensor(32, 1, dtype=F32),
            tensor(1, N, dtype=F32),
            ROWS,
        )
        assert len(re.findall(r"async_compile.triton\('(\w+)'", code)) == 1
        assert ("max_num_imprecise_acc=IMPRECISE" in code) != fast
        assert code.count("empty_strided_cuda((32, 48)") == 1
