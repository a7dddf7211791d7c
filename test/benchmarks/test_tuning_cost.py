"""The rows of the tuning cost, and the cores of its processes."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any
from unittest import mock

import pytest

from benchmarks.gemm import tuning_cost
from benchmarks.gemm.held_out import HELD_OUT


def test_rows_compare_each_variant_with_its_counterpart() -> None:
    rows = tuning_cost.make_rows(
        "m, 8 cores",
        {
            "stock": {"compile": 9.0, "dynamo": 2.0},
            "stock-max": {"compile": 40.0, "dynamo": 2.0, "Inductor's tuning, time": 25.0},
            "ours": {"compile": 8.0, "dynamo": 2.0, "tuning, time": 3.0, "import": 0.01},
            "ours-background": {"compile": 9.1, "dynamo": 2.1},
        },
    )
    values = {row["metric"]: (row["stock"], row["ours"]) for row in rows}
    assert values == {
        "max-autotune: compile": (40.0, 8.0),
        "max-autotune: dynamo": (2.0, 2.0),
        "max-autotune: tuning, time": (0.0, 3.0),
        "max-autotune: Inductor's tuning, time": (25.0, 0.0),
        "in the background: compile": (9.0, 9.1),
        "in the background: dynamo": (2.0, 2.1),
    }


def test_a_process_uses_the_given_number_of_cores() -> None:
    used = []

    def run(command: list[str], **_: Any) -> Any:
        used.append(len(os.sched_getaffinity(0)))
        return subprocess.CompletedProcess(command, 0, json.dumps({"compile": 1.0}), "")

    before = os.sched_getaffinity(0)
    with mock.patch.object(subprocess, "run", run):
        assert tuning_cost.measure("m", "stock", 1) == {"compile": 1.0}
    assert used == [1]
    assert os.sched_getaffinity(0) == before


def test_a_failed_process_is_an_error_with_its_output() -> None:
    failed = subprocess.CompletedProcess([], 1, "", "ValueError: no such model")
    with (
        mock.patch.object(subprocess, "run", return_value=failed),
        pytest.raises(RuntimeError, match="m, stock: ValueError: no such model"),
    ):
        tuning_cost.measure("m", "stock", 1)


def test_the_default_models_exist() -> None:
    assert set(tuning_cost.MODELS) <= HELD_OUT.keys()
