"""The sweep over models: what counts as right, whom a fault is put down to, and one real way."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.reliability import model_sweep, sweep_models

RIGHT = {"error": 2e-7, "eager": 1e-7}
WRONG = {"error": 2e-3, "eager": 1e-7}
FAILED = {"failure": "ValueError: no"}


@pytest.mark.parametrize(
    ("found", "right"),
    [
        (RIGHT, True),
        (WRONG, False),
        (FAILED, False),
        ({"error": 5e-6, "eager": 0.0}, True),
        ({"error": float("nan"), "eager": 1e-7}, False),
        ({"error": 2e-4, "eager": 1e-4}, True),
        ({}, True),
    ],
)
def test_right_results(found: dict[str, Any], right: bool) -> None:
    assert model_sweep.is_right(found) == right


@pytest.mark.parametrize(
    ("ours", "stock", "failed"),
    [
        (RIGHT, None, False),
        (WRONG, RIGHT, True),
        (WRONG, WRONG, True),
        (WRONG, FAILED, True),
        (FAILED, RIGHT, True),
        (FAILED, FAILED, False),
    ],
)
def test_inductor_runs_where_the_extension_is_not_right(
    ours: dict[str, Any], stock: dict[str, Any] | None, failed: bool
) -> None:
    asked = []

    def run(model: str, way: str, backend: str) -> dict[str, Any]:
        asked.append(backend)
        answer = ours if backend == "inductor_ext" else stock
        assert answer is not None
        return answer

    result = model_sweep.measure("bloom", ["inference"], run)
    assert asked == ["inductor_ext"] + ["inductor"] * (stock is not None)
    assert result.failed == failed
    (row,) = result.rows
    if ours is FAILED:
        assert (row["metric"], row["ours"]) == ("inference, failures", 1.0)
        assert row["stock"] == float(stock is FAILED)
        assert "the extension: ValueError: no" in str(row["note"])
    else:
        assert (row["metric"], row["ours"]) == ("inference", ours["error"])


@pytest.mark.parametrize(("found", "failures"), [({}, 0.0), (FAILED, 1.0)])
def test_a_package_that_is_only_built_has_no_error(found: dict[str, Any], failures: float) -> None:
    result = model_sweep.measure("bloom", ["package for sm_90"], lambda *_: found)
    (row,) = result.rows
    assert (row["metric"], row["ours"]) == ("package for sm_90, failures", failures)


def test_a_failure_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: str, backend: str) -> tuple[float, float]:
        raise ValueError("no\n  more")

    monkeypatch.setitem(model_sweep.WAYS, "inference", fail)  # type: ignore[arg-type]
    answer = model_sweep.run_way("bloom", "inference", "inductor_ext")
    assert answer == {"failure": "ValueError: no more"}


@pytest.mark.parametrize("errors", [(float("nan"), 1e-7), (1e-7, float("nan")), (1.0, 1.0)])
def test_an_error_that_says_nothing_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, errors: tuple[float, float]
) -> None:
    monkeypatch.setitem(model_sweep.WAYS, "inference", lambda *_: errors)  # type: ignore[arg-type]
    found = model_sweep.run_way("bloom", "inference", "inductor_ext")
    assert "cannot be compared" in found["failure"]


def test_models_are_not_those_of_other_benchmarks() -> None:
    from benchmarks.memory import step_models

    assert not set(sweep_models.MODELS) & set(step_models.MODELS)


@pytest.mark.parametrize("way", ["inference", "training"])
def test_a_model_is_right(way: str) -> None:
    pytest.importorskip("transformers")
    assert model_sweep.is_right(model_sweep.run_way("distilbert", way, "inductor_ext"))
