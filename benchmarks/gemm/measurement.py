"""What a GPU benchmark measures of one variant, and how accurate a result must be to be timed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["Measurement", "compute_error", "is_accurate"]


@dataclasses.dataclass
class Measurement:
    """Measurements of one variant, or of another way to compute a layer."""

    times: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    """By mode of the benchmark, the time of every round: microseconds of a GEMM, or seconds of a
    model."""
    compile: float | None = None
    """Seconds, from an empty cache."""
    compile_warm: float | None = None
    """Seconds, from warm caches."""
    error: float | None = None
    """Distance from the reference, as a fraction of its norm."""
    peak: int | None = None
    """Bytes of GPU memory that a call allocates at most."""
    failure: str | None = None
    """Why there are no times."""
    tuning: float | None = None
    """Seconds of `compile` per tuned GEMM, if any was tuned."""
    choices: tuple[str, ...] = ()
    """The kernel selected for every tuned GEMM."""

    def record_error(self, error: float) -> None:
        """Keep the largest error of several results."""
        self.error = max(error, self.error or 0.0)


MAX_ERROR_OVER_EAGER = 2.0
"""Maximum error of a result, relative to the error of eager mode."""

ROUNDING = 2**-8
"""Error that is accepted for any bfloat16 result, as a fraction of the norm."""


def is_accurate(error: float, eager_error: float) -> bool:
    """Whether a result is good enough to be timed; see `compute_error`."""
    return error <= max(MAX_ERROR_OVER_EAGER * eager_error, ROUNDING)


def compute_error(
    outputs: Any, reference: Sequence[torch.Tensor], *, by_row: bool = False
) -> float:
    """Return the relative Frobenius-norm error over all outputs; NaN if an output has NaN.

    Args:
        outputs: a tensor or several.
        reference: the exact values.
        by_row: whether to return the median of the errors of the rows (of the last dimension)
            instead, for models that select experts: rounding changes the selection for some rows,
            whose results are then others.
    """
    outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    if by_row:
        errors = [
            (output.double() - exact).norm(dim=-1) / exact.norm(dim=-1)
            for output, exact in zip(outputs, reference, strict=True)
        ]
        return float(torch.cat([error.flatten() for error in errors]).median())
    deviation = norm = 0.0
    for output, exact in zip(outputs, reference, strict=True):
        deviation += float((output.double() - exact).square().sum())
        norm += float(exact.square().sum())
    return math.sqrt(deviation / norm)
