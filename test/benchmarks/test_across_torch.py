"""What counts as right when a package is loaded with another release of torch."""

from __future__ import annotations

import pytest

from benchmarks.aot.across_torch import CASES, is_expected

REFUSED = "refused: it was compiled for torch 2.13.0, and this is torch 2.14.1"
BY_NAME = f"{REFUSED}; it calls operators by name, in a form that may differ"


@pytest.mark.parametrize(
    ("name", "outcome", "is_same", "expected"),
    [
        ("tuned matmul", "runs", False, True),
        ("tuned matmul", "runs", True, True),
        ("tuned matmul", REFUSED, False, False),
        ("tuned matmul", "AssertionError: Tensor-likes are not close!", False, False),
        ("operator by name", "runs", True, True),
        ("operator by name", "runs", False, False),
        ("operator by name", BY_NAME, False, True),
        ("operator by name", BY_NAME, True, False),
        ("operator by name", REFUSED, False, False),
    ],
)
def test_outcomes(name: str, outcome: str, is_same: bool, expected: bool) -> None:
    assert is_expected(CASES[name], outcome, is_same) is expected
