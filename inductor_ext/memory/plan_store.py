"""Stores the memory plans of compiled graphs, and maps a callable to its graphs.

A plan is made once, when its graph is compiled. It is queried later, often in a process that loaded
the graph from a cache and planned nothing. So the plans of a graph are written next to Inductor's
cache entry: under the same key, in Inductor's cache folder. If a file cannot be written, the
extension warns once; the compile does not fail.

The graphs of a callable are recorded during compilation. One call of Inductor's entry point is a
`Compile`. It records the code that dynamo traces and the call stack around it, because a graph
after a graph break, or in a function that dynamo does not inline, is compiled while the function
that needs it is running. Modules are distinguished by identity, functions by their code.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import sys
import threading
import types
import typing
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from inductor_ext import events
from inductor_ext.events import MemoryPlanRecord
from inductor_ext.hooks import context
from inductor_ext.storage import artifact_store

__all__ = ["Compile", "Graph", "begin", "clear", "find", "linking", "load", "loaded", "parse"]

_MOST_COMPILES = 4096
"""Maximum number of compiles remembered per process; the oldest are dropped first."""
_MOST_PLANS = 512
"""Maximum number of graphs whose plans are in memory; other plans are read from their files."""

_CodeId = tuple[str, str, int]
"""File, name and first line: dynamo keeps these when it runs a modified copy of the code."""

_lock = threading.Lock()
_compiles: collections.deque[Compile] = collections.deque(maxlen=_MOST_COMPILES)
_plans: collections.OrderedDict[str, tuple[MemoryPlanRecord, ...]] = collections.OrderedDict()


@dataclasses.dataclass(frozen=True)
class Graph:
    """A compiled graph of a `Compile`."""

    key: str | None
    """Key in the FX graph cache; None if the graph is not cached."""
    records: tuple[MemoryPlanRecord, ...] | None
    """The plans; None if they must be loaded by key."""

    def plans(self) -> tuple[MemoryPlanRecord, ...] | None:
        """Return the plans, one per generated function; None if they cannot be found."""
        if self.records is not None:
            return self.records
        return None if self.key is None else load(self.key)


class Compile:
    """One call of Inductor's entry point: the code it was called for, and the resulting graphs."""

    def __init__(self, code: _CodeId | None, around: set[_CodeId], modules: Sequence[Any]) -> None:
        self.code = code
        self.around = around
        self._modules = [weakref.ref(module) for module in modules]
        self.graphs: list[Graph] = []

    def modules(self) -> list[Any]:
        """Return the modules on the call stack that still exist, innermost first."""
        return [module for reference in self._modules if (module := reference()) is not None]

    def calls(self, module: object) -> bool:
        """Whether `module` was on the call stack."""
        return any(found is module for found in self.modules())

    def link(self, key: str) -> None:
        """Record a graph whose plans are stored under its key, by this or another compile."""
        with _lock:
            if all(graph.key != key for graph in self.graphs):
                self.graphs.append(Graph(key, None))

    def add(self, key: str | None, records: Sequence[events.Record] | None) -> None:
        """Record a graph that `inner_compile` returned, and store its plans for later processes.

        Args:
            key: key in the FX graph cache; None if the graph is not cached.
            records: records emitted during its compilation; None if it came from a cache.
        """
        plans = None
        if records is not None and (records or not _compiles_elsewhere()):
            plans = tuple(
                dataclasses.replace(record, cache_key=key)
                for record in records
                if isinstance(record, MemoryPlanRecord)
            )
        if key is None:
            with _lock:
                self.graphs.append(Graph(None, plans))
            return
        self.link(key)
        if plans is not None:
            _remember(key, plans)
            _write(key, plans)


def _compiles_elsewhere() -> bool:
    """Whether Inductor compiles in a subprocess, whose records do not reach this process."""
    from torch._inductor import compile_fx

    return compile_fx.fx_compile_mode.name == "SUBPROCESS"


def begin() -> Compile:
    """Record a call of Inductor's entry point, with the traced code and the call stack."""
    from torch._guards import TracingContext

    traced = TracingContext.get_traced_code() or []
    around, modules = _callers()
    compile_ = Compile(_identity(traced[0]) if traced else None, around, modules)
    with _lock:
        _compiles.append(compile_)
    return compile_


@contextlib.contextmanager
def linking(compile_: Compile) -> Iterator[None]:
    """Link the graphs that this context loads from a cache to `compile_`."""
    with context.enter(compile_=compile_):
        yield


def loaded(key: str | None) -> None:
    """Record a compiled graph that is about to be used, whether new or from a cache."""
    compile_ = context.current().compile_
    if compile_ is not None and key is not None:
        compile_.link(key)


def clear() -> None:
    """Forget which callables were compiled; for torch.compiler.reset, which resets dynamo too."""
    with _lock:
        _compiles.clear()


def find(target: Callable[..., Any]) -> list[Compile]:
    """Return the compiles with graphs that belong to a module or function, oldest first.

    A module for which nothing was compiled may run a graph that was compiled for another instance
    of its class. In that case the compiles of that instance are returned.

    Args:
        target: a callable returned by torch.compile, or the original passed to it.
    """
    with _lock:
        compiles = [compile_ for compile_ in _compiles if compile_.graphs]
    original = _original(target)
    code = _code(original)
    identity = None if code is None else _identity(code)
    if isinstance(original, types.FunctionType):
        return [c for c in compiles if c.code == identity or identity in c.around]
    found = [c for c in compiles if c.calls(original) or c.calls(target)]
    if found or code is None:
        return found
    same_code = [c for c in compiles if c.code == identity]
    siblings = [
        module for c in same_code for module in c.modules() if type(module) is type(original)
    ]
    if siblings:
        return [c for c in compiles if c.calls(siblings[-1])]
    return same_code


def _original(target: Any) -> Any:
    """Return the original of a callable that torch.compile returned."""
    inner = getattr(target, "_orig_mod", None)
    while inner is None and "_torchdynamo_orig_callable" in getattr(target, "__dict__", {}):
        target = target._torchdynamo_orig_callable
        inner = getattr(target, "_orig_mod", None)
    found = target if inner is None else inner
    return found.__func__ if isinstance(found, types.MethodType) else found


def _code(original: Any) -> types.CodeType | None:
    for name in ("__code__", "forward", "__call__"):
        found = getattr(original, name, None)
        if isinstance(found, types.CodeType):
            return found
        code = getattr(found, "__code__", None)
        if isinstance(code, types.CodeType):
            return code
    return None


def _identity(code: types.CodeType) -> _CodeId:
    return code.co_filename, code.co_name, code.co_firstlineno


def _callers() -> tuple[set[_CodeId], list[Any]]:
    """Return the code and the modules on the call stack of this thread."""
    import torch

    # The code of Module.__call__. It stays the same if a tool wraps Module.__call__.
    call_module = torch.nn.Module._wrapped_call_impl.__code__
    codes: set[_CodeId] = set()
    modules: list[Any] = []
    caller: types.FrameType | None = sys._getframe(1)
    while caller is not None:
        codes.add(_identity(caller.f_code))
        if caller.f_code is call_module:
            # Do not read the locals of other frames: before Python 3.13, reading them keeps their
            # objects alive until the frame ends.
            modules.append(caller.f_locals["self"])
        caller = caller.f_back
    return codes, modules


def _path(key: str) -> str:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return os.path.join(cache_dir(), "inductor_ext", "memory_plans", key[:3], f"{key}.json")


def _remember(key: str, records: tuple[MemoryPlanRecord, ...]) -> None:
    with _lock:
        _plans[key] = records
        _plans.move_to_end(key)
        while len(_plans) > _MOST_PLANS:
            _plans.popitem(last=False)


def _write(key: str, records: tuple[MemoryPlanRecord, ...]) -> None:
    path = _path(key)
    text = json.dumps([record.as_json() for record in records])
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with (
            artifact_store.publish(path) as temporary,
            open(temporary, "w", encoding="utf-8") as file,
        ):
            file.write(text)
    except OSError as error:
        folder = os.path.dirname(os.path.dirname(path))
        events.warn_once(
            f"memory_plans:{folder}",
            f"memory plans cannot be kept in {folder} ({error}); processes that take graphs from "
            f"the cache cannot report on them.",
        )


def load(key: str) -> tuple[MemoryPlanRecord, ...] | None:
    """Return the plans stored under a key of the FX graph cache; None if none can be read."""
    with _lock:
        if key in _plans:
            _plans.move_to_end(key)
            return _plans[key]
    try:
        with open(_path(key), encoding="utf-8") as file:
            records = tuple(parse(entry) for entry in json.load(file))
    except (OSError, ValueError):
        return None
    _remember(key, records)
    return records


def parse(entry: object) -> MemoryPlanRecord:
    """Build a record from the JSON object that `as_json` returned.

    Raises:
        ValueError: a field is missing or has the wrong type; the text names it.
    """
    record: MemoryPlanRecord = _build(MemoryPlanRecord, entry, "")
    for index, storage in enumerate(record.storages):
        where = f"storages[{index}]"
        if storage.arena is not None and not 0 <= storage.arena < len(record.arenas):
            raise ValueError(
                f"{where}.arena is {storage.arena}, and there are {len(record.arenas)}"
            )
        if (storage.arena is None) != (storage.offset is None):
            raise ValueError(f"{where} has one of arena and offset without the other")
    for name in ("storages", "arenas"):
        for index, part in enumerate(getattr(record, name)):
            if not 0 <= part.start <= part.end or part.bytes < 0:
                raise ValueError(f"{name}[{index}] has a negative size or lifetime")
    return record


def _build(cls: type[Any], entry: object, where: str) -> Any:
    if not isinstance(entry, dict):
        raise ValueError(f"{where or 'the record'} is no JSON object")
    values = {}
    optional = {f.name for f in dataclasses.fields(cls) if f.default is not dataclasses.MISSING}
    for name, annotation in _annotations(cls).items():
        if name not in entry and name in optional:
            continue  # written by an older release
        if name not in entry:
            raise ValueError(f"{where}{'.' if where else ''}{name} is missing")
        values[name] = _value(annotation, entry[name], f"{where}{'.' if where else ''}{name}")
    return cls(**values)


def _annotations(cls: type[Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _value(annotation: Any, value: object, where: str) -> object:
    if typing.get_origin(annotation) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where} is no list")
        (element, _) = typing.get_args(annotation)
        return tuple(_build(element, item, f"{where}[{index}]") for index, item in enumerate(value))
    allowed = typing.get_args(annotation) or (annotation,)
    if float in allowed:
        allowed = (*allowed, int)
    if not isinstance(value, allowed) or isinstance(value, bool):
        names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in allowed)
        raise ValueError(f"{where} is {value!r}; allowed is {names}")
    return value
