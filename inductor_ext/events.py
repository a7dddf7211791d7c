"""Typed records of the extension's decisions, and their outputs.

A module that makes a decision emits a frozen dataclass derived from `Record`. It is sent to

- the logger "inductor_ext" (`TORCH_LOGS="inductor_ext"` shows decisions, "+inductor_ext" details);
- torch's structured trace (`TORCH_TRACE`), as an artifact "inductor_ext_<record>";
- the file of the setting `event_log`, as one JSON object per line;
- listeners registered by `capture`, which tests use to inspect decisions.

Nothing is printed unless one of these is enabled. Messages that every user must see (something is
missing and a fallback was used) go through `warn_once`: one line per process. If a log cannot be
written, emitting warns instead of raising, so that logging never fails a compile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from inductor_ext.templates.kernels import Config
    from inductor_ext.templates.problem import GemmProblem

__all__ = [
    "ArtifactCacheRecord",
    "CompileRecord",
    "EagerFallbackRecord",
    "MemoryPlanRecord",
    "PackageRecord",
    "PlannedArena",
    "PlannedStorage",
    "ProductCandidate",
    "ProductRecord",
    "Record",
    "TuningRecord",
    "capture",
    "emit",
    "module_path",
    "muted",
    "warn_once",
]

log = logging.getLogger("inductor_ext")


@dataclasses.dataclass(eq=False)
class _Listener:
    records: list[Record]
    kinds: tuple[type[Record], ...]
    thread: int | None
    """Identifier of the only thread whose records are appended; None for all threads."""


_lock = threading.Lock()
_listeners: list[_Listener] = []
_warned: set[str] = set()
_threads = threading.local()


@dataclasses.dataclass(frozen=True)
class Record:
    """Base class of all records. Fields must be JSON-serializable."""

    name: ClassVar[str]
    level: ClassVar[int] = logging.INFO

    def describe(self) -> str:
        """Return a one-line, human-readable description."""
        fields = dataclasses.asdict(self).items()
        return f"{self.name}: " + ", ".join(f"{key}={value}" for key, value in fields)

    def as_json(self) -> dict[str, Any]:
        """Return the record as a JSON object, with the record's name under "event"."""
        return {"event": self.name, **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True)
class CompileRecord(Record):
    """A graph that Inductor compiled, or loaded from its cache, with the extension active."""

    name: ClassVar[str] = "compile"

    kind: str
    """"inference", "forward", "backward", "aot"; "whole" for a forward and backward graph loaded
    together from the AOTAutograd cache."""
    operators: int
    """Number of calls in the FX graph."""
    seconds: float
    """Wall time."""
    cache: str
    """State of the FX graph cache: "hit", "miss", "bypass" or "off"."""
    cache_key: str | None
    settings: dict[str, Any]
    """Settings of the extension that differ from their defaults."""


@dataclasses.dataclass(frozen=True)
class EagerFallbackRecord(Record):
    """A graph that runs in eager mode because its toolchain is missing."""

    name: ClassVar[str] = "eager_fallback"

    part: str
    why: str
    install: str
    operators: int


@dataclasses.dataclass(frozen=True)
class ProductCandidate:
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
class ProductRecord(Record):
    """The kernel selected for one matmul of a graph, and the reason."""

    name: ClassVar[str] = "product"

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
    candidates: tuple[ProductCandidate, ...]
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
        kernel = "stock" if self.chosen is None else self.chosen.template
        where = f" in {self.module}" if self.module else ""
        what = f"{self.operator} of {' and '.join(self.operands)}{where}"
        return f"product: {what}: {kernel} ({self.origin}: {self.reason})"


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
    candidates: tuple[ProductCandidate, ...]
    """All candidates, including Inductor (default)."""

    def describe(self) -> str:
        """Return a one-line, human-readable description, without the candidates."""
        kernel = "stock" if self.chosen is None else self.chosen.template
        p = self.problem
        size = f"{p.operation} {p.m}x{p.n}x{p.k}"
        return f"tuning: {size}: {kernel}: {self.reason}, {self.seconds:.2f} s"


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

    @property
    def ratio(self) -> float:
        """Peak divided by lower bound; 1.0 if nothing is allocated."""
        return self.peak / self.lower_bound if self.lower_bound else 1.0

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


@dataclasses.dataclass(frozen=True)
class PackageRecord(Record):
    """An AOT package that was written: compiled, or copied from the artifact cache."""

    name: ClassVar[str] = "package"

    path: str
    bytes: int
    seconds: float
    """Wall time of the whole compile and packaging, or of the lookup and copy on a cache hit."""


@dataclasses.dataclass(frozen=True)
class ArtifactCacheRecord(Record):
    """The result of a lookup of an AOT package in the artifact cache."""

    name: ClassVar[str] = "artifact_cache"

    state: str
    """"hit", "miss", "bypass" (no key can be computed) or "off"."""
    key: str | None
    why: str | None
    """The reason, for "bypass" and "off"."""
    seconds: float
    """Wall time of computing the key and, on a hit, of copying the package."""


@contextlib.contextmanager
def capture(*kinds: type[Record], this_thread: bool = False) -> Iterator[list[Any]]:
    """Yield a list to which records emitted in this process are appended inside the context.

    Args:
        kinds: append only records of these classes. Default: all.
        this_thread: whether to ignore records emitted by other threads. Default: False.
    """
    thread = threading.get_ident() if this_thread else None
    listener = _Listener([], kinds or (Record,), thread)
    with _lock:
        _listeners.append(listener)
    try:
        yield listener.records
    finally:
        with _lock:
            _listeners.remove(listener)


def emit(record: Record, *, event_log: str | None = None) -> None:
    """Send a record to all enabled outputs (see the module docstring).

    Args:
        record: the record.
        event_log: path of the JSON lines file, the value of the setting `event_log`. Default: None,
            no file.
    """
    if getattr(_threads, "muted", False):
        return
    log.log(record.level, "%s", record.describe())
    with _lock:
        for listener in _listeners:
            heard = listener.thread in (None, threading.get_ident())
            if heard and isinstance(record, listener.kinds):
                listener.records.append(record)
    line = json.dumps(record.as_json(), default=str)
    _trace(record, line)
    if event_log is not None:
        _append(event_log, line + "\n")


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Discard records that this thread emits inside the context, for trial compiles."""
    before = getattr(_threads, "muted", False)
    _threads.muted = True
    try:
        yield
    finally:
        _threads.muted = before


def _trace(record: Record, line: str) -> None:
    from torch._logging import trace_structured

    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"inductor_ext_{record.name}", "encoding": "json"},
        payload_fn=lambda: line,
    )


def _append(path: str, text: str) -> None:
    # A single write to a file opened with O_APPEND: lines of several processes do not interleave.
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        warn_once(f"event_log:{path}", f"the event log {path} cannot be written: {error}")


_ROOT = re.compile(r"^L\['\w+'\](?:\.__self__)?\.?|^L__self___?|^self\.?")
"""The prefix that Dynamo and export put before a module path: the variable that holds the model, or
one of its methods."""


def module_path(meta: Mapping[str, Any]) -> str:
    """Return the path of the module that an FX node comes from; empty if it is unknown.

    Args:
        meta: `node.meta` of the FX node.
    """
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = _ROOT.sub("", [*stack.values()][-1][0])
    return re.sub(r"\['?|'?\]", ".", path).replace("..", ".").strip(".")


def warn_once(key: str, message: str) -> None:
    """Log a one-line warning, once per process and key."""
    with _lock:
        if key in _warned:
            return
        _warned.add(key)
    log.warning("%s", message)
