"""Memory plans of a model that FSDP2 shards: gathered parameters are freed, and results agree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def run_ranks(
    folder: Path, ranks: int, device: str, names: list[str]
) -> list[dict[str, dict[str, float]]]:
    """Return what `children.fsdp_step` measures, by rank and name."""
    child = [sys.executable, "-m", "test.support.children.fsdp_step"]
    processes = [
        subprocess.Popen([*child, str(rank), str(ranks), device, str(folder), *names])
        for rank in range(ranks)
    ]
    try:
        codes = [process.wait(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * ranks
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def check_run(measured: dict[str, float]) -> None:
    assert measured["error"] < 1e-5
    # Nothing that the forward saved for the backward keeps the gathered parameters alive.
    assert measured["gathered"] == 0 < measured["unsharded"]


def check_runs(measured: dict[str, dict[str, float]]) -> None:
    for name, run in measured.items():
        check_run(run)
        assert bool(run["members"]) or name != "always"


def test_parameters_are_freed_and_the_peak_is_at_most_inductors(tmp_path: Path) -> None:
    (measured,) = run_ranks(tmp_path, 1, "cpu", ["inductor", "auto", "always"])
    check_runs(measured)
    assert measured["auto"]["peak"] <= measured["inductor"]["peak"]


@pytest.mark.slow
def test_two_ranks_compute_the_same_as_one_process(tmp_path: Path) -> None:
    for measured in run_ranks(tmp_path, 2, "cpu", ["always"]):
        check_run(measured["always"])
        assert measured["always"]["members"] > 0


@pytest.mark.gpu
def test_parameters_are_freed_on_a_gpu(tmp_path: Path) -> None:
    (measured,) = run_ranks(tmp_path, 1, "cuda", ["eager", "inductor", "auto", "always"])
    check_runs(measured)
