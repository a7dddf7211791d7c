"""Inductor's CUTLASS settings, and the kernels that are worth building under them.

The settings keep their meaning: `cutlass_backend_min_gemm_size`, `cutlass_op_allowlist_regex` and
`_denylist_regex`, `cutlass_max_profiling_configs`, `cutlass_max_profiling_swizzle_options`,
`cutlass_instantiation_level`, `cutlass_enabled_ops`, `cutlass_tma_only`,
`cutlass_epilogue_fusion_enabled`, `use_fast_math` and `enable_debug_info`. Each is read from
`torch._inductor.config.cutlass` or, under its older name, from `torch._inductor.config.cuda`.

`cutlass_prescreening` has no effect: it avoids benchmarking swizzles of slow kernels, and here the
cost model selects kernels and their swizzle before anything is benchmarked.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, replace
from typing import Any

from inductor_ext import numerics
from inductor_ext.autotune import decide
from inductor_ext.templates import kernels
from inductor_ext.templates.cutlass.config import CutlassConfig, Filter
from inductor_ext.templates.cutlass.cost_model import rank
from inductor_ext.templates.device import Device
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import ceiling
from inductor_ext.templates.versions import template_version

_BUILDS = 2
"""Default number of kernels built per GEMM; a build takes half a minute."""

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
"""The names of the operations in `cutlass_enabled_ops`."""


@dataclass(frozen=True)
class Options:
    """Inductor's CUTLASS settings."""

    enabled: bool = True
    """Whether CUTLASS is among the backends."""
    tunes: bool = True
    """Whether candidates may be benchmarked."""
    least: int = 1
    """Smallest M * N * K with CUTLASS kernels."""
    only: Filter = Filter()  # noqa: RUF009 - it is frozen
    limit: int = _BUILDS
    """Maximum number of kernels per GEMM."""
    swizzles: tuple[int, ...] = (1, 2, 4, 8)
    level: int = 0
    """Above 0 for all tiles and clusters."""
    operators: frozenset[str] | None = None
    """Names, in lower case, of the operators that have CUTLASS kernels; None for all."""
    tma_only: bool = False
    fuses: bool = False
    """Whether epilogues are fused."""
    alone: bool = False
    """Whether Triton is not among the backends."""
    flags: tuple[str, ...] = ()
    """Additional arguments of nvcc."""

    def covers(self, problem: GemmProblem) -> bool:
        """Whether the settings allow CUTLASS kernels for a GEMM."""
        named = self.operators is None or _OPERATORS[problem.operation] in self.operators
        return self.enabled and named and problem.m * problem.n * problem.k >= self.least

    def has_any(self, problem: GemmProblem, device: Device) -> bool:
        """Whether there are kernels for a GEMM, regardless of whether they may be benchmarked."""
        return self.limit > 0 and self.covers(problem) and bool(_rank(self, problem, device))

    def threshold(self, problem: GemmProblem) -> int:
        """Return the smallest M at which a matmul with this N and K is covered."""
        return ceiling(self.least, problem.n * problem.k)

    def allows(self, config: object) -> bool:
        """Whether the settings allow a configuration."""
        if not isinstance(config, CutlassConfig):
            return not self.alone
        stores = not self.tma_only or config.epilogue == "tma"
        return self.only.passes(config.name) and stores and config.flags == self.flags

    @property
    def candidate_set(self) -> str:
        """Text that identifies the candidate set."""
        launches = (self.limit, self.swizzles, self.level)
        fields = (self.only, *launches, self.tma_only, self.alone, self.flags)
        return (
            f"{template_version('cutlass')}-{hashlib.sha256(repr(fields).encode()).hexdigest()[:8]}"
        )

    def rank(self, problem: GemmProblem, device: Device) -> list[tuple[CutlassConfig, float]]:
        """Return the kernels worth building, with their predicted microseconds, fastest first."""
        if not self.tunes or not self.covers(problem):
            return []
        return list(_rank(self, problem, device))

    def with_launch_options(self, config: CutlassConfig) -> CutlassConfig:
        """Return a configuration with an allowed swizzle and the requested compiler flags."""
        allowed = [swizzle for swizzle in self.swizzles if swizzle <= config.swizzle]
        swizzle = max(allowed or self.swizzles[:1] or (config.swizzle,))
        return replace(config, swizzle=swizzle, flags=self.flags)


@functools.lru_cache(maxsize=1024)
def _rank(
    options: Options, problem: GemmProblem, device: Device
) -> tuple[tuple[CutlassConfig, float], ...]:
    kernel_problem = problem if problem.epilogue.tree is None else kernels.of_kernel(problem)
    candidates = []
    for config, microseconds in rank(
        kernel_problem,
        device,
        options.limit,
        options.only,
        options.level,
        tma_only=options.tma_only,
    ):
        variant = options.with_launch_options(config)
        if problem.epilogue.tree is None:
            candidates.append((variant, microseconds))
        elif (rendered := kernels.renderable(problem, variant)) is not None:
            candidates.append((rendered, microseconds))
    return tuple(candidates)


def current() -> Options:
    """Return Inductor's current configuration.

    Raises:
        exc.BadOptionError: an allowlist or denylist is not a regular expression.
    """
    if not decide.backend_enabled("CUTLASS"):
        return Options(enabled=False, tunes=False)
    operators = str(_setting("cutlass_enabled_ops")).lower().replace(" ", "")
    limit = _setting("cutlass_max_profiling_configs")
    return Options(
        True,
        decide.may_tune("CUTLASS"),
        _setting("cutlass_backend_min_gemm_size"),
        Filter(_setting("cutlass_op_allowlist_regex"), _setting("cutlass_op_denylist_regex")),
        _BUILDS if limit is None else limit,
        tuple(_setting("cutlass_max_profiling_swizzle_options")),
        int(_setting("cutlass_instantiation_level") or 0),
        None if operators == "all" else frozenset(operators.split(",")),
        bool(_setting("cutlass_tma_only")),
        # CUTLASS epilogues do not round between two ops.
        bool(_setting("cutlass_epilogue_fusion_enabled")) and not numerics.has_exact_pointwise(),
        not decide.backend_enabled("TRITON"),
        tuple(flag for name, flag in _FLAGS.items() if _setting(name)),
    )


_FLAGS = {"use_fast_math": "--use_fast_math", "enable_debug_info": "-lineinfo"}
"""nvcc's arguments by the setting that enables them."""


def _setting(name: str) -> Any:
    """Return a setting under whichever of its two names was set; the newer one if both were."""
    from torch._inductor import config

    newer, older = getattr(config.cutlass, name), getattr(config.cuda, name)
    # Upstream has no public way to query a default. Without it, a value set under the older name
    # would be lost.
    entries: Any = config
    return older if newer == entries._config[f"cutlass.{name}"].default else newer
