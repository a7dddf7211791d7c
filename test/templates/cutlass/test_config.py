"""CUTLASS configurations: names, JSON, shared memory, and filters by name."""

from __future__ import annotations

import json
import types
from dataclasses import replace
from typing import Any

import pytest

from inductor_ext import exc
from inductor_ext.templates.cutlass.config import CutlassConfig, Filter
from inductor_ext.templates.cutlass.cost_model import rank
from test.support.cutlass_examples import (
    A100,
    COOPERATIVE,
    FP8,
    H200,
    LINEAR,
    MULTISTAGE,
    PINGPONG,
    STREAM_K,
)

NAMES = [
    (
        PINGPONG,
        (
            "cutlass3x_sm90_tensorop_gemm_bf16_bf16_f32_void_bf16_128x128x64_2x1x1_0_tnt_align8"
            "_warpspecialized_pingpong_epi_tma"
        ),
    ),
    (
        replace(PINGPONG, c="bfloat16", layouts="ntn"),
        (
            "cutlass3x_sm90_tensorop_gemm_bf16_bf16_f32_bf16_bf16_128x128x64_2x1x1_0_ntn_align8"
            "_warpspecialized_pingpong_epi_tma"
        ),
    ),
    (
        STREAM_K,
        (
            "cutlass3x_sm90_tensorop_gemm_bf16_bf16_f32_void_bf16_128x256x64_2x1x1_0_tnt_align8"
            "_stream_k_warpspecialized_cooperative_epi_tma"
        ),
    ),
    (
        FP8,
        (
            "cutlass3x_sm90_tensorop_gemm_e4m3_e4m3_f32_void_bf16_128x128x128_2x1x1_0_tnt_align16"
            "_warpspecialized_cooperative_fp8_fastaccum_epi_tma"
        ),
    ),
    (
        replace(COOPERATIVE, grouped=True),
        (
            "cutlass3x_sm90_tensorop_gemm_grouped_bf16_bf16_f32_void_bf16_128x256x64_2x1x1_0_tnt"
            "_align8_warpspecialized_cooperative_epi_tma"
        ),
    ),
    (MULTISTAGE, "cutlass_tensorop_bf16_s16816gemm_bf16_128x256_32x3_tn_align8"),
    (
        replace(MULTISTAGE, d="float32", layouts="nnt", alignments=(2, 4, 1), stages=4),
        "cutlass_tensorop_s16816gemm_bf16_128x256_32x4_nn_align4",
    ),
    (
        replace(
            MULTISTAGE,
            a="int8",
            b="int8",
            d="int32",
            accumulator="int32",
            tile=(64, 64, 64),
            alignments=(16, 16, 4),
        ),
        "cutlass_tensorop_i16832gemm_s8_64x64_64x3_tn_align16",
    ),
    (
        replace(
            MULTISTAGE,
            a="float32",
            b="float32",
            d="float32",
            tf32=True,
            tile=(128, 128, 16),
            alignments=(4, 4, 4),
        ),
        "cutlass_tensorop_s1688tf32gemm_128x128_16x3_tn_align4",
    ),
]


class TestName:
    @pytest.mark.parametrize(("config", "name"), NAMES, ids=lambda name: "")
    def test_names_follow_cutlass(self, config: CutlassConfig, name: str) -> None:
        assert config.name == name

    @pytest.mark.parametrize(("config", "name"), NAMES, ids=lambda name: "")
    def test_names_equal_those_of_cutlass_library(self, config: CutlassConfig, name: str) -> None:
        library = pytest.importorskip("cutlass_library.library")
        gemm = pytest.importorskip("cutlass_library.gemm_operation")
        assert _named_by_the_library(library, gemm, config) == name

    def test_the_name_has_no_launch_parameters(self) -> None:
        launched = replace(STREAM_K, split_k=4, swizzle=8, raster="along_n")
        assert launched.name == STREAM_K.name
        assert launched.compiled == STREAM_K
        assert launched != STREAM_K


def _named_by_the_library(
    library: types.ModuleType, gemm: types.ModuleType, config: CutlassConfig
) -> str:
    """The name of a configuration in CUTLASS's generator."""
    types_ = {name: getattr(library.DataType, name) for name in dir(library.DataType)}
    short = {
        "float32": "f32",
        "bfloat16": "bf16",
        "float8_e4m3fn": "e4m3",
        "int8": "s8",
        "int32": "s32",
        "void": "void",
    }

    def operand(dtype: str, layout: str, alignment: int) -> Any:
        named = {"t": library.LayoutType.RowMajor, "n": library.LayoutType.ColumnMajor}
        return library.TensorDescription(types_[short[dtype]], named[layout], alignment)

    multiplied = types_["tf32" if config.tf32 else short[config.a]]
    modern = config.arch == 90
    operations = library.MathOperation
    instruction = library.MathInstruction(
        list(config.instruction),
        multiplied,
        multiplied,
        types_[short[config.accumulator]],
        library.OpcodeClass.TensorOp,
        operations.multiply_add,
    )
    tile = library.TileDescription(
        list(config.tile), config.stages, [2, 2, 1], instruction, config.arch, 90, config.cluster
    )
    kinds = library.GemmKind
    schedules = {}
    if modern:
        schedule = {
            "warpspecialized_pingpong": "TmaWarpSpecializedPingpong",
            "warpspecialized_cooperative": "TmaWarpSpecializedCooperative",
        }[config.mainloop] + ("FP8FastAccum" if config.fast_accumulation else "")
        schedules = {
            "kernel_schedule": getattr(library.KernelScheduleType, schedule),
            "epilogue_schedule": library.EpilogueScheduleType.TmaWarpSpecialized,
            "tile_scheduler": library.TileSchedulerType.StreamK
            if config.scheduler == "stream_k"
            else library.TileSchedulerType.Default,
        }
    named = gemm.GemmOperation(
        (kinds.GroupedUniversal3x if config.grouped else kinds.Universal3x)
        if modern
        else kinds.Universal,
        config.arch,
        tile,
        operand(config.a, config.layouts[0], config.alignments[0]),
        operand(config.b, config.layouts[1], config.alignments[1]),
        operand(config.c if modern else config.d, config.layouts[2], config.alignments[2]),
        types_["f32"],
        D=operand(config.d, config.layouts[2], config.alignments[2]),
        **schedules,
    )
    return str(named.procedural_name())


class TestConfig:
    @pytest.mark.parametrize("config", [PINGPONG, STREAM_K, FP8, MULTISTAGE])
    def test_configurations_round_trip_through_json(self, config: CutlassConfig) -> None:
        text = json.dumps(config.to_json())
        assert CutlassConfig.from_json(json.loads(text)) == config

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("arch", 70),
            ("mainloop", "pingpong"),
            ("a", "float3"),
            ("a", "void"),
            ("layouts", "row"),
            ("cluster", (2, 0, 1)),
            ("swizzle", 0),
        ],
    )
    def test_invalid_configurations_are_refused(self, field: str, value: object) -> None:
        with pytest.raises(exc.BadGemmError, match=f"CUTLASS configuration: {field}"):
            replace(PINGPONG, **{field: value})

    def test_a_pipeline_uses_the_memory_beside_the_epilogue(self) -> None:
        # Two output tiles of 64 x 32 in 16 bits; a stage is 32 KiB and its barriers.
        assert PINGPONG.epilogue_tile == (64, 32)
        assert PINGPONG.epilogue_bytes == 2 * 64 * 32 * 2
        assert PINGPONG.stage_bytes == 32 * 1024 + 16
        assert PINGPONG.pipeline(H200.shared_memory) == 6
        assert COOPERATIVE.pipeline(H200.shared_memory) == 4
        # A residual of the same dtype is loaded into four tiles, which the output uses again.
        assert replace(PINGPONG, c="bfloat16").epilogue_bytes == 4 * 64 * 32 * 2
        assert replace(PINGPONG, c="float32").epilogue_bytes == 4 * 64 * 32 * 4 + 2 * 64 * 32 * 2
        assert MULTISTAGE.pipeline(A100.shared_memory) == 3

    def test_accumulators_of_fp8_take_twice_the_registers(self) -> None:
        wide = replace(FP8, tile=(128, 256, 128))
        assert wide.accumulator_registers == 128
        assert replace(wide, fast_accumulation=False).accumulator_registers == 256
        assert COOPERATIVE.accumulator_registers == 128


class TestFilter:
    def test_patterns_are_searched_in_the_name(self) -> None:
        assert Filter("pingpong").passes(PINGPONG.name)
        assert not Filter("pingpong").passes(COOPERATIVE.name)
        assert not Filter(deny="pingpong").passes(PINGPONG.name)
        assert Filter("stream_k", deny="pingpong").passes(STREAM_K.name)
        assert Filter("128x256x64_2x1x1").passes(STREAM_K.name)
        assert not Filter("128x256x64_2x1x1", deny="stream_k").passes(STREAM_K.name)
        assert Filter("", "").passes("")

    @pytest.mark.parametrize("pattern", ["(", 3])
    def test_invalid_patterns_are_errors_by_name(self, pattern: Any) -> None:
        for fields, option in (
            ({"allow": pattern}, "cutlass_op_allowlist_regex"),
            ({"deny": pattern}, "cutlass_op_denylist_regex"),
        ):
            with pytest.raises(exc.BadOptionError, match=option):
                Filter(**fields)

    def test_filters_keep_only_or_none_of_a_kind(self) -> None:
        only = [config for config, _ in rank(LINEAR, H200, 8, Filter("pingpong"))]
        assert only
        assert all("pingpong" in config.name for config in only)
        none = [config for config, _ in rank(LINEAR, H200, 8, Filter(deny="pingpong"))]
        assert none
        assert not any("pingpong" in config.name for config in none)
        assert rank(LINEAR, H200, 8, Filter("no such kernel")) == []
