"""Flags for numerics: their values, their scope, and that each compile obeys them."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor_config

from inductor_ext import numerics
from inductor_ext.autotune import reference
from inductor_ext.templates.problem import GemmProblem

MATMUL: Any = torch.backends.cuda.matmul

FLAGS = {
    "allow_fp16_accumulation": True,
    "allow_fp16_reduced_precision_reduction": False,
    "allow_bf16_reduced_precision_reduction": False,
}
"""Other values than the defaults."""

has_batch_invariant = pytest.mark.skipif(
    not hasattr(inductor_config, "batch_invariant"), reason="torch 2.13 on has batch_invariant"
)
has_libdevice = pytest.mark.skipif(
    not hasattr(inductor_config.eager_numerics, "use_pytorch_libdevice"),
    reason="torch 2.12 on has use_pytorch_libdevice",
)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before, determinism = numerics.matmul_flags(), numerics.determinism()
    yield
    assert numerics.matmul_flags() == before
    assert numerics.determinism() == determinism


def in_mode(monkeypatch: pytest.MonkeyPatch, mode: object) -> None:
    """Stand-in for torch 2.15's config.numerics."""
    flags = types.SimpleNamespace(
        emulate_precision_casts=False,
        eager_numerics=types.SimpleNamespace(),
        deterministic=False,
        numerics=mode,
    )
    monkeypatch.setattr(numerics, "_config", lambda: flags)


class TestInductorsFlags:
    def test_all_flags_are_off_by_default(self) -> None:
        assert not numerics.has_exact_pointwise()
        assert not numerics.uses_cuda_math()
        assert not numerics.is_batch_invariant()
        assert not numerics.has_strict_reductions()
        assert not numerics.is_deterministic()
        assert numerics.gemm_obstacle() is None

    def test_exact_rounding_implies_cuda_libdevice(self) -> None:
        with inductor_config.patch(emulate_precision_casts=True):
            assert numerics.has_exact_pointwise()
            assert numerics.uses_cuda_math()
            assert numerics.gemm_obstacle() is None

    @has_libdevice
    def test_cuda_libdevice_does_not_imply_exact_rounding(self) -> None:
        with inductor_config.patch({"eager_numerics.use_pytorch_libdevice": True}):
            assert numerics.uses_cuda_math()
            assert not numerics.has_exact_pointwise()

    @has_batch_invariant
    def test_batch_invariance_implies_determinism(self) -> None:
        with inductor_config.patch(batch_invariant=True):
            assert numerics.is_batch_invariant()
            assert numerics.is_deterministic()
            assert "batch_invariant" in str(numerics.gemm_obstacle())

    def test_both_deterministic_modes_count(self) -> None:
        with inductor_config.patch(deterministic=True):
            assert numerics.is_deterministic()
        with numerics.with_determinism((True, True, True)):
            assert not inductor_config.deterministic
            assert numerics.is_deterministic()

    @pytest.mark.parametrize(
        ("mode", "pointwise", "reductions"),
        [
            ("default", False, False),
            (None, False, False),
            ("strict_pointwise", True, False),
            ("strict_reduction", False, True),
            ("strict", True, True),
            ("stricter", True, True),
            (types.SimpleNamespace(value="strict_reduction"), False, True),
        ],
    )
    def test_modes(
        self, monkeypatch: pytest.MonkeyPatch, mode: object, pointwise: bool, reductions: bool
    ) -> None:
        in_mode(monkeypatch, mode)
        assert numerics.has_exact_pointwise() == pointwise
        assert numerics.has_strict_reductions() == reductions
        assert numerics.uses_cuda_math() == (pointwise or reductions)
        assert (numerics.gemm_obstacle() is not None) == reductions

    def test_a_reduction_has_the_block_of_its_mode(self) -> None:
        for rblock, strict in ((None, False), (1024, True)):
            features = types.SimpleNamespace(strict_reduction_rblock=lambda rblock=rblock: rblock)
            assert numerics.has_strict_reductions(features) == strict
        assert not numerics.has_strict_reductions(types.SimpleNamespace())

    def test_they_are_in_inductors_cache_key(self) -> None:
        """So that the extension's key does not need them."""
        saved = inductor_config.save_config_portable()
        names = ["emulate_precision_casts", "deterministic", "batch_invariant", "numerics"]
        names.append("eager_numerics.use_pytorch_libdevice")
        ignored = tuple(inductor_config._cache_config_ignore_prefix)
        for name in names:
            if name in inductor_config._config:
                assert name in saved
                assert not name.startswith(ignored)


class TestMatmulFlags:
    def test_defaults_are_none(self) -> None:
        assert numerics.matmul_flags() is None
        assert numerics.matmul_flags("float16") is None

    @pytest.mark.parametrize("name", FLAGS)
    def test_only_those_of_the_dtype_count(self, name: str) -> None:
        own, other = ("float16", "bfloat16") if "fp16" in name else ("bfloat16", "float16")
        text = name if FLAGS[name] else f"-{name}"
        with numerics.with_matmul_flags(text):
            assert getattr(MATMUL, name) == FLAGS[name]
            assert numerics.matmul_flags() == numerics.matmul_flags(own) == text
            assert numerics.matmul_flags(other) is None
            assert numerics.matmul_flags("float32") is None
        assert getattr(MATMUL, name) != FLAGS[name]

    def test_a_forbidden_split_k_is_set_and_reported(self) -> None:
        flag = "allow_bf16_reduced_precision_reduction"
        text = f"-{flag},-{flag}_split_k"
        with numerics.with_matmul_flags(text, "bfloat16"):
            assert numerics.matmul_flags("bfloat16") == text
            assert not getattr(MATMUL, f"{flag}_split_k")

    def test_other_flags_are_reset_inside_and_restored(self) -> None:
        with numerics.with_matmul_flags("allow_fp16_accumulation"):
            with numerics.with_matmul_flags("-allow_bf16_reduced_precision_reduction", "bfloat16"):
                assert MATMUL.allow_fp16_accumulation
            with numerics.with_matmul_flags(None, "float16"):
                assert not MATMUL.allow_fp16_accumulation
            assert numerics.matmul_flags() == "allow_fp16_accumulation"


def test_determinism_is_set_and_restored() -> None:
    before = numerics.determinism()
    for flags in ((True, False, False), (True, True, True), (False, False, True)):
        with numerics.with_determinism(flags):
            assert numerics.determinism() == flags
        assert numerics.determinism() == before


def test_reference_programs_use_the_flags_of_the_problem() -> None:
    plain = GemmProblem.contiguous("mm", 16, 64, 64, "float16")
    freed = GemmProblem.contiguous(
        "mm", 16, 64, 64, "float16", math_flags="allow_fp16_accumulation"
    )
    with reference.precision(freed):
        assert numerics.matmul_flags() == freed.math_flags
        # Also if the process has other flags than the problem.
        with reference.precision(plain):
            assert numerics.matmul_flags() is None
        assert numerics.matmul_flags() == freed.math_flags
    assert numerics.matmul_flags() is None
