"""The summary of GEMM benchmarks: its arithmetic, on results that were made up."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gemm import e2e
from benchmarks.gemm import run as gemm
from benchmarks.gemm import summary as gemm_summary
from benchmarks.harness import results, variants
from test.benchmarks.test_gemm import HEADER

LINES = {
    "decode": "llama-8b o 16x4096x4096",
    "prefill": "llama-8b o 2048x4096x4096",
    "qkv": "QKV 16x6144x4096",
    "int8": "int8 weight 16x14336x4096",
}


def measured(times: Mapping[str, float], seconds: Mapping[str, float]) -> Any:
    return {
        name: gemm.Measured({"graph": [value]}, seconds.get(name)) for name, value in times.items()
    }


def gemm_document(**times: Mapping[str, float]) -> results.Document:
    seconds = {"stock-max": 4.0, "ours": 0.8}
    rows = [
        row
        for key, values in times.items()
        for row in gemm.rows(LINES[key], measured(values, seconds), 5.0)
    ]
    return {**HEADER, "rows": rows}


DOCUMENT = gemm_document(
    decode={"eager": 22, "stock": 23, "stock-max": 21, "stock-max-tma": 24, "ours": 10},
    prefill={"eager": 99, "stock": 99, "stock-max": 101, "stock-max-tma": 100, "ours": 100},
    qkv={"eager": 36, "stock": 36, "stock-max": 35, "ours": 20},
    int8={"eager": 200, "stock": 90, "stock-max": 84, "ours": 21, "bf16": 42},
)


def models() -> results.Document:
    def one(**milliseconds: float) -> Any:
        ways = {name.replace("_", "-"): value for name, value in milliseconds.items()}
        return {
            name: e2e.Measured({"graphs": [value / 1e3]}, 9.0 if name != "eager" else None)
            for name, value in ways.items()
        }

    decode = e2e.rows("llama decode 16x1", one(eager=2.0, stock=0.8, stock_max=0.7, ours=0.5), 0.4)
    bert = e2e.rows("bert 32x128", one(eager=3.0, stock=2.9, stock_max=2.8, ours=2.8))
    return {**HEADER, "suite": "e2e", "rows": [*decode, *bert]}


def found(*documents: results.Document) -> dict[str, gemm_summary.Line]:
    of = gemm_summary.numbers(documents)
    return {line.target.what: line for line in gemm_summary.lines(of)}


def test_the_slowest_tuning_counts() -> None:
    rows: list[results.Row] = []
    for key, seconds in (("decode", 0.5), ("qkv", 2.5)):
        ours = gemm.Measured({"graph": [1.0]}, 3.0, tuning=seconds)
        rows += gemm.rows(LINES[key], {"ours": ours, "eager": gemm.Measured({"graph": [1.0]})})
    line = found({**HEADER, "rows": rows})["tuning seconds of a new GEMM"]
    assert (line.found, line.count, line.worst, line.met) == (2.5, 2, LINES["qkv"], False)


def test_targets_count_what_they_say() -> None:
    of = found(DOCUMENT, models())
    # Against the best of max-autotune and cuBLAS: 2.1, 0.99, 1.75, 4.
    best = of["every case, against the best"]
    assert (best.found, best.worst, best.met) == (0.99, LINES["prefill"], True)
    layers = of["plain bf16 layers of Llama"]
    assert layers.found == pytest.approx((2.1 * 1.0) ** 0.5)
    assert layers.count == 2
    assert of["those of M <= 64"].found == pytest.approx(2.1)
    assert of["QKV, M <= 16"].found == pytest.approx(1.75)
    assert of["int8 weights, M <= 16"].found == pytest.approx(4)
    assert of["the same, over bf16 weights"].found == pytest.approx(2)
    assert of["models"].found == pytest.approx((1.4 * 1.0) ** 0.5)
    assert of["Llama, decode of 16 sequences"].found == pytest.approx(1.4)
    ratio = of["compile seconds, over stock max-autotune"]
    assert ratio.found == pytest.approx(0.2)
    assert ratio.met
    assert of["compile seconds of a case"].found == 0.8


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    of = found(models())
    assert of["fused"] == gemm_summary.Line(of["fused"].target, None, 0, None)
    assert of["fused"].met is None


def test_the_newest_run_counts_and_cutlass_is_separate() -> None:
    new = {**gemm_document(decode={"eager": 9, "stock-max": 12, "ours": 6}), "suite": "gemm-again"}
    new["date"] = "2026-03-01T12:00:00Z"
    old = gemm_document(
        decode={"eager": 9, "stock-max": 12, "ours": 10}, qkv={"ours": 2, "stock-max": 4}
    )
    both = found(new, old)["every case, against the best"]
    assert (both.found, both.count) == (1.5, 2)
    prefill = {"eager": 40, "stock-max": 42, "ours": 40, "ours-cutlass": 32}
    with_cutlass = {**gemm_document(prefill=prefill), "suite": "gemm-cutlass"}
    of = found(old, with_cutlass)
    assert of["every case, against the best"].count == 2
    assert of["with CUTLASS, large cases, over the best of the others"].found == 1.25
    share = of["with CUTLASS, share of large cases that gain 5 %"]
    assert (share.found, share.worst, share.met) == (1.0, "1 of 1", True)


def test_a_missed_target_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = gemm_document(decode={"eager": 9, "stock-max": 12, "ours": 10})
    path = results.write(tmp_path, slow)
    assert gemm_summary.main([str(path)]) == 1
    out = capsys.readouterr().out
    assert f"| every case, against the best | 1 | >= 0.98 | 0.90 | {LINES['decode']} |" in out
    assert "| plain bf16 layers of Llama | 1 | >= 1.05 | **1.20** |" in out


def test_tables() -> None:
    text = gemm_summary.render(gemm_summary.numbers([DOCUMENT, models()]))
    assert "| fused | 1 | 1.75 | 1.80 | 1.80 | 1.75 | 1.75 (QKV 16x6144x4096) | 25 % |" in text
    assert (
        "| llama decode 16x1 | graphs | 2.000 | 0.800 | 0.700 | 0.500 | 1.40 | 0.400 "
        "| 9.0 / 9.0 / 9.0 |" in text
    )


def test_every_target_is_about_something_that_is_measured() -> None:
    everything = dict.fromkeys(("eager", "bf16", *variants.CONTENDERS), 2.0)
    times = dict.fromkeys(gemm_summary.gemm_suite.CASES, everything)
    settings = {(name, "graphs"): everything for name in gemm_summary.gemm_models.MODELS}
    ranked = {"a problem": {"ours": 2.0, "floor": 2.0}}
    of = gemm_summary.Numbers(times, times, {}, times, settings, {}, ranked, times)
    assert all(line.found is not None for line in gemm_summary.lines(of))
    counts = {line.target.what: line.count for line in gemm_summary.lines(of)}
    groups = [case.group for case in gemm_summary.gemm_suite.CASES.values()]
    assert counts["every case, against the best"] == len(groups)
    assert counts["plain bf16 layers of Llama"] == 70
    assert counts["those of M <= 64"] == 40
    assert counts["fused"] == groups.count("fused")
