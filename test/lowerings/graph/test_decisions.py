"""Decisions of one compile among Triton, CUTLASS and Inductor (default)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from torch.nn import functional

from inductor_ext import config, events
from inductor_ext.autotune import cutlass_kernels, cutlass_options
from inductor_ext.autotune.decision import Decision, Timing
from inductor_ext.hooks import scope
from inductor_ext.templates import kernels
from inductor_ext.templates.cutlass import background_build
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.records import MatmulRecord
from inductor_ext.templates.triton import ranking
from test.support import fake_cuda
from test.support.cutlass_lowering import (
    FUSES,
    GRAPHS,
    H200,
    XW,
    Call,
    best,
    linear,
    lower,
    operations_of,
    plain,
)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="lowered on a stand-in for a GPU")


def product(*shapes: Any, **options: Any) -> set[bool]:
    """Whether the problems of a matmul have trees."""
    _, problems = lower(lambda _: None, lambda x, w: x @ w.t(), *linear(*shapes), **options)
    return {item.epilogue.tree is not None for item in problems}


@pytest.mark.parametrize("section", ["cutlass", "cuda"])
def test_small_matmuls_do_not_use_cutlass(section: str, calls: list[Call]) -> None:
    size = 512 * 384 * 256
    for least, expected in ((size - 1, 1), (size, 1), (size + 1, 0)):
        calls.clear()
        option = {f"{section}__cutlass_backend_min_gemm_size": least}
        lowered, _ = lower(best, lambda x, w: x @ w.t(), *linear(*XW), **option)
        assert len(calls) == expected
        assert lowered.code.count("extern_kernels.mm(") == 1 - expected


def test_trees_need_the_cutlass_backend() -> None:
    assert product(*XW) == {True, False}
    assert product(*XW, max_autotune_gemm_backends="ATEN,TRITON") == {False}
    assert product(*XW, cutlass__cutlass_enabled_ops="bmm") == {False}
    # A dynamic width may be unaligned.
    assert product((512, 256), ("n", 256)) == {False}


@pytest.mark.parametrize("name", ["bias and residual", "mixed", "sequence", "two outputs"])
def test_an_m_bucket_is_split_at_the_threshold(name: str, calls: list[Call]) -> None:
    function, (x, w, *others), _ = GRAPHS[name]
    known: dict[Any, str] = {512: "rows", 128: "rows"}
    inputs = [
        w if other is w else ([known.get(size, size) for size in other[0]], other[1])
        for other in (x, w, *others)
    ]
    lowered, problems = lower(
        best, function, *inputs, cutlass__cutlass_backend_min_gemm_size=100 * 384 * 256
    )
    with_trees = {item.m for item in problems if item.epilogue.tree is not None}
    assert min(with_trees) == 256
    assert max({item.m for item in problems} - with_trees) == 99
    (condition,) = {line for line in lowered.code.splitlines() if " <= 99" in line}
    assert condition
    # Both M buckets above use the same kernel, or one each.
    assert len({str(operations_of(call)) for call in calls}) == 1
    assert operations_of(calls[0])
    assert len(re.findall(r"extern_kernels\.(mm|addmm)\(", lowered.code)) == 1


class Tuned:
    """Simulated tuning that records its problems."""

    def __init__(self) -> None:
        self.asked: list[GemmProblem] = []

    def __call__(self, problems: Any, *_: Any, **__: Any) -> dict[GemmProblem, Decision]:
        self.asked += problems
        results = {}
        for problem in problems:
            candidates = cutlass_options.current().rank(problem, H200)
            configs = [config for config, _ in candidates] if problem.epilogue.tree else []
            timings = (Timing(None, 20.0), *(Timing(config, 10.0) for config in configs))
            chosen = configs[0] if configs else None
            results[problem] = Decision(chosen, "measured", timings)
        return results


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> Tuned:
    from inductor_ext.autotune import tuner

    result = Tuned()
    monkeypatch.setattr(tuner, "tune", result)
    return result


def compiled(
    function: Callable[..., Any], *inputs: Any, folder: Any = None, **options: Any
) -> fake_cuda.Lowered:
    """Lower a function with decisions from a folder and from simulated tuning."""
    settings = {"tuning_cache": folder is not None, "tuning_cache_dir": str(folder)}
    inductor_options = {**FUSES, "max_autotune": True, **options}
    with scope.compile_scope(config.snapshot(settings)):
        return fake_cuda.lower(function, *inputs, **inductor_options)


@pytest.mark.parametrize("denied", [False, True])
def test_lists_leave_only_or_none_of_pingpong(
    denied: bool, tuned: Tuned, calls: list[Call]
) -> None:
    name = "cutlass_op_denylist_regex" if denied else "cutlass_op_allowlist_regex"
    compiled(plain, *linear(*XW), **{f"cutlass__{name}": "pingpong"})
    assert [("pingpong" in call.config.name) for call in calls] == [not denied]


@pytest.mark.parametrize(
    "option",
    [
        {"cutlass__cutlass_op_denylist_regex": "."},
        {"cutlass__cutlass_max_profiling_configs": 0},
        {"cutlass__cutlass_enabled_ops": "addmm"},
    ],
)
def test_without_candidates_cutlass_is_not_probed(
    option: dict[str, Any], tuned: Tuned, calls: list[Call]
) -> None:
    lowered = compiled(
        plain, *linear(*XW), **{**option, "max_autotune_gemm_backends": "TRITON,CUTLASS"}
    )
    assert [item.epilogue.tree for item in tuned.asked] == [None]
    assert not calls
    assert "extern_kernels.mm(" in lowered.code
    # Inductor's CUTLASS kernels are not candidates either.
    assert lowered.choices in ((), (("mm",),))


def test_stored_results_are_used_without_max_autotune(
    tuned: Tuned, calls: list[Call], tmp_path: Any
) -> None:
    compiled(plain, *linear(*XW), folder=tmp_path)
    assert len(tuned.asked) == len(calls) == 1
    for options, expected in (
        ({"max_autotune": False}, 1),
        ({"max_autotune": False, "cutlass__cutlass_op_denylist_regex": "."}, 0),
        ({"max_autotune": False, "max_autotune_gemm_backends": "TRITON"}, 0),
        # Under other settings it is measured again.
        ({"cutlass__cutlass_max_profiling_configs": 5}, 1),
    ):
        calls.clear()
        compiled(plain, *linear(*XW), folder=tmp_path, **options)
        assert len(calls) == expected
    assert len(tuned.asked) == 2


@pytest.mark.usefixtures("repeated_warnings")
def test_without_nvcc_cutlass_results_are_not_used(
    tuned: Tuned,
    calls: list[Call],
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiled(plain, *linear(*XW), folder=tmp_path)
    calls.clear()
    tuned.asked.clear()
    monkeypatch.setattr(cutlass_kernels, "can_build", lambda: False)
    monkeypatch.setattr(
        cutlass_kernels, "prepare", lambda wanted, _: dict.fromkeys(wanted, "there is no nvcc")
    )
    both = {"max_autotune_gemm_backends": "TRITON,CUTLASS"}
    for _ in range(2):
        lowered = compiled(plain, *linear(*XW), folder=tmp_path)
        assert "extern_kernels.mm(" in lowered.code
    compiled(plain, *linear((256, 256), (384, 256)), folder=tmp_path, **both)
    assert [(item.m, item.epilogue.tree) for item in tuned.asked] == [(256, None)]
    assert not calls
    (warning,) = (message for message in caplog.messages if "there is no nvcc" in message)
    assert "falls back to Inductor (default)" in warning


def test_background_builds_are_measured_when_ready(
    tuned: Tuned, calls: list[Call], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: list[bool] = []
    monkeypatch.setattr(cutlass_kernels, "find_missing_tools", lambda: None)
    monkeypatch.setattr(
        background_build, "build_later", lambda sources, _: [] if there else list(sources)
    )
    settings = {"cutlass_background": True, "artifact_cache_dir": str(tmp_path)}
    both = {"max_autotune_gemm_backends": "TRITON,CUTLASS"}
    with config.patch(**settings):
        compiled(plain, *linear(*XW), folder=tmp_path, **both)
        assert not calls
        there.append(True)
        compiled(plain, *linear(*XW), folder=tmp_path, **both)
        assert len(calls) == 1
        # A stored decision also needs its built kernel.
        there.clear()
        calls.clear()
        compiled(plain, *linear(*XW), folder=tmp_path, **both)
    assert not calls
    assert [item.epilogue.tree is None for item in tuned.asked] == [True, False]


class GatesTuned(Tuned):
    """A fused gate saves `saved` of 100 us, a CUTLASS matmul with its epilogue 30 of 60 us."""

    def __init__(self, saved: float) -> None:
        super().__init__()
        self.saved = saved

    def __call__(self, problems: Any, *_: Any, **__: Any) -> dict[GemmProblem, Decision]:
        self.asked += problems
        return {problem: self.decision(problem) for problem in problems}

    def decision(self, problem: GemmProblem) -> Decision:
        chosen: kernels.Config | None = None
        inductor, extension = 50.0, 55.0
        if problem.epilogue.gated:
            ((chosen, _),) = ranking.rank(problem, H200, 1)
            inductor, extension = 100.0, 100.0 - self.saved
        elif problem.epilogue.tree:
            chosen = cutlass_options.current().rank(problem, H200)[0][0]
            inductor, extension = 60.0, 30.0
        timings = (Timing(None, inductor), *((Timing(chosen, extension),) if chosen else ()))
        return Decision(chosen, "measured", timings)


def gated(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return functional.silu(x @ w.t()) * (x @ v.t())


def turned(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    up = functional.linear(x, v)
    return up * functional.silu(functional.linear(x, w))


@pytest.mark.parametrize(
    ("function", "shapes"),
    [(gated, ((512, 256),) + ((384, 256),) * 2), (turned, ((4, 128, 256),) + ((384, 256),) * 2)],
)
@pytest.mark.parametrize("saved", [20.0, 40.0])
def test_a_gate_is_one_kernel_only_if_that_saves_most(
    function: Callable[..., Any],
    shapes: Any,
    saved: float,
    calls: list[Call],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from inductor_ext.autotune import tuner

    monkeypatch.setattr(tuner, "tune", GatesTuned(saved))
    both = {"max_autotune_gemm_backends": "TRITON,CUTLASS"}
    with events.capture(MatmulRecord) as records:
        lowered = compiled(function, *linear(*shapes), **both)
    if saved > 30:
        assert not calls
        assert len(lowered.kernels()) == len(records) == 1
        return
    computed = [operations_of(call) for call in calls]
    # One of the two kernels computes the epilogue of both.
    assert sorted(item[-1:] for item in computed if item) == [["mul"]]
    assert not lowered.kernels()
    declined = [item for record in records for item in record.declined]
    assert declined
    assert all("a kernel for one of its GEMMs alone saves more" in item for item in declined)


def test_values_used_only_by_an_epilogue_are_not_inputs(
    calls: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    from inductor_ext.autotune import tuner

    def function(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ w.t()) + torch.exp(y)

    monkeypatch.setattr(tuner, "tune", GatesTuned(0.0))
    compiled(function, *linear(*XW, (512, 384)))
    assert [operations_of(call) for call in calls] == [[]]
