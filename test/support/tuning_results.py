"""Environments of tuning results, lookups, and processes that share a folder."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

from inductor_ext.autotune.results import Environment
from inductor_ext.autotune.results_db import TuningDatabase
from test.support.children.tuning import H200, HERE, problem
from test.support.gemm_strategies import device

CHECKOUT = Path(__file__).parents[2]
H100 = device("NVIDIA H100 80GB HBM3")
ON_H100 = dataclasses.replace(HERE, device=H100.name)
OLD_TRITON = dataclasses.replace(HERE, triton="3.6.0")
OLD_TEMPLATES = dataclasses.replace(HERE, templates="f" * 16)


def lookup_result(
    store: TuningDatabase, index: int = 0, environment: Environment = HERE
) -> tuple[str, float | None] | None:
    """Origin of the decision for a problem, and the selected kernel's microseconds."""
    result = store.lookup(problem(index), H200, lambda problem: environment)
    return result and (result.origin, result.decision.microseconds(result.decision.config))


def run_child(*arguments: str | Path) -> str:
    """Run a mode of `test.support.children.tuning` in a new process; return what it prints."""
    command = [sys.executable, "-m", "test.support.children.tuning", *map(str, arguments)]
    run = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout
