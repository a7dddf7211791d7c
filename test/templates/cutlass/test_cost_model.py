"""Which CUTLASS kernels are worth building for a problem."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inductor_ext.templates.cutlass.constraints import why_not
from inductor_ext.templates.cutlass.cost_model import candidates, predict, rank
from inductor_ext.templates.device import Device
from inductor_ext.templates.fused_ops import Dequant, Epilogue, Prologue
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import EpilogueInput, Operand
from test.support.cutlass_examples import A100, B200, H200, INT4, LINEAR, mm
from test.support.gemm_strategies import device, examples, problems

L4 = device("NVIDIA L4")
RESIDUAL = mm("mm", 4096, 4096, 4096, epilogue=Epilogue((EpilogueInput("bfloat16", "matrix"),), 1))


class TestRanking:
    @pytest.mark.parametrize(
        ("problem", "where", "expected"),
        [
            (LINEAR, H200, "128x256x64_2x1x1_0_tnt_align8_warpspecialized_cooperative"),
            (LINEAR, A100, "_tn_align8"),
            (LINEAR, L4, "_tn_align8"),
            # A partial wave is divided evenly.
            (mm("mm", 2176, 4096, 4096), H200, "stream_k_warpspecialized_cooperative"),
            (RESIDUAL, H200, "gemm_bf16_bf16_f32_bf16_bf16_128x256x64"),
            (mm("bmm", 512, 512, 64, batch=64), H200, "pingpong"),
            (mm("int_mm", 4096, 4096, 4096, "int8"), H200, "s8_s8_s32_void_s32_128x256x128"),
            (mm("scaled", 4096, 4096, 4096, "float8_e4m3fn"), L4, "s16832gemm_e4m3_"),
            (mm("mm", 4096, 4096, 4096, "float32", tf32=True), A100, "s1688tf32gemm_"),
            (mm("mixed", 2048, 4096, 4096, b_dtype="int8"), H200, "s8_bf16_f32_void_bf16"),
            (INT4, H200, "u4_bf16_f32_void_bf16_128x256x64_2x1x1_0_tnn_align32"),
            (mm("grouped", 4096, 4096, 4096, batch=8), H200, "gemm_grouped_"),
            # TMA refuses an unaligned output, and what is for capability 8.0 runs there as well.
            (mm("mm", 4096, 4095, 4096), H200, "cutlass_tensorop_bf16_s16816gemm"),
            (mm("mm", 4096, 4096, 4094), H200, "_tn_align2"),
            # Few rows are along N of the kernel.
            (mm("mm", 16, 14336, 4096), H200, "128x16x64_2x1x1_0_tnn"),
        ],
    )
    def test_the_best_kernel_is_first(
        self, problem: GemmProblem, where: Device, expected: str
    ) -> None:
        (config, _), *_ = rank(problem, where)
        assert expected in config.name

    @pytest.mark.parametrize(
        ("problem", "where"),
        [
            (mm("mm", 64, 64, 64, "float32"), H200),
            (mm("mm", 4096, 4096, 4095), H200),
            (mm("scaled", 64, 64, 64, "float8_e4m3fn"), A100),
            (replace(INT4, prologue=Prologue(dequant=Dequant("group", 32))), H200),
            (LINEAR, B200.with_sms(10)),
        ],
    )
    def test_some_problems_have_no_kernel(self, problem: GemmProblem, where: Device) -> None:
        results = rank(problem, where)
        assert results == [] or results[0][0].arch < 90

    @pytest.mark.parametrize(
        ("problem", "where"),
        [
            (mm("mm", 999, 1001, 510), H200),
            (LINEAR, A100),
            (LINEAR, replace(A100, capability=(8, 6))),
            (LINEAR, B200),
            (mm("scaled", 64, 64, 64, "float8_e4m3fn"), B200),
        ],
    )
    def test_older_kernels_are_built_for_the_device(
        self, problem: GemmProblem, where: Device
    ) -> None:
        (config, _), *_ = rank(problem, where)
        assert config.arch < 90
        assert config.target == 10 * where.capability[0] + where.capability[1]

    def test_ranked_kernels_differ(self) -> None:
        results = rank(LINEAR, H200, 4)
        assert len(results) == 4
        assert len({(config.tile, config.mainloop) for config, _ in results}) == 4
        times = [microseconds for _, microseconds in results]
        assert times == sorted(times)
        two = rank(LINEAR, H200)
        assert set(two) <= set(results)
        mainloops = {config.mainloop for config, _ in two}
        assert mainloops == {"warpspecialized_pingpong", "warpspecialized_cooperative"}

    @pytest.mark.parametrize(("m", "swizzle"), [(2176, 1), (2304, 2)])
    def test_a_swizzle_makes_no_tiles_beyond_the_output(self, m: int, swizzle: int) -> None:
        """CUTLASS rounds the number of tiles up to a multiple of the swizzle."""
        problem = mm("mm", m, 4096, 4096)
        config = next(
            candidate
            for candidate in candidates(problem, H200)
            if (candidate.tile, candidate.cluster) == ((128, 256, 64), (1, 1, 1))
            and candidate.scheduler == "stream_k"
        )
        assert config.swizzle == swizzle
        rounded = replace(config, swizzle=8)
        assert predict(problem, rounded, H200) > 1.2 * predict(problem, config, H200)

    def test_ranking_is_by_prediction_and_not_by_name(self) -> None:
        everything = list(candidates(LINEAR, H200))
        best = min(everything, key=lambda config: predict(LINEAR, config, H200))
        assert rank(LINEAR, H200, 1)[0][0] == best
        assert best.name != min(config.name for config in everything)

    def test_an_exhaustive_search_has_all_of_the_others(self) -> None:
        usual, everything = (set(candidates(LINEAR, H200, level)) for level in (0, 1))
        assert usual < everything
        assert any("2x2x1" in config.name for config in everything)

    @given(problem=problems(), where=st.sampled_from([H200, A100, L4]))
    @examples(60)
    def test_candidates_are_legal_and_not_below_the_roofline(
        self, problem: GemmProblem, where: Device
    ) -> None:
        results = rank(problem, where, 3)
        assert len(results) <= 3
        for config, microseconds in results:
            assert why_not(problem, config, where) == []
            assert math.isfinite(microseconds)
            assert microseconds >= problem.roofline(where)

    def test_operands_of_other_layouts_have_no_kernel(self) -> None:
        strided = Operand.of("bfloat16", (64, 64), (128, 2))
        assert list(candidates(replace(LINEAR, a=strided), H200)) == []
