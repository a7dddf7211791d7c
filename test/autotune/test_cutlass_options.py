"""Inductor's CUTLASS settings, and which kernels they allow."""

from __future__ import annotations

from typing import Any

import pytest
import torch._inductor.config as inductor_config

from inductor_ext import exc
from inductor_ext.autotune.cutlass_options import Options, current
from inductor_ext.templates.cutlass import nvcc_build
from inductor_ext.templates.cutlass.config import Filter
from inductor_ext.templates.cutlass.epilogue import identity
from inductor_ext.templates.cutlass.source import source
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.triton.config import GemmConfig
from test.support.gemm_strategies import device

H200 = device("NVIDIA H200")
LINEAR = GemmProblem.contiguous("mm", 4096, 14336, 4096)
TUNED = {"max_autotune": True, "max_autotune_gemm_backends": "ATEN, cutlass"}


def options_under(**settings: Any) -> Options:
    """Options under settings of Inductor; `__` stands for the dot in a name."""
    patches = {name.replace("__", "."): value for name, value in settings.items()}
    with inductor_config.patch({**TUNED, **patches}):
        return current()


def names(options: Options, problem: GemmProblem = LINEAR) -> list[str]:
    return [config.name for config, _ in options.rank(problem, H200)]


def test_two_kernels_are_built_by_default() -> None:
    assert len(names(options_under())) == 2
    assert (
        names(options_under(cutlass__cutlass_max_profiling_configs=1)) == names(options_under())[:1]
    )
    assert len(names(options_under(cutlass__cutlass_max_profiling_configs=7))) == 7


@pytest.mark.parametrize(
    "settings",
    [
        {"max_autotune_gemm_backends": "ATEN,TRITON"},
        {"max_autotune": False, "max_autotune_gemm": False},
        {"cutlass__cutlass_enabled_ops": "addmm,bmm"},
        {"cutlass__cutlass_max_profiling_configs": 0},
    ],
)
def test_no_kernels_without_the_cutlass_backend(settings: dict[str, Any]) -> None:
    assert names(options_under(**settings)) == []


@pytest.mark.parametrize("section", ["cutlass", "cuda"])
def test_small_matmuls_have_no_candidates(section: str) -> None:
    """Strictly below the threshold, by either name of the setting."""
    size = 256 * 256 * 256
    problem = GemmProblem.contiguous("mm", 256, 256, 256)
    for least, expected in ((size - 1, True), (size, True), (size + 1, False)):
        options = options_under(**{f"{section}__cutlass_backend_min_gemm_size": least})
        assert options.least == least
        assert options.covers(problem) == expected
        assert bool(names(options, problem)) == expected


def test_the_newer_setting_wins_if_both_are_set() -> None:
    both = {"cutlass__cutlass_backend_min_gemm_size": 7, "cuda__cutlass_backend_min_gemm_size": 9}
    assert options_under(**both).least == 7


def test_allow_and_deny_lists_match_kernel_names() -> None:
    only = names(options_under(cutlass__cutlass_op_allowlist_regex="pingpong"))
    assert only
    assert all("pingpong" in name for name in only)
    none = names(options_under(cutlass__cutlass_op_denylist_regex="cooperative|stream_k"))
    assert none == only
    with pytest.raises(exc.BadOptionError, match="cutlass_op_allowlist_regex"):
        options_under(cutlass__cutlass_op_allowlist_regex="(")


def test_operators_are_named_in_any_case() -> None:
    options = options_under(cutlass__cutlass_enabled_ops="MM, scaled_mm")
    assert options.covers(LINEAR)
    assert options.covers(GemmProblem.contiguous("scaled", 64, 64, 64, "float8_e4m3fn"))
    assert not options.covers(GemmProblem.contiguous("bmm", 64, 64, 64, batch=2))


def test_swizzles_are_limited_by_the_setting() -> None:
    def swizzles(*allowed: int) -> set[int]:
        options = options_under(cutlass__cutlass_max_profiling_swizzle_options=list(allowed))
        return {config.swizzle for config, _ in options.rank(LINEAR, H200)}

    assert swizzles(1, 2, 4, 8) == {8}
    assert swizzles(1, 2) == {2}
    assert swizzles(16) == {16}


def test_tma_only_and_instantiation_levels() -> None:
    unaligned = GemmProblem.contiguous("mm", 4096, 4095, 4096)
    assert names(options_under(), unaligned)
    assert names(options_under(cutlass__cutlass_tma_only=True), unaligned) == []
    wide = options_under(
        cutlass__cutlass_instantiation_level="9999",
        cutlass__cutlass_op_allowlist_regex="_2x2x1_",
    )
    assert wide.level == 9999
    assert len(names(wide)) == 2
    assert names(options_under(cutlass__cutlass_op_allowlist_regex="_2x2x1_")) == []


@pytest.mark.parametrize("section", ["cutlass", "cuda"])
def test_nvcc_gets_the_flags_of_inductors_settings(section: str) -> None:
    plain, fast = options_under(), options_under(**{f"{section}__use_fast_math": True})
    both = options_under(cutlass__use_fast_math=True, cutlass__enable_debug_info=True)
    assert (plain.flags, fast.flags) == ((), ("--use_fast_math",))
    assert both.flags == ("--use_fast_math", "-lineinfo")
    (config, _), *_ = both.rank(LINEAR, H200)
    result = source(config, identity("bfloat16"))
    for half in nvcc_build.nvcc_flags(result, "device"), nvcc_build.nvcc_flags(result, "host"):
        assert {"--use_fast_math", "-lineinfo"} <= set(half)
    # It is another kernel, which is used with these settings only.
    assert both.allows(config)
    assert not plain.allows(config)
    other = source(plain.rank(LINEAR, H200)[0][0], identity("bfloat16"))
    assert other.name != result.name
    assert nvcc_build.key(other) != nvcc_build.key(result)
    assert len({item.candidate_set for item in (plain, fast, both)}) == 3


def test_triton_kernels_need_the_triton_backend() -> None:
    tile = GemmConfig("splitk", 16, 32, 64, 2, 2)
    assert not options_under().allows(tile)
    assert options_under(max_autotune_gemm_backends="TRITON,CUTLASS").allows(tile)


def test_epilogue_fusion_follows_the_setting() -> None:
    assert not options_under().fuses
    assert options_under(cutlass__cutlass_epilogue_fusion_enabled=True).fuses
    assert Options().only == Filter()
