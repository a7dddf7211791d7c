"""The benchmark of the host time: its cases, rows, and the check of results."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from benchmarks.gemm import host_time
from benchmarks.gemm.cases import Case


def test_cases_are_quantized_layers_with_few_rows() -> None:
    assert len(host_time.CASES) == 18
    for case in host_time.CASES.values():
        assert case.m in (1, 16)
        assert case.problem.prologue is not None
        assert case.problem.prologue.dequant is not None


def test_rows_compare_with_the_layer_in_bfloat16_compiled_by_inductor() -> None:
    times = {
        "quantized": [30.0, 32.0, 31.0],
        "ours": [20.0, 20.0, 20.0],
        "stock": [40.0, 40.0, 40.0],
        "eager": [10.0, 10.0, 10.0],
    }
    quantized, bfloat16 = host_time.make_rows("layer", times)
    assert (quantized["metric"], bfloat16["metric"]) == ("quantized", "bfloat16")
    assert (quantized["ours"], quantized["stock"], quantized["eager"]) == (31.0, 40.0, 10.0)
    assert (bfloat16["ours"], bfloat16["stock"], bfloat16["eager"]) == (20.0, 40.0, 10.0)


SMALL = Case("int8", "int8 weight", "int8", 1, 64, 128)


def test_all_ways_are_measured() -> None:
    with mock.patch.object(host_time, "CALLS", 2):
        times = host_time.measure_case(SMALL, "cpu", rounds=3)
    assert sorted(times) == ["eager", "ours", "quantized", "stock"]
    assert all(len(values) == 3 and min(values) > 0 for values in times.values())


def test_a_wrong_result_is_an_error() -> None:
    with pytest.raises(ValueError, match="The result is wrong: error 1"):
        host_time._check(SMALL.program("cpu"), lambda: torch.zeros(1, 64))
