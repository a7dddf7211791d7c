"""The constraints of Triton kernels, each with an example that it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from inductor_ext import _compat
from inductor_ext.templates.device import Device
from inductor_ext.templates.fused_ops import Dequant, Epilogue, Prologue, RowNorm
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.triton import config as config_module
from inductor_ext.templates.triton import constraints as constraints_module
from inductor_ext.templates.triton.config import GemmConfig
from inductor_ext.templates.triton.constraints import CONSTRAINTS, legal, why_not
from inductor_ext.templates.triton.templates import TEMPLATES
from test.support.gemm_strategies import configs, devices, examples, problems
from test.support.problem_examples import (
    A100,
    DECODE,
    H200,
    HUGE,
    INT4,
    INT8,
    L4,
    LINEAR,
    ODD,
    STATIONARY,
    TILE,
)

SPLIT = GemmConfig("splitk", 16, 128, 64, 4, 4, split_k=4, swap_ab=True)
SPECIALIZED = GemmConfig("persistent_tma_ws", 128, 128, 64, 4, 4, tma=True, warp_specialize=True)
GEMV = GemmConfig("gemv", 1, 16, 512, 1, 4)
MIXED = GemmConfig("mixed", 16, 128, 64, 4, 4, swap_ab=True)
DIRECT = GemmConfig("direct", 8, 32, 512, 1, 4)
PLAIN = replace(MIXED, swap_ab=False)
NORMALIZED = replace(LINEAR, prologue=Prologue(RowNorm("rms")))

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
    (replace(DECODE, deterministic=True), SPLIT, H200),
    (DECODE, replace(SPLIT, tma=False, swap_ab=False), A100),
    (DECODE, GEMV, L4),
    (WEIGHTED_HALF, GEMV, H200),
    (INT8, MIXED, H200),
    (ODD, GemmConfig("cp_async", 128, 128, 64, 3, 8), H200),
    (HUGE, replace(TILE, index64=True), H200),
    (
        replace(DECODE, prologue=Prologue(RowNorm("rms", 1))),
        replace(SPLIT, split_k=1, tma=False),
        H200,
    ),
    (replace(DECODE, prologue=Prologue(RowNorm("layer", 2))), SPLIT, H200),
    (replace(WIDE_ROWS, prologue=Prologue(RowNorm("layer"))), SPLIT, H200),
]

REFUSED = [
    ("shared_memory", LINEAR, replace(TILE, num_stages=5), H200, "needs 279552 bytes"),
    ("shared_memory", LINEAR, GemmConfig("cp_async", 128, 256, 64, 4, 8), L4, "may have 101376"),
    (
        "split_k",
        GemmProblem.contiguous("bmm", 4, 32, 257, batch=96),
        GemmConfig("gemv", 4, 16, 64, 1, 1, split_k=2),
        H200,
        "the splits of a batch of matrices have no reduction",
    ),
    ("registers", LINEAR, replace(TILE, num_warps=4), H200, "256 registers a thread"),
    ("registers", LINEAR, replace(TILE, block_m=256, num_stages=2), H200, "256 registers a thread"),
    (
        "registers",
        GemmProblem.contiguous("mm", 512, 512, 512, "float32"),
        GemmConfig("cp_async", 128, 256, 32, 2, 8),
        H200,
        "beyond 64 spills",
    ),
    (
        "align_operands",
        LINEAR,
        replace(TILE, align_operands="copy"),
        H200,
        "both operands are aligned",
    ),
    (
        "align_operands",
        INT8,
        replace(MIXED, align_operands="copy"),
        H200,
        "operands of mixed are not copied",
    ),
    (
        "align_operands",
        replace(GATED, a=replace(GATED.a, alignment=1)),
        replace(SPLIT, align_operands="copy"),
        H200,
        "several weights",
    ),
    ("blocks", LINEAR, replace(TILE, block_n=192), H200, "not a power of two"),
    ("blocks", LINEAR, replace(TILE, num_warps=12), H200, "not a power of two"),
    ("blocks", LINEAR, replace(TILE, num_warps=32), H200, "more than 16"),
    ("blocks", DECODE, replace(GEMV, num_stages=300), H200, "more than 16"),
    ("blocks", LINEAR, replace(TILE, group_m=1 << 30), H200, "more than 1024"),
    ("mma", DECODE, replace(SPLIT, block_m=8), H200, "tensor cores need 16"),
    ("mma", DECODE, replace(SPLIT, block_k=8), H200, "tensor cores need 16"),
    ("mma", LINEAR, replace(TILE, block_n=512), H200, "at most 256"),
    ("mma", INT8, replace(MIXED, block_k=16), H200, "tensor cores need 32"),
    ("mma", GATED, replace(SPLIT, block_n=16, swap_ab=False), H200, "tensor cores need 32"),
    ("warpgroups", LINEAR, replace(TILE, block_m=64), H200, "2 warpgroups need 128 rows"),
    ("warpgroups", LINEAR, replace(SPECIALIZED, block_m=64), H200, "2 warpgroups need 128 rows"),
    ("warpgroups", LINEAR, replace(TILE, num_warps=2), H200, "whole groups of four"),
    (
        "warpgroups",
        GemmProblem.contiguous("int_mm", 512, 512, 512, "int8", layouts="rr"),
        replace(TILE, block_n=128, block_k=128),
        H200,
        "K contiguous only",
    ),
    ("tma_alignment", ODD, TILE, H200, "aligned to 2 bytes"),
    (
        "tma_alignment",
        replace(LINEAR, a=replace(LINEAR.a, strides=(8192, 2))),
        TILE,
        H200,
        "no contiguous",
    ),
    (
        "tma_alignment",
        replace(LINEAR, a=replace(LINEAR.a, alignment=4)),
        TILE,
        H200,
        "aligned to 8 bytes",
    ),
    ("tma_alignment", replace(LINEAR, a=replace(LINEAR.a, strides=(0, 1))), TILE, H200, "overlap"),
    ("capability", LINEAR, TILE, A100, "TMA needs compute capability 9.0, and this is 8.0"),
    ("capability", DECODE, replace(GEMV, pdl=True), L4, "dependent launch needs"),
    (
        "capability",
        LINEAR,
        GemmConfig("cp_async", 128, 128, 32, 2, 8),
        replace(A100, capability=(7, 5)),
        "cp_async needs compute capability 8.0",
    ),
    ("warp_specialization", LINEAR, replace(SPECIALIZED, num_warps=8), H200, "needs 4 warps"),
    ("flags", LINEAR, replace(SPECIALIZED, flatten=True), H200, "does not flatten"),
    ("flags", LINEAR, replace(TILE, warp_specialize=True), H200, "only persistent_tma_ws"),
    (
        "flags",
        LINEAR,
        replace(SPECIALIZED, warp_specialize=False),
        H200,
        "persistent_tma_ws is warp",
    ),
    ("flags", LINEAR, replace(TILE, tma=False), H200, "always loads by TMA"),
    ("flags", DECODE, replace(GEMV, tma=True), H200, "never loads by TMA"),
    ("flags", DECODE, replace(SPLIT, flatten=True), H200, "does not flatten"),
    ("flags", DECODE, replace(GEMV, swap_ab=True), H200, "does not swap"),
    ("flags", LINEAR, replace(TILE, pdl=True), H200, "dependent launch"),
    ("split_k", LINEAR, replace(TILE, split_k=2), H200, "does not split K"),
    ("split_k", LINEAR, replace(TILE, fused_split_k=True), H200, "does not reduce splits"),
    ("split_k", DECODE, replace(SPLIT, split_k=1, fused_split_k=True), H200, "no splits to reduce"),
    ("split_k", DECODE, replace(SPLIT, split_k=65), H200, "without work"),
    ("split_k", DECODE, replace(SPLIT, split_k=63), H200, "without work"),
    ("pipeline", DECODE, replace(SPLIT, split_k=32), H200, "4 stages are more than the 2 steps"),
    (
        "dtype",
        replace(LINEAR, a=replace(LINEAR.a, dtype="float16")),
        TILE,
        H200,
        "is not supported",
    ),
    ("dtype", GemmProblem.contiguous("mm", 64, 64, 64, "float64"), TILE, H200, "is not supported"),
    ("dtype", WIDE_ROWS, SPLIT, H200, "mm of float32 and bfloat16 is not supported"),
    (
        "dtype",
        GemmProblem.contiguous("scaled", 512, 512, 512, "float8_e4m3fn"),
        GemmConfig("cp_async", 128, 128, 64, 2, 8),
        A100,
        "has no tensor cores for fp8",
    ),
    (
        "dtype",
        replace(INT8, b=replace(INT8.b, dtype="int32", alignment=1)),
        MIXED,
        H200,
        "dequantized",
    ),
    ("dtype", GemmProblem.contiguous("mm", 512, 512, 512, "float32"), TILE, H200, "tf32"),
    ("operation", GemmProblem.contiguous("bmm", 64, 64, 64, batch=2), TILE, H200, "support bmm"),
    ("operation", NORMALIZED, SPECIALIZED, H200, "no prologue to normalize"),
    (
        "operation",
        GemmProblem.contiguous("bmm", 512, 512, 512, batch=2, parts=(256, 256)),
        replace(TILE, template="bmm_persistent"),
        H200,
        "takes one weight",
    ),
    ("padding", replace(LINEAR, n=100), TILE, H200, "block_n is 256 for a size of 100"),
    ("padding", replace(LINEAR, k=16), TILE, H200, "block_k is 64 for a size of 16"),
    ("padding", DECODE, replace(SPLIT, block_m=32), H200, "block_m is 32 for a size of 1"),
    (
        "padding",
        GemmProblem.contiguous("mm", 128, 256, 64, parts=(64, 64, 128)),
        TILE,
        H200,
        "block_n is 256 for a size of 128",
    ),
    ("gemv", replace(DECODE, m=9), replace(GEMV, block_m=16), H200, "M up to 8, and M is 9"),
    ("gemv", replace(DECODE, m=8), replace(GEMV, block_m=4), H200, "all 8 rows in one tile"),
    ("gemv", DECODE, replace(GEMV, block_n=128), H200, "64 and 128 are free"),
    ("direct", INT8, DIRECT, H200, "up to 8 rows"),
    ("direct", replace(INT8, m=8), replace(DIRECT, block_m=16), H200, "in tiles of 16"),
    ("direct", replace(INT8, m=8), replace(DIRECT, block_n=128), H200, "by 128"),
    (
        "direct",
        replace(INT8, m=8),
        replace(DIRECT, block_k=1024),
        H200,
        "one or two loads of each of 4",
    ),
    ("words", replace(INT8, m=8, k=4096 + 256), DIRECT, H200, "no whole number of steps of 512"),
    ("words", replace(INT8, m=8), replace(DIRECT, split_k=3), H200, "for every split"),
    (
        "words",
        replace(INT8, m=8, b=replace(INT8.b, dtype="float8_e5m2")),
        DIRECT,
        H200,
        "loads integers",
    ),
    ("words", replace(INT8, m=8, b=replace(INT8.b, alignment=8)), DIRECT, H200, "16-byte aligned"),
    ("words", replace(INT8, m=8, a=replace(INT8.a, alignment=4)), DIRECT, H200, "16-byte aligned"),
    (
        "words",
        replace(INT4, m=8, prologue=Prologue(dequant=Dequant("group", 64))),
        DIRECT,
        H200,
        "ends within a load",
    ),
    (
        "words",
        replace(INT4, m=8, prologue=Prologue(dequant=Dequant("group", 128, zero_points=True))),
        DIRECT,
        H200,
        "one zero point for all of b",
    ),
    ("words", INT8, replace(STATIONARY, split_k=3), H200, "for every split"),
    ("stationary", replace(INT8, m=17), STATIONARY, H200, "up to 16 rows"),
    ("stationary", INT8, replace(STATIONARY, block_m=8), H200, "in tiles of 8"),
    ("stationary", replace(INT8, m=8), replace(STATIONARY, block_m=32), H200, "in tiles of 32"),
    ("stationary", INT8, replace(STATIONARY, block_n=40), H200, "not a multiple of the 16"),
    ("stationary", INT8, replace(STATIONARY, block_n=528), H200, "16 rows by 1024 columns"),
    ("stationary", INT8, replace(STATIONARY, block_k=128, split_k=32), H200, "less than a load"),
    ("stationary", INT8, replace(STATIONARY, block_k=4096), H200, "128 registers a thread"),
    ("stationary", INT8, replace(STATIONARY, block_k=1024), H200, "not 2 steps of 1024"),
    ("stationary", INT8, replace(STATIONARY, fused_split_k=False), H200, "in the same launch"),
    (
        "stationary",
        replace(INT8, parts=(INT8.n // 2,) * 2, epilogue=Epilogue(gated=True)),
        STATIONARY,
        H200,
        "not a multiple of the 32",
    ),
    (
        "scale_groups",
        replace(INT8, prologue=Prologue(dequant=Dequant("group", 96))),
        MIXED,
        H200,
        "groups of 96",
    ),
    ("tma_store", DECODE, replace(SPLIT, tma_store=True), H200, "does not store by TMA"),
    (
        "tma_store",
        replace(LINEAR, n=4095),
        replace(TILE, tma_store=True),
        H200,
        "not a multiple of 16 bytes",
    ),
    (
        "tma_store",
        replace(LINEAR, parts=(7168,) * 2),
        replace(TILE, tma_store=True),
        H200,
        "one fused weight",
    ),
    ("tma_store", LINEAR, replace(TILE, tma_store=True, swap_ab=True), H200, "are transposed"),
    ("stream_k", DECODE, replace(SPLIT, stream_k=True), H200, "does not support stream-K"),
    ("stream_k", LINEAR, replace(TILE, stream_k=True, flatten=True), H200, "whole tiles"),
    ("stream_k", GATED, replace(TILE, stream_k=True, flatten=False), H200, "which two CTAs share"),
    ("quantized", INT4, MIXED, H200, "swapped operands"),
    ("quantized", INT4, GEMV, H200, "no 4-bit weights"),
    (
        "quantized",
        replace(INT8, m=1, b=replace(INT8.b, dtype="uint8")),
        GEMV,
        H200,
        "does not subtract",
    ),
    ("quantized", replace(INT4, k=4095), PLAIN, H200, "words of two"),
    ("quantized", replace(INT4, a=replace(INT4.a, alignment=1)), PLAIN, H200, "words of two"),
    (
        "dtype",
        replace(INT8, b=replace(INT8.b, dtype="float8_e5m2")),
        MIXED,
        A100,
        "does not convert",
    ),
    ("normalization", NORMALIZED, TILE, H200, "more than 64 rows"),
    ("normalization", WEIGHTED_HALF, replace(TILE, block_m=64), H200, "overflow float16"),
    (
        "split_k",
        replace(DECODE, prologue=Prologue(RowNorm("rms"))),
        SPLIT,
        H200,
        "which no split has",
    ),
    ("split_k", GATED, SPLIT, H200, "the gate needs"),
    (
        "reductions",
        replace(DECODE, epilogue=Epilogue(reductions=1)),
        SPLIT,
        H200,
        "splits are reduced",
    ),
    (
        "reductions",
        replace(DECODE, epilogue=Epilogue(reductions=2)),
        TILE,
        H200,
        "the only supported reduction",
    ),
    (
        "reductions",
        replace(LINEAR, epilogue=Epilogue(reductions=1)),
        replace(TILE, template="persistent_tma_ws"),
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
        results = constraint.check(problem, config, on)
        assert results is not None
        assert reason in results
        assert results in why_not(problem, config, on)
        assert not legal(problem, config, on)

    def test_every_constraint_has_an_example_and_a_meaning(self) -> None:
        assert {name for name, *_ in REFUSED} == set(CONSTRAINTS)
        assert all(value.meaning for value in CONSTRAINTS.values())
        assert all(value.templates <= set(TEMPLATES) for value in CONSTRAINTS.values())

    def test_atomics_are_refused_if_results_are_deterministic(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        atomic = {**TEMPLATES, "splitk": replace(TEMPLATES["splitk"], atomics=True)}
        for module in (config_module, constraints_module):
            monkeypatch.setattr(module, "TEMPLATES", atomic)
        deterministic = replace(DECODE, deterministic=True)
        assert legal(DECODE, SPLIT, H200)
        assert legal(deterministic, replace(SPLIT, split_k=1), H200)
        assert any("atomics" in reason for reason in why_not(deterministic, SPLIT, H200))

    @pytest.mark.parametrize("config", [SPLIT, replace(TILE, stream_k=True, flatten=False)])
    def test_k_is_not_split_where_torch_does_not_allow_it(self, config: GemmConfig) -> None:
        flag = "-allow_bf16_reduced_precision_reduction"
        plain = DECODE if config is SPLIT else LINEAR
        assert legal(plain, config, H200)
        assert legal(replace(plain, math_flags=flag), config, H200)
        whole = replace(plain, math_flags=f"{flag},{flag}_split_k")
        assert any("does not allow" in reason for reason in why_not(whole, config, H200))
        assert legal(whole, replace(config, split_k=1, stream_k=False), H200)

    def test_only_matmul_flags_that_are_set_change_keys(self) -> None:
        assert "math_flags" not in LINEAR.to_json()
        freed = replace(LINEAR, math_flags="allow_fp16_accumulation")
        assert freed.key != LINEAR.key
        assert GemmProblem.from_json(freed.to_json()) == freed
        assert GemmProblem.from_json(LINEAR.to_json()) == LINEAR

    @pytest.mark.parametrize("copies", [False, True])
    def test_layer_norm_takes_additional_shared_memory(
        self, monkeypatch: pytest.MonkeyPatch, copies: bool
    ) -> None:
        """What Triton 3.7 and 3.8 allocate, as compiled."""
        monkeypatch.setattr(_compat, "triton_copies_register_operand", lambda: copies)
        standardized = replace(LINEAR, prologue=Prologue(RowNorm("layer", 2)))
        allocated = {64: (131_840, 148_224), 32: (41_344, 41_344)}
        for config in (
            GemmConfig("cp_async", 128, 128, 64, 4, 8),
            GemmConfig("cp_async", 128, 64, 32, 4, 8),
        ):
            needed = config.shared_memory(standardized)
            assert needed >= allocated[config.block_k][copies]
            one = config.block_m * config.block_k * 2 if config.block_k == 64 else 0
            stage_bytes = config.stage_bytes(standardized) + 2 * 2 * config.block_k
            plain = config.num_stages * stage_bytes
            assert needed == plain + copies * one

    @given(problems(), configs(), devices())
    @examples(200)
    def test_legal_configurations_have_no_reason(
        self, problem: GemmProblem, config: GemmConfig, on: Device
    ) -> None:
        reasons = why_not(problem, config, on)
        assert legal(problem, config, on) == (not reasons)
        assert all(reasons)
