"""The cost model of Triton kernels: it is monotonic, and never below the roofline."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from inductor_ext.templates.device import Device
from inductor_ext.templates.fused_ops import Epilogue
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import EpilogueInput
from inductor_ext.templates.triton.config import GemmConfig, warpgroup_mma
from inductor_ext.templates.triton.cost_model import DEFAULT, Prediction, predict
from inductor_ext.templates.triton.ranking import rank
from test.support.cost_model_cases import Case, cases, linear
from test.support.gemm_strategies import configs, devices, examples, problems
from test.support.problem_examples import A100, H200

PARTS = ("compute", "memory", "epilogue", "reduction", "launch")


def no_longer(one: Prediction, other: Prediction) -> bool:
    """Whether the first takes at most the time of the second, up to rounding."""
    return one.total <= other.total * (1 + 1e-9)


class TestPhysics:
    @given(cases())
    @examples(150)
    def test_no_prediction_is_below_the_roofline(self, case: Case) -> None:
        problem, _, on = case
        result = predict(*case)
        assert result.total >= on.launch + problem.roofline(on)
        assert all(getattr(result, part) >= 0 for part in PARTS)
        busy = result.compute + result.epilogue
        assert result.total >= result.launch + max(busy, result.memory) + result.reduction

    @given(problems(), configs(), devices())
    @examples(150)
    def test_no_illegal_prediction_is_below_the_roofline(
        self, problem: GemmProblem, config: GemmConfig, on: Device
    ) -> None:
        assert predict(problem, config, on).total >= on.launch + problem.roofline(on)

    @given(cases(plain=True), st.integers(1, 300))
    @examples(100)
    def test_a_longer_k_of_the_same_alignment_is_not_faster(self, case: Case, more: int) -> None:
        problem, config, on = case
        longer = replace(problem, k=problem.k + 16 * more)
        assert no_longer(predict(problem, config, on), predict(longer, config, on))

    @given(cases(), st.floats(1, 10))
    @examples(100)
    def test_more_bandwidth_is_not_slower(self, case: Case, factor: float) -> None:
        problem, config, on = case
        faster = replace(on, bandwidth=on.bandwidth * factor)
        assert no_longer(predict(problem, config, faster), predict(*case))

    @given(cases(), st.integers(1, 200))
    @examples(100)
    def test_more_multiprocessors_are_not_slower(self, case: Case, more: int) -> None:
        problem, config, on = case
        larger = on.with_sms(on.sms + more)
        for device_at_hand in (larger, replace(larger, bandwidth=on.bandwidth, l2=on.l2)):
            assert no_longer(predict(problem, config, device_at_hand), predict(*case))

    @given(cases(), st.integers(1, 1 << 30))
    @examples(100)
    def test_more_l2_is_not_slower(self, case: Case, more: int) -> None:
        problem, config, on = case
        assert no_longer(predict(problem, config, replace(on, l2=on.l2 + more)), predict(*case))

    @given(cases(plain=True), st.sampled_from(("row", "column", "matrix")), st.integers(1, 30))
    @examples(100)
    def test_a_longer_epilogue_is_not_faster(
        self, case: Case, broadcast: Any, pointwise: int
    ) -> None:
        problem, config, on = case
        longer = Epilogue((EpilogueInput("float32", broadcast),), pointwise)
        assert no_longer(predict(*case), predict(replace(problem, epilogue=longer), config, on))

    @given(cases(plain=True))
    @examples(60)
    def test_wider_stores_and_another_layout_of_the_same_bytes(self, case: Case) -> None:
        problem, config, on = case
        assert no_longer(
            predict(replace(problem, out="float8_e4m3fn"), config, on),
            predict(replace(problem, out="float32"), config, on),
        )
        spread = replace(problem, a=replace(problem.a, strides=(problem.k * 2, 2), alignment=1))
        # A kernel that loses wgmma by its layout can prefetch one stage more, which may pay off.
        assume(warpgroup_mma(problem, config, on) == warpgroup_mma(spread, config, on))
        assert no_longer(predict(*case), predict(spread, config, on))

    def test_a_deeper_pipeline_hides_more_latency(self) -> None:
        problem = linear(16, 4096, 14336)
        times = [
            predict(problem, GemmConfig("splitk", 16, 64, 64, stages, 4), H200).memory
            for stages in (2, 3, 4, 5, 6)
        ]
        assert times == sorted(times, reverse=True)
        assert times[0] > 2 * times[-1]

    def test_a_wave_that_is_hardly_begun_costs_a_whole_one(self) -> None:
        config = GemmConfig("persistent_tma", 128, 256, 64, 3, 8, tma=True, flatten=True)
        full, over = linear(128, 256 * 132, 4096), linear(128, 256 * 133, 4096)
        one, two = (predict(problem, config, H200) for problem in (full, over))
        assert two.compute == pytest.approx(2 * one.compute)

    def test_splits_are_added_up_at_a_price(self) -> None:
        problem = linear(16, 4096, 14336)
        config = GemmConfig("splitk", 16, 128, 64, 6, 4, swap_ab=True, tma=True, split_k=4)
        result = predict(problem, config, H200)
        assert DEFAULT.gap < result.reduction < 2 * DEFAULT.gap
        dependent = predict(problem, replace(config, pdl=True), H200)
        assert dependent.reduction < result.reduction
        assert dependent.total < result.total
        assert predict(problem, replace(config, split_k=1), H200).reduction == 0

    def test_two_stages_do_not_overlap_loads_and_wgmma(self) -> None:
        problem = linear(2048, 4096, 4096)
        config = GemmConfig("persistent_tma", 256, 128, 128, 2, 8, tma=True)
        two = predict(problem, config, H200)
        assert two.total >= two.launch + two.compute + two.memory
        # The same K in half as deep steps and twice the stages.
        four = predict(problem, replace(config, block_k=64, num_stages=4), H200)
        assert four.total < 0.75 * two.total

    def test_a_gate_uses_half_a_tile(self) -> None:
        gated = linear(2048, 28672, 4096, parts=(14336,) * 2, epilogue=Epilogue((), 8, gated=True))
        wide = GemmConfig("persistent_tma", 128, 256, 64, 4, 8, tma=True)
        high = replace(wide, block_m=256, block_n=128)
        # Measured on an H200: 623 and 730 microseconds.
        assert predict(gated, wide, H200).compute < predict(gated, high, H200).compute

    def test_flattening_fills_the_pipeline_once(self) -> None:
        problem = linear(4096, 14336, 4096)
        flat = GemmConfig("persistent_tma", 128, 256, 64, 3, 8, tma=True, flatten=True)
        assert (
            predict(problem, flat, H200).total
            < predict(problem, replace(flat, flatten=False), H200).total
        )

    def test_shares_of_stream_k_read_what_l2_does_not_keep_again(self) -> None:
        # 63 and 28 microseconds on an H100, 47 and 28 on an H200.
        shared = GemmConfig("persistent_tma", 64, 128, 128, 4, 4, tma=True, stream_k=True)
        whole = replace(shared, stream_k=False)
        assert predict(linear(256, 6144, 4096), shared, H200).memory > 40
        assert predict(linear(256, 6144, 4096), whole, H200).memory < 30
        small = linear(1024, 2048, 2048)
        assert predict(small, shared, H200).memory < 1.1 * predict(small, whole, H200).memory

    def test_unaligned_loads_cost(self) -> None:
        config = GemmConfig("cp_async", 128, 128, 64, 4, 8)
        aligned, odd = linear(4096, 4096, 4096), linear(4096, 4096, 4095)
        assert predict(odd, config, H200).total > 1.2 * predict(aligned, config, H200).total

    def test_dequantization_costs_time_and_saves_bytes(self) -> None:
        config = GemmConfig("mixed", 16, 128, 64, 4, 4, swap_ab=True)
        packed = GemmProblem.contiguous("mixed", 16, 14336, 4096, b_dtype="int4")
        wide = GemmProblem.contiguous("mixed", 16, 14336, 4096, b_dtype="int8")
        assert predict(packed, config, H200).memory < predict(wide, config, H200).memory
        same = replace(wide, operation="mm", prologue=None)
        assert predict(wide, config, H200).compute > predict(same, config, H200).compute

    def test_unsupported_dtypes_take_infinite_time(self) -> None:
        fp8 = GemmProblem.contiguous("scaled", 512, 512, 512, "float8_e4m3fn")
        config = GemmConfig("cp_async", 128, 128, 64, 3, 8)
        assert predict(fp8, config, A100).total == math.inf
        assert rank(fp8, A100) == []
