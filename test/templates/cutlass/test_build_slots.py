"""How many compilers run at a time."""

from __future__ import annotations

import os

import pytest

from inductor_ext.templates.cutlass import build_slots
from inductor_ext.templates.cutlass.nvcc_build import build_all
from test.support.scripted_nvcc import BAD, Machine, script


class TestJobs:
    def test_cores_and_memory_limit_the_jobs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
        for gigabytes, limit, expected in (
            (128, None, 16),
            (23, None, 4),
            (1, None, 1),
            (128, 3, 3),
            (128, 40, 16),
        ):
            monkeypatch.setattr(build_slots, "total_bytes", lambda g=gigabytes: g << 30)
            assert build_slots.jobs(limit) == expected

    def test_the_memory_of_the_machine_is_read(self) -> None:
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        assert 0 < build_slots.available_bytes() <= physical
        assert 0 < build_slots.total_bytes() <= physical

    def test_without_memory_one_job_runs_at_a_time(
        self, machine: Machine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(build_slots, "available_bytes", lambda: 0)
        sources = [script(f'sleep 0.05; echo {i} >"$out"', f"kernel_{i}") for i in range(2)]
        assert build_all(sources, machine.store, machine.toolchain) == {}
        assert machine.sequence == ["begin", "end"] * 2

    def test_the_limit_of_jobs_is_kept(self, machine: Machine) -> None:
        sources = [script(f'sleep 0.1; echo {i} >"$out"', f"kernel_{i}") for i in range(3)]
        assert build_all(sources, machine.store, machine.toolchain, limit=1) == {}
        assert machine.sequence == ["begin", "end"] * 3

    def test_an_error_affects_one_kernel_only(self, machine: Machine) -> None:
        other = script('echo fine >"$out"', "kernel_2")
        errors = build_all([BAD, other], machine.store, machine.toolchain)
        assert errors.keys() == {"kernel_1"}
        assert machine.built(other) == b"fine\n"
