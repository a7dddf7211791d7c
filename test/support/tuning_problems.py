"""Problems that several tests of tuning use."""

from __future__ import annotations

from typing import Any

import torch

from inductor_ext.autotune import candidate_run
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import EpilogueInput
from inductor_ext.templates.triton.config import GemmConfig
from test.support.benchmark_backends import CpuBench

contiguous = GemmProblem.contiguous
LINEAR = contiguous("mm", 24, 48, 64, "float32")


def inputs_of(*kinds: str, dtype: str = "bfloat16") -> tuple[EpilogueInput, ...]:
    return tuple(EpilogueInput(dtype, kind) for kind in kinds)  # type: ignore[arg-type]


SCALES = inputs_of("column", "row", dtype="float32")


def tried(
    problem: GemmProblem, *configs: GemmConfig, bench: CpuBench | None = None
) -> candidate_run.Report:
    notified: list[tuple[int, GemmConfig | None]] = []
    job = candidate_run.Job(problem, configs)
    bench = bench or CpuBench()
    (report,) = candidate_run.run([job], bench, 50, lambda *at: notified.append(at))
    assert {at for at in notified if at[1] is None} == {(0, None)}
    return report


def matrix(*size: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    return size, dtype
