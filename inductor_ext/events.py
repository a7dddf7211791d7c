"""Typed records of the extension's decisions, and their outputs.

A module that makes a decision emits a frozen dataclass derived from `Record`, which is defined in
the `records` module of its feature. The record is sent to

- the logger "inductor_ext" (`TORCH_LOGS="inductor_ext"` shows decisions, "+inductor_ext" details);
- torch's structured trace (`TORCH_TRACE`), as an artifact "inductor_ext_<record>";
- the file of the setting `event_log`, as one JSON object per line;
- listeners registered by `capture`, which tests use to inspect decisions.

Nothing is printed unless one of these is enabled. Messages that every user must see (something is
missing and a fallback was used) go through `warn_once`: one line per process. If a log cannot be
written, emitting warns instead of raising, so that logging never fails a compile.

`timed` adds the extension's parts of a compile to those that torch times.
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
from typing import Any, ClassVar

from inductor_ext.storage import json_codec

__all__ = ["Record", "capture", "emit", "module_path", "muted", "timed", "warn_once"]

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
        return {"event": self.name, **json_codec.as_dict(self)}


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
            is_meant = listener.thread in (None, threading.get_ident())
            if is_meant and isinstance(record, listener.kinds):
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


@contextlib.contextmanager
def timed(part: str) -> Iterator[None]:
    """Time a part of a compile, as torch times its own parts. Also used as a decorator.

    `torch._dynamo.utils.compile_times()` lists it, and `TORCH_TRACE` shows it in the timeline of
    `tlparse`.

    Args:
        part: what is done, such as "plan_memory"; the name in the timings is "inductor_ext.<part>".
    """
    from torch._dynamo.utils import dynamo_timed

    with dynamo_timed(f"inductor_ext.{part}"):
        yield


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
