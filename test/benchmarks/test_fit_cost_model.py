"""Fitting of the cost model's constants to measured kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.gemm.fit_cost_model import Measurement, compute_error, fit
from inductor_ext.templates.triton.cost_model import DEFAULT, Constants, predict
from inductor_ext.templates.triton.search_space import candidates
from test.support.cost_model_cases import MEASURED, linear
from test.support.problem_examples import H200


class TestFit:
    def measurements(self, constants: Constants) -> list[Measurement]:
        problems_ = [linear(*sizes) for sizes, _, _ in MEASURED]
        return [
            Measurement(problem, config, H200, predict(problem, config, H200, constants).total)
            for problem in problems_
            for config in list(candidates(problem, H200))[::16]
        ]

    def test_other_constants_are_found_again(self) -> None:
        real = replace(DEFAULT, latency=1.1, l2_rate=60e9, stream=0.75)
        measured = self.measurements(real)
        fitted = fit(measured)
        assert compute_error(measured, fitted) < compute_error(measured, DEFAULT) / 100
        for name in ("latency", "l2_rate", "stream"):
            assert getattr(fitted, name) == pytest.approx(getattr(real, name), rel=0.05)

    def test_nothing_changes_where_the_model_is_right(self) -> None:
        assert fit(self.measurements(DEFAULT), rounds=3) == DEFAULT

    def test_shares_stay_shares(self) -> None:
        fast = [
            replace(measurement, microseconds=measurement.microseconds / 10)
            for measurement in self.measurements(DEFAULT)
        ]
        fitted = fit(fast, rounds=4)
        assert compute_error(fast, fitted) < compute_error(fast, DEFAULT)
        for name in (
            "stream",
            "modified_operand",
            "mma_sync",
            "fma",
            "warp_specialized",
            "busy_stage",
        ):
            assert getattr(fitted, name) <= 1
        for case in fast:
            result = predict(case.problem, case.config, H200, fitted)
            assert result.total >= case.problem.roofline(H200)
