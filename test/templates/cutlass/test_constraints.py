"""Which problems a CUTLASS kernel can run, and why not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.cutlass.constraints import legal, why_not
from inductor_ext.templates.device import Device
from inductor_ext.templates.fused_ops import Dequant, Epilogue, Prologue
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import EpilogueInput
from test.support.cutlass_examples import (
    A100,
    B200,
    COOPERATIVE,
    FP8,
    H200,
    INT4,
    LINEAR,
    MULTISTAGE,
    PINGPONG,
    STREAM_K,
    mm,
)

INT4_KERNEL = replace(
    PINGPONG,
    tile=(64, 128, 64),
    a="uint4",
    layouts="tnn",
    alignments=(32, 8, 8),
    swap_ab=True,
    group=64,
)


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
            (
                LINEAR,
                replace(MULTISTAGE, target=86),
                A100,
                "sm_86 does not run on capability (8, 0)",
            ),
            (LINEAR, replace(MULTISTAGE, arch=89, target=89), A100, "sm_89 does not run"),
            (LINEAR, replace(COOPERATIVE, tile=(64, 256, 64)), H200, "a multiple of 128 rows"),
            (LINEAR, replace(PINGPONG, tile=(96, 128, 64)), H200, "a multiple of 64 rows"),
            (
                LINEAR,
                replace(PINGPONG, tile=(128, 120, 64)),
                H200,
                "multiple of the MMA instruction",
            ),
            (LINEAR, replace(PINGPONG, tile=(128, 128, 16)), H200, "two steps of 32 bytes"),
            (LINEAR, replace(PINGPONG, tile=(128, 256, 64)), H200, "256 registers per thread"),
            (LINEAR, replace(COOPERATIVE, tile=(256, 256, 64)), H200, "256 registers per thread"),
            (LINEAR, replace(COOPERATIVE, tile=(256, 128, 256)), H200, "1 stages of the pipeline"),
            (LINEAR, replace(PINGPONG, scheduler="stream_k"), H200, "cooperative kernels only"),
            (LINEAR, replace(PINGPONG, split_k=2), H200, "needs the stream-K scheduler"),
            (LINEAR, replace(STREAM_K, split_k=65), H200, "65 splits of 64 steps"),
            (LINEAR, replace(PINGPONG, cluster=(3, 1, 1)), H200, "powers of two"),
            (LINEAR, replace(PINGPONG, cluster=(4, 4, 1)), H200, "8 CTAs at most"),
            (LINEAR, replace(PINGPONG, mainloop="multistage"), H200, "are warp-specialized"),
            (LINEAR, replace(PINGPONG, layouts="nnt"), H200, "the operands are tnt"),
            (LINEAR, replace(PINGPONG, a="float16"), H200, "multiplies float16 and bfloat16"),
            (LINEAR, replace(PINGPONG, tf32=True), H200, "tf32"),
            (LINEAR, replace(PINGPONG, c="float32"), H200, "reads no matrix"),
            (LINEAR, replace(MULTISTAGE, cluster=(2, 1, 1)), A100, "no clusters"),
            (LINEAR, replace(MULTISTAGE, tile=(32, 512, 32)), A100, "no division"),
            (LINEAR, replace(MULTISTAGE, stages=9), A100, "bytes of shared memory"),
            (mm("mm", 4096, 4096, 4092), PINGPONG, H200, "A is aligned to 4 elements"),
            (
                mm("mm", 4096, 4096, 4092),
                replace(PINGPONG, alignments=(4, 4, 8)),
                H200,
                "less than 16 bytes",
            ),
            (mm("mm", 4096, 4095, 4096), PINGPONG, H200, "D is aligned to 1 elements"),
            (
                mm("mm", 4096, 4095, 4096),
                replace(PINGPONG, alignments=(8, 8, 1)),
                H200,
                "TMA needs 16 bytes",
            ),
            (
                mm("mm", 4096, 4096, 4095),
                replace(MULTISTAGE, alignments=(1, 1, 8)),
                A100,
                "less than 4 bytes",
            ),
            (
                mm("scaled", 64, 64, 64, "float8_e4m3fn", layouts="rr"),
                replace(FP8, layouts="ttt"),
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
                replace(PINGPONG, a="int8", layouts="tnn", swap_ab=True, group=64),
                H200,
                "4-bit weights only",
            ),
            (
                INT4,
                replace(INT4_KERNEL, group=None),
                H200,
                "groups of 64, but the kernel expects None",
            ),
            (INT4, replace(INT4_KERNEL, tile=(64, 128, 128)), H200, "multiple of the tile's 128"),
            (
                replace(
                    INT4, prologue=Prologue(dequant=Dequant("group", 64, scale_dtype="float32"))
                ),
                INT4_KERNEL,
                H200,
                "4-bit weights only, in bfloat16",
            ),
            (
                replace(INT4, prologue=Prologue(dequant=Dequant("group", 64, zero_points=True))),
                INT4_KERNEL,
                H200,
                "zero points",
            ),
        ],
    )
    def test_a_problem_without_kernels_has_a_reason(
        self, problem: GemmProblem, config: CutlassConfig, where: Device, reason: str
    ) -> None:
        assert not legal(problem, config, where)
        assert any(reason in item for item in why_not(problem, config, where))

    def test_broadcast_rows_reduce_the_pipeline(self) -> None:
        deep = replace(COOPERATIVE, tile=(256, 128, 128), cluster=(1, 1, 1))
        rows = Epilogue((EpilogueInput("float32", "row"),) * 60, 60)
        columns = Epilogue((EpilogueInput("float32", "column"),) * 60, 60)
        assert legal(mm("addmm", 4096, 4096, 4096, epilogue=columns), deep, H200)
        assert not legal(mm("addmm", 4096, 4096, 4096, epilogue=rows), deep, H200)
