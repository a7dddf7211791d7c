"""Triton configurations: shared memory, tiles, occupancy, JSON."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from inductor_ext import exc
from inductor_ext.templates.fused_ops import Epilogue
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import DTYPE_BITS
from inductor_ext.templates.triton.config import GemmConfig, warpgroup_mma
from inductor_ext.templates.triton.templates import TEMPLATES
from test.support.gemm_strategies import configs, examples, problems
from test.support.problem_examples import (
    A100,
    DECODE,
    H200,
    INT8,
    L4,
    LINEAR,
    STATIONARY,
    TILE,
    read_again,
)

TALL = replace(TILE, block_m=256, block_n=128)


class TestConfig:
    @pytest.mark.parametrize(
        ("config", "problem", "needed"),
        [
            # Stages of 48 KiB, half of the tile on its way out, barriers.
            (TILE, LINEAR, 3 * 49_152 + 32_768 + 1024),
            (replace(TILE, num_stages=4), LINEAR, 4 * 49_152 + 32_768 + 1024),
            (TILE, replace(LINEAR, epilogue=Epilogue(out="float32")), 3 * 49_152 + 131_072 + 1024),
            # A whole tile of rows that are not aligned.
            (TALL, replace(LINEAR, n=4099), 3 * 49_152 + 65_536 + 1024),
            (TALL, replace(LINEAR, n=4098), 3 * 49_152 + 32_768 + 1024),
            (TILE, replace(LINEAR, n=4099), 3 * 49_152 + 32_768 + 1024),
            # In place of stages.
            (replace(TILE, flatten=False), LINEAR, 3 * 49_152 + 1024),
            (GemmConfig("cp_async", 128, 128, 16, 2, 8), LINEAR, 32_768),
            (GemmConfig("cp_async", 128, 256, 64, 4, 8), LINEAR, 196_608),
            (GemmConfig("splitk", 16, 128, 64, 4, 4), DECODE, 4 * (2048 + 16_384)),
            # b in its own dtype, and once more as a's where it is no operand from registers.
            (GemmConfig("mixed", 16, 128, 64, 4, 4, swap_ab=True), INT8, 4 * (2048 + 8192)),
            (GemmConfig("mixed", 16, 128, 64, 4, 4), INT8, 4 * (2048 + 8192)),
            (GemmConfig("mixed", 64, 128, 64, 4, 4), INT8, 4 * (8192 + 8192) + 16_384),
            (GemmConfig("gemv", 1, 16, 512, 1, 4), DECODE, 0),
            (GemmConfig("direct", 8, 32, 512, 1, 4), replace(INT8, m=1), 4 * 4 * 8 * 32),
            # Sums of a strip.
            (STATIONARY, INT8, 4 * 8 * 16 * 16),
        ],
    )
    def test_shared_memory(self, config: GemmConfig, problem: GemmProblem, needed: int) -> None:
        assert config.shared_memory(problem) == needed

    @given(problems(), configs())
    @examples(100)
    def test_shared_memory_is_stages_and_what_comes_once(
        self, problem: GemmProblem, config: GemmConfig
    ) -> None:
        once = config.extra_bytes(problem)
        stage = config.stage_bytes(problem)
        stages = 1 if config.gathers(problem) else config.num_stages
        assert config.shared_memory(problem) == stages * stage + once
        template = TEMPLATES[config.template]
        if template.direct:
            assert stage == 0
        elif template.tensor_cores:
            bits = config.block_m * DTYPE_BITS[problem.a.dtype]
            bits += config.block_n * DTYPE_BITS[problem.b.dtype]
            tiles = config.block_k * bits // 8
            groups = problem.dequant is not None and problem.dequant.scales == "group"
            assert stage > tiles if groups else stage == tiles

    def test_a_gated_tile_is_half_as_wide_on_its_way_out(self) -> None:
        gated = GemmProblem.contiguous(
            "mm", 128, 512, 64, parts=(256, 256), epilogue=Epilogue(gated=True)
        )
        wide = replace(gated, out="float32")
        assert TILE.extra_bytes(wide) == 128 * 128 * 4 + 1024

    def test_accumulators_and_threads(self) -> None:
        assert TILE.accumulator_registers == 128
        assert replace(TILE, num_warps=4).accumulator_registers == 256
        specialized = replace(
            TILE, template="persistent_tma_ws", num_warps=4, warp_specialize=True, flatten=False
        )
        assert specialized.threads == 384
        assert specialized.accumulator_registers == 128
        assert specialized.cta_registers <= 65_536

    def test_swapped_operands_give_mma_the_long_side_first(self) -> None:
        config = GemmConfig("splitk", 16, 128, 64, 4, 4, swap_ab=True)
        assert (config.mma_m, config.mma_n) == (128, 16)
        assert warpgroup_mma(DECODE, config, H200)
        assert not warpgroup_mma(DECODE, replace(config, swap_ab=False), H200)
        assert not warpgroup_mma(DECODE, config, A100)

    def test_tiles_and_ctas(self) -> None:
        assert TILE.tiles(LINEAR) == 32 * 56
        assert TILE.ctas(LINEAR, H200) == 132
        plain = GemmConfig("cp_async", 128, 256, 64, 3, 8)
        assert plain.ctas(LINEAR, H200) == 32 * 56
        split = GemmConfig("splitk", 16, 128, 64, 4, 4, split_k=4)
        assert split.ctas(DECODE, H200) == 32 * 4
        assert split.k_steps(DECODE) == 16

    def test_no_tile_reaches_over_the_border_of_parts_and_matrices(self) -> None:
        parts = GemmProblem.contiguous("mm", 128, 600, 64, parts=(300, 200, 100))
        assert TILE.tiles(parts) == 2 + 1 + 1
        assert TILE.tiles(replace(parts, parts=())) == 3
        batch = GemmProblem.contiguous("bmm", 100, 100, 64, batch=7)
        assert replace(TILE, template="bmm_persistent").tiles(batch) == 7
        grouped = GemmProblem.contiguous("grouped", 1000, 256, 64, batch=4)
        assert replace(TILE, template="grouped").tiles(grouped) == 4 * 2

    def test_occupancy(self) -> None:
        config = GemmConfig("cp_async", 64, 64, 64, 3, 4)
        # 48 KiB and one for the driver, of 228; 96 registers of 128 threads, of 65,536.
        assert config.shared_memory(LINEAR) == 48 * 1024
        assert config.occupancy(LINEAR, H200) == 4
        assert replace(config, num_stages=1).occupancy(LINEAR, H200) == 5
        assert replace(config, num_stages=8).occupancy(LINEAR, L4) == 1
        assert TILE.occupancy(LINEAR, H200) == 1

    @given(configs())
    @examples(100)
    def test_json_keeps_everything(self, config: GemmConfig) -> None:
        assert read_again(config) == config
        assert hash(read_again(config)) == hash(config)

    @pytest.mark.parametrize(
        "fields", [{"template": "fast"}, {"block_m": 0}, {"num_stages": 0}, {"split_k": -1}]
    )
    def test_what_no_configuration_can_be_is_refused(self, fields: dict[str, Any]) -> None:
        with pytest.raises(exc.BadGemmError, match=next(iter(fields))):
            replace(TILE, **fields)
