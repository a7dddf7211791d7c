"""What the report of a compile shows: the facts, without how they are collected or rendered.

All times of kernels are microseconds, all times of compiles are seconds.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from inductor_ext.hooks.records import CompileRecord
from inductor_ext.memory.records import MemoryPlanRecord
from inductor_ext.reports.gemm_report import GemmReport, KernelFusion


@dataclasses.dataclass(frozen=True)
class KernelTime:
    """A kernel or operator of the profile of one call."""

    name: str
    calls: int
    microseconds: float
    """Of all its calls, without those of the kernels that it calls."""


@dataclasses.dataclass(frozen=True)
class KernelProfile:
    """The kernels of a call or of a program, those that take most of the time first."""

    device: str
    """"cuda" or "cpu"."""
    kernels: tuple[KernelTime, ...]
    outside: float
    """Microseconds on the CPU in the wrapper code and the runtime, outside of the kernels."""
    scope: str = "one call"
    """What was profiled."""

    @property
    def total(self) -> float:
        """Microseconds of all kernels."""
        return sum(kernel.microseconds for kernel in self.kernels)


@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of the time of a compile. No two phases overlap."""

    name: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class CompileFacts:
    """Everything about one compile and the calls after it."""

    title: str
    environment: tuple[tuple[str, str], ...]
    """Names and values: versions, device, mode, options."""
    gemms: GemmReport
    plans: tuple[MemoryPlanRecord, ...]
    graphs: tuple[CompileRecord, ...]
    """The graphs in the order of their compiles, with all caches of compiled code off."""
    phases: tuple[Phase, ...]
    """Of the compile, the longest first."""
    other_kernels: tuple[KernelFusion, ...] = ()
    """Kernels without GEMMs that are fused, or whose results other kernels use."""
    tuned: int = 0
    """GEMMs that were benchmarked during the compile."""
    kernels: KernelProfile | None = None
    """None if no call was profiled."""
    call_microseconds: float | None = None
    """Of one call without profiler; None if it was not measured."""
    recompiled: tuple[CompileRecord, ...] | None = None
    """The same graphs, compiled again with the caches as configured; None if they were not."""

    @property
    def compile_seconds(self) -> float:
        """Seconds of all phases."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def cache_hits(self) -> int:
        """The number of graphs of the second compile that came from a cache."""
        return sum(record.cache == "hit" for record in self.recompiled or ())

    def as_json(self) -> dict[str, Any]:
        """Return the facts as JSON-serializable values."""
        return {
            "title": self.title,
            "environment": dict(self.environment),
            **self.gemms.as_json(),
            "other_kernels": [dataclasses.asdict(kernel) for kernel in self.other_kernels],
            "plans": [plan.as_json() for plan in self.plans],
            "graphs": [graph.as_json() for graph in self.graphs],
            "phases": [dataclasses.asdict(phase) for phase in self.phases],
            "tuned": self.tuned,
            "kernels": None if self.kernels is None else dataclasses.asdict(self.kernels),
            "call_microseconds": self.call_microseconds,
            "recompiled": None
            if self.recompiled is None
            else [graph.as_json() for graph in self.recompiled],
        }
