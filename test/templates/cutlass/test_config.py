"""CUTLASS kernels as configurations: names, filters, legality, and which are worth building."""

from __future__ import annotations

import dataclasses
import json
import math
import types
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inductor_ext import exc
from inductor_ext.templates.cutlass.config import CutlassConfig, Filter
from inductor_ext.templates.cutlass.constraints import legal, why_not
from inductor_ext.templates.cutlass.cost_model import candidates, predict, rank
from inductor_ext.templates.device import Device
from inductor_ext.templates.problem import (
    Dequant,
    Epilogue,
    EpilogueInput,
    GemmProblem,
    Operand,
    Prologue,
)
from test.support.gemm_strategies import device, examples, problems

H200 = device("NVIDIA H200")
A100 = device("NVIDIA A100-SXM4-80GB")
L4 = device("NVIDIA L4")
B200 = device("NVIDIA B200")

mm = GemmProblem.contiguous

LINEAR = mm("mm", 4096, 14336, 4096)
RESIDUAL = mm("mm", 4096, 4096, 4096, epilogue=Epilogue((EpilogueInput("bfloat16", "matrix"),), 1))
PINGPONG = CutlassConfig(
    90,
    "warpspecialized_pingpong",
    (128, 128, 64),
    *("bfloat16",) * 3,
    cluster=(2, 1, 1),
)
COOPERATIVE = dataclasses.replace(
    PINGPONG, mainloop="warpspecialized_cooperative", tile=(128, 256, 64)
)
STREAM_K = dataclasses.replace(COOPERATIVE, scheduler="stream_k")
MULTISTAGE = CutlassConfig(
    80, "multistage", (128, 256, 32), *("bfloat16",) * 3, stages=3, epilogue="direct"
)
FP8 = dataclasses.replace(
    COOPERATIVE,
    a="float8_e4m3fn",
    b="float8_e4m3fn",
    tile=(128, 128, 128),
    alignments=(16, 16, 8),
    fast_accumulation=True,
)
GROUPS = Prologue(dequant=Dequant("group", 64))
INT4 = mm("mixed", 2048, 4096, 4096, b_dtype="uint4", prologue=GROUPS)
INT4_KERNEL = dataclasses.replace(
    PINGPONG,
    tile=(64, 128, 64),
    a="uint4",
    layouts="tnn",
    alignments=(32, 8, 8),
    swap=True,
    group=64,
)


def but(record: Any, **fields: Any) -> Any:
    return dataclasses.replace(record, **fields)


NAMES = [
    (
        PINGPONG,
        (
            "cutlass3x_sm90_tensorop_gemm_bf16_bf16_f32_void_bf16_128x128x64_2x1x1_0_tnt_align8"
            "_warpspecialized_pingpong_epi_tma"
        ),
    ),
    (
        but(PINGPONG, c="bfloat16", layouts="ntn"),
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
        but(COOPERATIVE, grouped=True),
        (
            "cutlass3x_sm90_tensorop_gemm_grouped_bf16_bf16_f32_void_bf16_128x256x64_2x1x1_0_tnt"
            "_align8_warpspecialized_cooperative_epi_tma"
        ),
    ),
    (MULTISTAGE, "cutlass_tensorop_bf16_s16816gemm_bf16_128x256_32x3_tn_align8"),
    (
        but(MULTISTAGE, d="float32", layouts="nnt", alignments=(2, 4, 1), stages=4),
        "cutlass_tensorop_s16816gemm_bf16_128x256_32x4_nn_align4",
    ),
    (
        but(
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
        but(
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
    def test_is_in_cutlass_own_scheme(self, config: CutlassConfig, name: str) -> None:
        assert config.name == name

    @pytest.mark.parametrize(("config", "name"), NAMES, ids=lambda name: "")
    def test_agrees_with_cutlass_library(self, config: CutlassConfig, name: str) -> None:
        library = pytest.importorskip("cutlass_library.library")
        gemm = pytest.importorskip("cutlass_library.gemm_operation")
        assert _named_by_the_library(library, gemm, config) == name

    def test_the_name_has_no_launch_parameters(self) -> None:
        launched = but(STREAM_K, split_k=4, swizzle=8, raster="along_n")
        assert launched.name == STREAM_K.name
        assert launched.compiled == STREAM_K
        assert launched != STREAM_K


def _named_by_the_library(
    library: types.ModuleType, gemm: types.ModuleType, config: CutlassConfig
) -> str:
    """What CUTLASS's generator calls a configuration."""
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
    def test_makes_the_round_trip_through_json(self, config: CutlassConfig) -> None:
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
    def test_what_cannot_be_is_refused(self, field: str, value: object) -> None:
        with pytest.raises(exc.BadGemmError, match=f"CUTLASS configuration: {field}"):
            but(PINGPONG, **{field: value})

    def test_a_pipeline_takes_what_the_epilogue_leaves(self) -> None:
        # Two tiles of 64 x 32 in 16 bits on their way out; a stage is 32 KiB and its barriers.
        assert PINGPONG.epilogue_tile == (64, 32)
        assert PINGPONG.epilogue_bytes == 2 * 64 * 32 * 2
        assert PINGPONG.stage_bytes == 32 * 1024 + 16
        assert PINGPONG.pipeline(H200.shared_memory) == 6
        assert COOPERATIVE.pipeline(H200.shared_memory) == 4
        # A residual of the same dtype is loaded into four tiles, which the output uses again.
        assert but(PINGPONG, c="bfloat16").epilogue_bytes == 4 * 64 * 32 * 2
        assert but(PINGPONG, c="float32").epilogue_bytes == 4 * 64 * 32 * 4 + 2 * 64 * 32 * 2
        assert MULTISTAGE.pipeline(A100.shared_memory) == 3

    def test_sums_of_8_bit_floats_are_there_twice(self) -> None:
        wide = but(FP8, tile=(128, 256, 128))
        assert wide.accumulator_registers == 128
        assert but(wide, fast_accumulation=False).accumulator_registers == 256
        assert COOPERATIVE.accumulator_registers == 128


class TestFilter:
    def test_searches_in_the_name(self) -> None:
        assert Filter("pingpong").passes(PINGPONG.name)
        assert not Filter("pingpong").passes(COOPERATIVE.name)
        assert not Filter(deny="pingpong").passes(PINGPONG.name)
        assert Filter("stream_k", deny="pingpong").passes(STREAM_K.name)
        assert Filter("128x256x64_2x1x1").passes(STREAM_K.name)
        assert not Filter("128x256x64_2x1x1", deny="stream_k").passes(STREAM_K.name)
        assert Filter("", "").passes("")

    @pytest.mark.parametrize("pattern", ["(", 3])
    def test_what_is_no_pattern_is_an_error_by_name(self, pattern: Any) -> None:
        for fields, option in (
            ({"allow": pattern}, "cutlass_op_allowlist_regex"),
            ({"deny": pattern}, "cutlass_op_denylist_regex"),
        ):
            with pytest.raises(exc.BadOptionError, match=option):
                Filter(**fields)

    def test_leaves_only_or_none_of_a_kind(self) -> None:
        only = [config for config, _ in rank(LINEAR, H200, 8, Filter("pingpong"))]
        assert only
        assert all("pingpong" in config.name for config in only)
        none = [config for config, _ in rank(LINEAR, H200, 8, Filter(deny="pingpong"))]
        assert none
        assert not any("pingpong" in config.name for config in none)
        assert rank(LINEAR, H200, 8, Filter("no such kernel")) == []


class TestConstraints:
    @pytest.mark.parametrize("config", [PINGPONG, COOPERATIVE, STREAM_K])
    def test_a_linear_layer_runs_on_all_schedules(self, config: CutlassConfig) -> None:
        assert why_not(LINEAR, config, H200) == []

    @pytest.mark.parametrize(
        ("problem", "config", "where", "reason"),
        [
            (LINEAR, PINGPONG, A100, "does not run on capability"),
            (LINEAR, PINGPONG, B200, "does not run on capability"),
            (LINEAR, MULTISTAGE, H200, "sm_80 does not run on capability (9, 0)"),
            (LINEAR, but(MULTISTAGE, target=86), A100, "sm_86 does not run on capability (8, 0)"),
            (LINEAR, but(MULTISTAGE, arch=89, target=89), A100, "sm_89 does not run"),
            (LINEAR, but(COOPERATIVE, tile=(64, 256, 64)), H200, "a multiple of 128 rows"),
            (LINEAR, but(PINGPONG, tile=(96, 128, 64)), H200, "a multiple of 64 rows"),
            (LINEAR, but(PINGPONG, tile=(128, 120, 64)), H200, "multiple of the MMA instruction"),
            (LINEAR, but(PINGPONG, tile=(128, 128, 16)), H200, "two steps of 32 bytes"),
            (LINEAR, but(PINGPONG, tile=(128, 256, 64)), H200, "256 registers per thread"),
            (LINEAR, but(COOPERATIVE, tile=(256, 256, 64)), H200, "256 registers per thread"),
            (LINEAR, but(COOPERATIVE, tile=(256, 128, 256)), H200, "1 stages of the pipeline"),
            (LINEAR, but(PINGPONG, scheduler="stream_k"), H200, "cooperative kernels only"),
            (LINEAR, but(PINGPONG, split_k=2), H200, "needs the stream-K scheduler"),
            (LINEAR, but(STREAM_K, split_k=65), H200, "65 splits of 64 steps"),
            (LINEAR, but(PINGPONG, cluster=(3, 1, 1)), H200, "powers of two"),
            (LINEAR, but(PINGPONG, cluster=(4, 4, 1)), H200, "8 CTAs at most"),
            (LINEAR, but(PINGPONG, mainloop="multistage"), H200, "are warp-specialized"),
            (LINEAR, but(PINGPONG, layouts="nnt"), H200, "the operands are tnt"),
            (LINEAR, but(PINGPONG, a="float16"), H200, "multiplies float16 and bfloat16"),
            (LINEAR, but(PINGPONG, tf32=True), H200, "tf32"),
            (LINEAR, but(PINGPONG, c="float32"), H200, "reads no matrix"),
            (LINEAR, but(MULTISTAGE, cluster=(2, 1, 1)), A100, "no clusters"),
            (LINEAR, but(MULTISTAGE, tile=(32, 512, 32)), A100, "no division"),
            (LINEAR, but(MULTISTAGE, stages=9), A100, "bytes of shared memory"),
            (mm("mm", 4096, 4096, 4092), PINGPONG, H200, "A is aligned to 4 elements"),
            (
                mm("mm", 4096, 4096, 4092),
                but(PINGPONG, alignments=(4, 4, 8)),
                H200,
                "less than 16 bytes",
            ),
            (mm("mm", 4096, 4095, 4096), PINGPONG, H200, "D is aligned to 1 elements"),
            (
                mm("mm", 4096, 4095, 4096),
                but(PINGPONG, alignments=(8, 8, 1)),
                H200,
                "TMA needs 16 bytes",
            ),
            (
                mm("mm", 4096, 4096, 4095),
                but(MULTISTAGE, alignments=(1, 1, 8)),
                A100,
                "less than 4 bytes",
            ),
            (
                mm("scaled", 64, 64, 64, "float8_e4m3fn", layouts="rr"),
                but(FP8, layouts="ttt"),
                H200,
                "with K contiguous",
            ),
            (
                mm("mm", 64, 64, 64, parts=(32, 32)),
                PINGPONG,
                H200,
                "not by several fused ones",
            ),
            (
                mm(
                    "mixed",
                    64,
                    64,
                    64,
                    b_dtype="int8",
                    prologue=Prologue(dequant=Dequant("group", 64)),
                ),
                but(PINGPONG, a="int8", layouts="tnn", swap=True, group=64),
                H200,
                "4-bit weights only",
            ),
            (INT4, but(INT4_KERNEL, group=None), H200, "groups of 64, but the kernel expects None"),
            (INT4, but(INT4_KERNEL, tile=(64, 128, 128)), H200, "multiple of the tile's 128"),
            (
                but(INT4, prologue=Prologue(dequant=Dequant("group", 64, scale_dtype="float32"))),
                INT4_KERNEL,
                H200,
                "4-bit weights only, in bfloat16",
            ),
            (
                but(INT4, prologue=Prologue(dequant=Dequant("group", 64, zero_points=True))),
                INT4_KERNEL,
                H200,
                "zero points",
            ),
        ],
    )
    def test_a_reason_is_given_in_words(
        self, problem: GemmProblem, config: CutlassConfig, where: Device, reason: str
    ) -> None:
        assert not legal(problem, config, where)
        assert any(reason in item for item in why_not(problem, config, where))

    def test_rows_that_are_broadcast_take_from_the_pipeline(self) -> None:
        deep = but(COOPERATIVE, tile=(256, 128, 128), cluster=(1, 1, 1))
        rows = Epilogue((EpilogueInput("float32", "row"),) * 60, 60)
        columns = Epilogue((EpilogueInput("float32", "column"),) * 60, 60)
        assert legal(mm("addmm", 4096, 4096, 4096, epilogue=columns), deep, H200)
        assert not legal(mm("addmm", 4096, 4096, 4096, epilogue=rows), deep, H200)


class TestRanking:
    @pytest.mark.parametrize(
        ("problem", "where", "expected"),
        [
            (LINEAR, H200, "128x256x64_2x1x1_0_tnt_align8_warpspecialized_cooperative"),
            (LINEAR, A100, "_tn_align8"),
            (LINEAR, L4, "_tn_align8"),
            # A wave that is not full is divided evenly.
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
    def test_the_first_is_the_one_expected(
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
            (but(INT4, prologue=Prologue(dequant=Dequant("group", 32))), H200),
            (LINEAR, B200.scaled(10)),
        ],
    )
    def test_there_may_be_none(self, problem: GemmProblem, where: Device) -> None:
        found = rank(problem, where)
        assert found == [] or found[0][0].arch < 90

    @pytest.mark.parametrize(
        ("problem", "where"),
        [
            (mm("mm", 999, 1001, 510), H200),
            (LINEAR, A100),
            (LINEAR, dataclasses.replace(A100, capability=(8, 6))),
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

    def test_what_is_kept_differs(self) -> None:
        found = rank(LINEAR, H200, 4)
        assert len(found) == 4
        assert len({(config.tile, config.mainloop) for config, _ in found}) == 4
        times = [microseconds for _, microseconds in found]
        assert times == sorted(times)
        two = rank(LINEAR, H200)
        assert set(two) <= set(found)
        mainloops = {config.mainloop for config, _ in two}
        assert mainloops == {"warpspecialized_pingpong", "warpspecialized_cooperative"}

    @pytest.mark.parametrize(("m", "swizzle"), [(2176, 1), (2304, 2)])
    def test_a_swizzle_makes_no_tiles_beyond_the_output(self, m: int, swizzle: int) -> None:
        """CUTLASS rounds the number of tiles up to what a swizzle takes together."""
        problem = mm("mm", m, 4096, 4096)
        config = next(
            candidate
            for candidate in candidates(problem, H200)
            if (candidate.tile, candidate.cluster) == ((128, 256, 64), (1, 1, 1))
            and candidate.scheduler == "stream_k"
        )
        assert config.swizzle == swizzle
        rounded = but(config, swizzle=8)
        assert predict(problem, rounded, H200) > 1.2 * predict(problem, config, H200)

    def test_is_by_prediction_and_not_by_name(self) -> None:
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
        found = rank(problem, where, 3)
        assert len(found) <= 3
        for config, microseconds in found:
            assert why_not(problem, config, where) == []
            assert math.isfinite(microseconds)
            assert microseconds >= problem.roofline(where)

    def test_an_operand_of_neither_layout_has_none(self) -> None:
        strided = Operand.of("bfloat16", (64, 64), (128, 2))
        assert list(candidates(but(LINEAR, a=strided), H200)) == []
