"""The state of the compile that is running in this thread, in one place.

Inductor's callbacks, such as lowerings and passes, take no argument for the extension's state. What
they need to know about the current compile is a field of `CompileContext`, which `current` returns.

`enter` changes fields for a block of code. Blocks nest: an inner block inherits every field that it
does not set, and leaving a block restores the fields of the outer one, also after an exception. A
new thread starts with the defaults, and so does the compile of a backward graph in another thread.
The settings of a compile are therefore carried by its `InductorChoices` handler (see `scope`), from
which `settings` reads them, and the context holds only state of the thread that is compiling.

The types of the fields belong to higher layers, which this module does not import; the docstring of
a field names the module that owns it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from inductor_ext import _compat
from inductor_ext.settings import Settings


@dataclasses.dataclass(frozen=True)
class CompileContext:
    """The state of the current compile. The defaults mean that no compile is running."""

    overrides: Mapping[str, object] | None = None
    """Settings requested by the innermost `activate`; None outside of it."""
    compile_: Any = None
    """The `compiled_callables.Compile` that graphs loaded from a cache are linked to."""
    records: list[Any] | None = None
    """The `events.Record`s of the compile of one graph so far; the list grows."""
    is_aot: bool = False
    """Whether the graph belongs to an AOT package, whose constants may change after the compile."""
    graph_in_passes: Any = None
    """The `torch.fx.GraphModule` that Inductor's post-grad passes are running on."""
    has_control_flow: bool = False
    """Whether the graph that joint passes are running on contains control flow
    (`pad_mm_policy`)."""
    in_control_flow: bool = False
    """Whether that graph is itself a subgraph of a control-flow op (`pad_mm_policy`)."""
    signature: Any = None
    """The `Signature` of the exported program (`cpp_wrapper.signature`); None if there is none."""
    symbol_ranges: Mapping[Any, Any] | None = None
    """Ranges of symbols that `torch.export` recorded on the module (`signature.from_graph`)."""
    dim_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Names of sizes by symbol, from `torch.export.Dim` (`signature.dim_names`)."""
    given_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The same, from the caller of the compile (`signature.given_shapes`)."""
    folding: Any = None
    """The `Recorder` of folded constants (`cpp_wrapper.codegen.frozen_constants`); None in a JIT
    compile."""
    artifacts: list[Any] | None = None
    """Collects every `build.artifact.Artifact`; None if weights are written to files
    immediately."""
    cpu_level: str | None = None
    """The level of `cpp_wrapper.build.cpu_target` whose vector ISA Inductor uses, whatever CPU this
    machine has; None for those of this machine."""
    target_gpu: Any = None
    """The `hooks.offline_gpu.GpuProperties` that torch reports; None for this machine's GPUs."""
    constant_values: Mapping[str, Any] | None = None
    """Values of the constants by fully qualified name, if the graph's are fake tensors
    (`cpp_wrapper.program_on_gpu`)."""
    saved_memory: Mapping[str, Any] | None = None
    """The `SavedMemory` of the tensors that were saved for this backward
    (`memory.saved_tensors`)."""
    recomputed_share: float = 0.0
    """Share of the segments of a forward that its backward computes again
    (`lowerings.graph.recompute_segments`)."""
    chunking: Any = None
    """The `memory.budget_search.Chunking` of graphs that are too large; None for no chunks."""
    graph_costs: list[Any] | None = None
    """Collects a `memory.budget_search.GraphCost` of every graph."""
    budget_checks: list[Any] | None = None
    """Collects every `memory.budget_runtime.BudgetCheck` of the code that is loaded."""
    gemm_rule: Callable[[Any], Any] | None = None
    """Decides every GEMM without a lookup or a benchmark (`autotune.decide.force_config`)."""


_NONE = CompileContext()

_current: ContextVar[CompileContext] = ContextVar("inductor_ext_compile", default=_NONE)


def current() -> CompileContext:
    """Return the context of the compile in this thread; all defaults outside of a compile."""
    return _current.get()


@contextlib.contextmanager
def enter(**changes: Any) -> Iterator[CompileContext]:
    """Set fields of the current context, in this thread, for the duration of the block.

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


class SettingsCarrier:
    """Base class of the `InductorChoices` handlers in the scope of a compile (`scope`)."""

    settings: Settings


def settings() -> Settings | None:
    """Return the settings of the extension's compile in this thread; None outside of one."""
    handler = _compat.peek_choices()
    return handler.settings if isinstance(handler, SettingsCarrier) else None
