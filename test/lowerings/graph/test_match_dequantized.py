"""Dequantised factors in FX graphs: found or not, and the same numbers after the replacement."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from torch import fx
from torch.nn import functional as F

from benchmarks.gemm.models import LlamaLayer, int4_linear, int8_linear, quantize_int8
from inductor_ext import config
from inductor_ext.autotune import decide
from inductor_ext.autotune.reference import program
from inductor_ext.hooks import scope
from inductor_ext.lowerings.graph import (
    match_dequantized,
    matmul_nodes,
    undo_woq_int8,
)
from inductor_ext.lowerings.graph.fusion import Fusion, View
from inductor_ext.lowerings.graph.fusion_search import find_fusions
from inductor_ext.lowerings.graph.rewrite import apply
from inductor_ext.settings import Settings
from inductor_ext.templates.fused_ops import Dequant, Epilogue, Prologue, RowNorm
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import EpilogueInput
from inductor_ext.templates.triton.config import GemmConfig
from test.support import fake_cuda, kernel_util
from test.support.gemm_graphs import call_operands, lowered_graph, operand_count, tensor

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="traced on a stand-in for a GPU")

Tensor = torch.Tensor

BF16, FP16, F32 = torch.bfloat16, torch.float16, torch.float32
I8, U8 = torch.int8, torch.uint8
PLAIN = Settings()
M, N, K, G = 5, 48, 64, 16
TILE = GemmConfig("mixed", 16, 16, 32, 2, 2)

X = tensor(M, K, dtype=BF16)
BYTES, PAIRS = tensor(N, K, dtype=I8), tensor(N, K // 2, dtype=U8)
SCALES, ROWS = tensor(N, K // G, dtype=BF16), tensor(N, dtype=BF16)


def pairs(w: Tensor, first: int = 0) -> Tensor:
    halves = (w & 15, w >> 4)
    found: Tensor = torch.stack((halves[first], halves[1 - first]), -1).reshape(N, K)
    return found


def in_groups(q: Tensor, s: Tensor, z: Any = 0) -> Tensor:
    found: Tensor = ((q.reshape(N, K // G, G) - z) * s.unsqueeze(-1)).reshape(N, K)
    return found


def views(found: Fusion) -> list[View | None]:
    """How the kernel views what B is computed from."""
    return [operand.view for operand in found.operands.a_and_weights[1:]]


def kernel(found: Fusion) -> Callable[..., Any]:
    """The fusion's kernel in plain torch, in float64."""
    problem, constants = found.problem, found.constants
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
        operands = call_operands(found, (a, *inputs))
        nothing = (None,) * len(parts)
        scaled = dequant.scales != "none"
        assert (bool(operands.scales), bool(operands.zero_points)) == (scaled, dequant.zero_points)
        factors = [
            dequantized(b, scale, zero)
            for b, scale, zero in zip(
                operands.weights,
                operands.scales or nothing,
                operands.zero_points or nothing,
                strict=True,
            )
        ]
        assert [factor.shape for factor in factors] == [(problem.k, part) for part in parts]
        a = a.double()
        if problem.norm:
            a = a * torch.rsqrt(a.square().mean(-1, keepdim=True) + constants.epsilon)
            assert len(operands.norm_vectors) == problem.norm.vectors
            a = a * (operands.norm_vectors[0].double() if problem.norm.vectors else 1)
        products = [a @ factor for factor in factors]
        biases = operands.biases
        if biases:
            assert problem.epilogue.inputs[0].broadcast == "row"
            products = [product + bias for product, bias in zip(products, biases, strict=True)]
        if problem.epilogue.gated:
            products = [ACTIVATIONS[constants.activation or ""](products[0]) * products[1]]
        results = tuple(product.to(getattr(torch, problem.stored)) for product in products)
        return results if len(results) > 1 else results[0]

    return run


ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu}


def values(inputs: Sequence[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(like: Tensor) -> Tensor:
        if like.dtype in (I8, U8):
            low = -128 if like.dtype is I8 else 0
            found = torch.randint(low, low + 256, like.shape, generator=generator)
        else:
            found = torch.randn(like.shape, generator=generator)
        storage = found.to(like.dtype)
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).copy_(storage)

    return [random(inp) for inp in inputs]


def find(function: Callable[..., Any], *inputs: Tensor, settings: Settings = PLAIN) -> list[Fusion]:
    return match_dequantized.find_dequantized_matmuls(lowered_graph(function, *inputs), settings)


def check(function: Callable[..., Any], *inputs: Tensor) -> Fusion:
    """The only fusion of a function, after which its graph computes the same."""
    graph = lowered_graph(function, *inputs)
    (found,) = match_dequantized.find_dequantized_matmuls(graph, PLAIN)
    assert found.problem.operation == "mixed"
    given = values(inputs)
    expected = function(*given)
    apply(graph, found, kernel(found))
    graph.lint()
    module = fx.GraphModule(torch.nn.Module(), graph)
    (result,) = module(*given)
    assert result.shape == expected.shape
    assert (result - expected).abs().max() <= 0.02 * expected.abs().max()
    return found


class TestBytes:
    def test_column_scales_stay_in_the_epilogue(self) -> None:
        found = check(lambda x, w, s: F.linear(x, w.to(BF16)) * s, X, BYTES, ROWS)
        assert found.problem.prologue == Prologue(dequant=Dequant())
        assert found.problem.b.dtype == "int8"
        assert found.problem.b.layout == "column"
        assert views(found) == [View((N, K), transposed=True)]

    def test_scales_of_columns_before_it_and_a_bias(self) -> None:
        found = check(
            lambda x, w, s, b: F.linear(x, w.to(FP16) * s.unsqueeze(-1), b),
            tensor(2, 3, K, dtype=FP16),
            BYTES,
            tensor(N, dtype=FP16),
            tensor(N, dtype=FP16),
        )
        assert found.problem.prologue == Prologue(dequant=Dequant("column", scale_dtype="float16"))
        assert operand_count(found) == 3
        assert [inp.broadcast for inp in found.problem.epilogue.inputs] == ["row"]

    def test_one_scale_for_all_in_float32(self) -> None:
        found = check(
            lambda x, w, s: x @ (w.to(F32) * s).to(BF16),
            X,
            tensor(K, N, dtype=I8),
            tensor(1, dtype=F32),
        )
        assert found.problem.prologue is not None
        assert found.problem.dequant.scales == "tensor"
        assert found.problem.b.layout == "row"

    def test_groups_with_zero_points(self) -> None:
        found = check(
            lambda x, w, s, z: F.linear(x, in_groups(w.to(BF16), s, z.to(BF16).unsqueeze(-1))),
            X,
            BYTES,
            SCALES,
            tensor(N, K // G, dtype=I8),
        )
        assert found.problem.prologue == Prologue(dequant=Dequant("group", G, zero_points=True))
        assert found.constants.constexprs() == {"SCALE_WORDS": 2, "ZERO_WORDS": 4}
        assert operand_count(found) == 4

    def test_one_zero_point_and_float32(self) -> None:
        found = check(
            lambda x, w, s: F.linear(x, in_groups(w.to(F32), s, 100).to(BF16)),
            X,
            tensor(N, K, dtype=U8),
            tensor(N, K // G, dtype=F32),
        )
        assert found.problem.dequant is not None
        assert found.problem.dequant.scale_dtype == "float32"
        assert found.constants.constexprs() == {"ZERO": 100, "WIDE": True}
        assert operand_count(found) == 3

    def test_columns_with_zero_points_are_groups_of_all_of_k(self) -> None:
        found = check(
            lambda x, w, s, z: F.linear(x, (w.to(BF16) - z.unsqueeze(-1)) * s.unsqueeze(-1)),
            X,
            BYTES,
            ROWS,
            ROWS,
        )
        assert found.problem.prologue == Prologue(dequant=Dequant("group", K, zero_points=True))

    @pytest.mark.parametrize("steps", [(torch.int16,), (I8, U8), (torch.int32,)], ids=str)
    def test_zero_points_that_are_truncated_or_wrap_stay_so(self, steps: Any) -> None:
        def function(x: Tensor, w: Tensor, s: Tensor, z: Tensor) -> Tensor:
            for step in steps:
                z = z.to(step)
            return F.linear(x, in_groups(w.to(BF16), s, z.to(BF16).unsqueeze(-1)))

        zeros = tensor(N, K // G, dtype=I8 if steps[0] is I8 else BF16)
        found = check(function, X, BYTES, SCALES, zeros)
        # What the kernel reads is what they have become.
        assert (
            matmul_nodes.dtype_of(found.operands.zero_points[0].node.meta["val"])
            == str(steps[-1])[6:]
        )

    @pytest.mark.parametrize("kind", [torch.int32, torch.float8_e4m3fn], ids=str)
    def test_scales_that_are_rounded_stay_so(self, kind: torch.dtype) -> None:
        found = check(
            lambda x, w, s: F.linear(x, in_groups(w.to(BF16), (s * 4).to(kind).to(BF16))),
            X,
            BYTES,
            SCALES,
        )
        assert found.operands.scales[0].node.name != "arg2_1"

    @pytest.mark.parametrize(
        ("function", "inputs"),
        [
            # Weights that are masked, and less than a number.
            (lambda x, m, w: F.linear(x, (1 - m) * w), (tensor(N, K), tensor(N, K))),
            (lambda x, w, s: F.linear(x, (8 - w.to(BF16)) * s.unsqueeze(-1)), (BYTES, ROWS)),
            # A part of a larger weight, and scales, that are no matrices without a copy.
            (
                lambda x, w: F.linear(x, w.reshape(N, K).to(BF16)),
                (tensor(N, 4, 16, dtype=I8, strides=(128, 32, 1)),),
            ),
            (
                lambda x, w, s: F.linear(x, w.to(BF16) * s.permute(1, 0).reshape(N, 1)),
                (BYTES, tensor(6, 8, dtype=BF16)),
            ),
            # Only integers without a sign have a zero point of all in kernels.
            (
                lambda x, w, s: F.linear(x, (w.to(BF16) - 3) * s.unsqueeze(-1)),
                (tensor(N, K, dtype=torch.float8_e4m3fn), ROWS),
            ),
            (lambda x, w, s: F.linear(x, (w.to(BF16) - 3) * s.unsqueeze(-1)), (BYTES, ROWS)),
        ],
    )
    def test_patterns_that_do_not_match(self, function: Any, inputs: Any) -> None:
        assert find(function, X, *inputs) == []

    def test_what_inductor_has_replaced_and_gets_back(self) -> None:
        x = tensor(2, 3, K)
        graph = lowered_graph(lambda x, w, s: F.linear(x, w.to(BF16)) * s, x, BYTES, ROWS)
        assert match_dequantized.find_dequantized_matmuls(graph, PLAIN) == []
        undo_woq_int8.restore_matmuls(graph)
        (found,) = match_dequantized.find_dequantized_matmuls(graph, PLAIN)
        assert found.problem.prologue == Prologue(dequant=Dequant())


class TestPairs:
    def test_neighbours_side_by_side(self) -> None:
        found = check(
            lambda x, w, s: F.linear(x, in_groups(pairs(w).to(BF16), s, 8)), X, PAIRS, SCALES
        )
        problem = found.problem
        assert (problem.b.dtype, problem.b.strides, problem.k) == ("uint4", (1, K), K)
        assert problem.prologue == Prologue(dequant=Dequant("group", G))
        assert found.constants.constexprs() == {"ZERO": 8, "SCALE_WORDS": 2}
        assert operand_count(found) == 3
        assert views(found) == [
            View((N, K // 2), transposed=True),
            View((N, K // G), transposed=True),
        ]

    def test_the_upper_half_first_through_int32(self) -> None:
        found = check(
            lambda x, w, s: F.linear(
                x.flatten(0, 1), in_groups(pairs(w.to(torch.int32), 1), s, 8).to(BF16)
            ),
            tensor(2, 3, K, dtype=BF16),
            PAIRS,
            SCALES,
        )
        assert found.problem.b.dtype == "uint4"
        assert found.constants.high_first is True

    def test_signed_by_shifts(self) -> None:
        def function(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
            q = torch.stack(((w << 4) >> 4, w >> 4), -1).reshape(N, K)
            return F.linear(x, in_groups(q.to(BF16), s))

        found = check(function, X, tensor(N, K // 2, dtype=I8), SCALES)
        assert found.problem.b.dtype == "int4"
        assert found.constants.zero is None

    def test_scales_that_are_spread_by_rows(self) -> None:
        found = check(
            lambda x, w, s: (
                x
                @ (
                    torch.stack((w & 15, w >> 4), 1).reshape(K, N).to(BF16)
                    * s.unsqueeze(1).expand(K // G, G, N).reshape(K, N)
                )
            ),
            X,
            tensor(K // 2, N, dtype=U8),
            tensor(K // G, N, dtype=BF16),
        )
        assert found.problem.b.layout == "row"
        assert found.constants.scale_words is None

    @pytest.mark.parametrize("b_dtype", ["int4", "uint4", "int8", "uint8"])
    @pytest.mark.parametrize(
        "prologue",
        [
            Prologue(dequant=Dequant()),
            Prologue(dequant=Dequant("column")),
            Prologue(dequant=Dequant("group", G)),
            Prologue(dequant=Dequant("group", G, zero_points=True)),
        ],
        ids=["none", "columns", "groups", "zeros"],
    )
    def test_the_canonical_program_is_found_as_its_problem(
        self, b_dtype: str, prologue: Prologue
    ) -> None:
        problem = GemmProblem.contiguous("mixed", M, N, K, b_dtype=b_dtype, prologue=prologue)
        canonical = program(problem)
        inputs = canonical.empty_inputs("meta")
        (found,) = find(canonical.function, *inputs)
        if prologue.dequant == Dequant("column"):
            # They follow the product.
            prologue = Prologue(dequant=Dequant())
        assert found.problem.b == problem.b
        assert found.problem.prologue == prologue
        if b_dtype == "uint4":
            assert found.constants.high_first
            assert found.constants.zero in (None, 8)


def check_several(
    function: Callable[..., Any], *inputs: Tensor, settings: Settings = PLAIN, **rest: Any
) -> Fusion:
    """The first fusion of several products, after which the function's graph computes the same."""
    graph = lowered_graph(function, *inputs, **rest)
    with fake_cuda.device():
        undo_woq_int8.restore_matmuls(graph)
    single = match_dequantized.find_dequantized_matmuls(graph, settings)
    scaled = [match_dequantized.add_scales(item) for item in single]
    found = next(
        case for case in find_fusions(graph, settings, scaled) if case.problem.operation == "mixed"
    )
    given = values(inputs)
    expected = function(*given)
    apply(graph, found, kernel(found))
    graph.lint()
    results = fx.GraphModule(torch.nn.Module(), graph)(*given)
    for result, exact in zip(results, expected if len(results) > 1 else [expected], strict=True):
        assert result.shape == exact.shape
        assert (result - exact).abs().max() <= 0.03 * exact.abs().max()
    return found


def int4(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return int4_linear(x, w, s)


def by_hand(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return F.linear(x, w.to(x.dtype)) * s


WEIGHTS = {int8_linear: (BYTES, ROWS), int4: (PAIRS, SCALES)}
"""Layers, and two tensors of each: a weight of N rows, and its scales."""

PROLOGUES = {
    int8_linear: Prologue(dequant=Dequant("column")),
    int4: Prologue(dequant=Dequant("group", G)),
}

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


def normalized(prologue: Prologue) -> Prologue:
    return dataclasses.replace(prologue, norm=RowNorm("rms", 1))


@pytest.mark.parametrize("layer", WEIGHTS)
class TestSeveral:
    """Products in one kernel, as those of plain weights in test_match_shared_input."""

    @pytest.mark.parametrize("x", [X, tensor(2, 3, K)], ids=["two dimensions", "three"])
    def test_a_gate(self, layer: Layer, x: Tensor) -> None:
        found = check_several(
            lambda x, w1, s1, w2, s2: F.silu(layer(x, w1, s1)) * layer(x, w2, s2),
            x,
            *WEIGHTS[layer] * 2,
        )
        assert found.problem.parts == (N, N)
        assert found.problem.epilogue.gated
        assert found.problem.prologue == PROLOGUES[layer]
        assert operand_count(found) == 5
        assert len(found.outputs) == 1

    def test_a_shared_input_of_three_dimensions(self, layer: Layer) -> None:
        weight, scales = WEIGHTS[layer]
        narrow = weight[: N // 2], scales[: N // 2]
        found = check_several(
            lambda x, w1, s1, w2, s2, w3, s3: (
                layer(x, w1, s1),
                layer(x, w2, s2).relu(),
                layer(x, w3, s3) + 1,
            ),
            tensor(2, 3, K),
            weight,
            scales,
            *narrow,
            *narrow,
        )
        assert found.problem.parts == (N, N // 2, N // 2)
        assert found.problem.prologue == PROLOGUES[layer]
        assert len(found.outputs) == 3

    def test_biases_behind_the_scales(self, layer: Layer) -> None:
        found = check_several(
            lambda x, w1, s1, b1, w2, s2, b2: (layer(x, w1, s1) + b1, layer(x, w2, s2) + b2),
            X,
            *(*WEIGHTS[layer], ROWS) * 2,
        )
        assert found.problem.parts == (N, N)
        assert [inp.broadcast for inp in found.problem.epilogue.inputs] == ["row"]
        assert len(found.operands.biases) == 2

    def test_behind_a_norm(self, layer: Layer) -> None:
        def function(x: Tensor, n: Tensor, *weights: Tensor) -> Tensor:
            y = F.rms_norm(x, (K,), n, 1e-5)
            return F.gelu(layer(y, *weights[:2])) * layer(y, *weights[2:])

        found = check_several(function, X, tensor(K), *WEIGHTS[layer] * 2)
        assert found.problem.prologue == normalized(PROLOGUES[layer])
        assert found.problem.epilogue.gated
        assert found.constants.epsilon == pytest.approx(1e-5)
        assert operand_count(found) == 6

    def test_one_behind_a_norm(self, layer: Layer) -> None:
        found = check_several(
            lambda x, n, w, s: layer(F.rms_norm(x, (K,), n, 1e-5), w, s) + 1,
            tensor(2, 3, K),
            tensor(K),
            *WEIGHTS[layer],
        )
        assert found.problem.prologue == normalized(PROLOGUES[layer])
        assert not found.problem.parts

    def test_a_gate_of_halves(self, layer: Layer) -> None:
        def function(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
            gate, up = layer(x, w, s).chunk(2, -1)
            return F.silu(gate) * up

        found = check_several(function, X, *WEIGHTS[layer])
        assert found.problem.parts == (N // 2, N // 2)
        assert found.halves == (0, N // 2)
        assert found.problem.prologue == PROLOGUES[layer]


class TestSeveralRead:
    def test_results_that_are_scaled_in_three_dimensions(self) -> None:
        found = check_several(
            lambda x, w, s, v, t: (by_hand(x, w, s), by_hand(x, v, t) + 1),
            tensor(2, 3, K, dtype=FP16),
            *(BYTES, tensor(N, dtype=FP16)) * 2,
        )
        assert found.problem.parts == (N, N)
        assert [len(output.meta["val"].shape) for output in found.outputs] == [3, 3]

    def test_a_norm_is_not_fused_if_rows_are_padded_by_zero_points(self) -> None:
        def function(x: Tensor, n: Tensor, w: Tensor, s: Tensor, v: Tensor, t: Tensor) -> Any:
            y = F.rms_norm(x, (K,), n, 1e-5)
            return tuple(
                F.linear(y, (q.to(BF16) - 128) * r.unsqueeze(-1)) for q, r in ((w, s), (v, t))
            )

        found = check_several(function, X, tensor(K), *(tensor(N, K, dtype=U8), ROWS) * 2)
        assert found.constants.zero == 128
        assert found.problem.prologue == Prologue(dequant=Dequant("column"))

    @pytest.mark.parametrize("shape", [(1, 1, N), (1, 1, 1)])
    def test_scales_that_give_results_another_dimension_follow(self, shape: Any) -> None:
        found = check_several(
            lambda x, w, s, v, t: (by_hand(x, w, s), by_hand(x, v, t)),
            tensor(M, K, dtype=FP16),
            *(BYTES, tensor(*shape, dtype=FP16)) * 2,
        )
        assert found.problem.prologue == Prologue(dequant=Dequant())
        assert [len(output.meta["val"].shape) for output in found.outputs] == [2, 2]

    @pytest.mark.parametrize(
        ("function", "inputs"),
        [
            (
                lambda x, w, s, v, t: (
                    F.linear(x, w.to(BF16)) * s,
                    F.linear(x, in_groups(v.to(BF16), t)),
                ),
                (X, BYTES, ROWS, BYTES, SCALES),
            ),
            (
                lambda x, w, s, v, t: (int8_linear(x, w, s), int4_linear(x, v, t)),
                (X, BYTES, ROWS, PAIRS, SCALES),
            ),
            (
                lambda x, w, s, v, t: (
                    int4_linear(x, w, s),
                    F.linear(x, in_groups(pairs(v).to(BF16), t, 8)),
                ),
                (X, PAIRS, SCALES, PAIRS, SCALES),
            ),
        ],
        ids=["columns and groups", "bytes and pairs", "another half first"],
    )
    def test_those_that_differ_are_not_merged(
        self, function: Callable[..., Any], inputs: tuple[Tensor, ...]
    ) -> None:
        graph = lowered_graph(function, *inputs)
        with fake_cuda.device():
            undo_woq_int8.restore_matmuls(graph)
        scaled = [
            match_dequantized.add_scales(item)
            for item in match_dequantized.find_dequantized_matmuls(graph, PLAIN)
        ]
        assert len(scaled) == 2
        found = find_fusions(graph, PLAIN, scaled)
        assert [case for case in found if case.problem.operation == "mixed"] == []

    def test_what_follows_is_read_as_far_as_kernels_do_it(self) -> None:
        def follow(function: Callable[..., Any], *more: Tensor) -> Fusion:
            graph = lowered_graph(
                lambda x, w, *rest: function(F.linear(x, w.to(BF16)), *rest), X, BYTES, *more
            )
            (found,) = match_dequantized.find_dequantized_matmuls(graph, PLAIN)
            return match_dequantized.add_scales(found)

        prologue = Prologue(dequant=Dequant("column", scale_dtype="float32"))
        wide = follow(lambda y, s: (y.float() * s).to(BF16), tensor(N, dtype=F32))
        assert (wide.problem.prologue, wide.problem.out) == (prologue, "bfloat16")
        one = follow(lambda y, s: y * s, tensor())
        assert one.problem.prologue == Prologue(dequant=Dequant("tensor"))
        rows = follow(lambda y, s: y * s, tensor(M, 1))
        assert rows.problem.prologue == Prologue(dequant=Dequant())
        twice = follow(lambda y, s, t: y * s * t, ROWS, ROWS)
        assert len(twice.inputs) == 3
        used = follow(lambda y, s: (y * s, y), ROWS)
        assert used.problem.prologue == Prologue(dequant=Dequant())

    @pytest.mark.parametrize("b_dtype", ["int8", "uint4"])
    @pytest.mark.parametrize("parts", [(), (N, N // 2), (N, N)], ids=["one", "parts", "gated"])
    @pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
    def test_the_canonical_program_is_found_as_its_problem(
        self, b_dtype: str, parts: tuple[int, ...], norm: bool
    ) -> None:
        if not parts and not norm:
            return  # Of one product alone there is more above.
        grouped = b_dtype == "uint4"
        prologue = Prologue(
            RowNorm("rms", 1) if norm else None,
            Dequant("group", G) if grouped else Dequant("column"),
        )
        problem = GemmProblem.contiguous(
            "mixed",
            M,
            sum(parts) or N,
            K,
            b_dtype=b_dtype,
            prologue=prologue,
            parts=parts,
            epilogue=Epilogue(gated=parts == (N, N)),
        )
        canonical = program(problem)
        graph = lowered_graph(canonical.function, *canonical.empty_inputs("meta"))
        with fake_cuda.device():
            undo_woq_int8.restore_matmuls(graph)
        scaled = [
            match_dequantized.add_scales(item)
            for item in match_dequantized.find_dequantized_matmuls(graph, PLAIN)
        ]
        assert problem in [case.problem for case in find_fusions(graph, PLAIN, scaled)]


def used_twice(x: Tensor, w: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    wide = w.to(BF16)
    return F.linear(x, wide), wide


class TestNotFound:
    @pytest.mark.parametrize(
        "function",
        [
            used_twice,
            lambda x, w, s: F.linear(x, (w.to(BF16) * s.unsqueeze(-1)) * s.unsqueeze(-1)),
            lambda x, w, s: F.linear(x, w.to(BF16) * s.unsqueeze(-1) - s.unsqueeze(-1)),
            lambda x, w, s: F.linear(x, w.to(BF16).exp()),
            lambda x, w, s: F.linear(x, (w - 3).to(BF16)),
            lambda x, w, s: F.linear(x, w.to(U8).to(BF16)),
            lambda x, w, s: F.linear(x.to(F32), w.to(F32)),
            lambda x, w, s: F.linear(x, w.to(BF16).t().reshape(N, K)),
            lambda x, w, s: F.linear(
                torch.cat((x, x), -1), torch.cat((w & 15, w >> 4), -1).to(BF16)
            ),
        ],
        ids=[
            "used twice",
            "two scales",
            "a zero after the scale",
            "a function",
            "bytes that wrap around",
            "bytes that change their sign",
            "float32",
            "another order",
            "halves of K",
        ],
    )
    def test_what_no_kernel_does(self, function: Callable[..., Any]) -> None:
        assert find(function, X, BYTES, ROWS) == []

    def test_switched_off(self) -> None:
        off = Settings(gemm_fuse_dequantize=False)
        assert find(lambda x, w: F.linear(x, w.to(BF16)), X, BYTES, settings=off) == []

    def test_where_rounding_is_emulated(self) -> None:
        from torch._inductor import config

        with config.patch(emulate_precision_casts=True):
            assert find(lambda x, w: F.linear(x, w.to(BF16)), X, BYTES) == []


class TestLowered:
    """From a function to the generated code."""

    def lower(self, function: Callable[..., Any], *inputs: Any) -> str:
        def rule(problem: GemmProblem) -> GemmConfig | None:
            return TILE if problem.operation == "mixed" else None

        with scope.compile_scope(config.snapshot({})), decide.force_config(rule):
            return fake_cuda.lower(function, *inputs).code

    def test_pairs_in_groups_are_read_by_one_kernel(self) -> None:
        code = self.lower(
            lambda x, w, s: F.linear(x, in_groups(pairs(w).to(BF16), s, 8)).relu(),
            X,
            PAIRS,
            SCALES,
        )
        kernels = re.findall(r"async_compile.triton\('(\w+)'", code)
        assert len(kernels) == 1
        assert "HIGH_FIRST : tl.constexpr = False" in code
        assert "b_even, b_odd = tl.inline_asm_elementwise" in code
        assert "SCALE_WORDS : tl.constexpr = 2" in code

    def test_bytes_with_scales_and_a_bias_behind(self) -> None:
        code = self.lower(lambda x, w, s, b: F.linear(x, w.to(BF16)) * s + b, X, BYTES, ROWS, ROWS)
        assert len(re.findall(r"async_compile.triton\('(\w+)'", code)) == 1
        assert "b = tl.inline_asm_elementwise" in code
        assert "extern_kernels" not in code.split("class Runner")[1]

    def test_a_bias_of_addmm(self) -> None:
        code = self.lower(
            lambda x, w, s, b: F.linear(x, w.to(BF16) * s.unsqueeze(-1), b), X, BYTES, ROWS, ROWS
        )
        assert len(re.findall(r"async_compile.triton\('(\w+)'", code)) == 1
        assert "SCALES : tl.constexpr = 'column'" in code

    def test_m_buckets_have_a_fused_kernel_each(self) -> None:
        def rule(problem: GemmProblem) -> GemmConfig | None:
            if problem.operation != "mixed" or problem.m > 64:
                return None
            return dataclasses.replace(TILE, block_m=16 if problem.m <= 16 else 64)

        def function(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
            # Each makes a view of its own of what they share.
            pairs = zip(weights[::2], weights[1::2], strict=True)
            return tuple(int8_linear(x, weight, scales) for weight, scales in pairs)

        weights = [((N, K), I8), ((N,), BF16)] * 3
        with scope.compile_scope(config.snapshot({})), decide.force_config(rule):
            code = fake_cuda.lower(function, ((2, "rows", K), BF16), *weights).code
        assert (
            code.count("PARTS : tl.constexpr = 3") == len(re.findall("def triton_gemm_", code)) == 2
        )
        assert kernel_util.dispatch_limits(code, r"2\*s\d+") == [16, 64]

    @pytest.fixture(scope="class")
    @staticmethod
    def layer() -> tuple[list[GemmProblem], str]:
        """A layer of a quantised Llama: the products that were met, and the code."""
        met: list[GemmProblem] = []

        def rule(problem: GemmProblem) -> GemmConfig | None:
            met.append(problem)
            if problem.operation != "mixed":
                return None
            return dataclasses.replace(TILE, block_n=32)

        module = quantize_int8(LlamaLayer(64, 128, 4, 2, 0, 2).to(BF16)).eval()
        tensors = dict((*module.named_parameters(), *module.named_buffers()))

        def function(x: Tensor, cosine: Tensor, sine: Tensor, *weights: Tensor) -> Any:
            given = dict(zip(tensors, weights, strict=True))
            return torch.func.functional_call(module, given, (x, cosine, sine))

        inputs = [tensor(2, 3, 64), tensor(3, 8), tensor(3, 8)]
        weights = [tensor(*item.shape, dtype=item.dtype) for item in tensors.values()]
        with scope.compile_scope(config.snapshot({})), decide.force_config(rule):
            return met, fake_cuda.lower(function, *inputs, *weights).code

    def test_a_layer_has_four_kernels_for_seven_matmuls(
        self, layer: tuple[list[GemmProblem], str]
    ) -> None:
        met, code = layer
        assert len(re.findall(r"def triton_gemm_", code)) == 4
        assert code.count("NORMALIZE : tl.constexpr = True") == 2
        assert code.count("GATED : tl.constexpr = True") == 1
        # Nothing is multiplied that was dequantised before.
        assert {item.operation for item in met} == {"mixed", "bmm"}

    def test_the_norm_s_weight_stands_behind_all_scales(
        self, layer: tuple[list[GemmProblem], str]
    ) -> None:
        _, code = layer
        kernels = [
            text for text in re.findall(r"def triton_gemm_\w+\((.*?)\)", code) if "W" in text
        ]
        assert [re.findall(r"arg_(\w+)", item)[:10] for item in kernels] == [
            ["A", "B0", "B1", "B2", "S0", "S1", "S2", "W"],
            ["A", "B0", "B1", "S0", "S1", "W"],
        ]


class TestLowPrecision:
    """Products of integers and of fp8, whose scales are fused behind them."""

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
        # Factors, then scales, then biases; sums are never stored without them.
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
        (found,) = find_fusions(graph, PLAIN)
        assert found.problem == problem
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
