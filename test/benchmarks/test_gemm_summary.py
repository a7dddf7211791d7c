"""The summary of GEMM benchmarks: its arithmetic, on made-up results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gemm import e2e
from benchmarks.gemm import run as gemm
from benchmarks.gemm import summary as gemm_summary
from benchmarks.gemm.measurement import Measurement
from benchmarks.harness import results, variants
from test.benchmarks.test_gemm import HEADER

CASES = {
    "decode": "llama-8b o 16x4096x4096",
    "prefill": "llama-8b o 2048x4096x4096",
    "qkv": "QKV 16x6144x4096",
    "int8": "int8 weight 16x14336x4096",
}


def make_measurements(times: Mapping[str, float], seconds: Mapping[str, float]) -> Any:
    return {
        name: Measurement({"graph": [value]}, seconds.get(name)) for name, value in times.items()
    }


def gemm_document(**times: Mapping[str, float]) -> results.Document:
    seconds = {"stock-max": 4.0, "ours": 0.8}
    rows = [
        row
        for key, values in times.items()
        for row in gemm.make_rows(CASES[key], make_measurements(values, seconds), 5.0)
    ]
    return {**HEADER, "rows": rows}


DOCUMENT = gemm_document(
    decode={"eager": 22, "stock": 23, "stock-max": 21, "stock-max-tma": 24, "ours": 10},
    prefill={"eager": 99, "stock": 99, "stock-max": 101, "stock-max-tma": 100, "ours": 100},
    qkv={"eager": 36, "stock": 36, "stock-max": 35, "ours": 20},
    int8={"eager": 200, "stock": 90, "stock-max": 84, "ours": 21, "bf16": 42},
)


def models() -> results.Document:
    def make(**milliseconds: float) -> Any:
        times = {name.replace("_", "-"): value for name, value in milliseconds.items()}
        return {
            name: Measurement({"graphs": [value / 1e3]}, 9.0 if name != "eager" else None)
            for name, value in times.items()
        }

    decode = e2e.make_rows(
        "llama decode 16x1", make(eager=2.0, stock=0.8, stock_max=0.7, ours=0.5), 0.4
    )
    bert = e2e.make_rows("bert 32x128", make(eager=3.0, stock=2.9, stock_max=2.8, ours=2.8))
    return {**HEADER, "suite": "e2e", "rows": [*decode, *bert]}


def check(*documents: results.Document) -> dict[str, gemm_summary.TargetResult]:
    numbers = gemm_summary.collect(documents)
    return {result.target.name: result for result in gemm_summary.check_targets(numbers)}


def test_tuning_target_counts_the_slowest_case() -> None:
    rows: list[results.Row] = []
    for key, seconds in (("decode", 0.5), ("qkv", 2.5)):
        ours = Measurement({"graph": [1.0]}, 3.0, tuning=seconds)
        eager = Measurement({"graph": [1.0]})
        rows += gemm.make_rows(CASES[key], {"ours": ours, "eager": eager})
    result = check({**HEADER, "rows": rows})["tuning seconds of a new GEMM"]
    assert (result.value, result.count, result.is_met) == (2.5, 2, False)
    assert result.worst == CASES["qkv"]


def test_targets_select_their_cases() -> None:
    targets = check(DOCUMENT, models())
    # Against the best of max-autotune and cuBLAS: 2.1, 0.99, 1.75, 4.
    best = targets["every case, against the best"]
    assert (best.value, best.worst, best.is_met) == (0.99, CASES["prefill"], True)
    layers = targets["plain bf16 layers of Llama"]
    assert layers.value == pytest.approx((2.1 * 1.0) ** 0.5)
    assert layers.count == 2
    assert targets["those of M <= 64"].value == pytest.approx(2.1)
    assert targets["QKV, M <= 16"].value == pytest.approx(1.75)
    assert targets["int8 weights, M <= 16"].value == pytest.approx(4)
    assert targets["the same, over bf16 weights"].value == pytest.approx(2)
    assert targets["models"].value == pytest.approx((1.4 * 1.0) ** 0.5)
    assert targets["Llama, decode of 16 sequences"].value == pytest.approx(1.4)
    ratio = targets["compile seconds, over Inductor max-autotune"]
    assert ratio.value == pytest.approx(0.2)
    assert ratio.is_met
    assert targets["compile seconds of a case"].value == 0.8


def test_targets_without_measurements_are_not_checked() -> None:
    targets = check(models())
    assert targets["fused"] == gemm_summary.TargetResult(targets["fused"].target, None, 0, None)
    assert targets["fused"].is_met is None


def test_newest_run_counts_and_cutlass_is_separate() -> None:
    new = {**gemm_document(decode={"eager": 9, "stock-max": 12, "ours": 6}), "suite": "gemm-again"}
    new["date"] = "2026-03-01T12:00:00Z"
    old = gemm_document(
        decode={"eager": 9, "stock-max": 12, "ours": 10}, qkv={"ours": 2, "stock-max": 4}
    )
    both = check(new, old)["every case, against the best"]
    assert (both.value, both.count) == (1.5, 2)
    prefill = {"eager": 40, "stock-max": 42, "ours": 40, "ours-cutlass": 32}
    with_cutlass = {**gemm_document(prefill=prefill), "suite": "gemm-cutlass"}
    targets = check(old, with_cutlass)
    assert targets["every case, against the best"].count == 2
    assert targets["with CUTLASS, large cases, over the best of the others"].value == 1.25
    share = targets["with CUTLASS, share of large cases that gain 5 %"]
    assert (share.value, share.worst, share.is_met) == (1.0, "1 of 1", True)


def test_missed_target_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = gemm_document(decode={"eager": 9, "stock-max": 12, "ours": 10})
    path = results.write(tmp_path, slow)
    assert gemm_summary.main([str(path)]) == 1
    out = capsys.readouterr().out
    assert f"| every case, against the best | 1 | >= 0.98 | 0.90 | {CASES['decode']} |" in out
    assert "| plain bf16 layers of Llama | 1 | >= 1.05 | **1.20** |" in out


def test_rendered_tables() -> None:
    text = gemm_summary.render(gemm_summary.collect([DOCUMENT, models()]))
    assert "| fused | 1 | 1.75 | 1.80 | 1.80 | 1.75 | 1.75 (QKV 16x6144x4096) | 25 % |" in text
    assert (
        "| llama decode 16x1 | graphs | 2.000 | 0.800 | 0.700 | 0.500 | 1.40 | 0.400 "
        "| 9.0 / 9.0 / 9.0 |" in text
    )


def test_every_target_has_measurements() -> None:
    everything = dict.fromkeys(("eager", "bf16", *variants.VARIANTS), 2.0)
    times = dict.fromkeys(gemm_summary.gemm_suite.CASES, everything)
    settings = {(name, "graphs"): everything for name in gemm_summary.gemm_models.MODELS}
    ranked = {"a problem": {"ours": 2.0, "floor": 2.0}}
    numbers = gemm_summary.Numbers(times, times, {}, times, settings, {}, ranked, times)
    target_results = gemm_summary.check_targets(numbers)
    assert all(result.value is not None for result in target_results)
    counts = {result.target.name: result.count for result in target_results}
    groups = [case.group for case in gemm_summary.gemm_suite.CASES.values()]
    assert counts["every case, against the best"] == len(groups)
    assert counts["plain bf16 layers of Llama"] == 70
    assert counts["those of M <= 64"] == 40
    assert counts["fused"] == groups.count("fused")
