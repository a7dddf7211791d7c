"""Typed records of what was decided, and the ways by which people see them.

A room that decides something emits a frozen dataclass derived from `Record`. It goes to

- the logger "inductor_ext" (`TORCH_LOGS="inductor_ext"` shows decisions, "+inductor_ext" details);
- torch's structured trace (`TORCH_TRACE`), as an artifact "inductor_ext_<record>";
- the file named by the setting `event_log`, one JSON object a line;
- whoever listens through `capture`, which is how tests look at decisions.

Nothing is printed unless one of these is asked for. What a user must know without asking, that
something is missing and what was done instead, goes through `warn_once`: one line a process.
Emitting never raises for want of a place to write to: a compile does not fail because of its log.
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
    """The only one that it listens to; None for all."""


_lock = threading.Lock()
_listeners: list[_Listener] = []
_warned: set[str] = set()
_threads = threading.local()


@dataclasses.dataclass(frozen=True)
class Record:
    """Base of all records. Fields must be JSON-able."""

    name: ClassVar[str]
    level: ClassVar[int] = logging.INFO

    def describe(self) -> str:
        """One line for a person."""
        fields = dataclasses.asdict(self).items()
        return f"{self.name}: " + ", ".join(f"{key}={value}" for key, value in fields)

    def as_json(self) -> dict[str, Any]:
        """The record as a JSON object, with its kind under "event"."""
        return {"event": self.name, **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True)
class CompileRecord(Record):
    """One graph that Inductor compiled, or took from its cache, under the extension."""

    name: ClassVar[str] = "compile"

    kind: str
    """"inference", "forward", "backward", "aot"; "whole" for a graph with its backward that came
    from the AOTAutograd cache."""
    operators: int
    """Calls in the FX graph."""
    seconds: float
    """Wall time."""
    cache: str
    """FX graph cache: "hit", "miss", "bypass" or "off"."""
    cache_key: str | None
    settings: dict[str, Any]
    """Our settings that differ from their defaults."""


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
    """One kernel that was measured for a GEMM, or was to be."""

    config: Config | None
    """None for stock's path."""
    predicted: float | None
    """Microseconds by the model; None for stock's path."""
    measured: float | None
    """Microseconds; None for a candidate that was dropped."""
    failure: str | None
    """Why it was dropped."""


@dataclasses.dataclass(frozen=True)
class ProductRecord(Record):
    """Which kernel one product of a graph gets, and on which grounds."""

    name: ClassVar[str] = "product"

    operator: str
    """As it stands in the graph, such as "aten.addmm"; "fused" for several nodes in one kernel."""
    operands: tuple[str, ...]
    """Its tensors, such as "bfloat16[16, 4096]"."""
    module: str
    """Path of the model's module that calls it, such as "layers.0.mlp.gate"."""
    problem: GemmProblem | None
    """With all that is fused into it; None for a product that is stock's alone."""
    device: str
    roofline: float | None
    """Microseconds below which no kernel can be."""
    chosen: Config | None
    """None for stock's path."""
    origin: str
    """As of `autotune.decision.Decision`; "uncovered" where there was nothing to decide."""
    reason: str
    candidates: tuple[ProductCandidate, ...]
    """Stock's path among them; none where nothing is known."""
    declined: tuple[str, ...] = ()
    """What it could have been one kernel with, in words, and why it is not."""

    @property
    def microseconds(self) -> float | None:
        """What the chosen kernel took; None if it was not measured."""
        return next((c.measured for c in self.candidates if c.config == self.chosen), None)

    @property
    def stock_microseconds(self) -> float | None:
        """What stock's path took; None if it was not measured."""
        return next((c.measured for c in self.candidates if c.config is None), None)

    def describe(self) -> str:
        """One line for a person; candidates are left to the structured forms."""
        kernel = "stock" if self.chosen is None else self.chosen.template
        where = f" in {self.module}" if self.module else ""
        what = f"{self.operator} of {' and '.join(self.operands)}{where}"
        return f"product: {what}: {kernel} ({self.origin}: {self.reason})"


@dataclasses.dataclass(frozen=True)
class TuningRecord(Record):
    """What measuring the candidates of a GEMM has brought."""

    name: ClassVar[str] = "tuning"

    problem: GemmProblem
    device: str
    chosen: Config | None
    """None for stock's path."""
    reason: str
    seconds: float
    """Wall time of verification and timing."""
    candidates: tuple[ProductCandidate, ...]
    """Stock's path among them."""

    def describe(self) -> str:
        """One line for a person; candidates are left to the structured forms."""
        kernel = "stock" if self.chosen is None else self.chosen.template
        p = self.problem
        size = f"{p.operation} {p.m}x{p.n}x{p.k}"
        return f"tuning: {size}: {kernel}: {self.reason}, {self.seconds:.2f} s"


@dataclasses.dataclass(frozen=True)
class PlannedStorage:
    """One storage of a memory plan: a buffer with every buffer that takes over its memory."""

    name: str
    """The buffer that allocates it."""
    bytes: int
    """At the hint, as the allocator counts it."""
    start: int
    """The first step of the schedule, a line of the generated code, at which it is allocated."""
    end: int
    """The first step at which it is free again."""
    kind: str
    """"intermediate", "output", "extern" (allocated by the kernel that makes it), "input" (freed
    during the call), "subgraph" (what a called subgraph needs during the call)."""
    device: str
    arena: int | None
    """Index among the plan's arenas; None for memory of its own."""
    offset: int | None
    """Bytes from the arena's start, at the hint."""
    operator: str
    """The operators that the kernel was made from, such as "addmm, gelu"."""
    module: str
    """Path of the model's module that made the buffer, such as "encoder.layer.0.attention"."""


@dataclasses.dataclass(frozen=True)
class PlannedArena:
    """One arena of a memory plan."""

    name: str
    device: str
    bytes: int
    """At the hint."""
    lower_bound: int
    """The most bytes of its members alive at once."""
    start: int
    end: int
    size: str
    """The expression of its size, in bytes."""


@dataclasses.dataclass(frozen=True)
class MemoryPlanRecord(Record):
    """How the buffers of one generated function share memory.

    All sizes are bytes at the hint, of what the function allocates or can free, summed over
    devices; what its callers keep alive throughout is not counted.
    """

    name: ClassVar[str] = "memory_plan"

    graph: str
    """The generated function, such as "call" or "partition_0"."""
    kind: str
    """"inference", "forward", "backward" or "aot"."""
    cache_key: str | None
    """Of the FX graph cache; None outside it."""
    strategy: str
    """"arenas", "reuse", "plain" or "stock"."""
    peak_before: int
    """Under stock's reuse, on the same schedule."""
    peak: int
    lower_bound: int
    """The most bytes alive at once, with nothing kept longer than it is used."""
    steps: int
    """Length of the schedule."""
    calls_before: int
    """Allocator calls under stock's reuse."""
    calls: int
    peak_reordered_from: int | None
    """The lower bound before our order of kernels replaced stock's; None where it did not."""
    seconds: float
    """CPU time of planning."""
    arenas: tuple[PlannedArena, ...]
    storages: tuple[PlannedStorage, ...]
    reason: str = ""
    """Why the function was left to Inductor's plan without being read; all sizes are 0 then."""

    @property
    def ratio(self) -> float:
        """Peak over lower bound; 1.0 where nothing is allocated."""
        return self.peak / self.lower_bound if self.lower_bound else 1.0

    def describe(self) -> str:
        """One line for a person; the storages are left to the structured forms."""
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
    """An AOT package that was written."""

    name: ClassVar[str] = "package"

    path: str
    bytes: int
    seconds: float
    """Wall time of the whole compile and packaging."""


@dataclasses.dataclass(frozen=True)
class ArtifactCacheRecord(Record):
    """Whether an AOT package was copied from the cache of artifacts instead of being compiled."""

    name: ClassVar[str] = "artifact_cache"

    state: str
    """"hit", "miss", "bypass" (the program has no key) or "off"."""
    key: str | None
    why: str | None
    """For "bypass" and "off"."""
    seconds: float
    """Wall time up to the decision: of the key, and of the copy of a hit."""


@contextlib.contextmanager
def capture(*kinds: type[Record], this_thread: bool = False) -> Iterator[list[Any]]:
    """Yield a list to which every record emitted in this process is appended meanwhile.

    Args:
        kinds: only records of these classes; none given: all.
        this_thread: whether to leave out what other threads emit.
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
    """Send a record to every place that asked for it.

    Args:
        record: what was decided.
        event_log: path of the JSON lines file, from the setting of that name.
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
    """Inside, what this thread emits goes nowhere: it is about a compile that is only a trial."""
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
    # One write to a descriptor opened for appending: lines of several processes do not mix.
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        warn_once(f"event_log:{path}", f"the event log {path} cannot be written: {error}")


_ROOT = re.compile(r"^L\['\w+'\](?:\.__self__)?\.?|^L__self___?|^self\.?")
"""What dynamo and export write before the path of a module: the variable that holds the model, or a
method of it."""


def module_path(meta: Mapping[str, Any]) -> str:
    """Path of the model's module that an FX node comes from; empty if it is not known.

    Args:
        meta: of the node.
    """
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = _ROOT.sub("", [*stack.values()][-1][0])
    return re.sub(r"\['?|'?\]", ".", path).replace("..", ".").strip(".")


def warn_once(key: str, message: str) -> None:
    """Log a one-line warning, once a process for each key."""
    with _lock:
        if key in _warned:
            return
        _warned.add(key)
    log.warning("%s", message)
