"""What Inductor's CUTLASS settings ask for, and the kernels that are then worth building.

The settings keep their meaning: `cutlass_backend_min_gemm_size`, `cutlass_op_allowlist_regex` and
`_denylist_regex`, `cutlass_max_profiling_configs`, `cutlass_max_profiling_swizzle_options`,
`cutlass_instantiation_level`, `cutlass_enabled_ops`, `cutlass_tma_only` and
`cutlass_epilogue_fusion_enabled`. Each is taken from `torch._inductor.config.cutlass` or, under its
older name, from `torch._inductor.config.cuda`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from inductor_ext.selection import choose
from inductor_ext.templates.cutlass.config import CutlassConfig, Filter
from inductor_ext.templates.cutlass.ranking import rank
from inductor_ext.templates.device import Device
from inductor_ext.templates.problem import GemmProblem

__all__ = ["Options", "current"]

_BUILDS = 2
"""Kernels that are built for a GEMM unless the user says so; each takes a minute."""

_OPERATORS = {
    "mm": "mm",
    "addmm": "addmm",
    "bmm": "bmm",
    "baddbmm": "baddbmm",
    "int_mm": "int_mm",
    "mixed": "mm",
    "scaled": "scaled_mm",
    "grouped": "grouped_mm",
}
"""What an operation is called in `cutlass_enabled_ops`."""


@dataclass(frozen=True)
class Options:
    """Inductor's CUTLASS settings."""

    wanted: bool = True
    """Whether kernels are tuned, and CUTLASS is among the backends."""
    least: int = 1
    """M * N * K from which on there are CUTLASS kernels; smaller products have none."""
    only: Filter = Filter()  # noqa: RUF009 - it is frozen
    limit: int = _BUILDS
    """Kernels for a GEMM at most."""
    swizzles: tuple[int, ...] = (1, 2, 4, 8)
    level: int = 0
    """Above 0 for all tiles and clusters."""
    operators: frozenset[str] | None = None
    """Names of those that have CUTLASS kernels, in lower case; None for all."""
    tma_only: bool = False
    fuses: bool = False
    """Whether epilogues are fused."""

    def covers(self, problem: GemmProblem) -> bool:
        """Whether a GEMM is to have CUTLASS kernels at all."""
        named = self.operators is None or _OPERATORS[problem.operation] in self.operators
        return self.wanted and named and problem.m * problem.n * problem.k >= self.least

    def rank(self, problem: GemmProblem, device: Device) -> list[tuple[CutlassConfig, float]]:
        """The kernels worth building, with their predicted microseconds, fastest first."""
        if not self.covers(problem):
            return []
        found = rank(problem, device, self.limit, self.only, self.level, tma_only=self.tma_only)
        return [(self._launched(config), microseconds) for config, microseconds in found]

    def _launched(self, config: CutlassConfig) -> CutlassConfig:
        """With a swizzle of those that are allowed."""
        allowed = [each for each in self.swizzles if each <= config.swizzle]
        return replace(config, swizzle=max(allowed or self.swizzles[:1] or (config.swizzle,)))


def current() -> Options:
    """What Inductor's configuration says now.

    Raises:
        exc.BadOptionError: an allowlist or denylist that is no regular expression.
    """
    operators = str(_setting("cutlass_enabled_ops")).lower().replace(" ", "")
    limit = _setting("cutlass_max_profiling_configs")
    return Options(
        choose.may_tune("CUTLASS"),
        _setting("cutlass_backend_min_gemm_size"),
        Filter(_setting("cutlass_op_allowlist_regex"), _setting("cutlass_op_denylist_regex")),
        _BUILDS if limit is None else limit,
        tuple(_setting("cutlass_max_profiling_swizzle_options")),
        int(_setting("cutlass_instantiation_level") or 0),
        None if operators == "all" else frozenset(operators.split(",")),
        bool(_setting("cutlass_tma_only")),
        bool(_setting("cutlass_epilogue_fusion_enabled")),
    )


def _setting(name: str) -> Any:
    """The value of a setting under the name that somebody has set it by; the newer one, if both."""
    from torch._inductor import config

    newer, older = getattr(config.cutlass, name), getattr(config.cuda, name)
    # There is no public way to ask for a default; without it, what was set by the older name would
    # be lost.
    entries: Any = config
    return older if newer == entries._config[f"cutlass.{name}"].default else newer
