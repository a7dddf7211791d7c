"""Flags for numerics on a CUDA device: bits of results, and tuning under the flags."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch.nn import functional as F

import inductor_ext
from inductor_ext import config, events, numerics
from inductor_ext.autotune import inductor_benchmark, subprocess_runner, tuner
from inductor_ext.hooks import activate, compile_fx, scope
from inductor_ext.settings import Settings
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.records import MatmulRecord, TuningRecord
from test.support import gpu_util

pytestmark = pytest.mark.gpu

Function = Callable[..., torch.Tensor]

DECODE = GemmProblem.contiguous("mm", 16, 4096, 4096)


def norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], w[0], w[1])


def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.gelu(x @ w.t())


def results(function: Function, backend: str, *inputs: torch.Tensor) -> torch.Tensor:
    torch._dynamo.reset()
    result: torch.Tensor = torch.compile(function, backend=backend, dynamic=False)(*inputs)
    return result


@pytest.mark.skipif(
    not hasattr(inductor_config, "batch_invariant"), reason="torch 2.13 on has batch_invariant"
)
@pytest.mark.parametrize("function", [norm, linear])
@pytest.mark.parametrize("rows", [1, 32])
def test_under_batch_invariance_bits_are_those_of_inductor(function: Function, rows: int) -> None:
    """Each row's bits are as invariant as with Inductor (default)."""
    generator = torch.Generator("cuda").manual_seed(0)
    x, w = (
        torch.randn(count, 4096, device="cuda", dtype=torch.bfloat16, generator=generator)
        for count in (32, 128)
    )
    options = {"batch_invariant": True, "max_autotune_gemm": True, "force_disable_caches": True}
    with inductor_config.patch(options):
        stock, ours = (
            results(function, name, x[:rows].clone(), w) for name in ("inductor", "inductor_ext")
        )
    # Inductor may measure and choose a Triton template for a matmul, in either compile.
    if function is norm:
        assert torch.equal(ours, stock)
    else:
        torch.testing.assert_close(ours, stock)


@pytest.mark.skipif(
    not hasattr(inductor_config, "batch_invariant"), reason="torch 2.13 on has batch_invariant"
)
def test_norm_rows_have_the_same_bits_for_any_count() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    x, w = (
        torch.randn(count, 4096, device="cuda", dtype=torch.bfloat16, generator=generator)
        for count in (32, 2)
    )
    with inductor_config.patch(batch_invariant=True, force_disable_caches=True):
        stock = [results(norm, "inductor", x[:rows].clone(), w)[0] for rows in (1, 32)]
        if not torch.equal(*stock):
            pytest.skip("not of Inductor (default) either")
        one, many = (results(norm, "inductor_ext", x[:rows].clone(), w)[0] for rows in (1, 32))
    assert torch.equal(one, many)


def test_results_with_float16_accumulators_are_separate(tmp_path: Path) -> None:
    if not hasattr(torch.backends.cuda.matmul, "allow_fp16_accumulation"):
        pytest.skip("this torch has no allow_fp16_accumulation")
    x = torch.randn(512, 1024, device="cuda", dtype=torch.float16)
    w = torch.randn(1024, 1024, device="cuda", dtype=torch.float16) / 32

    def measured(flags: str | None) -> tuple[list[Any], str, torch.Tensor]:
        torch._dynamo.reset()
        with (
            numerics.with_matmul_flags(flags, "float16"),
            inductor_ext.activate(tuning_cache_dir=str(tmp_path)),
            events.capture(TuningRecord) as tuned,
            events.capture(MatmulRecord) as matmuls,
        ):
            compiled = torch.compile(torch.mm, options={"max_autotune": True}, dynamic=False)
            result = compiled(x, w)
        (matmul,) = matmuls
        return [case.problem.math_flags for case in tuned], matmul.origin, result

    exact = x.double() @ w.double()
    with gpu_util.compiling():
        for flags, expected in (
            (None, [None]),
            ("allow_fp16_accumulation", ["allow_fp16_accumulation"]),
            (None, []),
            ("allow_fp16_accumulation", []),
        ):
            tuned, origin, result = measured(flags)
            assert tuned == expected
            assert origin == ("measured" if expected else "cache")
            assert (result.double() - exact).norm() < 1e-2 * exact.norm()


def test_the_deterministic_mode_holds_in_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without CUBLAS_WORKSPACE_CONFIG cuBLAS is not called there, and nothing can be compared."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    problem = dataclasses.replace(DECODE, deterministic=True)
    compile_fx.install_hooks(activate.requested)
    subprocess_runner.close_workers()
    try:
        with (
            inductor_config.patch(force_disable_caches=True, deterministic=True),
            numerics.with_determinism((True, False, False)),
            scope.compile_scope(config.snapshot()),
        ):
            decision = tuner.tune(
                [problem],
                gpu_util.device(),
                inductor_benchmark.cuda_bench,
                Settings(),
                isolated=True,
            )[problem]
    finally:
        subprocess_runner.close_workers()
    assert decision.origin == "measured"
    assert decision.microseconds(None) is not None, [timing.failure for timing in decision.timings]
