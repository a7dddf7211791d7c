"""CUTLASS candidates in tuning, and decisions about them that are kept; without a GPU or nvcc."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch._inductor.config as inductor_config

from inductor_ext import events, exc
from inductor_ext.autotune import (
    candidate_run,
    compile_workers,
    cutlass_kernels,
    cutlass_options,
    subprocess_runner,
    tuner,
)
from inductor_ext.autotune.decision import Decision, Timing
from inductor_ext.autotune.results import Environment, TuningResult
from inductor_ext.autotune.results_db import TuningDatabase
from inductor_ext.settings import Settings
from inductor_ext.storage import json_codec
from inductor_ext.templates import kernels
from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.cutlass.epilogue import ACCUMULATOR, apply, identity
from inductor_ext.templates.cutlass.epilogue import Epilogue as Tree
from inductor_ext.templates.format import config_words, problem_words
from inductor_ext.templates.fused_ops import Epilogue
from inductor_ext.templates.problem import GemmProblem, read
from inductor_ext.templates.records import TuningRecord
from inductor_ext.templates.tensors import Operand
from test.support import benchmark_backends
from test.support.benchmark_backends import candidate, cutlass_candidate
from test.support.gemm_strategies import device

H200 = device("NVIDIA H200")
ASKED = {"max_autotune": True, "max_autotune_gemm_backends": "TRITON,CUTLASS"}
RELU = Tree((("float32", apply("relu", ACCUMULATOR)),))

LINEAR = GemmProblem.contiguous("mm", 24, 48, 64, "float32")
TOLD = dataclasses.replace(LINEAR, epilogue=Epilogue((), 1, tree=RELU))
PLAIN = dataclasses.replace(
    GemmProblem.contiguous("mm", 512, 384, 256), epilogue=Epilogue(tree=identity("bfloat16"))
)
BEST = cutlass_options.Options().rank(PLAIN, H200)[0][0]


def in_a_process(
    jobs: Sequence[candidate_run.Job], make_bench: Any, index: int, budget: float, deadline: float
) -> Iterator[candidate_run.Report]:
    """Run a worker's code with all messages as JSON."""

    def through_json(value: Any) -> Any:
        return read(type(value), json.loads(json.dumps(json_codec.encode(value))), "message")

    received = [through_json(job) for job in jobs]
    assert received == list(jobs)
    for report in candidate_run.run(received, make_bench(index), budget, lambda *_: None):
        yield through_json(report)


def tune(
    triton: Sequence[kernels.Config],
    cutlass: Sequence[CutlassConfig],
    unbuilt: Mapping[CutlassConfig, str] | None = None,
    problems: Sequence[GemmProblem] = (TOLD,),
    **options: Any,
) -> dict[GemmProblem, Decision]:
    """Tune problems with these candidates, of which some cannot be built."""
    reasons = {(TOLD, config): why for config, why in (unbuilt or {}).items()}
    predicted = [(config, 40.0) for config in cutlass]
    ranked = [(config, mock.Mock(total=50.0)) for config in triton]
    with (
        inductor_config.patch({**ASKED, **options}),
        mock.patch.object(tuner.ranking, "rank", return_value=ranked),
        mock.patch.object(cutlass_options.Options, "rank", return_value=predicted),
        mock.patch.object(cutlass_kernels, "prepare", return_value=reasons),
        mock.patch.object(subprocess_runner, "warm_up") as warm_up,
        mock.patch.object(compile_workers, "warm_up") as compilers,
        mock.patch.object(subprocess_runner, "run", side_effect=in_a_process) as run,
    ):
        result = tuner.tune(problems, H200, benchmark_backends.cpu_bench, Settings())
    # While kernels are built.
    assert warm_up.called == compilers.called == bool(cutlass)
    apart = {job.problem for item in run.call_args_list for job in item.args[0]}
    assert apart == {
        problem for problem in problems if problem == TOLD and set(cutlass) - set(unbuilt or {})
    }
    return result


def test_candidates_of_both_families_are_measured_together(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fast, wrong = cutlass_candidate(60), cutlass_candidate(10, benchmark_backends.WRONG)
    with (
        events.capture(TuningRecord) as records,
        mock.patch("torch._inductor.select_algorithm.PRINT_AUTOTUNE", True),
    ):
        decision = tune([candidate(80)], [fast, wrong])[TOLD]
    assert decision.config == fast
    assert {timing.config for timing in decision.timings} == {None, candidate(80), fast, wrong}
    assert decision.microseconds(wrong) is None
    (record,) = records
    assert {item.config: item.predicted for item in record.candidates}[fast] == 40.0
    assert record.describe().startswith("tuning: mm 24x48x64: cutlass: 40.0% less time")
    table = capsys.readouterr().err
    assert f"  {config_words(fast)} 0.0600 ms 100.0% chosen" in table
    assert "SubProcess AUTOTUNE" in table


def test_problems_without_a_tree_are_tried_in_this_process() -> None:
    results = tune([candidate(80)], [cutlass_candidate(60)], problems=[LINEAR, TOLD])
    assert results[LINEAR].config == candidate(80)
    assert results[TOLD].config == cutlass_candidate(60)


def test_triton_candidates_need_the_triton_backend() -> None:
    backends = {"max_autotune_gemm_backends": "CUTLASS"}
    decision = tune([candidate(80)], [cutlass_candidate(90)], **backends)[TOLD]
    assert {timing.config for timing in decision.timings} == {None, cutlass_candidate(90)}


def test_failed_builds_are_dropped_with_the_reason() -> None:
    broken, right = cutlass_candidate(10), cutlass_candidate(70)
    decision = tune([], [broken, right], {broken: "failed to build: no such instruction"})[TOLD]
    assert decision.config == right
    (timing,) = (timing for timing in decision.timings if timing.config == broken)
    assert timing.failure == "failed to build: no such instruction"


@pytest.mark.usefixtures("repeated_warnings")
def test_if_all_fail_the_fallback_is_used_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken, wrong = cutlass_candidate(10), cutlass_candidate(20, benchmark_backends.WRONG)
    for _ in range(2):
        decision = tune([], [broken, wrong], {broken: "failed to build: why not"})[TOLD]
        assert decision.config is None
    (warning,) = (message for message in caplog.messages if "no extension kernel" in message)
    assert "failed to build: why not" in warning
    assert "wrong" in warning


def environments(candidate_set: str) -> Callable[[GemmProblem], Environment]:
    return lambda problem: Environment.of(H200, problem.operation, candidate_set)


class TestKernels:
    @pytest.mark.usefixtures("repeated_warnings")
    def test_missing_components_warn_once_with_the_command(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        error = exc.MissingToolchainError(part="nvcc", why="nowhere", install="apt install it")
        with mock.patch.object(cutlass_kernels.nvcc_build.Toolchain, "find", side_effect=error):
            for _ in range(2):
                reasons = cutlass_kernels.prepare([(PLAIN, BEST)], Settings())
        assert list(reasons) == [(PLAIN, BEST)]
        (warning,) = caplog.messages
        assert "nvcc" in warning
        assert "apt install it" in warning

    def test_a_binary_is_built_once_for_all_that_share_it(self) -> None:
        twin = dataclasses.replace(BEST, swizzle=1)
        result = dataclasses.replace(BEST, tile=(128, 128, 64))
        error = exc.KernelBuildError(kernel="it", why="no")
        built: list[Any] = []

        def build_all(sources: Any, store: Any) -> Any:
            built.extend(source.name for source in sources)
            return {kernels.source_of(PLAIN, result).name: error}

        with (
            mock.patch.object(cutlass_kernels.nvcc_build.Toolchain, "find"),
            mock.patch.object(cutlass_kernels.nvcc_build, "build_all", build_all),
        ):
            wanted = [(PLAIN, item) for item in (BEST, twin, result)]
            reasons = cutlass_kernels.prepare(wanted, Settings())
        assert len(built) == len(set(built)) == 2
        assert reasons == {(PLAIN, result): "failed to build: no"}


class TestKept:
    def test_problems_without_cutlass_keep_their_keys(self) -> None:
        assert LINEAR.key == (
            '{"a":{"alignment":4,"batch_stride":0,"dtype":"float32","strides":[64,1]},'
            '"accumulator":"float32","b":{"alignment":4,"batch_stride":0,"dtype":"float32",'
            '"strides":[1,64]},"batch":1,"deterministic":false,"divided":"m","epilogue":'
            '{"gated":false,"inputs":[],"out":null,"pointwise":0,"reductions":0},'
            '"fast_accumulation":false,"k":64,"m":24,"n":48,"operation":"mm","out":"float32",'
            '"parts":[],"prologue":null,"tf32":false}'
        )
        assert TOLD.key != dataclasses.replace(TOLD, epilogue=Epilogue((), 1)).key

    def test_problems_and_entries_make_the_round_trip(self) -> None:
        assert GemmProblem.from_json(json.loads(TOLD.key)) == TOLD
        decision = Decision(BEST, "measured", (Timing(None, 9.0), Timing(BEST, 5.0)))
        entry = TuningResult.of(PLAIN, decision, Environment.of(H200, "mm", "word"))
        assert TuningResult.from_json(json.loads(entry.line)) == entry
        assert entry.decision("cache").config == BEST

    def test_wrong_records_are_refused(self) -> None:
        value = {**BEST.to_json(), "arch": 70}
        with pytest.raises(exc.BadGemmError, match="arch"):
            kernels.config_from_json(value)
        with pytest.raises(exc.BadGemmError):
            kernels.config_from_json({**candidate(8).to_json(), "arch": 90})

    def test_settings_make_another_environment(self, tmp_path: Path) -> None:
        store = TuningDatabase(tmp_path)
        decision = Decision(BEST, "measured", (Timing(None, 9.0), Timing(BEST, 5.0)))
        details = [cutlass_options.Options(limit=limit).candidate_set for limit in (2, 3)]
        store.put({PLAIN: decision}, H200, environments(details[0]))
        same, other = (store.lookup(PLAIN, H200, environments(item)) for item in details)
        assert same is not None
        assert same.exact
        assert other is not None
        assert other.differences == ("with different CUTLASS settings",)
        # Without a tree it is another problem.
        assert store.lookup(dataclasses.replace(PLAIN, epilogue=Epilogue()), H200) is None

    def test_results_whose_kernel_lacks_the_epilogue_are_skipped(self, tmp_path: Path) -> None:
        store = TuningDatabase(tmp_path)
        wrong = dataclasses.replace(BEST, d="float32")
        decision = Decision(wrong, "measured", (Timing(None, 9.0), Timing(wrong, 5.0)))
        store.put({PLAIN: decision}, H200)
        assert store.lookup(PLAIN, H200) is None


def test_a_kernel_has_its_name_in_words() -> None:
    assert config_words(BEST) == f"{BEST.name}, swizzle {BEST.swizzle}, along n"
    assert "with CUTLASS" in problem_words(PLAIN)


def test_a_matrix_that_tma_cannot_read_is_read_by_threads() -> None:
    from inductor_ext.templates.cutlass.epilogue import Tensor, read
    from inductor_ext.templates.tensors import EpilogueInput

    def options(alignment: int) -> str:
        inputs = (Tensor("bfloat16", "matrix", alignment),)
        tree = Tree((("bfloat16", apply("add", ACCUMULATOR, read(0))),), inputs)
        text = Epilogue((EpilogueInput("bfloat16", "matrix"),), 1, tree=tree)
        problem = dataclasses.replace(PLAIN, epilogue=text)
        config = cutlass_options.Options().rank(problem, H200)[0][0]
        assert kernels.legal(problem, config, H200)
        return config.c

    assert [options(8), options(1)] == ["bfloat16", "void"]


def test_unfused_epilogue_nodes_follow_the_kernel() -> None:
    whole = dataclasses.replace(TOLD, epilogue=dataclasses.replace(TOLD.epilogue, out="float16"))
    assert (whole.stored_dtype, kernels.of_kernel(whole).stored_dtype) == ("float16", "float32")
    assert Operand.of("float32", (24, 64), (64, 1)) == kernels.of_kernel(whole).a
