"""Records of memory plans: what a generated function allocates, when, and where."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from inductor_ext.events import Record


@dataclasses.dataclass(frozen=True)
class PlannedStorage:
    """A storage of a memory plan: a buffer and all buffers that reuse its memory."""

    name: str
    """The buffer that allocates the storage."""
    bytes: int
    """Size at the size hint, rounded as the allocator does."""
    start: int
    """First step of its live range. A step of the schedule is a line of the generated code."""
    end: int
    """First step at which the storage is free again (exclusive end of the live range)."""
    kind: str
    """"intermediate", "output", "extern" (allocated by the extern kernel that computes it), "input"
    (freed during the call), "subgraph" (memory that a called subgraph needs during its call)."""
    device: str
    arena: int | None
    """Index into the plan's arenas; None if the storage is allocated separately."""
    offset: int | None
    """Bytes from the start of the arena, at the size hint."""
    operator: str
    """Operators fused into the kernel that computes the buffer, such as "addmm, gelu"."""
    module: str
    """Path of the model's module that computes the buffer, such as "encoder.layer.0.attention"."""


@dataclasses.dataclass(frozen=True)
class PlannedArena:
    """An arena (one allocation shared by several storages) of a memory plan."""

    name: str
    device: str
    bytes: int
    """Size at the size hint."""
    lower_bound: int
    """Maximum number of bytes of its storages that are live at the same time."""
    start: int
    end: int
    size: str
    """Expression of its size in bytes."""


@dataclasses.dataclass(frozen=True)
class InputDimension:
    """A dimension of an input tensor of a function."""

    input: str
    dimension: int

    def describe(self) -> str:
        """Return it as code: "x.size(0)"."""
        return f"{self.input}.size({self.dimension})"


@dataclasses.dataclass(frozen=True)
class DynamicSize:
    """A symbol that sizes of a plan depend on."""

    name: str
    """The symbol, such as "s77"."""
    hint: int
    """The value that the plan was made for. For a size read from data, an assumption."""
    lowest: int
    """The smallest value for which the code is valid, as far as its range is known."""
    highest: int | None
    """The largest one; None if there is no limit."""
    inputs: tuple[InputDimension, ...] = ()
    """The dimensions of inputs that have exactly this size."""
    is_data: bool = False
    """Whether the code reads it from data (an unbacked symbol)."""

    def describe(self) -> str:
        """Return the symbol and the first input that has this size: "s77 (x.size(0))"."""
        if self.is_data:
            return f"{self.name} (read from data)"
        if not self.inputs:
            return self.name
        return f"{self.name} ({self.inputs[0].describe()})"


@dataclasses.dataclass(frozen=True)
class PlannedSpan:
    """Memory that is in use in [start, end)."""

    device: str
    start: int
    end: int
    bytes: str
    """An expression in the symbols (`planner.size_expression`)."""


@dataclasses.dataclass(frozen=True)
class DynamicPlan:
    """What a plan with dynamic sizes needs at other sizes (`planner.resized_plan`).

    Expressions are in bytes, rounded as the allocator does.
    """

    sizes: tuple[DynamicSize, ...]
    definitions: tuple[tuple[str, str], ...]
    """Names and the expressions that they stand for, each in terms of earlier ones."""
    storages: tuple[str, ...]
    """The bytes of each storage of the plan."""
    offsets: tuple[str, ...]
    """The offset of each storage in its arena; empty outside of arenas."""
    arenas: tuple[str, ...]
    """The bytes of each arena."""
    before: tuple[PlannedSpan, ...]
    """The memory under Inductor's buffer reuse, whose peak is `peak_before`."""
    bound: tuple[PlannedSpan, ...]
    """The memory if every buffer is freed after its last use, whose peak is `lower_bound`."""
    unknown: str = ""
    """Why the plan is not known at other sizes; all but `sizes` is empty then. Otherwise empty."""


@dataclasses.dataclass(frozen=True)
class MemoryPlanRecord(Record):
    """The memory plan of one generated function.

    Sizes are bytes at the size hint, summed over devices. They cover the memory that the function
    allocates or can free, not the memory that its callers keep alive during the whole call.
    """

    name: ClassVar[str] = "memory_plan"

    graph: str
    """The generated function, such as "call" or "partition_0"."""
    kind: str
    """"inference", "forward", "backward" or "aot"."""
    cache_key: str | None
    """Key in the FX graph cache; None if the graph is not cached."""
    strategy: str
    """"arenas", "reuse", "plain" or "stock" (Inductor's plan)."""
    peak_before: int
    """Peak under Inductor's buffer reuse, on the same schedule."""
    peak: int
    lower_bound: int
    """Maximum number of bytes live at the same time if every buffer is freed after its last use."""
    steps: int
    """Length of the schedule."""
    calls_before: int
    """Allocator calls under Inductor's buffer reuse."""
    calls: int
    peak_reordered_from: int | None
    """Lower bound under Inductor's kernel order, if the extension changed the order; else None."""
    seconds: float
    """CPU time of planning."""
    arenas: tuple[PlannedArena, ...]
    storages: tuple[PlannedStorage, ...]
    reason: str = ""
    """Why the function was not analyzed and keeps Inductor's plan; all sizes are 0 then. Otherwise
    empty."""
    dynamic: DynamicPlan | None = None
    """The plan as expressions; None if no size depends on a symbol."""
    held_inputs: tuple[PlannedStorage, ...] = ()
    """Inputs of a backward that the forward took from its caller, parameters left out. They are
    freed during the call unless the caller keeps them, and not counted in the sizes above."""

    @property
    def ratio(self) -> float:
        """Peak divided by lower bound; 1.0 if nothing is allocated."""
        return self.peak / self.lower_bound if self.lower_bound else 1.0

    def summary(self) -> dict[str, Any]:
        """Return what the manifest of a package says of the plan. Sizes are in bytes."""
        return {
            "peak": self.peak,
            "lower_bound": self.lower_bound,
            "allocator_calls": self.calls,
            "arenas": [{"bytes": arena.bytes, "device": arena.device} for arena in self.arenas],
        }

    def describe(self) -> str:
        """Return a one-line, human-readable description, without the storages."""
        if self.reason:
            return f"memory_plan: {self.graph} ({self.kind}) Inductor's plan: {self.reason}"
        mib = 1024**2
        return (
            f"memory_plan: {self.graph} ({self.kind}) peak {self.peak_before / mib:.2f} -> "
            f"{self.peak / mib:.2f} MiB, lower bound {self.lower_bound / mib:.2f} MiB, ratio "
            f"{self.ratio:.3f}, {len(self.arenas)} arenas, allocator calls {self.calls_before} -> "
            f"{self.calls}, {self.strategy}"
        )
