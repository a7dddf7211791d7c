"""Short forms of the measurements of reliability."""

from __future__ import annotations

import importlib.util

import pytest

from benchmarks.reliability import compile_growth, faults, service
from benchmarks.reliability.faults import Case, Outcome


def test_the_slope_ignores_the_beginning_and_single_steps() -> None:
    assert compile_growth.find_slope([900.0, 500.0, *range(100, 114)]) == 1.0
    values = [100 + 0.5 * index for index in range(40)]
    values[30] += 80
    assert compile_growth.find_slope(values) == 0.5


@pytest.mark.slow
def test_compiles_in_one_process() -> None:
    resident = compile_growth.measure("inductor_ext", 2)
    assert len(resident) == 2
    # A process with torch has more than 50 MiB.
    assert min(resident) > 50


@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("fastapi", "httpx", "uvicorn"))),
    reason="FastAPI, httpx and uvicorn are not installed",
)
def test_a_service_under_clients() -> None:
    found = service.run(requests=400, clients=8, swaps=5)
    assert found["right"] + found["refused"] == 400
    assert (found["wrong"], found["dropped"], found["swaps"]) == (0, 0, 5)
    assert 0 < found["refused"] < 60
    assert found["samples"] == found["right"]


RIGHT = Outcome("right")


@pytest.mark.parametrize(
    ("under", "after", "good"),
    [
        (RIGHT, RIGHT, True),
        (Outcome("killed"), RIGHT, True),
        (Outcome("error", "OSError: [Errno 28] No space left on device: 'x'"), RIGHT, True),
        (Outcome("error", "BadPackageError: The package x is damaged or unsafe: y."), RIGHT, True),
        (Outcome("error", "KeyError: 'x'"), RIGHT, False),
        (Outcome("wrong"), RIGHT, False),
        (Outcome("died", "exit code -11"), RIGHT, False),
        (RIGHT, Outcome("error", "OSError: [Errno 28] No space left on device"), False),
        (RIGHT, Outcome("wrong"), False),
    ],
)
def test_outcomes(under: Outcome, after: Outcome, good: bool) -> None:
    assert faults.is_good(under, after) is good


@pytest.mark.slow
@pytest.mark.skipif(not faults.can_mount(), reason="this process may not mount a file system")
def test_a_package_on_a_full_disk() -> None:
    """The disk of this seed has 16 KiB."""
    under, after = faults.run_case(Case("full disk", "package", 0))
    assert under.kind == "error", under
    assert "No space left on device: '" in under.error
    assert faults.is_good(under, after), (under, after)
