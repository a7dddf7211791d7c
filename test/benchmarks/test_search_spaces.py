"""Measuring search spaces, and fitting the cost model to them."""

from __future__ import annotations

import dataclasses
import json
import types
from pathlib import Path

import pytest
import torch

from benchmarks.gemm import search_spaces
from benchmarks.gemm import summary as gemm_summary
from benchmarks.gemm.search_spaces import Space
from benchmarks.harness import results
from inductor_ext.autotune import inductor_benchmark
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.triton import cost_model, ranking, search_space
from inductor_ext.templates.triton.config import GemmConfig
from test.support.benchmark_backends import STOCK, cpu_bench
from test.support.gemm_strategies import device

H200 = device("NVIDIA H200")
SMALL = GemmProblem.contiguous("mm", 16, 48, 64, "float32")
INT8 = GemmProblem.contiguous("mixed", 2048, 4096, 4096, b_dtype="int8")
SLOW_CONVERT = dataclasses.replace(cost_model.DEFAULT, convert=2 * cost_model.DEFAULT.convert)


@pytest.fixture(scope="module")
def synthetic() -> Space:
    """Times of a device on which dequantization takes twice as long as the model predicts."""
    configs, count = search_spaces.select_candidates(INT8, H200, 30)
    times = {
        config: cost_model.predict(INT8, config, H200, SLOW_CONVERT).total for config in configs
    }
    return Space(INT8, H200, count, 500.0, times, {})


def test_sets_have_distinct_problems_with_candidates() -> None:
    for name, yield_problems in search_spaces.SETS.items():
        problems = list(yield_problems())
        assert len(set(problems)) == len(problems), name
        for problem in problems:
            assert next(search_space.candidates(problem, H200), None) is not None, problem
    assert len(list(search_spaces.SETS["regret"]())) == 12


def test_selection_has_ranked_and_other_candidates() -> None:
    everything = list(search_space.candidates(INT8, H200))
    selection, count = search_spaces.select_candidates(INT8, H200, 20)
    assert count == len(everything) > 30
    assert len(selection) == len(set(selection)) == 20
    assert set(selection) <= set(everything)
    ranked = [config for config, _ in ranking.rank(INT8, H200, 6)]
    assert selection[:6] == ranked
    times = sorted(cost_model.predict(INT8, item, H200).total for item in everything)
    selected_times = sorted(cost_model.predict(INT8, item, H200).total for item in selection)
    assert selected_times[0] == times[0]
    # Evenly spread up to the slow end.
    assert selected_times[-1] > times[len(times) * 3 // 4]
    assert search_spaces.select_candidates(INT8, H200, None) == (
        sorted(everything, key=lambda x: cost_model.predict(INT8, x, H200).total),
        count,
    )


def test_pairs_have_a_candidate_without_the_options() -> None:
    for problem in search_spaces.SETS["tails"]():
        selection, count = search_spaces.select_pairs(problem, H200, 12)
        assert 12 <= len(selection) <= 13 < count
        for item in selection:
            plain = dataclasses.replace(item, fused_split_k=False, stream_k=False, tma_store=False)
            assert plain in selection or item.warp_specialize
        assert any(item.fused_split_k or item.stream_k or item.tma_store for item in selection)


def test_spaces_are_read_as_written(tmp_path: Path) -> None:
    space = search_spaces.measure_space(SMALL, H200, cpu_bench(0), None, 1.0)
    assert space.inductor == pytest.approx(STOCK)
    assert space.candidates == len(space.microseconds) + len(space.failures)
    assert all(time == config.block_m for config, time in space.microseconds.items())
    failed = dataclasses.replace(space, failures={GemmConfig("splitk", 16, 16, 16, 2, 4): "wrong"})
    path = tmp_path / "space.json"
    path.write_text(json.dumps({"spaces": [space.to_json(), failed.to_json()]}))
    assert search_spaces.read(path) == [space, failed]


def test_measure_continues_an_existing_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    properties = types.SimpleNamespace(
        name="NVIDIA H200",
        major=9,
        minor=0,
        multi_processor_count=132,
        shared_memory_per_block_optin=232_448,
        shared_memory_per_multiprocessor=233_472,
        L2_cache_size=50 << 20,
        regs_per_multiprocessor=65_536,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(inductor_benchmark, "cuda_bench", cpu_bench)
    other = dataclasses.replace(SMALL, deterministic=True)
    sets = {"one": lambda: iter([SMALL]), "both": lambda: iter([SMALL, other])}
    monkeypatch.setattr(search_spaces, "SETS", sets)
    path = tmp_path / "space.json"
    common = ["measure", "--most", "5", "--out", str(path), "--commit", "a" * 40, "--set"]
    assert search_spaces.main([*common, "one"]) == 0
    (first,) = search_spaces.read(path)
    assert first.problem == SMALL
    assert len(first.microseconds) == 5
    assert search_spaces.main([*common, "both"]) == 0
    assert [space.problem for space in search_spaces.read(path)] == [SMALL, other]
    assert search_spaces.read(path)[0] == first
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("mm 16x48x64 fp32 rc: 5 of ")
    assert lines[-1].startswith("1 of 1 in ")


def test_fit_of_a_single_constant(synthetic: Space) -> None:
    constants, before, after = search_spaces.fit([synthetic], ["convert"])
    assert constants.convert == pytest.approx(SLOW_CONVERT.convert, rel=0.02)
    assert dataclasses.replace(constants, convert=cost_model.DEFAULT.convert) == cost_model.DEFAULT
    assert after < 0.1 * before


def test_speed_share_is_relative_to_the_fastest(synthetic: Space) -> None:
    assert search_spaces.compute_speed_share(synthetic, SLOW_CONVERT) == pytest.approx(1.0)
    ranked = [config for config, _ in ranking.rank(INT8, H200, 6)]
    best = min(synthetic.microseconds.values())
    times = {
        config: 2 * best if config in ranked else time
        for config, time in synthetic.microseconds.items()
    }
    fastest = min(times.values())
    space = dataclasses.replace(synthetic, microseconds=times)
    assert search_spaces.compute_speed_share(space) == pytest.approx(fastest / (2 * best))
    others = {config: time for config, time in times.items() if config not in ranked}
    assert search_spaces.compute_speed_share(dataclasses.replace(space, microseconds=others)) == 0.0


def test_fit_prints_constants_and_shares(
    synthetic: Space, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "space.json"
    path.write_text(json.dumps({"spaces": [synthetic.to_json()]}))
    assert search_spaces.main(["fit", str(path), "--only", "convert"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Error 0.")
    assert lines[1].split()[0] == "convert:"
    assert f"30 of {synthetic.candidates}" in lines[3]
    assert "mixed 2048x4096x4096 bf16*int8 rc" in lines[3]
    assert lines[-1].startswith("fitted: worst 1.000, 0.97 or more in 1 of 1")


def test_regret_is_written_as_a_result(
    synthetic: Space, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header = results.collect_header("gemm-space", "python -m benchmarks.gemm.search_spaces measure")
    path = tmp_path / "space.json"
    path.write_text(json.dumps({**header, "spaces": [synthetic.to_json()]}))
    assert search_spaces.main(["regret", str(path), "--json-out", str(tmp_path)]) == 0
    assert "best of the six ranked first" in capsys.readouterr().out
    document = results.read(tmp_path / "gemm-regret" / f"{header['hardware']}.json")
    (row,) = document["rows"]
    assert row["floor"] == min(synthetic.microseconds.values())
    assert row["floor"] / row["ours"] == pytest.approx(search_spaces.compute_speed_share(synthetic))
    (result,) = (
        result
        for result in gemm_summary.check_targets(gemm_summary.collect([document]))
        if result.target.name.startswith("best of those ranked first")
    )
    assert result.value == pytest.approx(search_spaces.compute_speed_share(synthetic))
