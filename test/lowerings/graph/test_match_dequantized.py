"""Matmuls with dequantized weights: gates, shared inputs and norms, from the graph to the code."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from torch.nn import functional as F

from benchmarks.gemm.models import LlamaLayer, int4_linear, int8_linear, quantize_int8
from inductor_ext import config
from inductor_ext.autotune import decide
from inductor_ext.autotune.reference import program
from inductor_ext.hooks import scope
from inductor_ext.lowerings.graph import match_dequantized, undo_woq_int8
from inductor_ext.lowerings.graph.fusion import Fusion
from inductor_ext.lowerings.graph.fusion_search import find_fusions
from inductor_ext.templates.fused_ops import Dequant, Epilogue, Prologue, RowNorm
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.triton.config import GemmConfig
from test.support import fake_cuda, generated_code
from test.support.dequant_checks import (
    BF16,
    BYTES,
    F32,
    FP16,
    I8,
    PAIRS,
    PLAIN,
    ROWS,
    SCALES,
    U8,
    G,
    K,
    M,
    N,
    Tensor,
    X,
    check_several,
    in_groups,
    pairs,
)
from test.support.gemm_graphs import lowered_graph, operand_count, tensor

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="traced on a stand-in for a GPU")
TILE = GemmConfig("mixed", 16, 16, 32, 2, 2)


def int4(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return int4_linear(x, w, s)


def by_hand(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return F.linear(x, w.to(x.dtype)) * s


WEIGHTS = {int8_linear: (BYTES, ROWS), int4: (PAIRS, SCALES)}
"""Layers, with a weight of N rows and its scales."""

PROLOGUES = {
    int8_linear: Prologue(dequant=Dequant("column")),
    int4: Prologue(dequant=Dequant("group", G)),
}

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


def normalized(prologue: Prologue) -> Prologue:
    return dataclasses.replace(prologue, norm=RowNorm("rms", 1))


@pytest.mark.parametrize("layer", WEIGHTS)
class TestSeveral:
    """Several matmuls in one kernel, as with plain weights in test_match_shared_input."""

    @pytest.mark.parametrize("x", [X, tensor(2, 3, K)], ids=["two dimensions", "three"])
    def test_a_gate(self, layer: Layer, x: Tensor) -> None:
        match = check_several(
            lambda x, w1, s1, w2, s2: F.silu(layer(x, w1, s1)) * layer(x, w2, s2),
            x,
            *WEIGHTS[layer] * 2,
        )
        assert match.problem.parts == (N, N)
        assert match.problem.epilogue.gated
        assert match.problem.prologue == PROLOGUES[layer]
        assert operand_count(match) == 5
        assert len(match.outputs) == 1

    def test_a_shared_input_of_three_dimensions(self, layer: Layer) -> None:
        weight, scales = WEIGHTS[layer]
        narrow = weight[: N // 2], scales[: N // 2]
        match = check_several(
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
        assert match.problem.parts == (N, N // 2, N // 2)
        assert match.problem.prologue == PROLOGUES[layer]
        assert len(match.outputs) == 3

    def test_biases_behind_the_scales(self, layer: Layer) -> None:
        match = check_several(
            lambda x, w1, s1, b1, w2, s2, b2: (layer(x, w1, s1) + b1, layer(x, w2, s2) + b2),
            X,
            *(*WEIGHTS[layer], ROWS) * 2,
        )
        assert match.problem.parts == (N, N)
        assert [inp.broadcast for inp in match.problem.epilogue.inputs] == ["row"]
        assert len(match.operands.biases) == 2

    def test_behind_a_norm(self, layer: Layer) -> None:
        def function(x: Tensor, n: Tensor, *weights: Tensor) -> Tensor:
            y = F.rms_norm(x, (K,), n, 1e-5)
            return F.gelu(layer(y, *weights[:2])) * layer(y, *weights[2:])

        match = check_several(function, X, tensor(K), *WEIGHTS[layer] * 2)
        assert match.problem.prologue == normalized(PROLOGUES[layer])
        assert match.problem.epilogue.gated
        assert match.constants.epsilon == pytest.approx(1e-5)
        assert operand_count(match) == 6

    def test_one_behind_a_norm(self, layer: Layer) -> None:
        match = check_several(
            lambda x, n, w, s: layer(F.rms_norm(x, (K,), n, 1e-5), w, s) + 1,
            tensor(2, 3, K),
            tensor(K),
            *WEIGHTS[layer],
        )
        assert match.problem.prologue == normalized(PROLOGUES[layer])
        assert not match.problem.parts

    def test_a_gate_of_halves(self, layer: Layer) -> None:
        def function(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
            gate, up = layer(x, w, s).chunk(2, -1)
            return F.silu(gate) * up

        match = check_several(function, X, *WEIGHTS[layer])
        assert match.problem.parts == (N // 2, N // 2)
        assert match.halves == (0, N // 2)
        assert match.problem.prologue == PROLOGUES[layer]


class TestSeveralRead:
    def test_results_that_are_scaled_in_three_dimensions(self) -> None:
        match = check_several(
            lambda x, w, s, v, t: (by_hand(x, w, s), by_hand(x, v, t) + 1),
            tensor(2, 3, K, dtype=FP16),
            *(BYTES, tensor(N, dtype=FP16)) * 2,
        )
        assert match.problem.parts == (N, N)
        assert [len(output.meta["val"].shape) for output in match.outputs] == [3, 3]

    def test_a_norm_is_not_fused_if_rows_are_padded_by_zero_points(self) -> None:
        def function(x: Tensor, n: Tensor, w: Tensor, s: Tensor, v: Tensor, t: Tensor) -> Any:
            y = F.rms_norm(x, (K,), n, 1e-5)
            return tuple(
                F.linear(y, (q.to(BF16) - 128) * r.unsqueeze(-1)) for q, r in ((w, s), (v, t))
            )

        match = check_several(function, X, tensor(K), *(tensor(N, K, dtype=U8), ROWS) * 2)
        assert match.constants.zero == 128
        assert match.problem.prologue == Prologue(dequant=Dequant("column"))

    @pytest.mark.parametrize("shape", [(1, 1, N), (1, 1, 1)])
    def test_scales_that_give_results_another_dimension_follow(self, shape: Any) -> None:
        match = check_several(
            lambda x, w, s, v, t: (by_hand(x, w, s), by_hand(x, v, t)),
            tensor(M, K, dtype=FP16),
            *(BYTES, tensor(*shape, dtype=FP16)) * 2,
        )
        assert match.problem.prologue == Prologue(dequant=Dequant())
        assert [len(output.meta["val"].shape) for output in match.outputs] == [2, 2]

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
    def test_different_dequantizations_are_not_merged(
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
        matches = find_fusions(graph, PLAIN, scaled)
        assert [case for case in matches if case.problem.operation == "mixed"] == []

    def test_scales_after_the_matmul_are_read(self) -> None:
        def follow(function: Callable[..., Any], *more: Tensor) -> Fusion:
            graph = lowered_graph(
                lambda x, w, *rest: function(F.linear(x, w.to(BF16)), *rest), X, BYTES, *more
            )
            (match,) = match_dequantized.find_dequantized_matmuls(graph, PLAIN)
            return match_dequantized.add_scales(match)

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
            return  # One matmul alone is tested above.
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
            # Every matmul has its own view of the shared input.
            pairs = zip(weights[::2], weights[1::2], strict=True)
            return tuple(int8_linear(x, weight, scales) for weight, scales in pairs)

        weights = [((N, K), I8), ((N,), BF16)] * 3
        with scope.compile_scope(config.snapshot({})), decide.force_config(rule):
            code = fake_cuda.lower(function, ((2, "rows", K), BF16), *weights).code
        assert (
            code.count("PARTS : tl.constexpr = 3") == len(re.findall("def triton_gemm_", code)) == 2
        )
        assert generated_code.dispatch_limits(code, r"2\*s\d+") == [16, 64]

    @pytest.fixture(scope="class")
    @staticmethod
    def layer() -> tuple[list[GemmProblem], str]:
        """A layer of a quantized Llama: the problems of its matmuls, and the code."""
        met: list[GemmProblem] = []

        def rule(problem: GemmProblem) -> GemmConfig | None:
            met.append(problem)
            if problem.operation != "mixed":
                return None
            return dataclasses.replace(TILE, block_n=32)

        module = quantize_int8(LlamaLayer(64, 128, 4, 2, 0, 2).to(BF16)).eval()
        tensors = dict((*module.named_parameters(), *module.named_buffers()))

        def function(x: Tensor, cosine: Tensor, sine: Tensor, *weights: Tensor) -> Any:
            parameters = dict(zip(tensors, weights, strict=True))
            return torch.func.functional_call(module, parameters, (x, cosine, sine))

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
        # No dequantized weight is materialized.
        assert {item.operation for item in met} == {"mixed", "bmm"}

    def test_the_norm_s_weight_follows_all_scales(
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
