"""GEMM problems, configurations, the constraints between them, and the space of candidates."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inductor_ext import _compat, autotune, exc
from inductor_ext.templates import kernels
from inductor_ext.templates.cutlass import epilogue as cutlass
from inductor_ext.templates.device import KNOWN, Device
from inductor_ext.templates.problem import (
    DTYPE_BITS,
    Dequant,
    Epilogue,
    EpilogueInput,
    GemmProblem,
    KernelDetails,
    Operand,
    Prologue,
    RowNorm,
)
from inductor_ext.templates.triton import config as config_module
from inductor_ext.templates.triton import constraints as constraints_module
from inductor_ext.templates.triton.config import TEMPLATES, GemmConfig, warpgroup_mma
from inductor_ext.templates.triton.constraints import CONSTRAINTS, legal, why_not
from inductor_ext.templates.triton.search_space import candidates
from test.support import hash_seeds
from test.support.gemm_strategies import configs, device, devices, examples, problems

H200 = device("NVIDIA H200")
A100 = device("NVIDIA A100-SXM4-80GB")
L4 = device("NVIDIA L4")

TABLES = Path(autotune.__file__).parent / "tables"
LINEAR = GemmProblem.contiguous("mm", 4096, 14336, 4096)
DECODE = GemmProblem.contiguous("mm", 1, 4096, 4096)
INT8 = GemmProblem.contiguous("mixed", 16, 14336, 4096, b_dtype="int8")
INT4 = GemmProblem.contiguous("mixed", 16, 14336, 4096, b_dtype="int4")
TILE = GemmConfig("persistent_tma", 128, 256, 64, 3, 8, tma=True, flatten=True)
STATIONARY = GemmConfig("stationary", 16, 112, 2048, 1, 8, split_k=2, one_launch=True)


def but(record: Any, **fields: Any) -> Any:
    return dataclasses.replace(record, **fields)


def read_again(record: Any) -> Any:
    return type(record).from_json(json.loads(json.dumps(record.to_json())))


class TestDevice:
    def test_the_h200_is_what_was_measured(self) -> None:
        assert H200.half == pytest.approx(800e12)
        assert H200.bandwidth == pytest.approx(4.25e12)
        assert (H200.sms, H200.capability, H200.shared_memory) == (132, (9, 0), 232_448)

    @pytest.mark.parametrize("known", KNOWN, ids=lambda entry: entry.name)
    def test_a_known_device_is_found_by_its_properties(self, known: Device) -> None:
        found = Device.from_properties(
            known.name, known.capability, known.sms, known.shared_memory, known.l2
        )
        assert found == known

    def test_names_are_unique(self) -> None:
        assert len({entry.name for entry in KNOWN}) == len(KNOWN)

    def test_a_slice_of_a_known_device_has_its_part(self) -> None:
        part = Device.from_properties("NVIDIA H200 MIG 1g.18gb", (9, 0), 16, 232_448, 8 << 20)
        assert part.half == pytest.approx(H200.half * 16 / 132)
        assert part.bandwidth == pytest.approx(H200.bandwidth * 16 / 132)
        assert part.l2 == 8 << 20

    def test_an_unknown_device_is_scaled_from_its_nearest_relative(self) -> None:
        found = Device.from_properties("NVIDIA L40S", (8, 9), 142, 101_376, 96 << 20)
        relative = device("NVIDIA GeForce RTX 4090")
        assert found.half == pytest.approx(relative.half * 142 / 128)
        assert found.capability == (8, 9)
        # Of the next lower capability if there is none of the same.
        newer = Device.from_properties("NVIDIA B300", (10, 3), 148, 232_448, 126 << 20)
        assert newer.half == device("NVIDIA B200").half
        older = Device.from_properties("NVIDIA A10G", (8, 6), 80, 101_376, 6 << 20)
        assert older.half == pytest.approx(A100.half * 80 / 108)
        assert older.fp8 == 0

    def test_the_drivers_bandwidth_is_taken_for_unknown_devices_only(self) -> None:
        arguments = ((9, 0), 78, 232_448, 60 << 20)
        unknown = Device.from_properties("NVIDIA H20", *arguments, bandwidth=4.8e12)
        assert unknown.bandwidth == pytest.approx(4.25e12)
        known = Device.from_properties("NVIDIA H200", *arguments, bandwidth=1e12)
        assert known.bandwidth == pytest.approx(H200.bandwidth * 78 / 132)

    def test_capability_8_0_has_no_fp8(self) -> None:
        assert A100.throughput("fp8") == 0
        assert L4.throughput("fp8") > L4.throughput("half")

    @pytest.mark.parametrize(
        ("field", "value"), [("sms", 0), ("l2", 0), ("bandwidth", -1.0), ("half", math.nan)]
    )
    def test_what_no_gpu_can_be_is_refused(self, field: str, value: float) -> None:
        with pytest.raises(exc.BadGemmError, match=field):
            but(H200, **{field: value})

    def test_time_scales_with_the_number_of_sms(self) -> None:
        twice = H200.scaled(264)
        for rate in ("half", "tf32", "fp8", "int8", "fma", "bandwidth"):
            assert getattr(twice, rate) == pytest.approx(2 * getattr(H200, rate))
        assert (twice.shared_memory, twice.sms) == (H200.shared_memory, 264)


class TestOperand:
    @pytest.mark.parametrize(
        ("dtype", "shape", "strides", "options", "layout", "leading", "alignment"),
        [
            ("bfloat16", (64, 128), (128, 1), {}, "row", 128, 8),
            ("bfloat16", (64, 128), (1, 64), {}, "column", 64, 8),
            ("bfloat16", (64, 127), (127, 1), {}, "row", 127, 1),
            ("bfloat16", (64, 127), (132, 1), {}, "row", 132, 4),
            ("bfloat16", (64, 128), (128, 1), {"offset": 2}, "row", 128, 2),
            ("bfloat16", (64, 128), (128, 1), {"base": 4}, "row", 128, 2),
            ("bfloat16", (64, 128), (128, 1), {"base": 1}, "row", 128, 1),
            ("bfloat16", (64, 128), (256, 2), {}, "strided", 256, 1),
            ("float32", (64, 128), (128, 1), {}, "row", 128, 4),
            ("int8", (64, 128), (128, 1), {}, "row", 128, 16),
            ("int4", (64, 128), (128, 1), {}, "row", 128, 32),
            ("bfloat16", (64, 128), (0, 1), {}, "row", 0, 8),
            ("bfloat16", (8, 8), (8, 1), {"batch": 3, "batch_stride": 68}, "row", 8, 4),
            ("bfloat16", (8, 8), (8, 1), {"batch": 1, "batch_stride": 67}, "row", 8, 8),
        ],
    )
    def test_layout_and_alignment(
        self,
        dtype: str,
        shape: tuple[int, int],
        strides: tuple[int, int],
        options: dict[str, int],
        layout: str,
        leading: int,
        alignment: int,
    ) -> None:
        operand = Operand.of(dtype, shape, strides, **options)
        assert (operand.layout, operand.leading, operand.alignment) == (layout, leading, alignment)

    @pytest.mark.parametrize(
        ("shape", "some", "others"),
        [
            ((1, 100), (100, 1), [(1, 1), (12345, 1), (0, 1)]),
            ((100, 1), (1, 1), [(1, 7), (1, 0)]),
            ((1, 1), (1, 1), [(5, 3), (1, 9), (0, 0)]),
            ((100, 1), (5, 1), [(5, 7), (5, 0)]),
            ((1, 100), (1, 5), [(7, 5)]),
        ],
    )
    def test_unused_strides_do_not_matter(
        self, shape: tuple[int, int], some: tuple[int, int], others: list[tuple[int, int]]
    ) -> None:
        first = Operand.of("bfloat16", shape, some)
        assert {Operand.of("bfloat16", shape, other) for other in others} == {first}

    def test_a_contiguous_vector_is_aligned_whatever_its_length(self) -> None:
        assert Operand.of("bfloat16", (1, 1001), (1001, 1)).alignment == 8
        assert Operand.of("bfloat16", (1001, 1), (1, 1)).alignment == 8

    @pytest.mark.parametrize(
        "fields",
        [
            {"dtype": "complex64"},
            {"strides": (-1, 1)},
            {"batch_stride": -8},
            {"alignment": 16},
            {"alignment": 3},
            {"alignment": 0},
        ],
    )
    def test_what_no_operand_can_be_is_refused(self, fields: dict[str, Any]) -> None:
        with pytest.raises(exc.BadGemmError, match=next(iter(fields)).removeprefix("batch_")):
            but(LINEAR.a, **fields)


class TestProblem:
    def test_flops_and_bytes(self) -> None:
        assert LINEAR.flops == 2 * 4096 * 14336 * 4096
        assert LINEAR.bytes_read == 2 * (4096 * 4096 + 4096 * 14336)
        assert LINEAR.bytes_written == 2 * 4096 * 14336
        moved = LINEAR.bytes_read + LINEAR.bytes_written
        assert LINEAR.intensity == pytest.approx(LINEAR.flops / moved)

    def test_what_a_batch_shares_is_read_once(self) -> None:
        own = GemmProblem.contiguous("bmm", 64, 64, 64, batch=10)
        shared = but(own, b=but(own.b, batch_stride=0))
        assert own.bytes_read == 10 * 2 * 2 * 64 * 64
        assert shared.bytes_read == 11 * 2 * 64 * 64
        assert shared.flops == own.flops == 10 * 2 * 64**3

    def test_a_group_has_its_own_weight_and_a_part_of_m(self) -> None:
        grouped = GemmProblem.contiguous("grouped", 100, 64, 32, batch=8)
        assert grouped.flops == 2 * 100 * 64 * 32
        assert grouped.bytes_read == 2 * (100 * 32 + 8 * 32 * 64)
        assert grouped.rows == 13

    def test_groups_divide_columns_or_the_summed_dimension(self) -> None:
        columns = GemmProblem.contiguous("grouped", 100, 64, 32, batch=8, divided="n")
        assert (columns.rows, columns.width, columns.depth) == (100, 8, 32)
        assert columns.bytes_read == 2 * (8 * 100 * 32 + 32 * 64)
        assert columns.bytes_written == 2 * 100 * 64
        summed = GemmProblem.contiguous("grouped", 100, 64, 32, batch=8, divided="k")
        assert (summed.rows, summed.width, summed.depth) == (100, 64, 4)
        assert summed.bytes_read == 2 * (100 * 32 + 32 * 64)
        assert summed.bytes_written == 2 * 8 * 100 * 64
        assert columns.flops == summed.flops == 2 * 100 * 64 * 32

    def test_packed_weights_and_their_scales(self) -> None:
        prologue = Prologue(dequant=Dequant("group", 128, zero_points=True))
        packed = GemmProblem.contiguous("mixed", 16, 512, 1024, b_dtype="int4", prologue=prologue)
        assert packed.b_bytes == 512 * 1024 // 2
        # A scale of 2 bytes and a zero point of 1 for each group.
        assert packed.fused_bytes == 3 * 512 * 8
        assert packed.arithmetic == "half"

    def test_weights_behind_a_norm(self) -> None:
        prologue = Prologue(RowNorm("rms", 1), Dequant("column", scale_dtype="float32"))
        problem = GemmProblem.contiguous("mixed", 16, 512, 1024, b_dtype="int8", prologue=prologue)
        assert problem.fused_bytes == 4 * 512 + 2 * 1024
        moved = 512 * 1024 + 2 * 16 * 1024 + problem.fused_bytes + 2 * 16 * 512
        assert problem.roofline(H200) == pytest.approx(moved / H200.bandwidth * 1e6)

    @pytest.mark.parametrize(
        ("name", "one", "other"),
        [
            (
                "epsilon",
                {"prologue": Prologue(RowNorm("rms"))},
                {"prologue": Prologue(RowNorm("rms")), "details": KernelDetails(epsilon=1e-6)},
            ),
            (
                "activation",
                {"parts": (256, 256), "epilogue": Epilogue(gated=True)},
                {
                    "parts": (256, 256),
                    "epilogue": Epilogue(gated=True),
                    "details": KernelDetails(activation="gelu"),
                },
            ),
            (
                "packed_first",
                {"parts": (256, 256), "epilogue": Epilogue(gated=True)},
                {
                    "parts": (256, 256),
                    "epilogue": Epilogue(gated=True),
                    "details": KernelDetails(packed_first="up"),
                },
            ),
        ],
    )
    def test_what_does_not_distinguish_problems(
        self, name: str, one: dict[str, Any], other: dict[str, Any]
    ) -> None:
        first, second = (
            GemmProblem.contiguous("mm", 16, 512, 1024, **item) for item in (one, other)
        )
        assert (first, hash(first), first.key) == (second, hash(second), second.key)
        assert name not in first.key
        assert GemmProblem.from_json(second.to_json()) == second
        whole = GemmProblem.from_json(json.loads(json.dumps(second.to_json(whole=True))))
        assert dataclasses.asdict(whole) == dataclasses.asdict(second)

    def test_what_an_epilogue_reads_and_writes(self) -> None:
        epilogue = Epilogue(
            (
                EpilogueInput("float32", "row"),
                EpilogueInput("float32", "column"),
                EpilogueInput("bfloat16", "matrix"),
                EpilogueInput("float32", "scalar"),
            ),
            3,
            "float8_e4m3fn",
            reductions=1,
        )
        problem = GemmProblem.contiguous("mm", 10, 20, 64, epilogue=epilogue)
        assert problem.fused_bytes == 4 * 20 + 4 * 10 + 2 * 10 * 20 + 4
        assert problem.bytes_written == 10 * 20 + 4 * 10
        assert problem.stored == "float8_e4m3fn"

    def test_one_of_two_parts_gates_the_other(self) -> None:
        both = GemmProblem.contiguous("mm", 16, 2048, 64, parts=(1024, 1024))
        gated = but(both, epilogue=Epilogue(gated=True))
        assert both.bytes_written == 2 * gated.bytes_written == 2 * 16 * 2048
        assert both.flops == gated.flops

    @pytest.mark.parametrize(
        ("sizes", "floor"),
        [
            ((1, 4096, 4096), 7.9),
            ((16, 14336, 4096), 27.8),
            ((64, 4096, 14336), 28.2),
            ((2048, 4096, 4096), 86),
            ((4096, 14336, 4096), 601),
            ((8192, 8192, 8192), 1374),
            ((1000, 1000, 1000), 2.5),
            ((256, 256, 65536), 16),
        ],
    )
    def test_rooflines_on_an_h200(self, sizes: tuple[int, int, int], floor: float) -> None:
        roofline = GemmProblem.contiguous("mm", *sizes).roofline(H200)
        assert roofline == pytest.approx(floor, rel=0.02)

    def test_the_roofline_of_unsupported_dtypes_is_infinite(self) -> None:
        fp8 = GemmProblem.contiguous("scaled", 64, 64, 64, "float8_e4m3fn")
        assert fp8.roofline(A100) == math.inf
        assert fp8.roofline(L4) < math.inf

    def test_what_multiplies(self) -> None:
        single = GemmProblem.contiguous("mm", 64, 64, 64, "float32")
        assert single.arithmetic == "fma"
        assert but(single, tf32=True).arithmetic == "tf32"
        assert GemmProblem.contiguous("int_mm", 64, 64, 64, "int8").arithmetic == "int8"
        assert LINEAR.arithmetic == "half"

    @given(problems())
    @examples(150)
    def test_json_keeps_everything(self, problem: GemmProblem) -> None:
        again = read_again(problem)
        assert again == problem
        assert hash(again) == hash(problem)
        assert again.key == problem.key

    def test_shipped_results_are_read_and_written_unchanged(self) -> None:
        for path in TABLES.glob("*.json"):
            for entry in json.loads(path.read_text())["entries"]:
                stored = entry["problem"]
                problem = GemmProblem.from_json(stored)
                assert json.dumps(problem.to_json(), sort_keys=True) == json.dumps(stored)
                if (stored := entry["config"]) is not None:
                    config = kernels.config_from_json(stored)
                    assert json.dumps(config.to_json(), sort_keys=True) == json.dumps(stored)

    @pytest.mark.parametrize(
        ("prologue", "stored"),
        [
            (Prologue(RowNorm("rms")), ("normalize", "none", 0, False, "bfloat16", 0)),
            (
                Prologue(RowNorm("layer", 2, "float32")),
                ("standardize", "none", 0, False, "float32", 2),
            ),
            (
                Prologue(dequant=Dequant("group", 64, True, "float16")),
                ("dequantize", "group", 64, True, "float16", 0),
            ),
            (
                Prologue(RowNorm("rms", 1), Dequant("column", scale_dtype="float32")),
                ("both", "column", 0, False, "float32", 1),
            ),
        ],
    )
    def test_prologues_have_the_json_of_earlier_versions(
        self, prologue: Prologue, stored: tuple[object, ...]
    ) -> None:
        names = ("kind", "scales", "group", "zero_points", "scale_dtype", "vectors")
        json_form = dict(zip(names, stored, strict=True))
        problem = but(LINEAR if prologue.dequant is None else INT8, prologue=prologue)
        assert problem.to_json()["prologue"] == json_form
        assert list(problem.to_json()["prologue"]) == list(names)
        assert read_again(problem) == problem

    def test_an_epilogue_tree_is_stored_as_its_text(self) -> None:
        tree = cutlass.Epilogue((("bfloat16", cutlass.gelu(cutlass.ACCUMULATOR)),))
        problem = but(LINEAR, epilogue=Epilogue(tree=tree))
        stored = problem.to_json()
        assert stored["epilogue"]["tree"] == tree.text
        assert read_again(problem) == problem
        stored["epilogue"]["tree"] = "{}"
        with pytest.raises(exc.BadGemmError, match="tree"):
            GemmProblem.from_json(stored)

    @given(problems(), problems())
    @examples(50)
    def test_keys_distinguish_problems(self, one: GemmProblem, other: GemmProblem) -> None:
        assert (one.key == other.key) == (one == other)

    @pytest.mark.parametrize(
        "fields",
        [
            {"m": 0},
            {"k": -1},
            {"operation": "conv"},
            {"batch": 2},
            {"divided": "k"},
            {"out": "float7"},
            {"accumulator": "float16"},
            {"prologue": Prologue(dequant=Dequant())},
            {"parts": (1, 2)},
            {"parts": (4096, 10240, 0)},
            {"parts": (4096, 10240), "epilogue": Epilogue(gated=True)},
        ],
    )
    def test_what_no_problem_can_be_is_refused(self, fields: dict[str, Any]) -> None:
        with pytest.raises(exc.BadGemmError, match=next(iter(fields))):
            but(LINEAR, **fields)
        with pytest.raises(exc.BadGemmError, match="prologue"):
            but(INT8, prologue=None)

    @pytest.mark.parametrize(
        ("cls", "arguments"),
        [
            (Dequant, ("group",)),
            (Dequant, ("column", 128)),
            (Dequant, ("column", 0, False, "float7")),
            (RowNorm, ("rms", 1, "float7")),
            (RowNorm, ("rms", 2)),
            (RowNorm, ("layer", 3)),
            (Prologue, ()),
            (Prologue, (RowNorm("layer"), Dequant())),
            (Prologue, (RowNorm("rms", 1, "float32"), Dequant())),
            (EpilogueInput, ("float7", "row")),
            (Epilogue, ((), -1)),
            (Epilogue, ((), 0, "float7")),
        ],
    )
    def test_what_cannot_be_fused_is_refused(self, cls: Any, arguments: tuple[Any, ...]) -> None:
        with pytest.raises(exc.BadGemmError):
            cls(*arguments)

    @pytest.mark.parametrize(
        ("path", "value"),
        [
            (("m",), "4096"),
            (("m",), True),
            (("m",), None),
            (("operation",), "conv"),
            (("a", "strides"), 7),
            (("a", "strides"), [1, 2, 3]),
            (("a",), []),
            (("epilogue", "inputs"), [{"dtype": "float32"}]),
            (("prologue",), {"kind": "dequantize"}),
            (("unknown",), 1),
        ],
    )
    def test_json_that_is_no_problem_is_refused(self, path: tuple[str, ...], value: Any) -> None:
        written: Any = LINEAR.to_json()
        place = written
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = value
        with pytest.raises(exc.BadGemmError):
            GemmProblem.from_json(written)
        del written["m"]
        with pytest.raises(exc.BadGemmError):
            GemmProblem.from_json(written)


class TestConfig:
    @pytest.mark.parametrize(
        ("config", "problem", "needed"),
        [
            # Stages of 48 KiB, half of the tile on its way out, barriers.
            (TILE, LINEAR, 3 * 49_152 + 32_768 + 1024),
            (but(TILE, stages=4), LINEAR, 4 * 49_152 + 32_768 + 1024),
            (TILE, but(LINEAR, epilogue=Epilogue(out="float32")), 3 * 49_152 + 131_072 + 1024),
            # In place of stages.
            (but(TILE, flatten=False), LINEAR, 3 * 49_152 + 1024),
            (GemmConfig("cp_async", 128, 128, 16, 2, 8), LINEAR, 32_768),
            (GemmConfig("cp_async", 128, 256, 64, 4, 8), LINEAR, 196_608),
            (GemmConfig("splitk", 16, 128, 64, 4, 4), DECODE, 4 * (2048 + 16_384)),
            # b in its own dtype, and once more as a's where it is no operand from registers.
            (GemmConfig("mixed", 16, 128, 64, 4, 4, swap=True), INT8, 4 * (2048 + 8192)),
            (GemmConfig("mixed", 16, 128, 64, 4, 4), INT8, 4 * (2048 + 8192)),
            (GemmConfig("mixed", 64, 128, 64, 4, 4), INT8, 4 * (8192 + 8192) + 16_384),
            (GemmConfig("gemv", 1, 16, 512, 1, 4), DECODE, 0),
            (GemmConfig("direct", 8, 32, 512, 1, 4), but(INT8, m=1), 4 * 4 * 8 * 32),
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
        stages = 1 if config.gathers(problem) else config.stages
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
        wide = but(gated, out="float32")
        assert TILE.extra_bytes(wide) == 128 * 128 * 4 + 1024

    def test_accumulators_and_threads(self) -> None:
        assert TILE.accumulator_registers == 128
        assert but(TILE, warps=4).accumulator_registers == 256
        specialized = but(
            TILE, template="persistent_tma_ws", warps=4, warp_specialize=True, flatten=False
        )
        assert specialized.threads == 384
        assert specialized.accumulator_registers == 128
        assert specialized.cta_registers <= 65_536

    def test_swapped_operands_give_mma_the_long_side_first(self) -> None:
        config = GemmConfig("splitk", 16, 128, 64, 4, 4, swap=True)
        assert (config.mma_m, config.mma_n) == (128, 16)
        assert warpgroup_mma(DECODE, config, H200)
        assert not warpgroup_mma(DECODE, but(config, swap=False), H200)
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
        assert TILE.tiles(but(parts, parts=())) == 3
        batch = GemmProblem.contiguous("bmm", 100, 100, 64, batch=7)
        assert but(TILE, template="bmm_persistent").tiles(batch) == 7
        grouped = GemmProblem.contiguous("grouped", 1000, 256, 64, batch=4)
        assert but(TILE, template="grouped").tiles(grouped) == 4 * 2

    def test_occupancy(self) -> None:
        config = GemmConfig("cp_async", 64, 64, 64, 3, 4)
        # 48 KiB and one for the driver, of 228; 96 registers of 128 threads, of 65,536.
        assert config.shared_memory(LINEAR) == 48 * 1024
        assert config.occupancy(LINEAR, H200) == 4
        assert but(config, stages=1).occupancy(LINEAR, H200) == 5
        assert but(config, stages=8).occupancy(LINEAR, L4) == 1
        assert TILE.occupancy(LINEAR, H200) == 1

    @given(configs())
    @examples(100)
    def test_json_keeps_everything(self, config: GemmConfig) -> None:
        assert read_again(config) == config
        assert hash(read_again(config)) == hash(config)

    @pytest.mark.parametrize(
        "fields", [{"template": "fast"}, {"block_m": 0}, {"stages": 0}, {"split_k": -1}]
    )
    def test_what_no_configuration_can_be_is_refused(self, fields: dict[str, Any]) -> None:
        with pytest.raises(exc.BadGemmError, match=next(iter(fields))):
            but(TILE, **fields)


SPLIT = GemmConfig("splitk", 16, 128, 64, 4, 4, split_k=4, swap=True)
SPECIALIZED = GemmConfig("persistent_tma_ws", 128, 128, 64, 4, 4, tma=True, warp_specialize=True)
GEMV = GemmConfig("gemv", 1, 16, 512, 1, 4)
MIXED = GemmConfig("mixed", 16, 128, 64, 4, 4, swap=True)
DIRECT = GemmConfig("direct", 8, 32, 512, 1, 4)
PLAIN = but(MIXED, swap=False)
ODD = GemmProblem.contiguous("mm", 4096, 4096, 4095)
HUGE = GemmProblem.contiguous("mm", 1 << 20, 4096, 4096)
NORMALIZED = but(LINEAR, prologue=Prologue(RowNorm("rms")))
WEIGHTED_HALF = GemmProblem.contiguous(
    "mm", 1, 4096, 4096, dtype="float16", prologue=Prologue(RowNorm("rms", 1))
)
GATED = GemmProblem.contiguous("mm", 16, 64, 4096, parts=(32, 32), epilogue=Epilogue(gated=True))

WIDE_ROWS = GemmProblem.contiguous(
    "mm", 1, 4096, 4096, "float32", b_dtype="bfloat16", out="bfloat16"
)

LEGAL = [
    (LINEAR, TILE, H200),
    (LINEAR, SPECIALIZED, H200),
    (DECODE, SPLIT, H200),
    (but(DECODE, deterministic=True), SPLIT, H200),
    (DECODE, but(SPLIT, tma=False, swap=False), A100),
    (DECODE, GEMV, L4),
    (WEIGHTED_HALF, GEMV, H200),
    (INT8, MIXED, H200),
    (ODD, GemmConfig("cp_async", 128, 128, 64, 3, 8), H200),
    (HUGE, but(TILE, index64=True), H200),
    (
        but(DECODE, prologue=Prologue(RowNorm("rms", 1))),
        but(SPLIT, split_k=1, tma=False),
        H200,
    ),
    (but(DECODE, prologue=Prologue(RowNorm("layer", 2))), SPLIT, H200),
    (but(WIDE_ROWS, prologue=Prologue(RowNorm("layer"))), SPLIT, H200),
]

REFUSED = [
    ("shared_memory", LINEAR, but(TILE, stages=5), H200, "needs 279552 bytes"),
    ("shared_memory", LINEAR, GemmConfig("cp_async", 128, 256, 64, 4, 8), L4, "may have 101376"),
    ("registers", LINEAR, but(TILE, warps=4), H200, "256 registers a thread"),
    ("registers", LINEAR, but(TILE, block_m=256, stages=2), H200, "256 registers a thread"),
    (
        "registers",
        GemmProblem.contiguous("mm", 512, 512, 512, "float32"),
        GemmConfig("cp_async", 128, 256, 32, 2, 8),
        H200,
        "beyond 64 spills",
    ),
    ("realign", LINEAR, but(TILE, realign="copy"), H200, "both operands are aligned"),
    ("realign", INT8, but(MIXED, realign="copy"), H200, "operands of mixed are not copied"),
    (
        "realign",
        but(GATED, a=but(GATED.a, alignment=1)),
        but(SPLIT, realign="copy"),
        H200,
        "several weights",
    ),
    ("blocks", LINEAR, but(TILE, block_n=192), H200, "not a power of two"),
    ("blocks", LINEAR, but(TILE, warps=12), H200, "not a power of two"),
    ("blocks", LINEAR, but(TILE, warps=32), H200, "more than 16"),
    ("blocks", DECODE, but(GEMV, stages=300), H200, "more than 16"),
    ("blocks", LINEAR, but(TILE, group_m=1 << 30), H200, "more than 1024"),
    ("mma", DECODE, but(SPLIT, block_m=8), H200, "tensor cores need 16"),
    ("mma", DECODE, but(SPLIT, block_k=8), H200, "tensor cores need 16"),
    ("mma", LINEAR, but(TILE, block_n=512), H200, "at most 256"),
    ("mma", INT8, but(MIXED, block_k=16), H200, "tensor cores need 32"),
    ("mma", GATED, but(SPLIT, block_n=16, swap=False), H200, "tensor cores need 32"),
    ("warpgroups", LINEAR, but(TILE, block_m=64), H200, "2 warpgroups need 128 rows"),
    ("warpgroups", LINEAR, but(SPECIALIZED, block_m=64), H200, "2 warpgroups need 128 rows"),
    ("warpgroups", LINEAR, but(TILE, warps=2), H200, "whole groups of four"),
    (
        "warpgroups",
        GemmProblem.contiguous("int_mm", 512, 512, 512, "int8", layouts="rr"),
        but(TILE, block_n=128, block_k=128),
        H200,
        "K contiguous only",
    ),
    ("tma_alignment", ODD, TILE, H200, "aligned to 2 bytes"),
    ("tma_alignment", but(LINEAR, a=but(LINEAR.a, strides=(8192, 2))), TILE, H200, "no contiguous"),
    ("tma_alignment", but(LINEAR, a=but(LINEAR.a, alignment=4)), TILE, H200, "aligned to 8 bytes"),
    ("tma_alignment", but(LINEAR, a=but(LINEAR.a, strides=(0, 1))), TILE, H200, "overlap"),
    ("capability", LINEAR, TILE, A100, "TMA needs compute capability 9.0, and this is 8.0"),
    ("capability", DECODE, but(GEMV, pdl=True), L4, "dependent launch needs"),
    (
        "capability",
        LINEAR,
        GemmConfig("cp_async", 128, 128, 32, 2, 8),
        but(A100, capability=(7, 5)),
        "cp_async needs compute capability 8.0",
    ),
    ("warp_specialization", LINEAR, but(SPECIALIZED, warps=8), H200, "needs 4 warps"),
    ("flags", LINEAR, but(SPECIALIZED, flatten=True), H200, "does not flatten"),
    ("flags", LINEAR, but(TILE, warp_specialize=True), H200, "only persistent_tma_ws"),
    ("flags", LINEAR, but(SPECIALIZED, warp_specialize=False), H200, "persistent_tma_ws is warp"),
    ("flags", LINEAR, but(TILE, tma=False), H200, "always loads by TMA"),
    ("flags", DECODE, but(GEMV, tma=True), H200, "never loads by TMA"),
    ("flags", DECODE, but(SPLIT, flatten=True), H200, "does not flatten"),
    ("flags", DECODE, but(GEMV, swap=True), H200, "does not swap"),
    ("flags", LINEAR, but(TILE, pdl=True), H200, "dependent launch"),
    ("split_k", LINEAR, but(TILE, split_k=2), H200, "does not split K"),
    ("split_k", LINEAR, but(TILE, one_launch=True), H200, "does not reduce splits"),
    ("split_k", DECODE, but(SPLIT, split_k=1, one_launch=True), H200, "no splits to reduce"),
    ("split_k", DECODE, but(SPLIT, split_k=65), H200, "without work"),
    ("split_k", DECODE, but(SPLIT, split_k=63), H200, "without work"),
    ("pipeline", DECODE, but(SPLIT, split_k=32), H200, "4 stages are more than the 2 steps"),
    ("dtype", but(LINEAR, a=but(LINEAR.a, dtype="float16")), TILE, H200, "is not supported"),
    ("dtype", GemmProblem.contiguous("mm", 64, 64, 64, "float64"), TILE, H200, "is not supported"),
    ("dtype", WIDE_ROWS, SPLIT, H200, "mm of float32 and bfloat16 is not supported"),
    (
        "dtype",
        GemmProblem.contiguous("scaled", 512, 512, 512, "float8_e4m3fn"),
        GemmConfig("cp_async", 128, 128, 64, 2, 8),
        A100,
        "has no tensor cores for fp8",
    ),
    ("dtype", but(INT8, b=but(INT8.b, dtype="int32", alignment=1)), MIXED, H200, "dequantized"),
    ("dtype", GemmProblem.contiguous("mm", 512, 512, 512, "float32"), TILE, H200, "tf32"),
    ("operation", GemmProblem.contiguous("bmm", 64, 64, 64, batch=2), TILE, H200, "support bmm"),
    ("operation", NORMALIZED, SPECIALIZED, H200, "no prologue to normalize"),
    (
        "operation",
        GemmProblem.contiguous("bmm", 512, 512, 512, batch=2, parts=(256, 256)),
        but(TILE, template="bmm_persistent"),
        H200,
        "takes one weight",
    ),
    ("padding", but(LINEAR, n=100), TILE, H200, "block_n is 256 for a size of 100"),
    ("padding", but(LINEAR, k=16), TILE, H200, "block_k is 64 for a size of 16"),
    ("padding", DECODE, but(SPLIT, block_m=32), H200, "block_m is 32 for a size of 1"),
    (
        "padding",
        GemmProblem.contiguous("mm", 128, 256, 64, parts=(64, 64, 128)),
        TILE,
        H200,
        "block_n is 256 for a size of 128",
    ),
    ("gemv", but(DECODE, m=9), but(GEMV, block_m=16), H200, "M up to 8, and M is 9"),
    ("gemv", but(DECODE, m=8), but(GEMV, block_m=4), H200, "all 8 rows in one tile"),
    ("gemv", DECODE, but(GEMV, block_n=128), H200, "64 and 128 are free"),
    ("direct", INT8, DIRECT, H200, "up to 8 rows"),
    ("direct", but(INT8, m=8), but(DIRECT, block_m=16), H200, "in tiles of 16"),
    ("direct", but(INT8, m=8), but(DIRECT, block_n=128), H200, "by 128"),
    ("direct", but(INT8, m=8), but(DIRECT, block_k=1024), H200, "one or two loads of each of 4"),
    ("words", but(INT8, m=8, k=4096 + 256), DIRECT, H200, "no whole number of steps of 512"),
    ("words", but(INT8, m=8), but(DIRECT, split_k=3), H200, "for every split"),
    ("words", but(INT8, m=8, b=but(INT8.b, dtype="float8_e5m2")), DIRECT, H200, "loads integers"),
    ("words", but(INT8, m=8, b=but(INT8.b, alignment=8)), DIRECT, H200, "16-byte aligned"),
    ("words", but(INT8, m=8, a=but(INT8.a, alignment=4)), DIRECT, H200, "16-byte aligned"),
    (
        "words",
        but(INT4, m=8, prologue=Prologue(dequant=Dequant("group", 64))),
        DIRECT,
        H200,
        "ends within a load",
    ),
    (
        "words",
        but(INT4, m=8, prologue=Prologue(dequant=Dequant("group", 128, zero_points=True))),
        DIRECT,
        H200,
        "one zero point for all of b",
    ),
    ("words", INT8, but(STATIONARY, split_k=3), H200, "for every split"),
    ("stationary", but(INT8, m=17), STATIONARY, H200, "up to 16 rows"),
    ("stationary", INT8, but(STATIONARY, block_m=8), H200, "in tiles of 8"),
    ("stationary", but(INT8, m=8), but(STATIONARY, block_m=32), H200, "in tiles of 32"),
    ("stationary", INT8, but(STATIONARY, block_n=40), H200, "not a multiple of the 16"),
    ("stationary", INT8, but(STATIONARY, block_n=528), H200, "16 rows by 1024 columns"),
    ("stationary", INT8, but(STATIONARY, block_k=128, split_k=32), H200, "less than a load"),
    ("stationary", INT8, but(STATIONARY, block_k=4096), H200, "128 registers a thread"),
    ("stationary", INT8, but(STATIONARY, block_k=1024), H200, "not 2 steps of 1024"),
    ("stationary", INT8, but(STATIONARY, one_launch=False), H200, "in the same launch"),
    (
        "stationary",
        but(INT8, parts=(INT8.n // 2,) * 2, epilogue=Epilogue(gated=True)),
        STATIONARY,
        H200,
        "not a multiple of the 32",
    ),
    (
        "scale_groups",
        but(INT8, prologue=Prologue(dequant=Dequant("group", 96))),
        MIXED,
        H200,
        "groups of 96",
    ),
    ("tma_store", DECODE, but(SPLIT, tma_store=True), H200, "does not store by TMA"),
    (
        "tma_store",
        but(LINEAR, n=4095),
        but(TILE, tma_store=True),
        H200,
        "not a multiple of 16 bytes",
    ),
    (
        "tma_store",
        but(LINEAR, parts=(7168,) * 2),
        but(TILE, tma_store=True),
        H200,
        "one fused weight",
    ),
    ("tma_store", LINEAR, but(TILE, tma_store=True, swap=True), H200, "are transposed"),
    ("stream_k", DECODE, but(SPLIT, stream_k=True), H200, "does not support stream-K"),
    ("stream_k", LINEAR, but(TILE, stream_k=True, flatten=True), H200, "whole tiles"),
    ("stream_k", GATED, but(TILE, stream_k=True, flatten=False), H200, "which two CTAs share"),
    ("quantized", INT4, MIXED, H200, "swapped operands"),
    ("quantized", INT4, GEMV, H200, "no 4-bit weights"),
    ("quantized", but(INT8, m=1, b=but(INT8.b, dtype="uint8")), GEMV, H200, "does not subtract"),
    ("quantized", but(INT4, k=4095), PLAIN, H200, "words of two"),
    ("quantized", but(INT4, a=but(INT4.a, alignment=1)), PLAIN, H200, "words of two"),
    ("dtype", but(INT8, b=but(INT8.b, dtype="float8_e5m2")), MIXED, A100, "does not convert"),
    ("normalization", NORMALIZED, TILE, H200, "more than 64 rows"),
    ("normalization", WEIGHTED_HALF, but(TILE, block_m=64), H200, "overflow float16"),
    ("split_k", but(DECODE, prologue=Prologue(RowNorm("rms"))), SPLIT, H200, "which no split has"),
    ("split_k", GATED, SPLIT, H200, "the gate needs"),
    (
        "reductions",
        but(DECODE, epilogue=Epilogue(reductions=1)),
        SPLIT,
        H200,
        "splits are reduced",
    ),
    (
        "reductions",
        but(DECODE, epilogue=Epilogue(reductions=2)),
        TILE,
        H200,
        "the only supported reduction",
    ),
    (
        "reductions",
        but(LINEAR, epilogue=Epilogue(reductions=1)),
        but(TILE, template="persistent_tma_ws"),
        H200,
        "does not reduce rows",
    ),
    ("index", HUGE, TILE, H200, "64-bit indices"),
]


class TestConstraints:
    @pytest.mark.parametrize(("problem", "config", "on"), LEGAL)
    def test_documented_configurations_are_legal(
        self, problem: GemmProblem, config: GemmConfig, on: Device
    ) -> None:
        assert why_not(problem, config, on) == []
        assert legal(problem, config, on)

    @pytest.mark.parametrize(("name", "problem", "config", "on", "reason"), REFUSED)
    def test_documented_configurations_are_refused_for_their_reason(
        self, name: str, problem: GemmProblem, config: GemmConfig, on: Device, reason: str
    ) -> None:
        constraint = CONSTRAINTS[name]
        assert config.template in constraint.templates
        found = constraint.check(problem, config, on)
        assert found is not None
        assert reason in found
        assert found in why_not(problem, config, on)
        assert not legal(problem, config, on)

    def test_every_constraint_has_an_example_and_a_meaning(self) -> None:
        assert {name for name, *_ in REFUSED} == set(CONSTRAINTS)
        assert all(value.meaning for value in CONSTRAINTS.values())
        assert all(value.templates <= set(TEMPLATES) for value in CONSTRAINTS.values())

    def test_atomics_are_refused_where_results_must_be_deterministic(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        atomic = {**TEMPLATES, "splitk": but(TEMPLATES["splitk"], atomics=True)}
        for module in (config_module, constraints_module):
            monkeypatch.setattr(module, "TEMPLATES", atomic)
        deterministic = but(DECODE, deterministic=True)
        assert legal(DECODE, SPLIT, H200)
        assert legal(deterministic, but(SPLIT, split_k=1), H200)
        assert any("atomics" in reason for reason in why_not(deterministic, SPLIT, H200))

    @pytest.mark.parametrize("config", [SPLIT, but(TILE, stream_k=True, flatten=False)])
    def test_k_is_not_split_where_torch_does_not_allow_it(self, config: GemmConfig) -> None:
        flag = "-allow_bf16_reduced_precision_reduction"
        plain = DECODE if config is SPLIT else LINEAR
        assert legal(plain, config, H200)
        assert legal(but(plain, math_flags=flag), config, H200)
        whole = but(plain, math_flags=f"{flag},{flag}_split_k")
        assert any("does not allow" in reason for reason in why_not(whole, config, H200))
        assert legal(whole, but(config, split_k=1, stream_k=False), H200)

    def test_only_matmul_flags_that_are_set_change_keys(self) -> None:
        assert "math_flags" not in LINEAR.to_json()
        freed = but(LINEAR, math_flags="allow_fp16_accumulation")
        assert freed.key != LINEAR.key
        assert GemmProblem.from_json(freed.to_json()) == freed
        assert GemmProblem.from_json(LINEAR.to_json()) == LINEAR

    @pytest.mark.parametrize("copies", [False, True])
    def test_a_standardised_operand_is_in_shared_memory_once_more(
        self, monkeypatch: pytest.MonkeyPatch, copies: bool
    ) -> None:
        """What Triton 3.7 and 3.8 allocate, as compiled."""
        monkeypatch.setattr(_compat, "triton_copies_register_operand", lambda: copies)
        standardized = but(LINEAR, prologue=Prologue(RowNorm("layer", 2)))
        allocated = {64: (131_840, 148_224), 32: (41_344, 41_344)}
        for config in (
            GemmConfig("cp_async", 128, 128, 64, 4, 8),
            GemmConfig("cp_async", 128, 64, 32, 4, 8),
        ):
            needed = config.shared_memory(standardized)
            assert needed >= allocated[config.block_k][copies]
            one = config.block_m * config.block_k * 2 if config.block_k == 64 else 0
            plain = config.stages * config.stage_bytes(standardized) + config.stages * 2 * 2 * (
                config.block_k
            )
            assert needed == plain + copies * one

    @given(problems(), configs(), devices())
    @examples(200)
    def test_legal_is_no_reason_against(
        self, problem: GemmProblem, config: GemmConfig, on: Device
    ) -> None:
        reasons = why_not(problem, config, on)
        assert legal(problem, config, on) == (not reasons)
        assert all(reasons)


def templates(problem: GemmProblem, on: Device) -> Counter[str]:
    return Counter(config.template for config in candidates(problem, on))


class TestCandidates:
    @given(problems(), devices())
    @examples(120)
    def test_random_problems_have_a_few_hundred_legal_ones_each_once(
        self, problem: GemmProblem, on: Device
    ) -> None:
        found = list(candidates(problem, on))
        assert [
            why_not(problem, config, on) for config in found if why_not(problem, config, on)
        ] == []
        assert len(set(found)) == len(found) <= 400

    @given(problems(plain=True))
    @examples(80)
    def test_contiguous_problems_have_some_on_an_h200(self, problem: GemmProblem) -> None:
        # torch itself groups only what TMA can load.
        refused = problem.operation == "grouped" and problem.tma_obstacle is not None
        # Pairs of 4 bits are multiplied by pairs along K.
        refused |= problem.b.dtype.endswith("int4") and problem.a.layout != "row"
        assert any(candidates(problem, H200)) != refused

    @pytest.mark.parametrize(
        ("problem", "on", "expected"),
        [
            (LINEAR, H200, {"cp_async", "persistent_tma", "persistent_tma_ws"}),
            (LINEAR, A100, {"cp_async"}),
            (ODD, H200, {"cp_async", "persistent_tma", "persistent_tma_ws"}),
            (ODD, A100, {"cp_async"}),
            (but(ODD, m=16), H200, {"splitk"}),
            (DECODE, H200, {"splitk", "gemv", "persistent_tma"}),
            (DECODE, A100, {"splitk", "gemv"}),
            (but(DECODE, m=16), A100, {"splitk"}),
            (INT8, H200, {"mixed", "stationary"}),
            (but(INT8, m=4), L4, {"mixed", "gemv", "direct", "stationary"}),
            (but(INT4, m=8), H200, {"mixed", "direct", "stationary"}),
            (but(INT4, m=9), H200, {"mixed", "stationary"}),
            (but(INT4, m=17), H200, {"mixed"}),
            (but(INT4, m=9, k=4096 + 256), H200, {"mixed"}),
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
            (candidate.split_k > 1, candidate.one_launch) for candidate in candidates(deep, H200)
        )
        assert ways[True, True] == ways[True, False]
        assert ways[False, True] == 0

    def test_splits_need_not_be_given_up_for_determinism(self) -> None:
        deterministic = but(DECODE, deterministic=True)
        assert templates(deterministic, H200) == templates(DECODE, H200)

    def test_as_many_ctas_as_an_sm_can_hold_are_tried(self) -> None:
        problem = GemmProblem.contiguous("mm", 4096, 768, 768)
        held: dict[tuple[int, int, int, int], dict[int, int]] = {}
        for candidate in candidates(problem, H200):
            if candidate.template == "cp_async":
                tile = (candidate.block_m, candidate.block_n, candidate.block_k, candidate.warps)
                held.setdefault(tile, {})[candidate.stages] = candidate.occupancy(problem, H200)
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
            "import json; from test.templates.test_problem import DECODE, H200, candidates; "
            "print(json.dumps([each.to_json() for each in candidates(DECODE, H200)]))"
        )
        expected = [candidate.to_json() for candidate in candidates(DECODE, H200)]
        for output in hash_seeds.outputs(code, ("0", "4242")):
            assert json.loads(output) == expected
