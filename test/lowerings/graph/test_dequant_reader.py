"""Dequantized weights in FX graphs: what is read, and that the fused graph computes the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from torch.nn import functional as F

from inductor_ext.autotune.reference import program
from inductor_ext.lowerings.graph import (
    match_dequantized,
    matmul_nodes,
    undo_woq_int8,
)
from inductor_ext.lowerings.graph.fusion import View
from inductor_ext.settings import Settings
from inductor_ext.templates.fused_ops import Dequant, Prologue
from inductor_ext.templates.problem import GemmProblem
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
    check,
    find,
    in_groups,
    pairs,
    views,
)
from test.support.gemm_graphs import lowered_graph, operand_count, tensor

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="traced on a stand-in for a GPU")


class TestBytes:
    def test_column_scales_stay_in_the_epilogue(self) -> None:
        match = check(lambda x, w, s: F.linear(x, w.to(BF16)) * s, X, BYTES, ROWS)
        assert match.problem.prologue == Prologue(dequant=Dequant())
        assert match.problem.b.dtype == "int8"
        assert match.problem.b.layout == "column"
        assert views(match) == [View((N, K), transposed=True)]

    def test_scales_of_columns_before_it_and_a_bias(self) -> None:
        match = check(
            lambda x, w, s, b: F.linear(x, w.to(FP16) * s.unsqueeze(-1), b),
            tensor(2, 3, K, dtype=FP16),
            BYTES,
            tensor(N, dtype=FP16),
            tensor(N, dtype=FP16),
        )
        assert match.problem.prologue == Prologue(dequant=Dequant("column", scale_dtype="float16"))
        assert operand_count(match) == 3
        assert [inp.broadcast for inp in match.problem.epilogue.inputs] == ["row"]

    def test_one_scale_for_all_in_float32(self) -> None:
        match = check(
            lambda x, w, s: x @ (w.to(F32) * s).to(BF16),
            X,
            tensor(K, N, dtype=I8),
            tensor(1, dtype=F32),
        )
        assert match.problem.prologue is not None
        assert match.problem.dequant.scales == "tensor"
        assert match.problem.b.layout == "row"

    def test_groups_with_zero_points(self) -> None:
        match = check(
            lambda x, w, s, z: F.linear(x, in_groups(w.to(BF16), s, z.to(BF16).unsqueeze(-1))),
            X,
            BYTES,
            SCALES,
            tensor(N, K // G, dtype=I8),
        )
        assert match.problem.prologue == Prologue(dequant=Dequant("group", G, zero_points=True))
        assert match.constants.constexprs() == {"SCALE_WORDS": 2, "ZERO_WORDS": 4}
        assert operand_count(match) == 4

    def test_one_zero_point_and_float32(self) -> None:
        match = check(
            lambda x, w, s: F.linear(x, in_groups(w.to(F32), s, 100).to(BF16)),
            X,
            tensor(N, K, dtype=U8),
            tensor(N, K // G, dtype=F32),
        )
        assert match.problem.dequant is not None
        assert match.problem.dequant.scale_dtype == "float32"
        assert match.constants.constexprs() == {"ZERO": 100, "WIDE": True}
        assert operand_count(match) == 3

    def test_columns_with_zero_points_are_groups_of_all_of_k(self) -> None:
        match = check(
            lambda x, w, s, z: F.linear(x, (w.to(BF16) - z.unsqueeze(-1)) * s.unsqueeze(-1)),
            X,
            BYTES,
            ROWS,
            ROWS,
        )
        assert match.problem.prologue == Prologue(dequant=Dequant("group", K, zero_points=True))

    @pytest.mark.parametrize("steps", [(torch.int16,), (I8, U8), (torch.int32,)], ids=str)
    def test_zero_points_that_are_truncated_or_wrap_stay_so(self, steps: Any) -> None:
        def function(x: Tensor, w: Tensor, s: Tensor, z: Tensor) -> Tensor:
            for step in steps:
                z = z.to(step)
            return F.linear(x, in_groups(w.to(BF16), s, z.to(BF16).unsqueeze(-1)))

        zeros = tensor(N, K // G, dtype=I8 if steps[0] is I8 else BF16)
        match = check(function, X, BYTES, SCALES, zeros)
        # The kernel reads the converted zero points.
        assert (
            matmul_nodes.dtype_of(match.operands.zero_points[0].node.meta["val"])
            == str(steps[-1])[6:]
        )

    @pytest.mark.parametrize("kind", [torch.int32, torch.float8_e4m3fn], ids=str)
    def test_scales_that_are_rounded_stay_so(self, kind: torch.dtype) -> None:
        match = check(
            lambda x, w, s: F.linear(x, in_groups(w.to(BF16), (s * 4).to(kind).to(BF16))),
            X,
            BYTES,
            SCALES,
        )
        assert match.operands.scales[0].node.name != "arg2_1"

    @pytest.mark.parametrize(
        ("function", "inputs"),
        [
            # Masked weights, and weights that are subtracted from a scalar.
            (lambda x, m, w: F.linear(x, (1 - m) * w), (tensor(N, K), tensor(N, K))),
            (lambda x, w, s: F.linear(x, (8 - w.to(BF16)) * s.unsqueeze(-1)), (BYTES, ROWS)),
            # Slices and scales that are not matrices without a copy.
            (
                lambda x, w: F.linear(x, w.reshape(N, K).to(BF16)),
                (tensor(N, 4, 16, dtype=I8, strides=(128, 32, 1)),),
            ),
            (
                lambda x, w, s: F.linear(x, w.to(BF16) * s.permute(1, 0).reshape(N, 1)),
                (BYTES, tensor(6, 8, dtype=BF16)),
            ),
            # Kernels have one zero point for all only with unsigned integers.
            (
                lambda x, w, s: F.linear(x, (w.to(BF16) - 3) * s.unsqueeze(-1)),
                (tensor(N, K, dtype=torch.float8_e4m3fn), ROWS),
            ),
            (lambda x, w, s: F.linear(x, (w.to(BF16) - 3) * s.unsqueeze(-1)), (BYTES, ROWS)),
            # A is the dequantized tensor, too.
            (lambda x, w: F.linear(w.to(BF16), w.to(BF16)), (BYTES,)),
        ],
    )
    def test_patterns_that_do_not_match(self, function: Any, inputs: Any) -> None:
        assert find(function, X, *inputs) == []

    def test_woq_int8_replacements_are_undone(self) -> None:
        x = tensor(2, 3, K)
        graph = lowered_graph(lambda x, w, s: F.linear(x, w.to(BF16)) * s, x, BYTES, ROWS)
        assert match_dequantized.find_dequantized_matmuls(graph, PLAIN) == []
        undo_woq_int8.restore_matmuls(graph)
        (match,) = match_dequantized.find_dequantized_matmuls(graph, PLAIN)
        assert match.problem.prologue == Prologue(dequant=Dequant())


class TestPairs:
    def test_interleaved_4_bit_values(self) -> None:
        match = check(
            lambda x, w, s: F.linear(x, in_groups(pairs(w).to(BF16), s, 8)), X, PAIRS, SCALES
        )
        problem = match.problem
        assert (problem.b.dtype, problem.b.strides, problem.k) == ("uint4", (1, K), K)
        assert problem.prologue == Prologue(dequant=Dequant("group", G))
        assert match.constants.constexprs() == {"ZERO": 8, "SCALE_WORDS": 2}
        assert operand_count(match) == 3
        assert views(match) == [
            View((N, K // 2), transposed=True),
            View((N, K // G), transposed=True),
        ]

    def test_the_upper_half_first_through_int32(self) -> None:
        match = check(
            lambda x, w, s: F.linear(
                x.flatten(0, 1), in_groups(pairs(w.to(torch.int32), 1), s, 8).to(BF16)
            ),
            tensor(2, 3, K, dtype=BF16),
            PAIRS,
            SCALES,
        )
        assert match.problem.b.dtype == "uint4"
        assert match.constants.high_first is True

    def test_signed_by_shifts(self) -> None:
        def function(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
            q = torch.stack(((w << 4) >> 4, w >> 4), -1).reshape(N, K)
            return F.linear(x, in_groups(q.to(BF16), s))

        match = check(function, X, tensor(N, K // 2, dtype=I8), SCALES)
        assert match.problem.b.dtype == "int4"
        assert match.constants.zero is None

    def test_scales_that_are_spread_by_rows(self) -> None:
        match = check(
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
        assert match.problem.b.layout == "row"
        assert match.constants.scale_words is None

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
        (match,) = find(canonical.function, *inputs)
        if prologue.dequant == Dequant("column"):
            # The scales are applied after the matmul.
            prologue = Prologue(dequant=Dequant())
        assert match.problem.b == problem.b
        assert match.problem.prologue == prologue
        if b_dtype == "uint4":
            assert match.constants.high_first
            assert match.constants.zero in (None, 8)


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
    def test_unsupported_patterns_do_not_match(self, function: Callable[..., Any]) -> None:
        assert find(function, X, BYTES, ROWS) == []

    def test_switched_off(self) -> None:
        off = Settings(gemm_fuse_dequantize=False)
        assert find(lambda x, w: F.linear(x, w.to(BF16)), X, BYTES, settings=off) == []

    def test_emulated_rounding_disables_the_fusion(self) -> None:
        from torch._inductor import config

        with config.patch(emulate_precision_casts=True):
            assert find(lambda x, w: F.linear(x, w.to(BF16)), X, BYTES) == []
