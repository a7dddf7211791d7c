"""The decision for one GEMM: its kernel, where the decision came from, and the timings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from inductor_ext.templates.kernels import Config

Origin = Literal["measured", "cache", "table", "forced", "predicted", "unknown"]
"""`measured`: in this compile. `cache`: measured earlier on this machine. `table`: imported, or
shipped with the package. `forced`: by the caller. `predicted`: by the cost model, without measuring
(`default_choice`), or not measured because it sees no possible gain. `unknown`: there is no tuning
result."""


@dataclass(frozen=True)
class Timing:
    """The measured time of one candidate."""

    config: Config | None
    """None for Inductor's path."""
    microseconds: float | None
    """The median, with operands in DRAM; None for a candidate that was dropped."""
    failure: str | None = None
    """Why the candidate was dropped."""


@dataclass(frozen=True)
class Decision:
    """The kernel selected for one GEMM."""

    config: Config | None
    """None for Inductor's path."""
    origin: Origin
    timings: tuple[Timing, ...] = ()
    """Timings of all candidates that were measured, including Inductor's path; empty if there is no
    tuning result."""
    saving: float | None = None
    """Microseconds that a kernel which was not measured is predicted to save."""

    def microseconds(self, config: Config | None) -> float | None:
        """Return the time of a candidate; None if it was not measured or was dropped."""
        return next((t.microseconds for t in self.timings if t.config == config), None)


STOCK = Decision(None, "unknown")
"""The decision for a GEMM without a tuning result."""
