"""Measuring spaces of candidates, and fitting the model to them."""

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
FAR = dataclasses.replace(cost_model.DEFAULT, convert=2 * cost_model.DEFAULT.convert)


@pytest.fixture(scope="module")
def imagined() -> Space:
    """Times of a device on which dequantising takes twice as long as the model thinks."""
    configs, count = search_spaces.chosen(INT8, H200, 30)
    taken = {config: cost_model.predict(INT8, config, H200, FAR).total for config in configs}
    return Space(INT8, H200, count, 500.0, taken, {})


def test_the_sets_hold_different_problems_that_are_covered() -> None:
    for name, problems in search_spaces.SETS.items():
        found = list(problems())
        assert len(set(found)) == len(found), name
        for problem in found:
            assert next(search_space.candidates(problem, H200), None) is not None, problem
    assert len(list(search_spaces.SETS["regret"]())) == 12


def test_a_sample_has_the_ranked_and_some_other_candidates() -> None:
    everything = list(search_space.candidates(INT8, H200))
    found, count = search_spaces.chosen(INT8, H200, 20)
    assert count == len(everything) > 30
    assert len(found) == len(set(found)) == 20
    assert set(found) <= set(everything)
    ranked = [config for config, _ in ranking.rank(INT8, H200, 6)]
    assert found[:6] == ranked
    times = sorted(cost_model.predict(INT8, item, H200).total for item in everything)
    chosen = sorted(cost_model.predict(INT8, item, H200).total for item in found)
    assert chosen[0] == times[0]
    # Evenly spread up to the slow end.
    assert chosen[-1] > times[len(times) * 3 // 4]
    assert search_spaces.chosen(INT8, H200, None) == (
        sorted(everything, key=lambda x: cost_model.predict(INT8, x, H200).total),
        count,
    )


def test_ways_to_end_stand_beside_what_they_are_compared_with() -> None:
    for problem in search_spaces.SETS["tails"]():
        found, count = search_spaces.pairs(problem, H200, 12)
        assert 12 <= len(found) <= 13 < count
        for item in found:
            twin = dataclasses.replace(item, fused_split_k=False, stream_k=False, tma_store=False)
            assert twin in found or item.warp_specialize
        assert any(item.fused_split_k or item.stream_k or item.tma_store for item in found)


def test_what_was_measured_is_written_and_read(tmp_path: Path) -> None:
    one = search_spaces.measured(SMALL, H200, cpu_bench(0), None, 1.0)
    assert one.stock == pytest.approx(STOCK)
    assert one.candidates == len(one.microseconds) + len(one.failed)
    assert all(taken == config.block_m for config, taken in one.microseconds.items())
    failed = dataclasses.replace(one, failed={GemmConfig("splitk", 16, 16, 16, 2, 4): "wrong"})
    path = tmp_path / "space.json"
    path.write_text(json.dumps({"spaces": [one.to_json(), failed.to_json()]}))
    assert search_spaces.read(path) == [one, failed]


def test_the_command_goes_on_with_what_is_in_the_file(
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
    assert [one.problem for one in search_spaces.read(path)] == [SMALL, other]
    assert search_spaces.read(path)[0] == first
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("mm 16x48x64 fp32 rc: 5 of ")
    assert lines[-1].startswith("1 of 1 in ")


def test_one_constant_is_fitted_alone(imagined: Space) -> None:
    found, before, after = search_spaces.fitted([imagined], ["convert"])
    assert found.convert == pytest.approx(FAR.convert, rel=0.02)
    assert dataclasses.replace(found, convert=cost_model.DEFAULT.convert) == cost_model.DEFAULT
    assert after < 0.1 * before


def test_the_share_is_of_the_fastest(imagined: Space) -> None:
    assert search_spaces.share(imagined, FAR) == pytest.approx(1.0)
    ranked = [config for config, _ in ranking.rank(INT8, H200, 6)]
    best = min(imagined.microseconds.values())
    times = {
        config: 2 * best if config in ranked else taken
        for config, taken in imagined.microseconds.items()
    }
    fastest = min(times.values())
    one = dataclasses.replace(imagined, microseconds=times)
    assert search_spaces.share(one) == pytest.approx(fastest / (2 * best))
    others = {config: taken for config, taken in times.items() if config not in ranked}
    assert search_spaces.share(dataclasses.replace(one, microseconds=others)) == 0.0


def test_the_command_prints_constants_and_shares(
    imagined: Space, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "space.json"
    path.write_text(json.dumps({"spaces": [imagined.to_json()]}))
    assert search_spaces.main(["fit", str(path), "--only", "convert"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Error 0.")
    assert lines[1].split()[0] == "convert:"
    assert f"30 of {imagined.candidates}" in lines[3]
    assert "mixed 2048x4096x4096 bf16*int8 rc" in lines[3]
    assert lines[-1].startswith("fitted: worst 1.000, 0.97 or more in 1 of 1")


def test_what_ranking_misses_is_a_result(
    imagined: Space, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header = results.collect_header("gemm-space", "python -m benchmarks.gemm.search_spaces measure")
    path = tmp_path / "space.json"
    path.write_text(json.dumps({**header, "spaces": [imagined.to_json()]}))
    assert search_spaces.main(["regret", str(path), "--json-out", str(tmp_path)]) == 0
    assert "best of the six ranked first" in capsys.readouterr().out
    document = results.read(tmp_path / "gemm-regret" / f"{header['hardware']}.json")
    (row,) = document["rows"]
    assert row["floor"] == min(imagined.microseconds.values())
    assert row["floor"] / row["ours"] == pytest.approx(search_spaces.share(imagined))
    (line,) = (
        line
        for line in gemm_summary.lines(gemm_summary.numbers([document]))
        if line.target.what.startswith("best of those ranked first")
    )
    assert line.found == pytest.approx(search_spaces.share(imagined))
