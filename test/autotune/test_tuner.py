"""Decisions of tuning, their records, and tuning within a compile."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Generator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.gemm.models import int8_linear
from inductor_ext import config, events, progress
from inductor_ext.autotune import (
    accuracy,
    candidate_run,
    decide,
    inductor_benchmark,
    reference,
    tuner,
)
from inductor_ext.autotune.decision import Decision, Timing
from inductor_ext.hooks import activate, compile_fx, scope
from inductor_ext.memory.records import MemoryPlanRecord
from inductor_ext.progress import Stage
from inductor_ext.settings import Settings
from inductor_ext.templates.format import problem_words
from inductor_ext.templates.fused_ops import Epilogue, Prologue, RowNorm
from inductor_ext.templates.problem import GemmProblem, KernelDetails
from inductor_ext.templates.records import MatmulRecord, TuningRecord
from inductor_ext.templates.tensors import Operand
from inductor_ext.templates.triton.config import GemmConfig
from test.support import benchmark_backends, fake_cuda
from test.support.benchmark_backends import STOCK, CpuBench, candidate
from test.support.gemm_strategies import device
from test.support.tuning_problems import LINEAR, contiguous, inputs_of, matrix

H200 = device("NVIDIA H200")
GATED = Epilogue(gated=True)
HALVES = KernelDetails("gelu", "up")
NORM = Prologue(RowNorm("rms", 1))
LAYER_NORM = Prologue(RowNorm("layer", 2))

FUSED = [
    contiguous("mm", 16, 512, 256, epilogue=Epilogue((), 3)),
    contiguous("addmm", 16, 512, 256, epilogue=Epilogue(inputs_of("row"), 5)),
    contiguous("bmm", 16, 512, 256, batch=4, epilogue=Epilogue((), 2)),
    contiguous("mm", 16, 512, 256, epilogue=Epilogue(inputs_of("column", "row"), 2, "float32")),
    contiguous("mm", 16, 512, 256, parts=(256, 256), epilogue=GATED),
    contiguous("mm", 16, 512, 256, parts=(256, 256), epilogue=GATED, prologue=NORM),
    contiguous("mm", 16, 512, 256, parts=(256, 256), epilogue=GATED, details=HALVES),
    contiguous(
        "addmm",
        16,
        512,
        256,
        parts=(256, 256),
        epilogue=Epilogue(inputs_of("row"), 1, gated=True),
    ),
    contiguous("mm", 16, 512, 256, parts=(256, 128, 128), prologue=NORM),
    contiguous("mm", 16, 512, 256, parts=(256, 128, 128), prologue=LAYER_NORM),
    contiguous(
        "addmm", 16, 512, 256, parts=(256, 128, 128), epilogue=Epilogue(inputs_of("row"), 1)
    ),
]
"""Problems of fusions, as the planner describes them."""


def tune(*configs: GemmConfig, settings: Settings | None = None, **options: Any) -> Decision:
    """Tune one problem with these candidates."""
    ranked = [(config, mock.Mock(total=50.0)) for config in configs]
    with mock.patch.object(tuner.ranking, "rank", return_value=ranked):
        results = tuner.tune(
            [LINEAR, LINEAR], H200, benchmark_backends.cpu_bench, settings or Settings(), **options
        )
    assert list(results) == [LINEAR]
    return results[LINEAR]


class NoReports:
    """A runner that reports no job."""

    def __init__(self) -> None:
        self.jobs: list[candidate_run.Job] = []

    def __call__(
        self, jobs: Sequence[candidate_run.Job], *_: Any
    ) -> Generator[candidate_run.Report, None, None]:
        self.jobs.extend(jobs)
        yield from ()


class TestTuner:
    def test_decisions_are_recorded(self, tmp_path: Any) -> None:
        log = tmp_path / "events.jsonl"
        settings = Settings(event_log=str(log))
        wrong = candidate(10, benchmark_backends.WRONG)
        with events.capture(TuningRecord) as records:
            decision = tune(candidate(80), wrong, settings=settings)
        assert decision.config == candidate(80)
        assert decision.origin == "measured"
        assert decision.microseconds(candidate(80)) == pytest.approx(80)
        assert decision.microseconds(None) == pytest.approx(STOCK)
        (record,) = records
        assert (record.problem, record.chosen) == (LINEAR, candidate(80))
        assert record.reason == "20.0% less time than Inductor (default)"
        assert [item.config for item in record.candidates] == [None, candidate(80), wrong]
        assert [item.predicted for item in record.candidates] == [None, 50.0, 50.0]
        assert "wrong" in (record.candidates[2].failure or "")
        (line,) = map(json.loads, log.read_text().splitlines())
        assert line["candidates"][1]["measured"] == pytest.approx(80)
        assert record.describe().startswith("tuning: mm 24x48x64: splitk: 20.0% less time")

    def test_problems_without_templates_are_not_measured(self) -> None:
        with mock.patch.object(tuner.candidate_run, "run", side_effect=AssertionError):
            assert tune() == Decision(None, "unknown")

    @pytest.mark.parametrize("exhaustive", [False, True])
    def test_predicted_losses_are_not_measured(self, exhaustive: bool) -> None:
        normalized = contiguous("mm", 2048, 4096, 4096, prologue=Prologue(RowNorm("rms", 1)))
        plain = contiguous("mm", 2048, 4096, 4096)
        tried = NoReports()
        search = "EXHAUSTIVE" if exhaustive else "DEFAULT"
        with (
            inductor_config.patch(max_autotune_gemm_search_space=search),
            mock.patch.object(tuner.candidate_run, "run", tried),
        ):
            results = tuner.tune(
                [normalized, plain], H200, benchmark_backends.cpu_bench, Settings()
            )
        measured = [normalized, plain] if exhaustive else [plain]
        assert [job.problem for job in tried.jobs] == measured
        assert results[normalized] == Decision(None, "unknown" if exhaustive else "predicted")

    def test_predicted_losses_of_triton_keep_cutlass_kernels(self) -> None:
        problem, options = mock.Mock(), mock.Mock(alone=False)
        options.rank.return_value = {"a CUTLASS kernel": 300.0}
        run_options = tuner.Options(False, False, 0, 0, True, options)
        hopeless = tuner.rank_candidates(problem, H200, run_options, True)
        assert hopeless == options.rank.return_value

    @pytest.mark.usefixtures("repeated_warnings")
    def test_dropping_every_candidate_warns_once(self, caplog: pytest.LogCaptureFixture) -> None:
        for _ in range(2):
            assert tune(candidate(10, benchmark_backends.WRONG)).config is None
        warnings = [record for record in caplog.records if record.levelname == "WARNING"]
        assert len(warnings) == 1
        assert "mm 24x48x64" in warnings[0].getMessage()

    def test_exhaustive_search_tries_the_whole_space(self) -> None:
        seen = NoReports()
        with (
            inductor_config.patch(max_autotune_gemm_search_space="EXHAUSTIVE"),
            mock.patch.object(tuner.candidate_run, "run", seen),
        ):
            tuner.tune(
                [contiguous("mm", 16, 512, 256)], H200, benchmark_backends.cpu_bench, Settings()
            )
        assert len(seen.jobs[0].configs) > tuner.CANDIDATES

    def test_interrupts_restore_torch_state(self) -> None:
        class BenchmarkBackend(CpuBench):
            prepared = inductor_benchmark.InductorBench.prepared

        ranked = [(candidate(80), mock.Mock(total=50.0))]
        other = contiguous("mm", 24, 48, 32, "float32")
        with (
            mock.patch.object(tuner.ranking, "rank", return_value=ranked),
            mock.patch.object(tuner, "print_table", side_effect=KeyboardInterrupt),
            events.capture(TuningRecord) as records,
            pytest.raises(KeyboardInterrupt) as kept,
        ):
            tuner.tune([LINEAR, other], H200, lambda index: BenchmarkBackend(), Settings())
        assert kept.tb is not None
        assert torch.is_grad_enabled()
        # Results until then are reported: output is not muted any more.
        assert [record.problem for record in records] == [LINEAR]

    def test_a_process_without_stderr_has_no_table(self) -> None:
        with inductor_config.patch(max_autotune=True), mock.patch("sys.stderr", None):
            assert tune(candidate(80)).config == candidate(80)

    @pytest.mark.parametrize("asked", [False, True])
    def test_inductor_prints_the_table(
        self, asked: bool, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with inductor_config.patch(max_autotune=asked):
            tune(candidate(80))
        lines = capsys.readouterr().err.splitlines()
        if not asked:
            assert lines == []
            return
        assert lines[:3] == [
            "AUTOTUNE mm(24x64, 64x48)",
            "strides: [64, 1], [1, 64]",
            "dtypes: torch.float32, torch.float32",
        ]
        assert lines[3].startswith("  splitk 80x32x32, 2 stages, 4 warps, group 1 0.0")
        assert lines[3].endswith("100.0% chosen")
        assert lines[4].startswith("  mm (Inductor) 0.1")
        assert lines[5].startswith("SingleProcess AUTOTUNE benchmarking takes ")
        assert lines[5].endswith("2 choices: 20.0% less time than Inductor (default)")

    def test_progress(self, monkeypatch: pytest.MonkeyPatch) -> None:
        texts: list[str] = []

        class Recorded(Stage):
            def __setattr__(self, name: str, value: object) -> None:
                super().__setattr__(name, value)
                if name == "text":
                    texts.append(str(self) if hasattr(self, "total") else "")

        monkeypatch.setattr(progress, "Stage", Recorded)
        tune(candidate(80))
        assert texts[1] == "tuning matmuls (compiling) 0/1"
        assert texts[-1].endswith(", best splitk 80x32x32, 2 stages, 4 warps, group 1 80.0 us) 1/1")


def constants(code: str) -> list[str]:
    """The constants of the only matmul kernel in a module."""
    kernels = fake_cuda.Lowered(code, ()).kernels().values()
    matmuls = [kernel for kernel in kernels if "tl.dot" in kernel]
    return re.findall(r"\w+ : tl.constexpr = \S+", matmuls[0]) if matmuls else []


WRITTEN: dict[str, tuple[Any, ...]] = {
    "product": (lambda x, w: x @ w.t(), matrix(16, 512), matrix(256, 512)),
    # Inductor names the kernel after an operator.
    "residual": (
        lambda x, w, y: y + x @ w.t(),
        *(matrix(16, 512), matrix(256, 512), matrix(16, 256)),
    ),
    "relu": (lambda x, w: torch.relu(x @ w.t()), matrix(16, 512), matrix(256, 512)),
    "silu": (
        lambda x, w: torch.nn.functional.silu(x @ w.t()),
        matrix(16, 512),
        matrix(256, 512),
    ),
    "gelu": (
        lambda x, w, bias: torch.nn.functional.gelu(torch.nn.functional.linear(x, w, bias)),
        *(matrix(16, 512), matrix(256, 512), matrix(256)),
    ),
    "int8": (int8_linear, matrix(16, 512), matrix(256, 512, dtype=torch.int8), matrix(256)),
    "gate": (
        lambda x, w1, w2: torch.nn.functional.silu(x @ w1.t()) * (x @ w2.t()),
        *(matrix(16, 512), matrix(256, 512), matrix(256, 512)),
    ),
}
"""Matmuls as models write them, and their inputs; the winner is a dependent launch."""


def compiled_text(code: str) -> str:
    """The source of a template kernel in a module, as Triton compiles it."""
    texts = (node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant))
    (text,) = (text for text in texts if isinstance(text, str) and "triton_gemm" in text)
    meta, name = r"^inductor_meta=.*$", r"^triton_tem_\w+ = \w+\n"
    return re.sub(f"{meta}|{name}", "", text, flags=re.M)


def compiled_and_tuned(
    function: Any, *inputs: Any, **options: Any
) -> tuple[fake_cuda.Lowered, list[str], list[Any]]:
    """Compile a function whose second candidate wins.

    Returns its code, the code of the fallback and of all candidates, and the output.
    """
    pytest.importorskip("triton")
    codes: list[str] = []

    def run(jobs: list[candidate_run.Job], bench: Any, *_: Any) -> Any:
        (job,) = jobs
        wanted = [(job.problem, config) for config in (None, *job.configs)]
        with bench.prepared():
            results = list(bench.compile(wanted, lambda index: None))
        codes.extend(item.key for item in results)
        timings = tuple(
            Timing(config, 10.0 if config == job.configs[1] else 20.0) for _, config in wanted
        )
        yield candidate_run.Report(job.problem, job.configs[1], timings, "it is", 0.0)

    compile_fx.install_hooks(activate.requested)
    with (
        scope.compile_scope(config.snapshot({"tuning_cache": False})),
        mock.patch.object(candidate_run, "run", run),
        mock.patch.object(
            inductor_benchmark, "load_code", lambda code, _: candidate_run.Compiled(list, code)
        ),
        mock.patch.object(torch.cuda, "init"),
        events.capture() as records,
    ):
        lowered = fake_cuda.lower(
            function,
            *inputs,
            max_autotune_gemm=True,
            max_autotune_gemm_backends="ATEN,TRITON",
            **options,
        )
    return lowered, codes, records


def generation_order(candidates: list[candidate_run.Candidate]) -> list[int]:
    """The indices of candidates in the order in which their code is generated."""
    bench = inductor_benchmark.InductorBench("cpu")
    begun: list[int] = []
    with (
        inductor_config.patch(compile_threads=1),
        mock.patch.object(inductor_benchmark, "trace_program"),
        mock.patch.object(inductor_benchmark, "generate_code", side_effect=ValueError("no")),
    ):
        list(bench.compile(candidates, begun.append))
    return begun[: len(candidates)]


class TestVariants:
    def test_compiling_a_program_restores_inductor_state(self) -> None:
        bench = inductor_benchmark.InductorBench("cpu")
        program = reference.program(LINEAR)
        inputs = program.make_inputs("cpu")
        started: list[int] = []
        before = json.dumps(counters)
        outer = torch._guards.TracingContext(FakeTensorMode())
        with (
            inductor_config.patch(compile_threads=1, max_autotune=True),
            torch.autocast("cpu", torch.bfloat16),
            torch._guards.tracing(outer),
            events.capture() as records,
            bench.prepared(),
        ):
            (compiled,) = bench.compile([(LINEAR, None)], started.append)
            assert isinstance(compiled, candidate_run.Compiled)
            (out,) = compiled.call(*inputs)
        assert out.dtype == torch.float32
        assert accuracy.Verifier(program, inputs).check(lambda: [out]) is None
        assert started == [0, 0]
        assert records == []
        assert json.dumps(counters) == before

    def test_compile_errors_are_returned(self) -> None:
        bench = inductor_benchmark.InductorBench("cpu")
        with (
            inductor_config.patch(compile_threads=1),
            mock.patch.object(inductor_benchmark, "generate_code", side_effect=ValueError("no")),
        ):
            (error,) = bench.compile([(LINEAR, None)], lambda index: None)
        assert isinstance(error, ValueError)

    def test_slow_compiles_are_generated_first(self) -> None:
        light, heavy = candidate(1), dataclasses.replace(candidate(1), block_k=4096)
        wanted = [(LINEAR, None), (LINEAR, light), (LINEAR, heavy)]
        assert generation_order(wanted) == [2, 1, 0]

    def test_code_is_generated_problem_by_problem(self) -> None:
        light, heavy = candidate(1), dataclasses.replace(candidate(1), block_k=4096)
        prebuilt = benchmark_backends.cutlass_candidate(1)
        other = dataclasses.replace(LINEAR, m=2)
        wanted = [
            (LINEAR, None),
            (LINEAR, prebuilt),
            (LINEAR, light),
            (other, None),
            (other, heavy),
        ]
        assert generation_order(wanted) == [2, 0, 4, 3, 1]

    def test_a_crashed_compile_worker_is_retried_per_kernel(self) -> None:
        from concurrent.futures.process import BrokenProcessPool

        loaded = []

        def load(code: str, attributes: Any) -> Any:
            loaded.append(code)
            try:
                raise BrokenProcessPool
            except BrokenProcessPool as error:
                crash = RuntimeError("a compilation subprocess exited")
                crash.__cause__ = error
            return (
                crash
                if code == "bad" or loaded.count(code) < 2
                else candidate_run.Compiled(list, code)
            )

        bench = inductor_benchmark.InductorBench("cpu")
        codes = [("good", {}), ("bad", {}), ("better", {})]
        with (
            inductor_config.patch(compile_threads=1),
            mock.patch.object(inductor_benchmark, "generate_code", side_effect=codes),
            mock.patch.object(inductor_benchmark, "load_code", load),
        ):
            results = list(bench.compile([(LINEAR, None)] * 3, lambda index: None))
        assert [isinstance(item, candidate_run.Compiled) for item in results] == [True, False, True]

    @pytest.mark.skipif(torch.cuda.is_available(), reason="it stands in for a GPU")
    @pytest.mark.parametrize("problem", FUSED, ids=problem_words)
    def test_fused_programs_are_matched_as_their_problem(self, problem: GemmProblem) -> None:
        pytest.importorskip("triton")
        met: list[GemmProblem] = []
        compile_fx.install_hooks(activate.requested)
        with (
            fake_cuda.device(),
            scope.compile_scope(config.snapshot()),
            decide.force_config(met.append),  # type: ignore[func-returns-value]
            inductor_benchmark.restore_counters(),
        ):
            inductor_benchmark.generate_code(inductor_benchmark.trace_program(problem, "cuda:0"))
        assert problem in met

    @pytest.mark.skipif(torch.cuda.is_available(), reason="it stands in for a GPU")
    def test_inputs_at_unaligned_addresses_are_copied_for_wide_loads(self) -> None:
        pytest.importorskip("triton")
        unaligned = [Operand("float16", strides, 1) for strides in ((64, 1), (1, 64))]
        problem = GemmProblem("mm", 64, 64, 64, *unaligned, "float16")
        wide = GemmConfig("persistent_tma", 64, 16, 16, 2, 4, tma=True, align_operands="copy")
        compile_fx.install_hooks(activate.requested)
        with (
            fake_cuda.device(),
            scope.compile_scope(config.snapshot()),
            decide.force_config(lambda _: wide),
            inductor_benchmark.restore_counters(),
        ):
            code, _ = inductor_benchmark.generate_code(
                inductor_benchmark.trace_program(problem, "cuda:0")
            )
        assert len(re.findall(r"triton_poi_\w+\.run\(", code)) == 2
        assert "def triton_gemm_persistent_tma_" in code

    @pytest.mark.skipif(torch.cuda.is_available(), reason="it stands in for a GPU")
    def test_models_use_the_kernel_that_was_tuned(self) -> None:
        pytest.importorskip("triton")
        problem = contiguous("mm", 256, 512, 256, epilogue=Epilogue((), 2))
        tile = GemmConfig("cp_async", 64, 64, 64, 3, 4)
        parts = dataclasses.replace(problem, parts=(256, 256), epilogue=GATED)
        bench = inductor_benchmark.InductorBench("cuda:0")
        compile_fx.install_hooks(activate.requested)
        with (
            fake_cuda.device(),
            scope.compile_scope(config.snapshot()),
            mock.patch.object(
                inductor_benchmark, "load_code", lambda code, _: candidate_run.Compiled(list, code)
            ),
            mock.patch.object(
                inductor_benchmark, "trace_program", wraps=inductor_benchmark.trace_program
            ) as trace,
            mock.patch.object(bench, "device", "cuda:0"),
            inductor_config.patch(compile_threads=1),
            inductor_benchmark.restore_counters(),
        ):
            wanted = [(problem, None), (problem, tile), (parts, None)]
            results = list(bench.compile(wanted, lambda index: None))
        assert [item.args[0] for item in trace.call_args_list] == [problem, parts]
        codes = [
            item.key if isinstance(item, candidate_run.Compiled) else repr(item) for item in results
        ]
        assert "extern_kernels.mm" in codes[0]
        assert "extern_kernels.mm" not in codes[1]
        assert "tl.dot" in codes[1]
        assert codes[2].count("extern_kernels.mm(") == 2

    @pytest.mark.skipif(torch.cuda.is_available(), reason="it stands in for a GPU")
    def test_a_compile_benchmarks_and_uses_the_fastest(self) -> None:
        lowered, codes, records = compiled_and_tuned(
            lambda x, w: torch.relu(x @ w.t()), matrix(64, 512), matrix(256, 512)
        )
        kinds = [type(record) for record in records]
        assert kinds.count(TuningRecord) == kinds.count(MatmulRecord) == 1
        assert kinds.count(MemoryPlanRecord) == 1
        assert len(set(codes)) == len(codes) == 7
        taken = [constants(code) for code in codes]
        assert constants(lowered.code) == taken[2] != taken[1]
        assert lowered.choices == ()

    @pytest.mark.skipif(torch.cuda.is_available(), reason="it stands in for a GPU")
    @pytest.mark.parametrize("graphs", [False, True], ids=["", "graphs"])
    @pytest.mark.parametrize("name", WRITTEN)
    def test_the_selected_kernel_is_not_compiled_again(self, name: str, graphs: bool) -> None:
        function, *inputs = WRITTEN[name]
        lowered, codes, _ = compiled_and_tuned(function, *inputs, triton__cudagraphs=graphs)
        assert ("gdc_wait" in lowered.code) == graphs
        assert compiled_text(lowered.code) == compiled_text(codes[2])
