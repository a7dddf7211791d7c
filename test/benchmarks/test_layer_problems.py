"""Random GEMMs of model layers and their measurements."""

from __future__ import annotations

from benchmarks.gemm import layer_problems
from benchmarks.gemm.cases import CASES
from inductor_ext.autotune import results_db
from inductor_ext.autotune.results import TuningResult


def test_problems_are_reproducible_and_differ() -> None:
    problems = layer_problems.draw_problems(300, seed=0)
    assert problems == layer_problems.draw_problems(300, seed=0)
    assert len(set(problems)) == 300
    assert {problem.operation for problem in problems} == {"mm", "addmm", "bmm", "mixed"}


def test_problems_are_not_those_of_the_suite_or_the_tables() -> None:
    tables = results_db.read_shipped_tables(results_db.TABLES)
    known = {case.problem for case in CASES.values()} | {
        TuningResult.from_json(value).problem for values in tables.values() for value in values
    }
    assert known.isdisjoint(layer_problems.draw_problems(1500, seed=0))


def test_measurements_have_the_time_of_inductor_and_of_candidates() -> None:
    for path in layer_problems.MEASUREMENTS.glob("*.json.gz"):
        entries = layer_problems.read(path)
        assert len(entries) > 300
        for entry in entries:
            configs = [timing.config for timing in entry.timings if timing.microseconds]
            assert None in configs
            assert len(configs) >= 2
