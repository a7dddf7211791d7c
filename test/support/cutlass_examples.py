"""CUTLASS configurations and problems that several tests use."""

from __future__ import annotations

import dataclasses

from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.fused_ops import Dequant, Prologue
from inductor_ext.templates.problem import GemmProblem
from test.support.gemm_strategies import device

H200 = device("NVIDIA H200")
A100 = device("NVIDIA A100-SXM4-80GB")
B200 = device("NVIDIA B200")
mm = GemmProblem.contiguous
LINEAR = mm("mm", 4096, 14336, 4096)

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
