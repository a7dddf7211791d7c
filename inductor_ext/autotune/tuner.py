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
Inductor's. On a terminal, a progress line is shown on stderr.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

from inductor_ext import events
from inductor_ext.autotune import (
    candidate_run,
    compile_workers,
    cutlass_kernels,
    cutlass_options,
    subprocess_runner,
)
from inductor_ext.autotune.candidate_run import Bench, Job, Report
from inductor_ext.autotune.decision import Decision, Timing
from inductor_ext.settings import Settings
from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.device import Device
from inductor_ext.templates.format import config_words, problem_words
from inductor_ext.templates.kernels import Config
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.records import ProductCandidate, TuningRecord
from inductor_ext.templates.triton import cost_model, ranking, search_space

__all__ = ["CANDIDATES", "tune"]

CANDIDATES = 6
"""Number of Triton candidates that are measured besides Inductor's path."""


def tune(
    problems: Iterable[GemmProblem],
    device: Device,
    make_bench: Callable[[int], Bench],
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
    from torch._inductor import config as inductor_config

    exhaustive = inductor_config.max_autotune_gemm_search_space == "EXHAUSTIVE"
    isolated = isolated or bool(inductor_config.autotune_in_subproc)
    deadline = inductor_config.max_autotune_subproc_result_timeout_seconds
    options = cutlass_options.current()
    different = list(dict.fromkeys(problems))
    hopeless = {
        item for item in different if not exhaustive and not ranking.prologue_pays(item, device)
    }
    predictions = {
        item: _candidates(item, device, exhaustive, options, dependent, item in hopeless)
        for item in different
    }
    if any(
        isinstance(config, CutlassConfig) for configs in predictions.values() for config in configs
    ):
        # Overlaps with nvcc, which builds the kernels that the worker will run.
        subprocess_runner.warm_up(make_bench, index)
        compile_workers.warm_up(device.capability)
    jobs = _jobs(predictions, settings)
    decisions = {
        problem: Decision(None, "predicted" if problem in hopeless else "unknown")
        for problem in different
    }
    if not jobs:
        return decisions
    progress = _Progress(len(jobs))
    begun = time.perf_counter()
    reports: list[Generator[Report, None, None]] = []
    apart = {job.problem for job in jobs if isolated or _has_cutlass(job)}
    if apart:
        told = [job for job in jobs if job.problem in apart]
        reports.append(
            subprocess_runner.run(told, make_bench, index, settings.tuning_budget, deadline)
        )
    here = [job for job in jobs if job.problem not in apart]
    if here:
        reports.append(
            candidate_run.run(here, make_bench(index), settings.tuning_budget, progress.at)
        )
    finished: list[Report] = []
    try:
        for report in itertools.chain(*reports):
            decisions[report.problem] = Decision(report.chosen, "measured", report.timings)
            finished.append(report)
            progress.finished(report)
            _print_table(report, time.perf_counter() - begun, report.problem in apart)
            begun = time.perf_counter()
    finally:
        progress.close()
        # Otherwise the traceback of an error keeps the generators alive, and the contexts that they
        # entered.
        for item in reports:
            item.close()
        # Emit only now: events of this thread are muted while the generators run.
        for report in finished:
            record = _record(report, device, predictions[report.problem])
            events.emit(record, event_log=settings.event_log)
    for report in finished:
        if all(
            timing.microseconds is None for timing in report.timings if timing.config is not None
        ):
            reasons = _failures(report)
            words = problem_words(report.problem)
            events.warn_once(
                f"tuning:{reasons}", f"no extension kernel can be used for {words}: {reasons}"
            )
    return decisions


def _candidates(
    problem: GemmProblem,
    device: Device,
    exhaustive: bool,
    options: cutlass_options.Options,
    dependent: bool,
    hopeless: bool,
) -> dict[Config, float]:
    """Return the configurations to measure, with their predicted microseconds.

    A hopeless problem gets no Triton candidates.
    """
    found: dict[Config, float] = {}
    if problem.epilogue.tree is not None:
        found |= options.rank(problem, device)
        if options.alone:
            return found
    if hopeless:
        return found
    if exhaustive:
        ranked = [
            (config, cost_model.predict(problem, config, device))
            for config in search_space.candidates(problem, device)
        ]
    else:
        ranked = ranking.rank(problem, device, CANDIDATES)
    return found | {
        dataclasses.replace(config, pdl=config.pdl and dependent): prediction.total
        for config, prediction in ranked
    }


def _jobs(
    candidates: Mapping[GemmProblem, Mapping[Config, float]], settings: Settings
) -> list[Job]:
    """Build all CUTLASS kernels and return the jobs of the problems that have candidates."""
    wanted = [
        (problem, config)
        for problem, configs in candidates.items()
        for config in configs
        if isinstance(config, CutlassConfig)
    ]
    unbuilt = cutlass_kernels.prepare(wanted, settings)
    jobs = []
    for problem, configs in candidates.items():
        reasons: dict[Config, str | None] = {
            config: unbuilt.get((problem, config)) if isinstance(config, CutlassConfig) else None
            for config in configs
        }
        if configs:
            left = tuple(config for config, reason in reasons.items() if reason is None)
            dropped = (Timing(config, None, why) for config, why in reasons.items() if why)
            jobs.append(Job(problem, left, tuple(dropped)))
    return jobs


def _has_cutlass(job: Job) -> bool:
    return any(isinstance(config, CutlassConfig) for config in job.configs)


def _failures(report: Report) -> str:
    reasons = dict.fromkeys(timing.failure for timing in report.timings if timing.failure)
    return "; ".join(str(reason) for reason in reasons)


def _record(report: Report, device: Device, predictions: Mapping[Config, float]) -> TuningRecord:
    candidates = tuple(
        ProductCandidate(
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


# --- terminal output ---------------------------------------------------------------------------


def _print_table(report: Report, seconds: float, isolated: bool) -> None:
    """Print the AUTOTUNE table in Inductor's format, where Inductor would print one."""
    from torch._inductor import config as inductor_config
    from torch._inductor import select_algorithm

    asked = inductor_config.max_autotune or inductor_config.max_autotune_gemm
    shown = inductor_config.autotune_num_choices_displayed
    if not asked or not select_algorithm.PRINT_AUTOTUNE or shown == 0 or sys.stderr is None:
        return
    problem = report.problem
    batch = f"{problem.batch}x" if problem.batch > 1 else ""
    taken = [timing for timing in report.timings if timing.microseconds is not None]
    taken.sort(key=lambda timing: timing.microseconds or 0.0)
    strides = [_strides(item) for item in (problem.a, problem.b)]
    sizes = f"{batch}{problem.m}x{problem.k}, {batch}{problem.k}x{problem.n}"
    lines = [
        f"AUTOTUNE {problem.operation}({sizes})",
        f"strides: {', '.join(strides)}",
        f"dtypes: torch.{problem.a.dtype}, torch.{problem.b.dtype}",
    ]
    for timing in taken[:shown]:
        milliseconds = (timing.microseconds or 0.0) / 1e3
        best = (taken[0].microseconds or 0.0) / 1e3
        name = (
            f"{problem.operation} (Inductor)"
            if timing.config is None
            else config_words(timing.config)
        )
        mark = " chosen" if timing.config == report.chosen else ""
        lines.append(f"  {name} {milliseconds:.4f} ms {best / milliseconds:.1%}{mark}")
    process = "SubProcess" if isolated else "SingleProcess"
    lines.append(
        f"{process} AUTOTUNE benchmarking takes {report.seconds:.4f} seconds and "
        f"{max(0.0, seconds - report.seconds):.4f} seconds precompiling for {len(taken)} choices: "
        f"{report.reason}"
    )
    sys.stderr.write("\n".join(lines) + "\n")


def _strides(operand: Any) -> str:
    own = [*operand.strides]
    return str([operand.batch_stride, *own] if operand.batch_stride else own)


class _Progress:
    """A progress line on the terminal; does nothing without a terminal."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._begun = time.monotonic()
        self._best = ""
        self._shown = sys.stderr is not None and sys.stderr.isatty()
        self._show("compiling")

    def at(self, index: int, config: Config | None) -> None:
        """The callback that `candidate_run.run` calls before each step."""
        self._show(config_words(config))

    def finished(self, report: Report) -> None:
        self._done += 1
        taken = [timing for timing in report.timings if timing.microseconds is not None]
        best = min(taken, key=lambda timing: timing.microseconds or 0.0, default=None)
        if best is not None:
            self._best = f"{config_words(best.config)} {best.microseconds:.1f} us"
        self._show(problem_words(report.problem))
        self.close()

    def _show(self, what: str) -> None:
        if self._shown:
            elapsed = time.monotonic() - self._begun
            best = f", best {self._best}" if self._best else ""
            text = f"tuning GEMMs: {elapsed:.1f} s, {self._done}/{self._total}{best}, {what}"
            sys.stderr.write(f"\r\x1b[K{text[:120]}")
            sys.stderr.flush()

    def close(self) -> None:
        """Clear the line."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
