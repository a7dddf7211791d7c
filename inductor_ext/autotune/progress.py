"""Terminal output of tuning: its progress, and the AUTOTUNE table in Inductor's format."""

from __future__ import annotations

import sys

from inductor_ext.autotune.candidate_run import Report
from inductor_ext.progress import Stage
from inductor_ext.templates.format import config_words, problem_words
from inductor_ext.templates.kernels import Config
from inductor_ext.templates.tensors import Operand


def print_table(report: Report, seconds: float, isolated: bool) -> None:
    """Print the AUTOTUNE table in Inductor's format, where Inductor would print one."""
    from torch._inductor import config as inductor_config
    from torch._inductor import select_algorithm

    enabled = inductor_config.max_autotune or inductor_config.max_autotune_gemm
    num_displayed = inductor_config.autotune_num_choices_displayed
    if (
        not enabled
        or not select_algorithm.PRINT_AUTOTUNE
        or num_displayed == 0
        or sys.stderr is None
    ):
        return
    problem = report.problem
    batch = f"{problem.batch}x" if problem.batch > 1 else ""
    timings = [timing for timing in report.timings if timing.microseconds is not None]
    timings.sort(key=lambda timing: timing.microseconds or 0.0)
    strides = [_strides(operand) for operand in (problem.a, problem.b)]
    sizes = f"{batch}{problem.m}x{problem.k}, {batch}{problem.k}x{problem.n}"
    lines = [
        f"AUTOTUNE {problem.operation}({sizes})",
        f"strides: {', '.join(strides)}",
        f"dtypes: torch.{problem.a.dtype}, torch.{problem.b.dtype}",
    ]
    for timing in timings[:num_displayed]:
        milliseconds = (timing.microseconds or 0.0) / 1e3
        best = (timings[0].microseconds or 0.0) / 1e3
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
        f"{max(0.0, seconds - report.seconds):.4f} seconds precompiling for {len(timings)} "
        f"choices: {report.reason}"
    )
    sys.stderr.write("\n".join(lines) + "\n")


def _strides(operand: Operand) -> str:
    strides = [*operand.strides]
    return str([operand.batch_stride, *strides] if operand.batch_stride else strides)


class TuningProgress:
    """What is shown of tuning on a terminal, see `inductor_ext.progress`."""

    def __init__(self, stage: Stage) -> None:
        """Show the progress in a stage, whose parts are the matmuls to tune."""
        self._stage = stage
        self._best = ""
        self._show("compiling")

    def show_candidate(self, index: int, config: Config | None) -> None:
        """The callback that `candidate_run.run` calls before each step."""
        self._show(config_words(config))

    def show_report(self, report: Report) -> None:
        """Count a problem as finished."""
        self._stage.advance()
        timings = [timing for timing in report.timings if timing.microseconds is not None]
        best = min(timings, key=lambda timing: timing.microseconds or 0.0, default=None)
        if best is not None:
            self._best = f", best {config_words(best.config)} {best.microseconds:.1f} us"
        self._show(problem_words(report.problem))

    def _show(self, step: str) -> None:
        self._stage.text = f"tuning matmuls ({step}{self._best})"
