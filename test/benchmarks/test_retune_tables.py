"""Measuring the GEMMs of a tuning table again, and merging the results."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

pytest.importorskip("triton")

from benchmarks.gemm import retune_tables
from benchmarks.gemm.cases import CASES
from inductor_ext.autotune import results
from inductor_ext.autotune.decision import Decision, Timing
from inductor_ext.autotune.results import Environment, TuningResult
from inductor_ext.templates.problem import GemmProblem
from test.support.benchmark_backends import cpu_bench
from test.support.gemm_strategies import device

H200 = device("NVIDIA H200")
PROBLEMS = [GemmProblem.contiguous("mm", 16, 48, k, "float32") for k in (32, 64, 96, 128, 160)]


def entry(problem: GemmProblem, measured: int = 1, templates: str = "old") -> TuningResult:
    environment = Environment("NVIDIA H200", (9, 0), 132, "3.6.0", "13.0", templates)
    decision = Decision(None, "measured", (Timing(None, 10.0 * measured),))
    return dataclasses.replace(TuningResult.of(problem, decision, environment), measured=measured)


def test_parts_mix_large_and_small_matmuls() -> None:
    table = [entry(item) for item in PROBLEMS]
    first, second = (retune_tables.list_problems(table, part, 2) for part in (1, 2))
    assert sorted(first + second, key=lambda x: x.k) == PROBLEMS
    assert [item.k for item in first] == [32, 96, 160]


def test_excluded_and_cutlass_problems_are_skipped() -> None:
    table = [entry(PROBLEMS[0]), entry(PROBLEMS[1], templates="old+cutlass"), entry(PROBLEMS[2])]
    assert retune_tables.list_problems(table, 1, 1, excluded=table[:1]) == [PROBLEMS[2]]


def test_problems_of_the_suite_keep_their_activation() -> None:
    problem = CASES["GEGLU 2048x5120x1280"].problem
    stored = GemmProblem.from_json(problem.to_json())
    (problem,) = retune_tables.list_problems([entry(stored)], 1, 1)
    assert stored.details.activation == "silu"
    assert (problem.details.activation, problem.details.packed_first) == ("gelu", "up")


def test_newest_result_of_a_matmul_counts() -> None:
    old, new = entry(PROBLEMS[0], 1, "old"), entry(PROBLEMS[0], 2, "new")
    other = entry(PROBLEMS[1], 1, "old")
    assert results.merge_results(
        retune_tables.select_newest([new, old, other])
    ) == results.merge_results([other, new])


def test_measured_matmuls_are_merged_into_a_table(tmp_path: Path) -> None:
    table, part = tmp_path / "table.json", tmp_path / "part.json"
    results.write_table(table, [entry(item) for item in PROBLEMS[:2]])
    entries = retune_tables.measure(PROBLEMS[:1], H200, cpu_bench, part, 60.0)
    assert [result.problem for result in entries] == PROBLEMS[:1]
    assert retune_tables.main(["--table", str(table), "merge", str(part)]) == 0
    merged = {result.problem: result for result in results.read_table(table)}
    assert set(merged) == set(PROBLEMS[:2])
    assert merged[PROBLEMS[0]] == entries[0]
    assert merged[PROBLEMS[1]].environment.templates == "old"


def test_merge_creates_a_new_table(tmp_path: Path) -> None:
    table, part = tmp_path / "table.json", tmp_path / "part.json"
    results.write_table(part, [entry(PROBLEMS[0])])
    assert retune_tables.main(["--table", str(table), "merge", str(part)]) == 0
    assert results.read_table(table) == [entry(PROBLEMS[0])]


def test_no_matmul_starts_after_the_budget(tmp_path: Path) -> None:
    assert retune_tables.measure(PROBLEMS, H200, cpu_bench, tmp_path / "part.json", -1.0) == []
    assert not list(tmp_path.iterdir())


def test_invalid_part_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        retune_tables.main(["measure", "--part", "5/4", "--out", "x.json"])
    assert "5/4 is not a part such as 1/4" in capsys.readouterr().err
