"""The kernels that are taken without measuring, against all measurements of such GEMMs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from unittest import mock

import pytest
import torch

from benchmarks.gemm import layer_problems
from inductor_ext.autotune import decide, default_choice, results_db
from inductor_ext.autotune.decision import STOCK, Decision
from inductor_ext.autotune.results import TuningResult
from inductor_ext.settings import Settings
from inductor_ext.templates.device import KNOWN
from inductor_ext.templates.fused_ops import Dequant, Epilogue, Prologue, RowNorm
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import EpilogueInput
from inductor_ext.templates.triton import ranking
from inductor_ext.templates.triton.config import GemmConfig
from test.support import kernel_compiler
from test.support.kernel_cases import Case

DEVICES = {device.name: device for device in KNOWN}
H100 = DEVICES["NVIDIA H100 80GB HBM3"]


def _shipped(name: str) -> list[TuningResult]:
    text = (results_db.TABLES / f"{name}.json").read_text()
    return [TuningResult.from_json(entry) for entry in json.loads(text)["entries"]]


def _measure(entries: Iterable[TuningResult]) -> tuple[list[float], int]:
    """Return the measured speedups of the chosen kernels, and how many were not measured."""
    speedups, unknown = [], 0
    for entry in entries:
        choice = default_choice.choose(entry.problem, DEVICES[entry.environment.device])
        times = {timing.config: timing.microseconds for timing in entry.timings}
        stock, chosen = times.get(None), times.get(choice.config)
        if choice.config is None or stock is None:
            continue
        if chosen is None:
            unknown += 1
        else:
            speedups.append(stock / chosen)
    return speedups, unknown


@pytest.mark.parametrize(
    ("source", "least"),
    [
        ("layers of nvidia-h100-80gb-hbm3", 690),
        ("layers of nvidia-h200", 180),
        ("nvidia-h100-80gb-hbm3", 70),
        ("nvidia-h200", 70),
    ],
)
def test_no_kernel_is_slower_than_inductor(source: str, least: int) -> None:
    """The rules come from the first source; the others were not used for them."""
    layers = source.removeprefix("layers of ")
    entries = (
        _shipped(source)
        if layers == source
        else layer_problems.read(layer_problems.MEASUREMENTS / f"{layers}.json.gz")
    )
    speedups, unknown = _measure(entries)
    assert len(speedups) >= least
    assert unknown <= 0.05 * len(speedups)
    assert min(speedups) >= 0.95
    assert sum(speedup < 0.98 for speedup in speedups) <= 0.005 * len(speedups)


LINEAR = GemmProblem.contiguous("mm", 1, 2048, 2048)
GATED = GemmProblem.contiguous(
    "mm", 8, 8192, 2048, parts=(4096, 4096), epilogue=Epilogue(gated=True)
)


INT8 = GemmProblem.contiguous(
    "mixed", 8, 4096, 4096, b_dtype="int8", prologue=Prologue(dequant=Dequant("column"))
)
UNALIGNED = GemmProblem.contiguous("mm", 999, 1003, 1536)
BATCH = GemmProblem.contiguous("bmm", 49, 49, 32, batch=96, layouts="rr")


@pytest.mark.parametrize(
    "problem",
    [LINEAR, GATED, INT8, UNALIGNED, BATCH],
    ids=["linear", "gated", "int8", "unaligned", "batch"],
)
def test_choices(problem: GemmProblem) -> None:
    choice = default_choice.choose(problem, H100)
    assert choice.config is not None
    assert choice.origin == "predicted"
    assert choice.timings == ()
    assert choice.saving is not None
    assert choice.saving >= 0


@pytest.mark.parametrize(
    "problem",
    [
        dataclasses.replace(LINEAR, m=65),
        GemmProblem.contiguous("mm", 16, 2048, 2048),
        GemmProblem.contiguous("mm", 1, 2048, 2048, "float32"),
        GemmProblem.contiguous("mm", 1, 2048, 2048, layouts="rr"),
        GemmProblem.contiguous("bmm", 4, 128, 128, batch=8),
        dataclasses.replace(BATCH, m=1),
        dataclasses.replace(INT8, m=65),
        dataclasses.replace(UNALIGNED, m=8, k=1003),
        GemmProblem.contiguous("mm", 4, 2048, 2048, prologue=Prologue(RowNorm("layer", 2))),
        GemmProblem.contiguous(
            "addmm", 32, 2048, 2048, epilogue=Epilogue((EpilogueInput("bfloat16", "row"),), 1)
        ),
    ],
)
def test_kinds_that_are_not_known_to_be_faster(problem: GemmProblem) -> None:
    assert default_choice.choose(problem, H100) == STOCK


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU instead")
def test_kernels_compile_for_the_gpu() -> None:
    """They are used without having been compiled before; a sample of all that were measured."""
    pytest.importorskip("triton")
    entries = layer_problems.read(layer_problems.MEASUREMENTS / "nvidia-h100-80gb-hbm3.json.gz")
    compiled = 0
    for entry in entries[::60]:
        problem = entry.problem
        config = default_choice.choose(problem, H100).config
        if isinstance(config, GemmConfig):
            epsilon = {"EPSILON": 1e-5} if problem.norm is not None else {}
            activation = {"ACTIVATION": "'silu'"} if problem.epilogue.gated else {}
            case = Case(problem, config, {**epsilon, **activation})
            kernel = kernel_compiler.compiled(case)
            assert kernel.shared <= H100.shared_memory
            assert kernel.spills == 0
            compiled += 1
    assert compiled >= 10


def test_configurations_are_ranked_at_most_once() -> None:
    default_choice.choose.cache_clear()
    with mock.patch.object(ranking, "rank", wraps=ranking.rank) as rank:
        for m in (65, 1024):
            default_choice.choose(dataclasses.replace(LINEAR, m=m), H100)
        assert not rank.called
        for _ in range(2):
            default_choice.choose(LINEAR, H100)
            default_choice.explain_stock(LINEAR, H100)
        assert rank.call_count == 1


def test_gpus_that_were_not_measured() -> None:
    for name in ("NVIDIA A100-SXM4-80GB", "NVIDIA L4"):
        assert default_choice.choose(GATED, DEVICES[name]) == STOCK


def _decide(
    problem: GemmProblem, *, tune: results_db.Tune | None = None, predict: bool = True
) -> Decision:
    settings = Settings(tuning_cache=False)
    return decide.decide([problem], H100, settings, tune, predict=predict)[problem]


def test_only_what_has_no_result_is_predicted() -> None:
    assert _decide(GATED) == default_choice.choose(GATED, H100)
    assert _decide(GATED, predict=False) == STOCK
    measured = Decision(None, "measured")
    assert _decide(GATED, tune=lambda problems: dict.fromkeys(problems, measured)) == measured
    with decide.force_config(lambda problem: None):
        assert _decide(GATED) == Decision(None, "forced")
    (entry, *_) = (entry for entry in _shipped("nvidia-h100-80gb-hbm3") if entry.problem.m == 1)
    assert _decide(entry.problem).origin == "table"
