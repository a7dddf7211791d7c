"""Configurations and epilogues of CUTLASS kernels, one for each kind of source."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.cutlass.epilogue import (
    ACCUMULATOR,
    Epilogue,
    Packed,
    Tensor,
    apply,
    gelu,
    identity,
    parameter,
    read,
    silu,
)

BF16 = "bfloat16"


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
    "mm_nt": (replace(BASE, layouts="ntt"), identity(BF16)),
    "mm_float16": (replace(BASE, **FLOAT16), identity("float16")),
    "mm_float16_cooperative": (replace(BASE, **FLOAT16, **COOPERATIVE), identity("float16")),
    "mm_fast": (replace(BASE, flags=("--use_fast_math", "-lineinfo")), identity(BF16)),
    "mm_float32_out": (replace(BASE, d="float32", alignments=(8, 8, 4)), identity("float32")),
    "mm_tf32": (replace(BASE, tile=(128, 128, 32), **TF32), identity("float32")),
    "mm_swapped": (replace(BASE, tile=(128, 16, 64), layouts="tnn", swap_ab=True), identity(BF16)),
    "mm_cooperative": (replace(BASE, cluster=(2, 1, 1), **COOPERATIVE), identity(BF16)),
    "mm_stream_k": (replace(BASE, scheduler="stream_k", **COOPERATIVE), identity(BF16)),
    "mm_stream_k_tf32": (
        replace(BASE, scheduler="stream_k", **{**COOPERATIVE, "tile": (128, 256, 32)}, **TF32),
        identity("float32"),
    ),
    "mm_unspecialized_consumers": (
        replace(BASE, mainloop="warpspecialized", tile=(64, 128, 64)),
        identity(BF16),
    ),
    "addmm_row": (BASE, biased("row")),
    "addmm_column": (BASE, biased("column")),
    "addmm_matrix": (replace(BASE, c=BF16), biased("matrix", alignment=8)),
    "addmm_matrix_unaligned": (BASE, biased("matrix", "float32", 2)),
    "addmm_gelu": (BASE, ACTIVATED),
    "addmm_residual_relu": (replace(BASE, c=BF16), RESIDUAL),
    "addmm_residual_stream_k": (
        replace(BASE, c=BF16, scheduler="stream_k", **COOPERATIVE),
        RESIDUAL,
    ),
    "mm_by_size": (BASE, BY_SIZE),
    "mm_gate": (replace(BASE, c=BF16), GATED),
    "mm_two_outputs": (BASE, TWO),
    "int_mm": (replace(BASE, tile=(128, 128, 128), **INT8), identity("int32")),
    "int_mm_scaled": (
        replace(BASE, tile=(128, 128, 128), **{**INT8, "d": BF16, "alignments": (16, 16, 8)}),
        SCALES,
    ),
    "scaled_tensor_wise": (replace(BASE, tile=(128, 128, 128), **FP8), TENSOR_WISE),
    "scaled_e5m2": (replace(BASE, tile=(128, 128, 128), **{**FP8, "b": "float8_e5m2"}), SCALES),
    "scaled": (replace(BASE, tile=(128, 128, 128), **FP8), SCALES),
    "scaled_fast": (
        replace(BASE, fast_accumulation=True, **{**COOPERATIVE, "tile": (128, 128, 128)}, **FP8),
        SCALES,
    ),
    "mixed_int8": (
        replace(
            BASE, a="int8", tile=(64, 128, 64), alignments=(16, 8, 8), layouts="tnn", swap_ab=True
        ),
        DEQUANTIZED,
    ),
    "mixed_fp8": (
        replace(
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
        replace(
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
        replace(BASE, a="uint4", cluster=(2, 1, 1), group=128, **COOPERATIVE, **MIXED_INT4),
        Epilogue(
            ((BF16, apply("add", ACCUMULATOR, read(0))),),
            (Tensor(BF16, "row"), Tensor(BF16, "group")),
            packed=Packed(high_first=True, zero=8),
        ),
    ),
    "mixed_int4_float16": (
        replace(BASE, **{**FLOAT16, "a": "int4"}, tile=(64, 128, 64), **MIXED_INT4),
        replace(HALF_WEIGHTS, packed=Packed()),
    ),
    "grouped_cooperative": (replace(BASE, grouped=True, **COOPERATIVE), identity(BF16)),
    "grouped": (replace(BASE, grouped=True), identity(BF16)),
    "grouped_fp8": (
        replace(BASE, grouped=True, fast_accumulation=True, tile=(128, 128, 128), **FP8),
        identity(BF16),
    ),
    "old_mm": (OLD, identity(BF16)),
    "old_mm_float16": (replace(OLD, **FLOAT16), identity("float16")),
    "old_addmm_residual_relu": (OLD, RESIDUAL),
    "old_mm_by_size": (OLD, BY_SIZE),
    "old_mm_align2": (replace(OLD, alignments=(2, 2, 1)), identity(BF16)),
    "old_mm_tf32": (replace(OLD, tile=(128, 128, 16), **TF32), identity("float32")),
    "old_addmm_row": (OLD, biased("row")),
    "old_mm_two_outputs": (OLD, TWO),
    "old_int_mm": (replace(OLD, tile=(128, 128, 64), **INT8), identity("int32")),
    "old_scaled": (replace(OLD, arch=89, target=89, tile=(128, 128, 64), **FP8), SCALES),
    "old_mixed_int8": (
        replace(OLD, b="int8", tile=(128, 128, 64), alignments=(8, 16, 8)),
        DEQUANTIZED,
    ),
}
"""A kernel of each operator, dtype, schedule and kind of epilogue. bmm and baddbmm are those of mm
and addmm, with another batch."""
