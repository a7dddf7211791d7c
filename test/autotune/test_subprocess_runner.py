"""Tuning in a worker process: crashes, hangs, and the end of the parent."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from inductor_ext import numerics
from inductor_ext.autotune import candidate_run, subprocess_runner
from inductor_ext.templates.fused_ops import Epilogue
from inductor_ext.templates.problem import GemmProblem, KernelDetails, read
from inductor_ext.templates.triton.config import GemmConfig
from test.support import benchmark_backends
from test.support.benchmark_backends import STOCK, candidate

PROBLEM = GemmProblem.contiguous("mm", 24, 48, 64, "float32")
OTHER = GemmProblem.contiguous("mm", 24, 48, 32, "float32")
THIRD = GemmProblem.contiguous("mm", 24, 48, 16, "float32")


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    subprocess_runner.close_workers()


def reports(
    *jobs: candidate_run.Job,
    bench: Callable[[int], benchmark_backends.CpuBench] = benchmark_backends.cpu_bench,
    deadline: float = 120.0,
) -> dict[GemmProblem, candidate_run.Report]:
    results = subprocess_runner.run(jobs, bench, 0, 50, deadline)
    return {case.problem: case for case in results}


def failures(report: candidate_run.Report) -> dict[GemmConfig | None, str | None]:
    return {timing.config: timing.failure for timing in report.timings}


def test_a_crash_drops_only_its_candidate() -> None:
    dies, good = candidate(20, benchmark_backends.SEGFAULTS), candidate(80)
    results = reports(candidate_run.Job(OTHER, (good,)), candidate_run.Job(PROBLEM, (dies, good)))
    assert set(results) == {OTHER, PROBLEM}
    for report in results.values():
        assert report.chosen == good
        assert report.timings[0].microseconds == pytest.approx(STOCK)
    assert failures(results[PROBLEM]) == {
        None: None,
        good: None,
        dies: "the process died of SIGSEGV",
    }
    # The worker without a crash is reused for the next batch.
    process = subprocess_runner.workers[0].process.pid
    assert reports(candidate_run.Job(PROBLEM, (good,)))[PROBLEM].chosen == good
    assert subprocess_runner.workers[0].process.pid == process


def test_a_worker_started_ahead_is_used() -> None:
    started = subprocess_runner.warm_up(benchmark_backends.cpu_bench, 0)
    assert started is not None
    good = candidate(80)
    # A request waits until the worker has started.
    assert reports(candidate_run.Job(PROBLEM, (good,)))[PROBLEM].chosen == good
    started.join()
    process = subprocess_runner.workers[0].process.pid
    assert subprocess_runner.warm_up(benchmark_backends.cpu_bench, 0) is None
    assert reports(candidate_run.Job(PROBLEM, (good,)))[PROBLEM].chosen == good
    assert subprocess_runner.workers[0].process.pid == process


def test_a_worker_started_ahead_is_warmed_up() -> None:
    good = candidate(80)
    job = candidate_run.Job(PROBLEM, (good,))
    assert "warmed up 0 times" in str(reports(job, bench=benchmark_backends.eager_bench)[PROBLEM])
    subprocess_runner.close_workers()
    started = subprocess_runner.warm_up(benchmark_backends.eager_bench, 0)
    assert started is not None
    started.join()
    assert reports(job, bench=benchmark_backends.eager_bench)[PROBLEM].chosen == good


def test_a_hang_ends_with_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, exits = (
        candidate(10, benchmark_backends.HANGS),
        candidate(20, benchmark_backends.CRASHES),
    )
    read_message = subprocess_runner._Worker._read_message
    steps: list[Any] = [None]

    def read_with_deadline(worker: subprocess_runner._Worker, limit: float) -> dict[str, Any]:
        # On a busy machine other steps may take longer than the deadline.
        _, config = steps[-1] or (0, None)
        message = read_message(worker, limit if config == hangs.to_json() else 120.0)
        steps.append(message.get("at"))
        return message

    monkeypatch.setattr(subprocess_runner._Worker, "_read_message", read_with_deadline)
    job = candidate_run.Job(PROBLEM, (hangs, exits))
    results = reports(job, bench=benchmark_backends.warm_cpu_bench, deadline=0.5)
    report = results[PROBLEM]
    assert report.chosen is None
    assert report.timings[0].microseconds == pytest.approx(STOCK)
    assert failures(report)[hangs] == "no result within 0.5 s"
    assert failures(report)[exits] == "the process ended with status 3"


def test_failing_backends_give_the_fallback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(benchmark_backends.cpu_bench, "__qualname__", "no_such_bench")
    report = reports(candidate_run.Job(PROBLEM, (candidate(10),)))[PROBLEM]
    assert report.chosen is None
    assert "no_such_bench" in report.reason


def test_without_a_process_everything_falls_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    report = reports(candidate_run.Job(PROBLEM, (candidate(10),)))[PROBLEM]
    assert report.chosen is None
    assert "cannot be started" in report.reason
    assert len(os.listdir("/proc/self/fd")) == opened


def test_reports_before_a_crash_are_kept() -> None:
    good = candidate(80)
    jobs = [candidate_run.Job(PROBLEM, (good,)), candidate_run.Job(OTHER, (good,))]
    results = list(subprocess_runner.run(jobs, benchmark_backends.dying_bench, 0, 50, 120.0))
    assert [(case.problem, case.chosen) for case in results] == [(PROBLEM, good), (OTHER, good)]


def test_unread_answers_are_discarded() -> None:
    good = candidate(80)
    jobs = [candidate_run.Job(PROBLEM, (good,)), candidate_run.Job(OTHER, (good,))]
    result = subprocess_runner.run(jobs, benchmark_backends.cpu_bench, 0, 50, 120.0)
    assert next(result).problem == PROBLEM
    result.close()
    assert set(reports(candidate_run.Job(THIRD, (good,)))) == {THIRD}


def test_a_process_may_have_many_files_open() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
        while not opened or opened[-1] < 1100:
            opened.append(os.open(os.devnull, os.O_RDONLY))
        assert reports(candidate_run.Job(PROBLEM, (candidate(80),)))[PROBLEM].chosen == candidate(
            80
        )
    finally:
        subprocess_runner.close_workers()
        for item in opened:
            os.close(item)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_the_worker_ends_with_its_parent() -> None:
    parent = (
        "import sys, os, signal\n"
        "from inductor_ext.autotune import subprocess_runner\n"
        "print(subprocess_runner._get_worker(0).process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    run = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True)
    assert run.returncode == -signal.SIGKILL
    process = int(run.stdout)
    for _ in range(200):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("the worker outlives its parent")


def test_the_worker_has_the_deterministic_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config as inductor_config

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    job = candidate_run.Job(PROBLEM, ())

    def text() -> str | None:
        return failures(reports(job, bench=benchmark_backends.telling_bench)[PROBLEM])[None]

    fill = numerics.determinism()[2]
    plain = f"((False, False, {fill}), None, False)"
    assert plain in str(text())
    # The worker was started before.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    flags = "allow_fp16_accumulation,-allow_bf16_reduced_precision_reduction"
    with (
        inductor_config.patch(deterministic=True),
        numerics.with_determinism((True, True, False)),
        numerics.with_matmul_flags(flags),
    ):
        assert f"((True, True, False), '{flags}', True) :4096:8" in str(text())
    assert plain in str(text())


def test_problems_reach_the_worker_unchanged() -> None:
    problem = GemmProblem.contiguous(
        "mm",
        16,
        64,
        32,
        parts=(32, 32),
        epilogue=Epilogue(gated=True),
        details=KernelDetails("relu"),
    )
    request = subprocess_runner.build_request(
        [candidate_run.Job(problem, ())], benchmark_backends.cpu_bench, 0, 50
    )
    result = read(candidate_run.Job, json.loads(json.dumps(request))["jobs"][0], "job").problem
    assert dataclasses.asdict(result) == dataclasses.asdict(problem)
