"""Calls and hot swaps by several threads under the thread sanitizer.

Only the client is instrumented here. `python -m test.fuzz.cpp_client` also instruments the model,
and makes thousands of calls.
"""

from __future__ import annotations

import pathlib

import pytest

from test.fuzz import cpp_client as fuzzer
from test.support import cpp_client


@pytest.mark.slow
@pytest.mark.skipif(not cpp_client.has_sanitizer("thread"), reason="g++ has no libtsan")
def test_calls_while_weights_are_replaced(tmp_path: pathlib.Path) -> None:
    fuzzer.compile_package(tmp_path)
    program = cpp_client.build_driver(tmp_path, "thread")
    outcome = fuzzer.soak(program, tmp_path, 300)
    assert (outcome.calls, outcome.loads) == (300, 1)
    assert outcome.swaps > 0
    assert (outcome.wrong, outcome.reports) == (0, ())


def test_reports_are_counted() -> None:
    text = """
==1==ERROR: AddressSanitizer: heap-use-after-free on address 0x1
SUMMARY: AddressSanitizer: heap-use-after-free /tmp/x/driver.cpp:3 in run
/tmp/x/driver.cpp:4:5: runtime error: signed integer overflow
SUMMARY: ThreadSanitizer: data race (/tmp/x/model.so+0x12b6e)
"""
    assert fuzzer.read_reports(text) == (
        "AddressSanitizer: heap-use-after-free driver.cpp:3 in run",
        "driver.cpp:4:5: runtime error: signed integer overflow",
        "ThreadSanitizer: data race model.so+0x12b6e)",
    )


def test_rows_of_results() -> None:
    outcome = fuzzer.Outcome(500, 1, 20, 0, ("race",))
    rows = {row["metric"]: row for row in fuzzer.rows({"thread": outcome})}
    assert {metric: row["ours"] for metric, row in rows.items()} == {
        "calls": 500,
        "loads": 1,
        "swaps": 20,
        "wrong": 0,
        "reports": 1,
    }
    assert rows["reports"]["note"] == "race"
