"""Operands and problems: bytes, FLOPs, keys, JSON, and which are refused."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from inductor_ext import autotune, exc
from inductor_ext.templates import kernels
from inductor_ext.templates.cutlass import epilogue as cutlass
from inductor_ext.templates.fused_ops import Dequant, Epilogue, Prologue, RowNorm
from inductor_ext.templates.problem import GemmProblem, KernelDetails
from inductor_ext.templates.tensors import EpilogueInput, Operand
from test.support.gemm_strategies import examples, problems
from test.support.problem_examples import A100, H200, INT8, L4, LINEAR, read_again

TABLES = Path(autotune.__file__).parent / "tables"


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
    def test_invalid_operands_are_refused(self, fields: dict[str, Any]) -> None:
        with pytest.raises(exc.BadGemmError, match=next(iter(fields)).removeprefix("batch_")):
            replace(LINEAR.a, **fields)


class TestProblem:
    def test_flops_and_bytes(self) -> None:
        assert LINEAR.flops == 2 * 4096 * 14336 * 4096
        assert LINEAR.bytes_read == 2 * (4096 * 4096 + 4096 * 14336)
        assert LINEAR.bytes_written == 2 * 4096 * 14336
        moved = LINEAR.bytes_read + LINEAR.bytes_written
        assert LINEAR.intensity == pytest.approx(LINEAR.flops / moved)

    def test_operands_shared_by_a_batch_are_read_once(self) -> None:
        own = GemmProblem.contiguous("bmm", 64, 64, 64, batch=10)
        shared = replace(own, b=replace(own.b, batch_stride=0))
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
    def test_keys_ignore_irrelevant_fields(
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

    def test_bytes_of_epilogues(self) -> None:
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
        assert problem.stored_dtype == "float8_e4m3fn"

    def test_one_of_two_parts_gates_the_other(self) -> None:
        both = GemmProblem.contiguous("mm", 16, 2048, 64, parts=(1024, 1024))
        gated = replace(both, epilogue=Epilogue(gated=True))
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

    def test_types_of_multiplication(self) -> None:
        single = GemmProblem.contiguous("mm", 64, 64, 64, "float32")
        assert single.arithmetic == "fma"
        assert replace(single, tf32=True).arithmetic == "tf32"
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
        problem = replace(LINEAR if prologue.dequant is None else INT8, prologue=prologue)
        assert problem.to_json()["prologue"] == json_form
        assert list(problem.to_json()["prologue"]) == list(names)
        assert read_again(problem) == problem

    def test_an_epilogue_tree_is_stored_as_its_text(self) -> None:
        tree = cutlass.Epilogue((("bfloat16", cutlass.gelu(cutlass.ACCUMULATOR)),))
        problem = replace(LINEAR, epilogue=Epilogue(tree=tree))
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
    def test_invalid_problems_are_refused(self, fields: dict[str, Any]) -> None:
        with pytest.raises(exc.BadGemmError, match=next(iter(fields))):
            replace(LINEAR, **fields)
        with pytest.raises(exc.BadGemmError, match="prologue"):
            replace(INT8, prologue=None)

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
    def test_invalid_fusions_are_refused(self, cls: Any, arguments: tuple[Any, ...]) -> None:
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
    def test_invalid_json_is_refused(self, path: tuple[str, ...], value: Any) -> None:
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
