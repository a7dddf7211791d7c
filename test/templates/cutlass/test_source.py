"""Sources of CUTLASS kernels: goldens of what differs between classes, and what does not."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

import pytest

from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.cutlass.epilogue import (
    ACCUMULATOR,
    Epilogue,
    NotExpressible,
    Packed,
    Tensor,
    apply,
    gelu,
    identity,
    parameter,
    read,
    silu,
)
from inductor_ext.templates.cutlass.source import Source, source
from test.support.goldens import assert_matches_golden, golden_names

BF16 = "bfloat16"


def but(record: Any, **fields: Any) -> Any:
    return dataclasses.replace(record, **fields)


BASE = CutlassConfig(90, "warpspecialized_pingpong", (128, 128, 64), BF16, BF16, BF16)
OLD = CutlassConfig(80, "multistage", (128, 128, 32), BF16, BF16, BF16, stages=4, epilogue="direct")


def product(first: Any, *rest: Any) -> Any:
    for item in rest:
        first = apply("mul", first, item)
    return first


def biased(broadcast: Any, dtype: str = BF16, alignment: int = 1) -> Epilogue:
    """alpha * product + beta * bias."""
    scaled = product(parameter(1), read(0))
    value = apply("add", product(parameter(0), ACCUMULATOR), scaled)
    return Epilogue(((BF16, value),), (Tensor(dtype, broadcast, alignment),))


SCALES = Epilogue(
    ((BF16, product(ACCUMULATOR, read(0), read(1))),),
    (Tensor("float32", "column"), Tensor("float32", "row")),
)
ACTIVATED = Epilogue(((BF16, gelu(apply("add", ACCUMULATOR, read(0)))),), (Tensor(BF16, "row"),))
GATED = Epilogue(((BF16, product(read(0), silu(ACCUMULATOR))),), (Tensor(BF16, "matrix", 8),))
TWO = Epilogue(((BF16, silu(ACCUMULATOR)), ("float32", ACCUMULATOR)))
DEQUANTIZED = Epilogue(((BF16, product(ACCUMULATOR, read(0))),), (Tensor(BF16, "row"),))
TENSOR_WISE = Epilogue(SCALES.outputs, (Tensor("float32", "scalar"),) * 2)
RESIDUAL = Epilogue(
    ((BF16, apply("relu", apply("add", apply("add", ACCUMULATOR, read(0)), read(1)))),),
    (Tensor(BF16, "row"), Tensor(BF16, "matrix", 8)),
)
BY_SIZE = Epilogue(((BF16, apply("truediv", ACCUMULATOR, parameter(0))),))
HALF_WEIGHTS = Epilogue((("float16", product(ACCUMULATOR, read(0))),), (Tensor("float16", "row"),))

FP8 = {"a": "float8_e4m3fn", "b": "float8_e4m3fn", "alignments": (16, 16, 8)}
INT8 = {"a": "int8", "b": "int8", "d": "int32", "accumulator": "int32", "alignments": (16, 16, 4)}
TF32 = {"a": "float32", "b": "float32", "d": "float32", "tf32": True, "alignments": (4, 4, 4)}
COOPERATIVE = {"mainloop": "warpspecialized_cooperative", "tile": (128, 256, 64)}
FLOAT16 = {"a": "float16", "b": "float16", "d": "float16"}
MIXED_INT4 = {"alignments": (32, 8, 8), "layouts": "tnn", "swap_ab": True}

CLASSES: dict[str, tuple[CutlassConfig, Epilogue]] = {
    "mm": (BASE, identity(BF16)),
    "mm_nt": (but(BASE, layouts="ntt"), identity(BF16)),
    "mm_float16": (but(BASE, **FLOAT16), identity("float16")),
    "mm_float16_cooperative": (but(BASE, **FLOAT16, **COOPERATIVE), identity("float16")),
    "mm_fast": (but(BASE, flags=("--use_fast_math", "-lineinfo")), identity(BF16)),
    "mm_float32_out": (but(BASE, d="float32", alignments=(8, 8, 4)), identity("float32")),
    "mm_tf32": (but(BASE, tile=(128, 128, 32), **TF32), identity("float32")),
    "mm_swapped": (but(BASE, tile=(128, 16, 64), layouts="tnn", swap_ab=True), identity(BF16)),
    "mm_cooperative": (but(BASE, cluster=(2, 1, 1), **COOPERATIVE), identity(BF16)),
    "mm_stream_k": (but(BASE, scheduler="stream_k", **COOPERATIVE), identity(BF16)),
    "mm_stream_k_tf32": (
        but(BASE, scheduler="stream_k", **{**COOPERATIVE, "tile": (128, 256, 32)}, **TF32),
        identity("float32"),
    ),
    "mm_unspecialized_consumers": (
        but(BASE, mainloop="warpspecialized", tile=(64, 128, 64)),
        identity(BF16),
    ),
    "addmm_row": (BASE, biased("row")),
    "addmm_column": (BASE, biased("column")),
    "addmm_matrix": (but(BASE, c=BF16), biased("matrix", alignment=8)),
    "addmm_matrix_unaligned": (BASE, biased("matrix", "float32", 2)),
    "addmm_gelu": (BASE, ACTIVATED),
    "addmm_residual_relu": (but(BASE, c=BF16), RESIDUAL),
    "addmm_residual_stream_k": (but(BASE, c=BF16, scheduler="stream_k", **COOPERATIVE), RESIDUAL),
    "mm_by_size": (BASE, BY_SIZE),
    "mm_gate": (but(BASE, c=BF16), GATED),
    "mm_two_outputs": (BASE, TWO),
    "int_mm": (but(BASE, tile=(128, 128, 128), **INT8), identity("int32")),
    "int_mm_scaled": (
        but(BASE, tile=(128, 128, 128), **{**INT8, "d": BF16, "alignments": (16, 16, 8)}),
        SCALES,
    ),
    "scaled_tensor_wise": (but(BASE, tile=(128, 128, 128), **FP8), TENSOR_WISE),
    "scaled_e5m2": (but(BASE, tile=(128, 128, 128), **{**FP8, "b": "float8_e5m2"}), SCALES),
    "scaled": (but(BASE, tile=(128, 128, 128), **FP8), SCALES),
    "scaled_fast": (
        but(BASE, fast_accumulation=True, **{**COOPERATIVE, "tile": (128, 128, 128)}, **FP8),
        SCALES,
    ),
    "mixed_int8": (
        but(BASE, a="int8", tile=(64, 128, 64), alignments=(16, 8, 8), layouts="tnn", swap_ab=True),
        DEQUANTIZED,
    ),
    "mixed_fp8": (
        but(
            BASE,
            a="float8_e4m3fn",
            tile=(64, 128, 64),
            alignments=(16, 8, 8),
            layouts="tnn",
            swap_ab=True,
        ),
        DEQUANTIZED,
    ),
    "mixed_float16": (
        but(
            BASE,
            **{**FLOAT16, "a": "int8"},
            **{**COOPERATIVE, "tile": (128, 128, 64)},
            alignments=(16, 8, 8),
            layouts="tnn",
            swap_ab=True,
        ),
        HALF_WEIGHTS,
    ),
    "mixed_uint4": (
        but(BASE, a="uint4", cluster=(2, 1, 1), group=128, **COOPERATIVE, **MIXED_INT4),
        Epilogue(
            ((BF16, apply("add", ACCUMULATOR, read(0))),),
            (Tensor(BF16, "row"), Tensor(BF16, "group")),
            packed=Packed(high_first=True, zero=8),
        ),
    ),
    "mixed_int4_float16": (
        but(BASE, **{**FLOAT16, "a": "int4"}, tile=(64, 128, 64), **MIXED_INT4),
        dataclasses.replace(HALF_WEIGHTS, packed=Packed()),
    ),
    "grouped_cooperative": (but(BASE, grouped=True, **COOPERATIVE), identity(BF16)),
    "grouped": (but(BASE, grouped=True), identity(BF16)),
    "grouped_fp8": (
        but(BASE, grouped=True, fast_accumulation=True, tile=(128, 128, 128), **FP8),
        identity(BF16),
    ),
    "old_mm": (OLD, identity(BF16)),
    "old_mm_float16": (but(OLD, **FLOAT16), identity("float16")),
    "old_addmm_residual_relu": (OLD, RESIDUAL),
    "old_mm_by_size": (OLD, BY_SIZE),
    "old_mm_align2": (but(OLD, alignments=(2, 2, 1)), identity(BF16)),
    "old_mm_tf32": (but(OLD, tile=(128, 128, 16), **TF32), identity("float32")),
    "old_addmm_row": (OLD, biased("row")),
    "old_mm_two_outputs": (OLD, TWO),
    "old_int_mm": (but(OLD, tile=(128, 128, 64), **INT8), identity("int32")),
    "old_scaled": (but(OLD, arch=89, target=89, tile=(128, 128, 64), **FP8), SCALES),
    "old_mixed_int8": (
        but(OLD, b="int8", tile=(128, 128, 64), alignments=(8, 16, 8)),
        DEQUANTIZED,
    ),
}
"""A kernel of each operator, dtype, schedule and kind of epilogue. bmm and baddbmm are those of mm
and addmm, with another batch."""


def lines(made: Source) -> list[str]:
    """A source without its own name, and without functions of epilogues, which have tests of their
    own.
    """
    kept = []
    inside = False
    for line in made.text.replace(made.name, "NAME").splitlines():
        inside = inside or line == "template <class Fragment>"
        if not inside:
            kept.append(line)
        inside = inside and line != "};"
    return kept


def changes(name: str) -> list[str]:
    """The lines of a class that the plain product of its family has not."""
    plain = "old_mm" if name.startswith("old_") else "mm"
    first, second = lines(source(*CLASSES[plain])), lines(source(*CLASSES[name]))
    if name == plain:
        return second
    matcher = difflib.SequenceMatcher(None, first, second, autojunk=False)
    return [
        line
        for tag, _, _, begin, end in matcher.get_opcodes()
        if tag in ("insert", "replace")
        for line in second[begin:end]
    ]


@pytest.mark.parametrize("name", CLASSES)
def test_difference_from_the_plain_matmul(name: str) -> None:
    assert_matches_golden("\n".join(changes(name)) + "\n", "cutlass", name)


def test_there_are_no_other_goldens() -> None:
    assert golden_names("cutlass") == CLASSES.keys()


class TestSource:
    def test_a_launch_makes_no_other_source(self) -> None:
        config, epilogue = CLASSES["mm_stream_k"]
        launched = but(config, split_k=4, swizzle=8, raster="along_n")
        assert source(launched, epilogue) == source(config, epilogue)

    def test_no_size_is_part_of_it(self) -> None:
        for name in CLASSES:
            assert "4096" not in source(*CLASSES[name]).text

    def test_its_name_distinguishes_epilogues(self) -> None:
        made = [source(BASE, epilogue) for epilogue in (identity(BF16), ACTIVATED)]
        assert made[0].name != made[1].name
        for entry in made:
            assert entry.name.startswith(BASE.name)
            # What a profiler shows.
            assert f"    {entry.name}(__grid_constant__ " in entry.text
            assert "@" not in entry.text

    def test_is_for_an_architecture(self) -> None:
        assert source(BASE, identity(BF16)).architecture == "90a"
        assert source(OLD, identity(BF16)).architecture == "80"
        assert source(*CLASSES["old_scaled"]).architecture == "89"

    def test_older_kernels_are_built_for_their_device(self) -> None:
        found = {
            value: source(but(OLD, target=value), identity(BF16)) for value in (80, 86, 90, 120)
        }
        assert {key: item.architecture for key, item in found.items()} == {
            80: "80",
            86: "86",
            90: "90",
            120: "120",
        }
        # Each has a name of its own.
        assert len({value.name for value in found.values()}) == 4

    def test_includes_no_cutlass_utilities(self) -> None:
        for name in CLASSES:
            text = source(*CLASSES[name]).text
            assert "cutlass/util" not in text
            assert "EXTENDED_MMA_SHAPES" not in text
            assert text.count("#include") <= 13
            # Launchers of CUTLASS's, which would have the kernel compiled for the host, too.
            assert "gemm/device/" not in text

    @pytest.mark.parametrize(
        ("alignment", "dtype", "access"),
        [(8, BF16, 8), (2, BF16, 2), (4, "float32", 8), (2, "float32", 2), (1, BF16, 1)],
    )
    def test_older_kernels_access_rows_by_the_least_alignment(
        self, alignment: int, dtype: str, access: int
    ) -> None:
        text = source(OLD, biased("matrix", dtype, alignment)).text
        assert f"Tile, Warp, cutlass::bfloat16_t, {access}, 1>;" in text

    def test_an_epilogue_that_it_cannot_have_is_refused(self) -> None:
        with pytest.raises(NotExpressible):
            source(BASE, identity("float64"))

    def test_a_kernel_for_other_4_bit_weights_is_refused(self) -> None:
        config, epilogue = CLASSES["mixed_uint4"]
        for other in (but(epilogue, packed=None), but(epilogue, inputs=epilogue.inputs[:1])):
            with pytest.raises(NotExpressible, match="do not match the kernel"):
                source(config, other)
        with pytest.raises(NotExpressible, match="do not match the kernel"):
            source(but(config, group=None), epilogue)

    def test_each_kind_of_4_bit_weight_has_a_kernel(self) -> None:
        config, epilogue = CLASSES["mixed_uint4"]
        kinds = [Packed(first, zero) for first in (False, True) for zero in (0, 8)]
        made = {source(config, but(epilogue, packed=kind)).name for kind in kinds}
        assert len(made) == 4
        text = source(config, but(epilogue, packed=Packed(zero=8))).text
        assert "offset = 0x43084308;" in text
        # Two's complement with its highest bit inverted is 8 more.
        signed = source(but(config, a="int4"), but(epilogue, packed=Packed(zero=3))).text
        assert "offset = 0x430b430b;" in signed
        assert "^ 0x88888888;" in signed
