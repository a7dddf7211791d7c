"""Fits the constants of the cost model of Triton kernels to measured times."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from inductor_ext.templates.device import Device
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.triton.config import GemmConfig
from inductor_ext.templates.triton.cost_model import DEFAULT, Constants, predict

__all__ = ["Measurement", "compute_error", "fit"]

_SHARES = (
    "stream",
    "modified_operand",
    "mma_sync",
    "fma",
    "warp_specialized",
    "async_store",
    "l2_share",
    "busy_stage",
)
"""Constants that are fractions, at most 1."""


@dataclass(frozen=True)
class Measurement:
    """The measured time of one configuration on a device."""

    problem: GemmProblem
    config: GemmConfig
    device: Device
    microseconds: float


def compute_error(measurements: Iterable[Measurement], constants: Constants) -> float:
    """Return the weighted mean square of log(predicted / measured).

    Every problem has the same weight. Within a problem slow configurations have less weight: the
    square of the fastest over the measured time.
    """
    return sum(residual**2 for residual in _compute_residuals(_weight(measurements), constants))


_WeightedMeasurements = list[tuple[Measurement, float]]
"""Measurements with weights that sum to 1."""


def _weight(measurements: Iterable[Measurement]) -> _WeightedMeasurements:
    groups: dict[tuple[GemmProblem, Device], list[Measurement]] = {}
    for measurement in measurements:
        groups.setdefault((measurement.problem, measurement.device), []).append(measurement)
    weighted = []
    for group in groups.values():
        weights = [timing.microseconds**-2 for timing in group]
        whole = sum(weights) * len(groups)
        weighted += [
            (timing, weight / whole) for timing, weight in zip(group, weights, strict=True)
        ]
    return weighted


def _compute_residuals(measurements: _WeightedMeasurements, constants: Constants) -> list[float]:
    """Return the weighted residuals; their sum of squares is `compute_error`."""
    return [
        math.sqrt(weight)
        * math.log(
            predict(timing.problem, timing.config, timing.device, constants).total
            / timing.microseconds
        )
        for timing, weight in measurements
    ]


_PULL = 1e-5
"""Regularization: the increase of the mean square error that is accepted to keep a constant within
a factor e of its start, so that constants which the measurements do not determine do not move."""


def fit(
    measurements: Sequence[Measurement],
    constants: Constants = DEFAULT,
    rounds: int = 30,
    names: Sequence[str] | None = None,
) -> Constants:
    """Return constants that fit the measurements better, by least squares.

    Levenberg-Marquardt on the logarithms of the constants: each step linearizes the predictions,
    and the damping shortens it the less the previous steps succeeded.

    Args:
        measurements: one or more; many of different templates, tiles and sizes.
        constants: the starting point.
        rounds: maximum number of steps; each predicts every measurement once for each constant, and
            a few times more.
        names: the constants to change; None for all.

    Returns:
        Constants whose `compute_error` is no higher than that of `constants`.
    """
    names = names or [field.name for field in dataclasses.fields(Constants)]
    weighted = _weight(measurements)

    def compute_all(candidate: Constants) -> torch.Tensor:
        distances = [
            math.log(getattr(candidate, name) / getattr(constants, name)) for name in names
        ]
        pulls = [math.sqrt(_PULL) * distance for distance in distances]
        return torch.tensor(_compute_residuals(weighted, candidate) + pulls, dtype=torch.float64)

    def step_from_best(logarithms: Sequence[float]) -> Constants:
        return dataclasses.replace(
            best,
            **{
                name: _clamp(name, getattr(best, name) * math.exp(logarithm))
                for name, logarithm in zip(names, logarithms, strict=True)
            },
        )

    best, errors, damping = constants, compute_all(constants), 1e-2
    for _ in range(rounds):
        columns = []
        for name in names:
            # Step down, since a fraction cannot exceed 1.
            near = dataclasses.replace(best, **{name: getattr(best, name) * math.exp(-_STEP)})
            columns.append((errors - compute_all(near)) / _STEP)
        slopes = torch.stack(columns, 1)
        squares, gradient = slopes.T @ slopes, slopes.T @ errors
        while damping < _MOST_DAMPING:
            damped = squares + damping * torch.diag(squares.diagonal())
            step = torch.linalg.solve(damped, -gradient).clamp(-_LONGEST, _LONGEST)
            candidate = step_from_best(step.tolist())
            after = compute_all(candidate)
            if after @ after < errors @ errors:
                break
            damping *= 4
        else:
            break
        best, errors, damping = candidate, after, damping / 4
    return best


_STEP = 1e-3
"""Finite difference of a logarithm, for the derivatives."""

_LONGEST = 0.7
"""Maximum change of a logarithm per step; the model is not linear beyond a factor of two."""

_MOST_DAMPING = 1e6
"""Stop above this damping: the steps are too short to matter."""


def _clamp(name: str, value: float) -> float:
    return min(value, 1.0) if name in _SHARES else value
