"""Which configurations a problem has, and in which order."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inductor_ext.templates.device import Device
from inductor_ext.templates.fused_ops import Epilogue
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import Operand
from inductor_ext.templates.triton.config import GemmConfig, warpgroup_mma
from inductor_ext.templates.triton.constraints import legal, why_not
from inductor_ext.templates.triton.search_space import candidates
from test.support import hash_seeds
from test.support.cost_model_cases import linear
from test.support.gemm_strategies import device, devices, examples, problems
from test.support.problem_examples import A100, DECODE, H200, HUGE, INT4, INT8, L4, LINEAR, ODD


def templates(problem: GemmProblem, on: Device) -> Counter[str]:
    return Counter(config.template for config in candidates(problem, on))


class TestCandidates:
    @given(problems(), devices())
    @examples(120)
    def test_random_problems_have_unique_legal_configurations(
        self, problem: GemmProblem, on: Device
    ) -> None:
        results = list(candidates(problem, on))
        assert [
            why_not(problem, config, on) for config in results if why_not(problem, config, on)
        ] == []
        assert len(set(results)) == len(results) <= 400

    @given(problems(plain=True))
    @examples(80)
    def test_contiguous_problems_have_configurations_on_an_h200(self, problem: GemmProblem) -> None:
        # torch itself requires operands of grouped matmuls that TMA can load.
        refused = problem.operation == "grouped" and problem.tma_obstacle is not None
        # 4-bit pairs are multiplied by pairs along K.
        refused |= problem.b.dtype.endswith("int4") and problem.a.layout != "row"
        assert any(candidates(problem, H200)) != refused

    @pytest.mark.parametrize(
        ("problem", "on", "expected"),
        [
            (LINEAR, H200, {"cp_async", "persistent_tma", "persistent_tma_ws"}),
            (LINEAR, A100, {"cp_async"}),
            (ODD, H200, {"cp_async", "persistent_tma", "persistent_tma_ws"}),
            (ODD, A100, {"cp_async"}),
            (replace(ODD, m=16), H200, {"splitk"}),
            (DECODE, H200, {"splitk", "gemv", "persistent_tma"}),
            (DECODE, A100, {"splitk", "gemv"}),
            (replace(DECODE, m=16), A100, {"splitk"}),
            (INT8, H200, {"mixed", "stationary"}),
            (replace(INT8, m=4), L4, {"mixed", "gemv", "direct", "stationary"}),
            (replace(INT4, m=8), H200, {"mixed", "direct", "stationary"}),
            (replace(INT4, m=9), H200, {"mixed", "stationary"}),
            (replace(INT4, m=17), H200, {"mixed"}),
            (replace(INT4, m=9, k=4096 + 256), H200, {"mixed"}),
            (
                GemmProblem.contiguous("bmm", 512, 512, 64, batch=64),
                H200,
                {"cp_async", "bmm_persistent"},
            ),
            (GemmProblem.contiguous("grouped", 512, 512, 64, batch=8), H200, {"grouped"}),
            (GemmProblem.contiguous("mm", 64, 64, 64, "float64"), H200, set()),
            (GemmProblem.contiguous("scaled", 64, 64, 64, "float8_e5m2"), A100, set()),
        ],
    )
    def test_templates(self, problem: GemmProblem, on: Device, expected: set[str]) -> None:
        assert set(templates(problem, on)) == expected

    def test_narrow_outputs_have_narrow_tiles(self) -> None:
        narrow = GemmProblem.contiguous("mm", 4096, 8, 4096)
        assert {config.block_n for config in candidates(narrow, H200)} == {16}

    def test_a_long_k_beside_few_tiles_is_split(self) -> None:
        deep = GemmProblem.contiguous("mm", 256, 256, 65536)
        splits = {config.split_k for config in candidates(deep, H200)}
        assert max(splits) >= 32
        assert 1 in splits
        ways = Counter(
            (candidate.split_k > 1, candidate.fused_split_k) for candidate in candidates(deep, H200)
        )
        assert ways[True, True] == ways[True, False]
        assert ways[False, True] == 0

    def test_deterministic_splits_are_kept(self) -> None:
        deterministic = replace(DECODE, deterministic=True)
        assert templates(deterministic, H200) == templates(DECODE, H200)

    def test_as_many_ctas_as_an_sm_can_hold_are_tried(self) -> None:
        problem = GemmProblem.contiguous("mm", 4096, 768, 768)
        held: dict[tuple[int, int, int, int], dict[int, int]] = {}
        for candidate in candidates(problem, H200):
            if candidate.template == "cp_async":
                tile = (
                    candidate.block_m,
                    candidate.block_n,
                    candidate.block_k,
                    candidate.num_warps,
                )
                held.setdefault(tile, {})[candidate.num_stages] = candidate.occupancy(problem, H200)
        # The two deepest pipelines, and those that make room for another CTA.
        assert held[128, 128, 64, 8] == {5: 1, 4: 1, 3: 2}
        assert held[64, 128, 64, 4] == {5: 1, 4: 2, 3: 3, 2: 4}
        assert held[128, 256, 64, 8] == {4: 1, 3: 1}

    def test_wide_indices_where_tensors_need_them(self) -> None:
        assert all(config.index64 for config in candidates(HUGE, H200))
        assert not any(config.index64 for config in candidates(LINEAR, H200))

    @given(st.sampled_from((LINEAR, DECODE, INT8)), devices())
    @examples(10)
    def test_the_order_is_the_same_each_time(self, problem: GemmProblem, on: Device) -> None:
        assert list(candidates(problem, on)) == list(candidates(problem, on))

    def test_the_order_is_the_same_in_every_process(self) -> None:
        code = (
            "import json; "
            "from test.templates.triton.test_search_space import DECODE, H200, candidates; "
            "print(json.dumps([each.to_json() for each in candidates(DECODE, H200)]))"
        )
        expected = [candidate.to_json() for candidate in candidates(DECODE, H200)]
        for output in hash_seeds.outputs(code, ("0", "4242")):
            assert json.loads(output) == expected


H200 = device("NVIDIA H200")


class TestSpace:
    """Configurations that were never among the fastest are not in the space."""

    def test_loops_are_flattened_where_a_cta_has_more_than_one_tile(self) -> None:
        for problem in (linear(256, 4096, 4096), linear(2048, 4096, 4096)):
            flat = [config for config in candidates(problem, H200) if config.flatten]
            assert flat
            assert all(config.tiles(problem) > H200.sms for config in flat)
        gated = linear(2048, 28672, 4096, parts=(14336,) * 2, epilogue=Epilogue((), 8, gated=True))
        # A loop over two matmuls would not be pipelined as one.
        flat = [config for config in candidates(gated, H200) if config.flatten]
        assert flat
        assert all(config.joins(gated) for config in flat)
        in_rows = replace(gated, b=Operand.of("bfloat16", (4096, 28672), (28672, 1)))
        assert not any(config.flatten for config in candidates(in_rows, H200))

    def test_warps_have_columns_of_both_matmuls(self) -> None:
        gated = linear(16, 28672, 4096, parts=(14336,) * 2, epilogue=Epilogue((), 8, gated=True))
        for config in candidates(gated, H200):
            if not warpgroup_mma(gated, config, H200) and config.template == "splitk":
                assert config.block_n >= 16 * config.num_warps or config.swap_ab

    def test_elements_loaded_one_by_one_leave_registers_for_them(self) -> None:
        config = GemmConfig("cp_async", 128, 128, 64, 4, 4)
        assert legal(linear(4096, 4096, 4096), config, H200)
        assert not legal(linear(4096, 4096, 4095), config, H200)
        assert legal(linear(4096, 4096, 4095), replace(config, num_warps=8), H200)

    def test_scalar_loads_fit_registers_without_a_pipeline(self) -> None:
        odd = linear(16, 4096, 4095)
        config = GemmConfig("splitk", 16, 64, 256, 2, 4)
        assert (config.gathered(odd), config.gathered(linear(16, 4096, 4096))) == (160, 0)
        assert legal(odd, config, H200)
        assert not legal(odd, replace(config, num_warps=2), H200)
        assert legal(linear(16, 4096, 4096), replace(config, num_warps=2), H200)
        assert config.shared_memory(odd) == replace(config, num_stages=4).shared_memory(odd)
        alone = [
            candidate for candidate in candidates(odd, H200) if candidate.align_operands is None
        ]
        assert {item.num_stages for item in alone} == {2}

    def test_gate_and_up_need_the_rows_of_wgmma_each(self) -> None:
        gated = linear(16, 28672, 4096, parts=(14336,) * 2, epilogue=Epilogue((), 8, gated=True))
        config = GemmConfig("persistent_tma", 16, 64, 64, 4, 4, swap_ab=True, tma=True)
        assert legal(linear(16, 28672, 4096), config, H200)
        assert not legal(gated, config, H200)
        assert legal(gated, replace(config, block_n=128), H200)
