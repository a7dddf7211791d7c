"""Candidates compiled and timed together: which are dropped, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest

from inductor_ext import exc
from inductor_ext.autotune import candidate_run
from inductor_ext.templates.triton.config import GemmConfig
from test.support import benchmark_backends
from test.support.benchmark_backends import STOCK, CpuBench, candidate
from test.support.tuning_problems import LINEAR, tried


class TestTrial:
    def test_failed_candidates_are_dropped_with_the_reason(self) -> None:
        kinds = (
            benchmark_backends.WRONG,
            benchmark_backends.NOT_A_NUMBER,
            benchmark_backends.RAISES,
            benchmark_backends.NO_COMPILE,
            benchmark_backends.UNUSED,
        )
        bad = [candidate(10, kind) for kind in kinds]
        good = candidate(80)
        report = tried(LINEAR, *bad, good)
        assert report.chosen == good
        assert report.reason == "20.0% less time than Inductor (default)"
        assert [item.config for item in report.timings] == [None, *bad, good]
        assert report.timings[0].microseconds == pytest.approx(STOCK, rel=0.01)
        failures = [item.failure or "" for item in report.timings]
        assert failures[1].startswith("wrong: error")
        assert failures[2:] == [
            "wrong: NaN, infinity or another shape",
            "failed: RuntimeError: an illegal memory access",
            "does not compile: ValueError: no such instruction",
            "generates the same code as Inductor (default): the template was not used",
            "",
        ]
        assert all(item.microseconds is None for item in report.timings[1:-1])

    def test_fallback_stays_without_a_faster_candidate(self) -> None:
        report = tried(LINEAR, candidate(10, benchmark_backends.WRONG))
        assert (report.chosen, report.reason) == (None, "no candidates are left")
        assert report.timings[0].microseconds == pytest.approx(STOCK, rel=0.01)
        report = tried(LINEAR, candidate(99), candidate(120))
        assert report.chosen is None
        assert report.reason.startswith("the best candidate is 1.0% ahead; 2.0%")

    def test_the_same_code_is_measured_once(self) -> None:
        twin = dataclasses.replace(candidate(80), num_stages=3)
        with mock.patch.object(GemmConfig, "__repr__", return_value="same"):
            report = tried(LINEAR, candidate(80), twin)
        assert (
            report.timings[2].failure
            == "generates the same code as splitk 80x32x32, 2 stages, 4 warps, group 1"
        )

    def test_problems_are_timed_while_the_next_ones_compile(self) -> None:
        events: list[str] = []

        class Recorder(CpuBench):
            def stopwatch(self, calls: Sequence[Callable[[], object]]) -> Any:
                events.append("time")
                return super().stopwatch(calls)

        narrow = dataclasses.replace(LINEAR, m=2)
        jobs = [candidate_run.Job(problem, (candidate(80),)) for problem in (LINEAR, narrow)]
        run = candidate_run.run(
            jobs, Recorder(), 50, lambda job, config: events.append(f"{job} {bool(config)}")
        )
        reports = list(run)
        assert [report.chosen for report in reports] == [candidate(80)] * 2
        assert events.index("time") < events.index("1 False")
        assert events.count("time") == 2

    def test_problems_beyond_memory_fall_back(self) -> None:
        bench = CpuBench()
        bench.free = 1 << 10
        report = tried(LINEAR, candidate(10), bench=bench)
        assert report.chosen is None
        assert report.reason == "tuning needs 0.0 GiB, and 0.0 GiB are free"

    def test_a_broken_device_is_an_error(self) -> None:
        bench = CpuBench()
        bench.broken = True
        with pytest.raises(exc.TuningFaultError, match="splitk 10x32x32") as caught:
            tried(LINEAR, candidate(10, benchmark_backends.RAISES), bench=bench)
        assert "AUTOTUNE_IN_SUBPROC" in str(caught.value)
