"""Interleaved timing on a simulated clock: the winner, and the end of timing."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from inductor_ext.autotune import timing
from test.support.benchmark_backends import SimulatedStopwatch


class TestTiming:
    def chosen(self, *microseconds: float, seeds: int = 40, **options: Any) -> set[int]:
        """The winners of several runs."""
        results = set()
        for seed in range(seeds):
            stopwatch = SimulatedStopwatch(microseconds, seed=seed, **options)
            samples = timing.measure(stopwatch, len(microseconds), 200, seed)
            results.add(timing.decide(samples).index)
        return results

    def test_the_fastest_wins_in_spite_of_noise_and_drift(self) -> None:
        assert self.chosen(100, 96, 90, 150, noise=0.01, drift=3.0, cold=2.0) == {2}

    def test_ties_go_to_the_fallback(self) -> None:
        assert self.chosen(100, 100, 99, noise=0.01) == {0}
        assert self.chosen(100, 98.5, noise=0.0) == {0}
        assert self.chosen(100, 97.5, noise=0.0) == {1}

    def test_noise_needs_a_larger_lead(self) -> None:
        assert 0 in self.chosen(100, 97, noise=0.2)
        assert self.chosen(100, 97, noise=0.003) == {1}

    def test_timing_begins_after_warm_up(self) -> None:
        stopwatch = SimulatedStopwatch((100.0, 50.0), cold=3.0)
        samples = timing.measure(stopwatch, 2, 1000)
        assert [sample.microseconds for sample in samples] == pytest.approx([100, 50], rel=0.02)

    def test_slow_candidates_are_measured_less(self) -> None:
        stopwatch = SimulatedStopwatch((100.0, 99.0, 140.0, 500.0), noise=0.02)
        samples = timing.measure(stopwatch, 4, 1000)
        counts = [len(sample.times) for sample in samples]
        assert counts[3] == counts[2] == 5 < counts[0] == counts[1]

    def test_the_order_of_candidates_alternates(self) -> None:
        stopwatch = SimulatedStopwatch((100.0, 99.0, 101.0), noise=0.01)
        timing.measure(stopwatch, 3, 1000)
        firsts = {order[0] for order in stopwatch.orders if len(order) == 3}
        assert firsts == {0, 1, 2}

    def test_the_budget_ends_the_timing(self) -> None:
        stopwatch = SimulatedStopwatch((100.0, 100.0), noise=0.05)
        timing.measure(stopwatch, 2, budget=5)
        assert 5e-3 <= stopwatch.now() < 5.3e-3

    def test_less_noise_needs_fewer_measurements(self) -> None:
        rounds = [
            len(timing.measure(SimulatedStopwatch((100.0, 99.0), noise), 2, 1000)[0].times)
            for noise in (0.0, 0.03)
        ]
        assert rounds[0] == 12 < rounds[1]

    def test_the_error_of_a_median_assumes_normal_values(self) -> None:
        stopwatch = SimulatedStopwatch((100.0,), noise=0.01)
        medians, errors = [], []
        for _ in range(300):
            sample = timing.Sample(tuple(stopwatch.round([0] * 25)))
            medians.append(sample.microseconds)
            errors.append(sample.deviation)
        assert statistics.mean(errors) == pytest.approx(statistics.stdev(medians), rel=0.15)
