"""Records which compiled graphs belong to a callable.

One call of Inductor's entry point is a `Compile`. It records the code that dynamo traces and the
call stack around it, because a graph after a graph break, or in a function that dynamo does not
inline, is compiled while the function that needs it is running. Modules are distinguished by
identity, functions by their code.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from inductor_ext import events
from inductor_ext.hooks import context
from inductor_ext.memory import plan_store, saved_tensors
from inductor_ext.memory.records import MemoryPlanRecord

_MAX_COMPILES = 4096
"""Maximum number of compiles remembered per process; the oldest are dropped first."""

_CodeId = tuple[str, str, int]
"""File, name and first line: dynamo keeps these when it runs a modified copy of the code."""

_lock = threading.Lock()
_compiles: collections.deque[Compile] = collections.deque(maxlen=_MAX_COMPILES)


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
        return None if self.key is None else plan_store.load(self.key)


class Compile:
    """One call of Inductor's entry point: the code it was called for, and the resulting graphs."""

    def __init__(self, code: _CodeId | None, around: set[_CodeId], modules: Sequence[Any]) -> None:
        self.code = code
        self.around = around
        self._modules = [weakref.ref(module) for module in modules]
        self.graphs: list[Graph] = []
        self.saved_memory: dict[str, saved_tensors.SavedMemory] = {}
        """`saved_tensors.find_memory` of the forward graph."""

    def modules(self) -> list[Any]:
        """Return the modules on the call stack that still exist, innermost first."""
        return [module for reference in self._modules if (module := reference()) is not None]

    def calls(self, module: object) -> bool:
        """Whether `module` was on the call stack."""
        return any(caller is module for caller in self.modules())

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
            plan_store.store(key, plans)


def _compiles_elsewhere() -> bool:
    """Whether Inductor compiles in a subprocess, whose records do not reach this process."""
    from torch._inductor import compile_fx

    return compile_fx.fx_compile_mode.name == "SUBPROCESS"


def begin_compile() -> Compile:
    """Record a call of Inductor's entry point, with the traced code and the call stack."""
    from torch._guards import TracingContext

    traced = TracingContext.get_traced_code() or []
    around, modules = _callers()
    compile_ = Compile(_identity(traced[0]) if traced else None, around, modules)
    with _lock:
        _compiles.append(compile_)
    return compile_


def forget_compile(compile_: Compile) -> None:
    """Forget a compile that has failed, and the graphs that it compiled before."""
    with _lock, contextlib.suppress(ValueError):
        _compiles.remove(compile_)


@contextlib.contextmanager
def link_cached_graphs(compile_: Compile) -> Iterator[None]:
    """Link the graphs that this context loads from a cache to `compile_`."""
    with context.enter(compile_=compile_):
        yield


def note_graph(key: str | None) -> None:
    """Record a compiled graph that is about to be used, whether new or from a cache."""
    compile_ = context.current().compile_
    if compile_ is not None and key is not None:
        compile_.link(key)


def forget_compiles() -> None:
    """Forget which callables were compiled; for torch.compiler.reset, which resets dynamo too."""
    with _lock:
        _compiles.clear()


def find_compiles(target: Callable[..., Any]) -> list[Compile]:
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
    matches = [c for c in compiles if c.calls(original) or c.calls(target)]
    if matches or code is None:
        return matches
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
    original = target if inner is None else inner
    return original.__func__ if isinstance(original, types.MethodType) else original


def _code(original: Any) -> types.CodeType | None:
    for name in ("__code__", "forward", "__call__"):
        attribute = getattr(original, name, None)
        if isinstance(attribute, types.CodeType):
            return attribute
        code = getattr(attribute, "__code__", None)
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
