"""Calls of a loaded model from threads while its weights and its package are replaced."""

from __future__ import annotations

from benchmarks.aot import soak


def test_no_call_is_wrong_or_dropped() -> None:
    found = soak.run(requests=1500, threads=6, swaps=20)
    assert found["right"] + found["refused"] == 1500
    assert found["right"] > 0
    assert found["refused"] > 0
    assert (found["wrong"], found["dropped"], found["swaps"]) == (0, 0, 20)
