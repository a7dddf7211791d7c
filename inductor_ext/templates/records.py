"""Records about GEMMs: the kernel selected for each, and the results of benchmarking."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from inductor_ext.events import Record

if TYPE_CHECKING:
    from inductor_ext.templates.kernels import Config
    from inductor_ext.templates.problem import GemmProblem


@dataclasses.dataclass(frozen=True)
class MatmulCandidate:
    """A candidate kernel for a GEMM."""

    config: Config | None
    """Configuration of the extension kernel; None for Inductor (default)."""
    predicted: float | None
    """Time predicted by the cost model, in microseconds; None for Inductor (default)."""
    measured: float | None
    """Measured time in microseconds; None for a candidate that was dropped."""
    failure: str | None
    """Why the candidate was dropped."""


@dataclasses.dataclass(frozen=True)
class MatmulRecord(Record):
    """The kernel selected for one matmul of a graph, and the reason."""

    name: ClassVar[str] = "matmul"

    operator: str
    """Name of the operator in the graph, such as "aten.addmm"; "fused" for several nodes computed
    by one kernel."""
    operands: tuple[str, ...]
    """The operand tensors, such as "bfloat16[16, 4096]"."""
    module: str
    """Path of the model's module that calls the operator, such as "layers.0.mlp.gate"."""
    problem: GemmProblem | None
    """The GEMM with everything fused into it; None for a matmul that the extension does not
    support."""
    device: str
    roofline: float | None
    """Lower bound of the kernel time in microseconds."""
    chosen: Config | None
    """Configuration of the selected extension kernel; None for Inductor (default)."""
    origin: str
    """See `autotune.decision.Decision.origin`; "uncovered" for a matmul that was not planned
    (unsupported, `gemm_templates` off, or added later; see `reason`)."""
    reason: str
    candidates: tuple[MatmulCandidate, ...]
    """All candidates, including Inductor (default); empty if nothing is known."""
    declined: tuple[str, ...] = ()
    """Descriptions of possible fusions that were not applied, with the reason."""

    @property
    def microseconds(self) -> float | None:
        """Measured time of the selected kernel; None if it was not measured."""
        return next((c.measured for c in self.candidates if c.config == self.chosen), None)

    @property
    def stock_microseconds(self) -> float | None:
        """Measured time of Inductor (default), in microseconds; None if it was not measured."""
        return next((c.measured for c in self.candidates if c.config is None), None)

    def describe(self) -> str:
        """Return a one-line, human-readable description, without the candidates."""
        kernel = "Inductor" if self.chosen is None else self.chosen.template
        location = f" in {self.module}" if self.module else ""
        matmul = f"{self.operator} of {' and '.join(self.operands)}{location}"
        return f"matmul: {matmul}: {kernel} ({self.origin}: {self.reason})"


@dataclasses.dataclass(frozen=True)
class TuningRecord(Record):
    """The result of benchmarking the candidates of a GEMM."""

    name: ClassVar[str] = "tuning"

    problem: GemmProblem
    device: str
    chosen: Config | None
    """Configuration of the selected extension kernel; None for Inductor (default)."""
    reason: str
    seconds: float
    """Wall time of verification and timing."""
    candidates: tuple[MatmulCandidate, ...]
    """All candidates, including Inductor (default)."""

    def describe(self) -> str:
        """Return a one-line, human-readable description, without the candidates."""
        kernel = "Inductor" if self.chosen is None else self.chosen.template
        p = self.problem
        size = f"{p.operation} {p.m}x{p.n}x{p.k}"
        return f"tuning: {size}: {kernel}: {self.reason}, {self.seconds:.2f} s"
