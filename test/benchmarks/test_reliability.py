"""Short forms of the measurements of reliability."""

from __future__ import annotations

import importlib.util

import pytest

from benchmarks.reliability import compile_growth, faults, service, threads
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


def test_bits_are_compared_by_compiler() -> None:
    alone = {"a/1": "sha256:1", "a/2": "sha256:2", "a/3": "sha256:3", "b/4": "sha256:4"}
    together = {**alone, "a/2": "wrong", "a/3": "sha256:0", "b/4": "KeyError: 'x'"}
    assert threads.compare(together, alone, "a") == (1, 1, 1)
    assert threads.compare(together, alone, "b") == (0, 1, 0)


@pytest.mark.slow
def test_threads_with_both_compilers() -> None:
    together = threads.measure(4, 1)
    assert len(together) == 4
    assert threads.compare(together, threads.measure(4, 1, "inductor"), "inductor") == (2, 0, 0)
    assert {digest[:7] for digest in together.values()} == {"sha256:"}


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
