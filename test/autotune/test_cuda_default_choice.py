"""The kernels that are taken without measuring compute the right results, for sizes never seen."""

from __future__ import annotations

import pytest
import torch
import torch._inductor.config as inductor_config

from benchmarks.gemm import layer_problems
from inductor_ext import config
from inductor_ext.autotune import candidate_run, default_choice, inductor_benchmark
from inductor_ext.hooks import activate, compile_fx, scope
from inductor_ext.templates.device import Device

pytestmark = pytest.mark.gpu

SEED = 900_000
"""The rules come from problems of other seeds."""


def test_kernels_of_unseen_layers_are_correct() -> None:
    device = Device.from_torch(torch.cuda.get_device_properties(0))
    choices = {
        problem: default_choice.choose(problem, device).config
        for problem in layer_problems.draw_problems(120, SEED)
    }
    jobs = [
        candidate_run.Job(problem, (choice,))
        for problem, choice in choices.items()
        if choice is not None
    ]
    if not jobs:
        pytest.skip(f"no kernel is taken without a measurement on {device.name}")
    assert len(jobs) >= 40
    compile_fx.install_hooks(activate.requested)
    with (
        inductor_config.patch(force_disable_caches=True),
        scope.compile_scope(config.snapshot()),
    ):
        bench = inductor_benchmark.cuda_bench(0)
        reports = list(candidate_run.run(jobs, bench, 1.0, lambda index, choice: None))
    failures = {
        report.problem: timing.failure
        for report in reports
        for timing in report.timings
        if timing.failure
    }
    assert failures == {}
