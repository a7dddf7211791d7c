"""Benchmark candidates for problems without a tuning result.

`tune` takes the candidates that the cost model ranks first, benchmarks them (`candidate_run` in
this process, or `subprocess_runner` in a worker process) and returns decisions. If the cost model
sees no gain from fusing the prologue, no Triton candidates are tried. CUTLASS kernels are built
first, and are always tried in a worker process. A candidate that fails is dropped, never an error;
the record (`TuningRecord`) says why.

Inductor's options apply: `autotune_in_subproc` selects the process;
`max_autotune_gemm_search_space` set to EXHAUSTIVE tries every legal candidate;
`max_autotune_subproc_result_timeout_seconds` is the deadline of the worker;
`autotune_num_choices_displayed` limits the AUTOTUNE table on stderr, which has the format of
Inductor's (`progress`).
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Container, Generator, Iterable, Mapping, Sequence

from inductor_ext import events, progress
from inductor_ext.autotune import (
    candidate_run,
    compile_workers,
    cutlass_kernels,
    cutlass_options,
    subprocess_runner,
)
from inductor_ext.autotune.candidate_run import BenchmarkBackend, Job, Report
from inductor_ext.autotune.decision import Decision, Timing
from inductor_ext.autotune.progress import TuningProgress, print_table
from inductor_ext.settings import Settings
from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.device import Device
from inductor_ext.templates.format import problem_words
from inductor_ext.templates.kernels import Config
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.records import MatmulCandidate, TuningRecord
from inductor_ext.templates.triton import cost_model, ranking, search_space

CANDIDATES = 6
"""Number of Triton candidates that are measured besides Inductor's path."""


@events.timed("tune_matmuls")
def tune(
    problems: Iterable[GemmProblem],
    device: Device,
    make_bench: Callable[[int], BenchmarkBackend],
    settings: Settings,
    *,
    index: int = 0,
    isolated: bool = False,
    dependent: bool = True,
) -> dict[GemmProblem, Decision]:
    """Benchmark the candidates of problems against Inductor's path.

    Args:
        problems: equal problems count once.
        device: the cost model's description of the device.
        make_bench: creates the bench, given `index`; a top-level function of a module, such as
            `inductor_benchmark.cuda_bench`.
        settings: `tuning_budget`, `event_log` and the settings of the CUTLASS kernel store are
            used.
        index: index of the CUDA device.
        isolated: whether to use a worker process regardless of Inductor's options.
        dependent: whether the compile uses programmatic dependent launch (PDL). Candidates are
            tried with the same launch attribute, so that the chosen kernel is already compiled.

    Returns:
        A decision for every problem. A problem that no template covers has the origin "unknown"; a
        problem without measured candidates because of the cost model has "predicted".

    Raises:
        exc.TuningFaultError: a candidate has broken the device for this process.
    """
    options = Options.current(settings, dependent)
    unique = list(dict.fromkeys(problems))
    hopeless = set() if options.exhaustive else _find_hopeless(unique, device)
    predictions = {
        problem: rank_candidates(problem, device, options, problem in hopeless)
        for problem in unique
    }
    if any(map(_has_cutlass, predictions.values())):
        # Overlaps with nvcc, which builds the kernels that the worker will run.
        subprocess_runner.warm_up(make_bench, index)
        compile_workers.warm_up(device.capability)
    jobs = _make_jobs(predictions, settings)
    decisions = {p: Decision(None, "predicted" if p in hopeless else "unknown") for p in unique}
    if jobs:
        isolated = isolated or options.in_subprocess
        apart = {job.problem for job in jobs if isolated or _has_cutlass(job.configs)}
        reports: list[Report] = []
        try:
            _run_jobs(jobs, apart, make_bench, index, options, reports)
        finally:
            # Only now: events of this thread are muted while the generators run.
            for report in reports:
                record = _make_record(report, device, predictions[report.problem])
                events.emit(record, event_log=settings.event_log)
        for report in reports:
            decisions[report.problem] = Decision(report.chosen, "measured", report.timings)
            _warn_if_unusable(report)
    return decisions


def _find_hopeless(problems: Iterable[GemmProblem], device: Device) -> set[GemmProblem]:
    """Return the problems for which the cost model predicts no gain from fusing the prologue."""
    return {problem for problem in problems if not ranking.prologue_pays(problem, device)}


@dataclasses.dataclass(frozen=True)
class Options:
    """Inductor's options and the settings that apply to a tuning run."""

    exhaustive: bool
    """Whether to measure every legal Triton candidate."""
    in_subprocess: bool
    deadline: float
    """Seconds for an answer of the worker process."""
    budget: float
    """Milliseconds of timing per problem."""
    dependent: bool
    """Whether kernels are launched with PDL."""
    cutlass: cutlass_options.Options

    @classmethod
    def current(cls, settings: Settings, dependent: bool) -> Options:
        from torch._inductor import config

        return cls(
            config.max_autotune_gemm_search_space == "EXHAUSTIVE",
            bool(config.autotune_in_subproc),
            config.max_autotune_subproc_result_timeout_seconds,
            settings.tuning_budget,
            dependent,
            cutlass_options.current(),
        )


def _run_jobs(
    jobs: Sequence[Job],
    apart: Container[GemmProblem],
    make_bench: Callable[[int], BenchmarkBackend],
    index: int,
    options: Options,
    reports: list[Report],
) -> None:
    """Run jobs, those of the problems in `apart` in a worker process; show progress and tables.

    `reports` receives the report of each finished job, also if an error ends the run.
    """
    start = time.perf_counter()
    runs: list[Generator[Report, None, None]] = []
    isolated_jobs = [job for job in jobs if job.problem in apart]
    if isolated_jobs:
        runs.append(
            subprocess_runner.run(
                isolated_jobs, make_bench, index, options.budget, options.deadline
            )
        )
    with progress.stage("tuning matmuls", len(jobs)) as stage:
        shown = TuningProgress(stage)
        local_jobs = [job for job in jobs if job.problem not in apart]
        if local_jobs:
            bench = make_bench(index)
            runs.append(candidate_run.run(local_jobs, bench, options.budget, shown.show_candidate))
        try:
            for report in itertools.chain(*runs):
                reports.append(report)
                shown.show_report(report)
                print_table(report, time.perf_counter() - start, report.problem in apart)
                start = time.perf_counter()
        finally:
            # Otherwise the traceback of an error keeps the generators alive, and the contexts that
            # they entered.
            for run in runs:
                run.close()


def _warn_if_unusable(report: Report) -> None:
    timings = [timing for timing in report.timings if timing.config is not None]
    if all(timing.microseconds is None for timing in timings):
        reasons = _list_failures(report)
        words = problem_words(report.problem)
        events.warn_once(
            f"tuning:{reasons}", f"no extension kernel can be used for {words}: {reasons}"
        )


def rank_candidates(
    problem: GemmProblem, device: Device, options: Options, hopeless: bool
) -> dict[Config, float]:
    """Return the configurations to measure, with their predicted microseconds.

    A hopeless problem gets no Triton candidates.
    """
    candidates: dict[Config, float] = {}
    if problem.epilogue.tree is not None:
        candidates |= options.cutlass.rank(problem, device)
        if options.cutlass.alone:
            return candidates
    if hopeless:
        return candidates
    if options.exhaustive:
        ranked = [
            (config, cost_model.predict(problem, config, device))
            for config in search_space.candidates(problem, device)
        ]
    else:
        ranked = ranking.rank(problem, device, CANDIDATES)
    return candidates | {
        dataclasses.replace(config, pdl=config.pdl and options.dependent): prediction.total
        for config, prediction in ranked
    }


def _make_jobs(
    candidates: Mapping[GemmProblem, Mapping[Config, float]], settings: Settings
) -> list[Job]:
    """Build all CUTLASS kernels and return the jobs of the problems that have candidates."""
    kernels = [
        (problem, config)
        for problem, configs in candidates.items()
        for config in configs
        if isinstance(config, CutlassConfig)
    ]
    unbuilt = cutlass_kernels.prepare(kernels, settings)
    jobs = []
    for problem, configs in candidates.items():
        reasons: dict[Config, str | None] = {
            config: unbuilt.get((problem, config)) if isinstance(config, CutlassConfig) else None
            for config in configs
        }
        if configs:
            usable = tuple(config for config, reason in reasons.items() if reason is None)
            dropped = (Timing(config, None, why) for config, why in reasons.items() if why)
            jobs.append(Job(problem, usable, tuple(dropped)))
    return jobs


def _has_cutlass(configs: Iterable[Config]) -> bool:
    return any(isinstance(config, CutlassConfig) for config in configs)


def _list_failures(report: Report) -> str:
    reasons = dict.fromkeys(timing.failure for timing in report.timings if timing.failure)
    return "; ".join(str(reason) for reason in reasons)


def _make_record(
    report: Report, device: Device, predictions: Mapping[Config, float]
) -> TuningRecord:
    candidates = tuple(
        MatmulCandidate(
            config=timing.config,
            predicted=predictions[timing.config] if timing.config is not None else None,
            measured=timing.microseconds,
            failure=timing.failure,
        )
        for timing in report.timings
    )
    return TuningRecord(
        problem=report.problem,
        device=device.name,
        chosen=report.chosen,
        reason=report.reason,
        seconds=round(report.seconds, 3),
        candidates=candidates,
    )
