"""Decisions in compiles: when kernels use dependent launches, and which backends they need."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._inductor import config as inductor_config

from inductor_ext import config
from inductor_ext.autotune import decide, tuner
from inductor_ext.autotune.decision import Decision, Timing
from inductor_ext.hooks import scope

pytest.importorskip("triton")

from test.support import fake_cuda
from test.support.matmul_lowering import TILE, matrix

aten = torch.ops.aten


def test_stored_results_need_their_backend(tmp_path: Path) -> None:
    decision = Decision(TILE, "measured", (Timing(None, 100.0), Timing(TILE, 50.0)))

    def extension(**options: Any) -> bool:
        with scope.compile_scope(config.snapshot({"tuning_cache_dir": str(tmp_path)})):
            lowered = fake_cuda.lower(torch.mm, matrix(8, 64), matrix(64, 64), **options)
        return any("tl.dot" in kernel for kernel in lowered.kernels().values())

    with mock.patch.object(tuner, "tune", lambda result, *_, **__: dict.fromkeys(result, decision)):
        assert extension(max_autotune=True)
    for tunes in (True, False):
        for backends, expected in (("ATEN, triton", True), ("aten", False), ("ATEN,CPP", False)):
            options = {"max_autotune": tunes, "max_autotune_gemm_backends": backends}
            assert extension(**options) == expected


@pytest.mark.parametrize(
    ("options", "dependent"),
    [
        ({}, False),
        ({"triton__cudagraphs": True}, True),
        ({"triton__enable_pdl": True}, True),
        ({"use_static_cuda_launcher": False}, True),
    ],
    ids=["torch's launcher", "graphs", "asked for", "Triton's launcher"],
)
@pytest.mark.parametrize("measured", [False, True], ids=["", "measured"])
def test_dependent_launches_only_without_host_cost(
    options: dict[str, bool], dependent: bool, measured: bool
) -> None:
    tile = dataclasses.replace(TILE, pdl=measured)
    decision = Decision(tile, "measured", (Timing(None, 100.0), Timing(tile, 50.0)))
    decided = mock.patch.object(
        decide, "decide", lambda result, *_, **__: dict.fromkeys(result, decision)
    )
    with scope.compile_scope(config.snapshot({})), decided:
        lowered = fake_cuda.lower(
            lambda x, w: x @ w.t(), matrix(8, 64), matrix(64, 64), max_autotune=True, **options
        )
    (kernel,) = (kernel for kernel in lowered.kernels().values() if "tl.dot" in kernel)
    assert ("gdc_wait" in kernel) == dependent
    assert ("'launch_pdl': True" in lowered.code) == dependent


def test_cpp_launches_dependents() -> None:
    assert not decide.launches_dependents()
    with inductor_config.patch(cpp_wrapper=True):
        assert decide.launches_dependents()
