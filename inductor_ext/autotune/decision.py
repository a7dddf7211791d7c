"""What was decided for one GEMM, and on which grounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from inductor_ext.templates.kernels import Config

__all__ = ["STOCK", "Decision", "Origin", "Timing"]

Origin = Literal["measured", "cache", "table", "forced", "predicted", "unknown"]
"""`measured` in this compile; `cache`: measured before on this machine; `table`: imported, or
shipped with the package; `forced` by the caller; `predicted`: measuring is in vain, by the model;
`unknown`: nobody has measured it."""


@dataclass(frozen=True)
class Timing:
    """What one candidate took."""

    config: Config | None
    """None for stock's path."""
    microseconds: float | None
    """The median with operands in DRAM; None for a candidate that was dropped."""
    failure: str | None = None
    """Why it was dropped."""


@dataclass(frozen=True)
class Decision:
    """The kernel of one GEMM."""

    config: Config | None
    """None for stock's path."""
    origin: Origin
    timings: tuple[Timing, ...] = ()
    """Of all candidates that were measured, stock's among them; none where nothing is known."""

    def microseconds(self, config: Config | None) -> float | None:
        """What a candidate took; None if it was not measured or was dropped."""
        return next((t.microseconds for t in self.timings if t.config == config), None)


STOCK = Decision(None, "unknown")
"""Of a GEMM of which nothing is known."""
