"""The state of a compile that is running in this thread, in one place.

Code that Inductor calls back, such as a lowering or a pass, gets no argument of ours. What it needs
to know about the compile around it is a field of `CompileContext`, which `current` returns.

`enter` changes fields for a block of code. Blocks nest: an inner block inherits every field that it
does not set, and leaving a block restores the fields of the outer one, also after an exception. A
new thread starts with the defaults. So does the compile of a backward graph in another thread; the
settings of a compile therefore travel with its `InductorChoices` handler (see `scope`), and the
context has only what belongs to the thread that is compiling.

The fields' types are those of higher layers, which this module does not import; each field names
the module that owns it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

__all__ = ["CompileContext", "current", "enter"]


@dataclasses.dataclass(frozen=True)
class CompileContext:
    """What is known of the compile at hand; the defaults mean that none is running."""

    overrides: Mapping[str, object] | None = None
    """Settings requested by the innermost `activate`; None outside of it."""
    compile_: Any = None
    """`plan_store.Compile` to which graphs are linked that come from a cache."""
    is_aot: bool = False
    """Whether the graph belongs to an AOT package, whose constants may change after the compile."""
    graph_in_passes: Any = None
    """`torch.fx.GraphModule` that Inductor's post-grad passes are running on."""
    has_control_flow: bool = False
    """Whether the graph that joint passes are running on contains control flow (`padding`)."""
    in_control_flow: bool = False
    """Whether that graph is itself a subgraph of control flow (`padding`)."""
    signature: Any = None
    """The `Signature` of the exported program (`cpp_wrapper.signature`); None if there is none."""
    symbol_ranges: Mapping[Any, Any] | None = None
    """Ranges of symbols that `torch.export` left at the module (`signature.from_graph`)."""
    artifacts: list[Any] | None = None
    """Collects each `build.artifact.Artifact`; None if weights are written to files right away."""
    gemm_rule: Callable[[Any], Any] | None = None
    """Decides every GEMM without a lookup or a measurement (`autotune.decide.forced`)."""


_NONE = CompileContext()

_current: ContextVar[CompileContext] = ContextVar("inductor_ext_compile", default=_NONE)


def current() -> CompileContext:
    """The context of the compile in this thread; all defaults outside of one."""
    return _current.get()


@contextlib.contextmanager
def enter(**changes: Any) -> Iterator[CompileContext]:
    """Inside, in this thread, `current()` has these fields.

    Args:
        changes: fields of `CompileContext`.

    Raises:
        TypeError: a name is not a field.
    """
    token = _current.set(dataclasses.replace(_current.get(), **changes))
    try:
        yield _current.get()
    finally:
        _current.reset(token)
