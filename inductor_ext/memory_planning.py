"""Memory planning of generated code: reads the wrapper's lines, plans, and writes the lines back.

Once a wrapper's lines are final, Inductor decides in `run_wrapper_ir_passes` how its buffers share
memory. In compiles of the extension, `plan_wrapper` replaces that step, for Python and C++
wrappers:

1. `_Reader` finds the storages behind the lines: what allocates them, which buffers reuse them
   (in-place reuse, views, aliasing fallbacks), what frees them, and what kernels allocate
   themselves.
2. Inductor's reuse is applied to a copy of the lines, which is read the same way for comparison.
3. `memory.planner.placement_policy.decide` chooses arenas and reuse that keep the lower bound.
4. The plan with the lower peak, then with fewer allocator calls, is written as lines
   (`arena_lines`). A record reports the gain.

A storage is placed in an arena only if every way to reach its memory is understood. The wrapper
must allocate it and free it in the same scope; it must be used on one stream only; it must not be
pinned, used for communication, passed to a subgraph or a stateful operator, nor (unless requested
by `memory_pool`) be an output. Every other storage keeps its own memory, which reference counts
protect. A graph with lines or operations that are not understood gets Inductor's plan.

Settings: memory_arenas, memory_replan, memory_budget, memory_debug. Inductor's memory_planning,
memory_pool and allow_buffer_reuse keep their meaning.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import re
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._inductor import config as inductor_config
from torch._inductor import ir
from torch._inductor.codegen import wrapper as stock_lines
from torch._inductor.codegen.common import WorkspaceArg
from torch._inductor.utils import align as align64
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import FloorDiv, Max

from inductor_ext import events, exc
from inductor_ext.memory import known_ir, reorder_kernels
from inductor_ext.memory.arena_lines import (
    ArenaEndLine,
    ArenaLine,
    ArenaVariable,
    MemberEndLine,
    MemberLine,
    MemberPlace,
)
from inductor_ext.memory.planner import arenas, peak_report, placement_policy, symbolic
from inductor_ext.memory.planner.interval import round_up
from inductor_ext.memory.records import MemoryPlanRecord, PlannedArena, PlannedStorage
from inductor_ext.settings import Settings, parse_bytes

__all__ = ["ALIGNMENT", "plan_wrapper"]

ALIGNMENT = {"cpu": 64, "cuda": 512}
"""Bytes to which the allocator of each device type rounds sizes and aligns addresses.

Arena members get the same alignment as separately allocated memory, so kernels see no difference.
Device types that are not listed have no arenas.
"""

SMALLEST = 512
"""Minimum size in bytes of a buffer that is placed in an arena."""

REPLAN_FROM = 1.05
"""Ratio of arena size to lower bound, at the worst of the sampled sizes, above which the arena is
planned again at run time."""

FALLBACK_HINT = 64
"""Value assumed for a size without a hint (unbacked symbols), as in Inductor's planner."""


@dataclasses.dataclass(eq=False)
class _Storage:
    """One storage, as described by the lines."""

    node: Any
    """The buffer that it was allocated for."""
    kind: str
    """As in `PlannedStorage`."""
    scope: int
    context: tuple[Any, ...]
    """The stream and the CUDA memory pool in whose contexts it is allocated."""
    start: int
    end: int = -1
    refs: set[str] = dataclasses.field(default_factory=set)
    """Variables that reference it now, and those that will."""
    seen: set[str] = dataclasses.field(default_factory=set)
    """All variables that ever referenced it."""
    names: list[str] = dataclasses.field(default_factory=list)
    """Buffers that use it from its start offset, one after the other."""
    last: Any = None
    """The line that freed it."""
    regular: bool = True
    """Whether it is freed in the scope that allocates it and nothing else can keep it."""
    placeable: bool = False
    output: bool = False
    bytes: Any = 0
    """Size: int or sympy expression."""
    hint: int = 0
    """Size at the hint, as the allocator rounds it."""

    @property
    def device(self) -> torch.device:
        """The device of its memory."""
        device: torch.device = self.node.get_device()
        return device

    @property
    def counted(self) -> bool:
        """Whether the generated code allocates it."""
        return self.kind in ("intermediate", "output")

    @property
    def reusable(self) -> bool:
        """Whether another buffer can reuse it through the variable that is dropped last."""
        return (
            isinstance(self.last, stock_lines.FreeIfNotReusedLine)
            and self.last.node.get_name() in self.names
            and self.regular
            and not self.output
        )


@dataclasses.dataclass
class _Scope:
    """Lines that run together: a function, or a subgraph that is inlined into it."""

    graph: Any
    start: int
    end: int = -1


@dataclasses.dataclass
class _Reading:
    """The storages and memory needs that the lines of one wrapper describe."""

    storages: list[_Storage]
    inputs: list[_Storage]
    """Inputs that the code drops: free from then on, unless the caller keeps them."""
    calls: list[tuple[int, int, dict[str, int]]]
    """Called subgraphs: first step, end, peak by device."""
    scratch: list[tuple[int, str, int]]
    """Workspace that a kernel needs while it runs: step, device, bytes."""
    rigid: set[int]
    """Steps with unbounded workspace: their kernels may need more memory than is known."""
    removed: set[str]
    """Buffers that were removed because nothing needs them, even if lines mention them."""
    steps: int
    unread: str = ""
    """Name of a called function whose memory use is unknown."""


def _hint(expression: Any) -> int:
    value: int = V.graph.sizevars.optimization_hint(expression, fallback=FALLBACK_HINT)
    return value


def _set_size(storage: _Storage, graph: Any) -> None:
    node = storage.node
    with V.set_graph_handler(graph):
        length = V.graph.get_allocation_storage_size(node)
        nbytes = V.graph.sizevars.simplify(sympy.sympify(length) * node.get_dtype().itemsize)
        storage.bytes = int(nbytes) if nbytes.is_number else nbytes
        hint = max(_hint(storage.bytes), 0)
    storage.hint = round_up(hint, ALIGNMENT.get(storage.device.type, 1))


def _graphs(lines: Iterable[Any]) -> list[Any]:
    """Return the current graph and the subgraphs that are inlined into its function."""
    graphs = [V.graph]
    for line in lines:
        if isinstance(line, stock_lines.EnterSubgraphLine) and line.graph not in graphs:
            graphs.append(line.graph)
    return graphs


def _aliases(graphs: Iterable[Any]) -> dict[str, set[str]]:
    """Map a buffer to the buffers whose memory it may share, as declared by its kernel."""
    direct = {
        buffer.get_name(): set(buffer.get_inputs_that_alias_output())
        for graph in graphs
        for buffer in graph.buffers
        # The body of a template has no name: it is inlined into the kernel.
        if buffer.name is not None
    }
    closed: dict[str, set[str]] = {}

    def close(name: str) -> set[str]:
        if name not in closed:
            closed[name] = set()
            for base in direct.get(name, ()):
                closed[name] |= {base} | close(base)
        return closed[name]

    return {name: bases for name in direct if (bases := close(name))}


def _kept(graphs: Iterable[Any]) -> set[str]:
    """Return the buffers that must have their own memory."""
    kept: set[str] = set()
    for graph in graphs:
        kept |= set(graph.never_reuse_buffers)
        # From torch 2.15: inputs of effectful operators, which are freed but never reused.
        kept |= set(getattr(graph, "never_reuse_but_free_buffers", ()))
        for operation in graph.operations:
            stateful = any(
                isinstance(value, ir.TorchBindObject)
                for value in getattr(operation, "inputs", None) or ()
            )
            if stateful or known_ir.keeps_memory(operation):
                kept |= set(operation.get_read_names())
                kept.update(buffer.get_name() for buffer in operation.get_outputs())
        kept |= _across_streams(graph.scheduler)
    return kept


def _across_streams(scheduler: Any) -> set[str]:
    """Return the buffers with a user on another stream than their producer (torch >= 2.13)."""
    streams = getattr(scheduler, "node_to_stream", None)
    if not streams or len(set(streams.values())) == 1:
        return set()
    return {
        name
        for name, buffer in scheduler.name_to_buf.items()
        for user in buffer.users
        if streams.get(user.node, 0) != scheduler.get_buf_stream(name)
    }


def _stream(scheduler: Any, name: str) -> int:
    find = getattr(scheduler, "get_buf_stream", None)
    return find(name) if find is not None else 0


def _output_names(wrapper: Any, graphs: Iterable[Any]) -> set[str]:
    names = set(V.graph._get_output_names(wrapper.get_graph_outputs()))
    for graph in graphs:
        names |= set(graph.get_output_names())
    return names


_subgraph_peaks: weakref.WeakKeyDictionary[Any, dict[str, dict[str, int] | None]] = (
    weakref.WeakKeyDictionary()
)
"""Per root wrapper: peak by device of the functions generated so far; None for a function that was
not read."""


def _root(wrapper: Any) -> Any:
    while (parent := getattr(wrapper, "parent_wrapper", None)) is not None:
        wrapper = parent
    return wrapper


_CALL = re.compile(r"= (?:self\.partitions\[(?P<partition>\d+)\]|(?P<graph>\w+))\((?:\w+)_args\)")


class _Reader:
    """Walks over the lines once and stores the result in `reading`.

    Inductor removes the frees at the end of a function. `unplanned` are the lines before that; they
    mention every buffer that a kernel allocates.
    """

    def __init__(self, wrapper: Any, lines: Sequence[Any], unplanned: Sequence[Any]) -> None:
        self.wrapper = wrapper
        graphs = _graphs(lines)
        self.outputs = _output_names(wrapper, graphs)
        self.kept = _kept(graphs)
        self.aliases = _aliases(graphs)
        self.removed = set().union(*(graph.removed_buffers for graph in graphs))
        self.holders: dict[str, list[_Storage]] = {}
        self.alias_of: dict[str, list[str]] = {}
        for name, bases in self.aliases.items():
            for base in bases:
                self.alias_of.setdefault(base, []).append(name)
        self.scopes = [_Scope(V.graph, 0, len(lines))]
        self.stack = [0]
        self.streams = [0]
        self.pools: list[Any] = [None]
        self.reading = _Reading([], [], [], [], set(), self.removed, len(lines))
        self.extracted = {
            line.result_name for line in lines if isinstance(line, stock_lines.MultiOutputLine)
        }
        self.extern_starts = self._find_externs(lines, unplanned)
        for step, line in enumerate(lines):
            self._read(step, line)
        self._finish()

    def _find_externs(self, lines: Sequence[Any], unplanned: Sequence[Any]) -> dict[int, list[Any]]:
        """Map a step to the buffers that a kernel allocates at it."""
        made: set[str] = set()
        wanted: dict[str, Any] = {}
        for line in lines:
            if isinstance(line, stock_lines.AllocateLine):
                made.add(line.node.get_name())
            elif isinstance(line, (stock_lines.ReuseLine, stock_lines.ReinterpretLine)):
                made.add(line.reused_as.get_name())
        kinds = (
            stock_lines.FreeIfNotReusedLine,
            stock_lines.ReuseLine,
            stock_lines.ReinterpretLine,
        )
        used: dict[str, Any] = {
            line.node.get_name(): line.node
            for line in unplanned
            if isinstance(line, kinds)
            or (
                isinstance(line, stock_lines.FreeLine) and not isinstance(line.node, ir.InputBuffer)
            )
        }
        if not V.graph.cpp_wrapper:
            for line in lines:
                # In Python the tuple of a kernel's outputs references them as well.
                if isinstance(line, stock_lines.MultiOutputLine) and line.arg_name in used:
                    self.alias_of.setdefault(line.result_name, []).append(line.arg_name)
        for name in self.outputs:
            buffer = V.graph.try_get_buffer(name)
            if buffer is not None and not isinstance(buffer, ir.TorchBindObject):
                used.setdefault(name, buffer)
        inputs = set(self.wrapper.get_graph_inputs())
        for name, node in used.items():
            if isinstance(node, WorkspaceArg) or name in made or name in self.removed:
                continue
            if name in V.graph.constants or name in self.aliases:
                continue
            if isinstance(node, ir.InputBuffer) and not isinstance(node, ir.DonatedBuffer):
                continue
            if _owns(node):
                wanted[name] = node
        starts: dict[int, list[Any]] = {}
        for name in inputs & set(wanted):
            starts.setdefault(0, []).append(wanted.pop(name))
        children: dict[str, list[str]] = {}
        for line in lines:
            if isinstance(line, stock_lines.MultiOutputLine):
                children.setdefault(line.arg_name, []).append(line.result_name)
        for step, line in enumerate(lines):
            names = _mentions(line)
            if isinstance(line, stock_lines.ExternKernelAllocLine):
                # The outputs that a kernel returns in a tuple exist before they are extracted.
                names += children.get(line.node.get_name(), [])
            for name in names:
                if name in wanted:
                    starts.setdefault(step, []).append(wanted.pop(name))
        return starts

    def _read(self, step: int, line: Any) -> None:
        for node in self.extern_starts.get(step, ()):
            self._begin(node, "extern", step)
        read = _READERS.get(type(line).__name__)
        if read is not None:
            read(self, step, line)

    def _read_allocation(self, step: int, line: Any) -> None:
        if line.node.get_name() not in self.removed:
            storage = self._begin(line.node, "intermediate", step)
            storage.placeable = not line.comm_buffer

    def _read_reuse(self, step: int, line: Any) -> None:
        if line.node.get_name() not in self.removed:
            self._take_over(step, line)

    def _read_view(self, step: int, line: Any) -> None:
        self._hold(line.node.get_name(), line.reused_as.get_name())

    def _read_free(self, step: int, line: Any) -> None:
        if not line.is_reused:
            self._drop(line.node.get_name(), step, line)

    def _read_final_free(self, step: int, line: Any) -> None:
        name = line.node.get_name()
        if name in self.holders and name not in self.wrapper.get_graph_inputs():
            # From torch 2.15: a buffer of `never_reuse_but_free_buffers`.
            self._drop(name, step, line)
        else:
            self._drop_input(line.node, step)

    def _read_subgraph_start(self, step: int, line: Any) -> None:
        self.stack.append(len(self.scopes))
        self.scopes.append(_Scope(line.graph, step))

    def _read_subgraph_end(self, step: int, line: Any) -> None:
        self.scopes[self.stack.pop()].end = step

    def _read_stream_start(self, step: int, line: Any) -> None:
        self.streams.append(line.stream_idx)

    def _read_stream_end(self, step: int, line: Any) -> None:
        self.streams.pop()

    def _read_pool_start(self, step: int, line: Any) -> None:
        self.pools.append((line.mempool_index, line.device_index))

    def _read_pool_end(self, step: int, line: Any) -> None:
        self.pools.pop()

    def _read_extern(self, step: int, line: Any) -> None:
        self._read_kernel(step, line.node)

    def _read_extern_out(self, step: int, line: Any) -> None:
        if _copies_operands(line.node) or _is_custom(line.node):
            self.reading.rigid.add(step)

    def _read_unknown_need(self, step: int, line: Any) -> None:
        self.reading.rigid.add(step)

    def _read_name(self, step: int, line: Any) -> None:
        """Do nothing: `_mentions` has read the line."""

    def _read_text(self, step: int, line: Any) -> None:
        text = getattr(line, "line", line)
        if _OPERATOR.search(text):
            self.reading.rigid.add(step)
        elif (call := _CALL.search(text)) is not None:
            known = _subgraph_peaks.get(_root(self.wrapper), {})
            name = call["graph"] or f"partition_{call['partition']}"
            if name in known and known[name] is None:
                self.reading.rigid.add(step)
                self.reading.unread = name
            elif name in known:
                self.reading.calls.append((step, step + 1, known[name] or {}))

    def _read_kernel(self, step: int, node: Any) -> None:
        """Record the unused outputs and the workspace of a kernel that allocates its outputs."""
        for unused in _flat(getattr(node, "outputs", ())):
            name = unused.get_name()
            if name not in self.extracted and name not in self.aliases and _owns(unused):
                # In Python the tuple of the outputs references it.
                storage = self._begin(unused, "extern", step)
                if not V.graph.cpp_wrapper:
                    self._add_holder(storage, node.get_name())
                    self._drop(name, step, None)
        scratch = scratch_bytes(node)
        if scratch is None:
            self.reading.rigid.add(step)
        elif scratch:
            self.reading.scratch.append((step, str(node.get_device()), scratch))

    def _begin(self, node: Any, kind: str, step: int) -> _Storage:
        name = node.get_name()
        context = (self.streams[-1], self.pools[-1])
        storage = _Storage(node, kind, self.stack[-1], context, step, names=[name])
        for holder in (name, *self.alias_of.get(name, ())):
            self._add_holder(storage, holder)
        _set_size(storage, self.scopes[storage.scope].graph)
        self.reading.storages.append(storage)
        return storage

    def _hold(self, name: str, by: str) -> list[_Storage]:
        held = list(self.holders.get(name, ()))
        for storage in held:
            for holder in (by, *self.alias_of.get(by, ())):
                self._add_holder(storage, holder)
        return held

    def _add_holder(self, storage: _Storage, name: str) -> None:
        storage.refs.add(name)
        if name not in storage.seen:
            storage.seen.add(name)
            self.holders.setdefault(name, []).append(storage)

    def _take_over(self, step: int, line: Any) -> None:
        old, new = line.node.get_name(), line.reused_as.get_name()
        for storage in self._hold(old, new):
            storage.names.append(new)
            storage.regular &= self.stack[-1] == storage.scope
        if line.delete_old and old not in self.outputs:
            self._drop(old, step, line)

    def _drop(self, name: str, step: int, line: Any) -> None:
        for storage in self.holders.get(name, ()):
            if self.stack[-1] != storage.scope:
                # It is freed on one path only.
                storage.regular = False
                continue
            storage.refs.discard(name)
            if not storage.refs and storage.end < 0:
                storage.end, storage.last = step, line

    def _drop_input(self, node: Any, step: int) -> None:
        if node.get_name().startswith(_HELD_INPUTS):
            return
        if isinstance(node, ir.Buffer) and isinstance(node.layout, ir.Layout):
            storage = _Storage(node, "input", 0, (0, None), 0, end=step)
            _set_size(storage, V.graph)
            self.reading.inputs.append(storage)

    def _finish(self) -> None:
        for storage in self.reading.storages:
            storage.output = bool(storage.seen & self.outputs)
            if storage.output:
                storage.kind = "output" if storage.kind == "intermediate" else storage.kind
            storage.regular &= not storage.seen & self.kept
            storage.placeable = (
                storage.placeable
                and storage.regular
                and (storage.end >= 0 or storage.output)
                and storage.device.type in ALIGNMENT
                and _plain_layout(storage.node)
            )
            if storage.end < 0:
                storage.end = self.scopes[storage.scope].end


_READERS: Mapping[str, Callable[[_Reader, int, Any], None]] = {
    "AllocateLine": _Reader._read_allocation,
    "ReuseLine": _Reader._read_reuse,
    "ReinterpretLine": _Reader._read_view,
    "FreeIfNotReusedLine": _Reader._read_free,
    "FreeLine": _Reader._read_final_free,
    "EnterSubgraphLine": _Reader._read_subgraph_start,
    "ExitSubgraphLine": _Reader._read_subgraph_end,
    "EnterCudaStreamContextLine": _Reader._read_stream_start,
    "ExitCudaStreamContextLine": _Reader._read_stream_end,
    "EnterCudaMemPoolContextLine": _Reader._read_pool_start,
    "ExitCudaMemPoolContextLine": _Reader._read_pool_end,
    "ExternKernelAllocLine": _Reader._read_extern,
    "ExternKernelOutLine": _Reader._read_extern_out,
    "ExternKernelMultiOutLine": _Reader._read_unknown_need,
    "IndexPutFallbackLine": _Reader._read_unknown_need,
    "ScatterFallbackLine": _Reader._read_unknown_need,
    "ConditionalLine": _Reader._read_unknown_need,
    "SwitchLine": _Reader._read_unknown_need,
    "MultiOutputLine": _Reader._read_name,
    "str": _Reader._read_text,
    "DeferredLine": _Reader._read_text,
    "DelayReplaceLine": _Reader._read_text,
}
"""Reader of each line class that `known_ir` marks as read, by class name."""

_OPERATOR = re.compile(
    r"^(?!\s*(?:assert_|#|//|del ))"
    r".*\b(?:torch\.ops\.|aten\.|aoti_torch_proxy_executor|(?:launch_)?with_workspace\()"
)
"""Matches a line of text that calls an operator, or a kernel with an allocated workspace."""


def _flat(outputs: Any) -> list[Any]:
    if isinstance(outputs, (list, tuple)):
        return [leaf for output in outputs for leaf in _flat(output)]
    return [outputs] if isinstance(outputs, ir.MultiOutput) else []


def scratch_bytes(node: Any) -> int | None:
    """Return the workspace bytes of a kernel that allocates its own outputs; None if unknown.

    The formula for float32 attention on CPU follows the allocations in at::native's flash
    attention: each thread has a tile of scores, two statistics per row, and a tile of the output.
    """
    name = str(getattr(node, "op_overload", ""))
    if name.startswith("aten._scaled_dot_product_flash_attention_for_cpu.default"):
        query, key = (value.get_size() for value in node.inputs[:2])
        if node.inputs[0].get_dtype() != torch.float32 or len(node.inputs) > 3:
            # A mask is copied; other dtypes need more tiles.
            return None
        length, keys, head = (_hint(size) for size in (query[2], key[2], query[3]))
        rows = min(256 if length >= 768 else 64 if length >= 192 else 32, length)
        columns = min(512, keys)
        return torch.get_num_threads() * (rows * columns + 2 * rows + rows * head) * 4
    return None


def _copies_operands(node: Any) -> bool:
    """Whether a kernel may copy an operand to make it contiguous, as bmm does on CPU."""
    if "bmm" not in (node.get_kernel_name() or "") or node.get_device().type != "cpu":
        return False
    for operand in node.inputs:
        size, stride = operand.get_size(), operand.get_stride()
        rows, columns = size[-2:]
        if [*stride] not in ([rows * columns, columns, 1], [rows * columns, 1, rows]):
            return True
    return False


def _is_custom(node: Any) -> bool:
    """Whether a kernel is the out variant of a custom operator, which torch 2.13 calls."""
    overload = getattr(node, "op_overload", None)
    return isinstance(overload, torch._ops.OpOverload) and overload.namespace != "aten"


def _owns(node: Any) -> bool:
    layout = node.layout if isinstance(node, ir.Buffer) else None
    return isinstance(layout, ir.Layout) and not isinstance(layout, ir.NonOwningLayout)


def _is_comm(node: Any) -> bool:
    return isinstance(getattr(node, "layout", None), ir.CommBufferLayout)


_HELD_INPUTS = ("primals_", "fwd_rng_state")
"""Name prefixes of a backward's inputs that outlive it: the forward's inputs, mostly parameters."""


def _plain_layout(node: Any) -> bool:
    if isinstance(node, WorkspaceArg):
        return True
    layout = node.get_layout()
    viewable = not str(layout.dtype).startswith(_NO_VIEWS)
    return layout.offset == 0 and viewable and not node.get_is_pinned()


_NO_VIEWS = ("torch.q", "torch.bits", "torch.float4")
"""Prefixes of dtypes that an arena cannot be viewed as."""


_WORD = re.compile(r"\w+")


def _mentions(line: Any) -> list[str]:
    """Return the names of buffers that a line may define."""
    if isinstance(line, stock_lines.ExternKernelAllocLine):
        return [line.node.get_name()]
    if isinstance(line, stock_lines.MultiOutputLine):
        return [line.result_name]
    text = getattr(line, "line", line)
    if isinstance(text, str):
        return [word.removesuffix("_handle") for word in _WORD.findall(text)]
    return []


def _aligned(expression: Any, alignment: int) -> Any:
    """Round `expression` up to a multiple of `alignment` in terms that Inductor can print."""
    if alignment == 64:
        return align64(expression)
    return alignment * FloorDiv(expression + alignment - 1, alignment)


def _first_uses(storages: Iterable[_Storage]) -> dict[Any, int]:
    """Map an unbacked symbol to the first step at which a size uses it: it is known from there."""
    first: dict[Any, int] = {}
    for storage in storages:
        for symbol in _unbacked(storage.bytes):
            first[symbol] = min(first.get(symbol, storage.start), storage.start)
    return first


SAMPLES = 9
"""Number of values of the size symbols, including the hint, at which a plan must not need more
memory than separate allocations."""


def _samples(storages: Sequence[_Storage]) -> list[dict[Any, int]]:
    """Return the samples other than the hint at which all storages have a valid size."""
    symbols: dict[Any, int] = {}
    for storage in storages:
        if isinstance(storage.bytes, sympy.Expr):
            for symbol in sorted(storage.bytes.free_symbols, key=str):
                symbols.setdefault(symbol, max(_hint(symbol), 1))
    if not symbols:
        return []
    program = symbolic.Program([storage.bytes for storage in storages])

    def has_sizes(sample: Mapping[Any, int]) -> bool:
        try:
            return min(program(sample)) >= 0
        except ValueError:
            # For example `x.view(n // 2, 2, -1)` divides by zero if n is 1.
            return False

    return [sample for sample in symbolic.samples(symbols)[1:SAMPLES] if has_sizes(sample)]


def _unbacked(expression: Any) -> set[Any]:
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return set(free_unbacked_symbols(expression)) if isinstance(expression, sympy.Expr) else set()


def _planned(
    reading: _Reading,
    *,
    pool: str = "none",
    place: bool = False,
    reuse: bool = False,
    known: Mapping[Any, int] = MappingProxyType({}),
    samples: Sequence[Mapping[Any, int]] = (),
) -> list[placement_policy.Storage]:
    """Convert the storages for the pure planner, index by index."""
    found = []
    program = symbolic.Program([storage.bytes for storage in reading.storages])
    columns = [program(sample) for sample in samples]
    for index, storage in enumerate(reading.storages):
        device = storage.device
        name = storage.node.get_name()
        request = group = None
        if place and storage.placeable and (pool != "intermediates" or not storage.output):
            symbols = [known[symbol] for symbol in _unbacked(storage.bytes)]
            request = arenas.Request(
                name=str(index),
                start=storage.start,
                end=storage.end,
                size=storage.bytes,
                alignment=ALIGNMENT[device.type],
                known_from=max(symbols) if symbols else None,
            )
            apart = storage.output and pool == "outputs"
            # A workspace has no stream in the scheduler, but it has a context.
            stream = _stream(V.graph.scheduler, name)
            group = (storage.scope, stream, storage.context, apart)
        wants = leaves = None
        if reuse and storage.kind not in ("extern", "input") and not _is_comm(storage.node):
            wants = (storage.scope, storage.context, stock_lines.buffer_reuse_key(storage.node))
        if reuse and storage.reusable:
            key = stock_lines.buffer_reuse_key(storage.last.node)
            leaves = (storage.scope, storage.context, key)
        found.append(
            placement_policy.Storage(
                size=storage.hint,
                start=storage.start,
                end=storage.end,
                device=str(device),
                counted=storage.counted,
                request=request,
                group=group,
                leaves=leaves,
                wants=wants,
                more=tuple(
                    round_up(max(column[index], 0), ALIGNMENT.get(device.type, 1))
                    for column in columns
                ),
            )
        )
    return found


def _held(reading: _Reading, *, backward: bool) -> dict[str, list[list[int]]]:
    """Return other live memory by device, one profile per assumption about the callers.

    Callees and kernels always need their memory. The caller keeps dropped inputs alive, except in a
    backward: most of its inputs were saved by the forward and are freed when dropped, unless the
    graph is retained. The first assumption is that the dropped inputs do not count. The second one,
    for a backward only, is that they are live until the code drops them.
    """
    inner = [
        placement_policy.Storage(size=size, start=start, end=end, device=device)
        for start, end, peaks in reading.calls
        for device, size in peaks.items()
    ]
    inner += [
        placement_policy.Storage(size=size, start=step, end=step + 1, device=device)
        for step, device, size in reading.scratch
    ]
    dropped = [
        placement_policy.Storage(size=item.hint, start=0, end=item.end, device=str(item.device))
        for item in reading.inputs
    ]
    held = {}
    for device in {str(item.device) for item in (*reading.storages, *reading.inputs)}:
        held[device] = [placement_policy.load(inner, reading.steps, device)]
        if backward:
            held[device].append(placement_policy.load([*inner, *dropped], reading.steps, device))
    return held


def _peaks(
    storages: Sequence[placement_policy.Storage],
    held: dict[str, list[list[int]]],
    steps: int,
    assumption: int,
) -> dict[str, int]:
    """Return the peak by device, including the memory of one assumption of `_held`."""
    peaks = {}
    for device, profiles in held.items():
        own = placement_policy.load(storages, steps, device)
        total = (a + b for a, b in zip(own, profiles[assumption], strict=True))
        peaks[device] = max(total, default=0)
    return peaks


class _Writer:
    """Writes a decision into the lines that it was made from."""

    def __init__(
        self,
        wrapper: Any,
        lines: Sequence[Any],
        reading: _Reading,
        decision: placement_policy.Decision,
        *,
        debug: bool,
        replan: bool,
    ) -> None:
        self.wrapper = wrapper
        self.storages = reading.storages
        self.removed = reading.removed
        self.decision = decision
        self.debug = debug
        self.replan = replan
        self.replaced: dict[int, list[Any]] = {}
        """Step -> the lines that replace its line."""
        self.added: dict[int, list[Any]] = {}
        """Step -> the lines to add after it."""
        self.lines = self._needed(lines)
        self.variables = [self._variable(index) for index in range(len(decision.arenas))]
        for variable, arena in zip(self.variables, decision.arenas, strict=True):
            self._write_arena(variable, arena)
        for later, earlier in decision.taken_over.items():
            self._hand_on(self.storages[earlier], self.storages[later])

    def _needed(self, lines: Sequence[Any]) -> list[Any]:
        """Return copies of the lines, with those of unneeded buffers replaced by null lines.

        Communication buffers reuse only each other's memory, as in Inductor.
        """
        found = []
        states = [stock_lines.MemoryPlanningState()]
        for line in lines:
            if isinstance(line, stock_lines.EnterSubgraphLine):
                states.append(stock_lines.MemoryPlanningState())
            elif isinstance(line, stock_lines.ExitSubgraphLine):
                states.pop()
            elif isinstance(line, _NAMED_LINES):
                if line.node.get_name() in self.removed:
                    line = stock_lines.NullLine(self.wrapper)
                else:
                    line = copy.copy(line)
                    line = line.plan(states[-1]) if line.comm_buffer else line
            found.append(line)
        return found

    def result(self) -> list[Any]:
        """Return the lines with the decision applied."""
        found = []
        for step, line in enumerate(self.lines):
            found += self.replaced.get(step, [line])
            found += self.added.get(step, [])
        while found and isinstance(found[-1], _ENDS):
            # The end of the function frees them.
            found.pop()
        return found

    def members(self, arena: arenas.Arena) -> list[tuple[_Storage, MemberPlace]]:
        """Return the storages of an arena and their offsets, first allocated first."""
        pairs = [
            (self.storages[int(member.request.name)], MemberPlace(index, member.offset))
            for index, member in enumerate(arena.members)
        ]
        return sorted(pairs, key=lambda pair: pair[0].start)

    def _variable(self, index: int) -> ArenaVariable:
        arena = self.decision.arenas[index]
        dtypes = [storage.node.get_dtype() for storage, _ in self.members(arena)]
        ranked = sorted(set(dtypes), key=lambda dtype: (-dtypes.count(dtype), str(dtype)))
        device = self.storages[int(arena.members[0].request.name)].device
        name = _arena_name(self.wrapper)
        replan = None
        if self.replan and arena.worst_ratio > REPLAN_FROM and not V.graph.cpp_wrapper:
            replan = arenas.replanner(arena)
        return ArenaVariable(name, device, arena.size, tuple(ranked), arena.definitions, replan)

    def _write_arena(self, variable: ArenaVariable, arena: arenas.Arena) -> None:
        members = self.members(arena)
        left: dict[tuple[Any, torch.dtype], _Storage] = {}
        for number, (storage, place) in enumerate(members):
            key = (place.offset, storage.node.get_dtype())
            # A plan made at run time may give them different offsets.
            earlier = left.get(key) if variable.replan is None else None
            if earlier is not None and earlier.end <= storage.start and self._same(earlier):
                self._hand_on(earlier, storage)
            else:
                view = MemberLine(
                    self.wrapper, storage.node, variable, place, storage.bytes, self.debug
                )
                self.replaced[storage.start] = [view]
            left[key] = storage
            if number == 0:
                first = ArenaLine(self.wrapper, variable, len(members))
                self.replaced[storage.start].insert(0, first)
            if self.debug and storage.last is not None:
                end = MemberEndLine(self.wrapper, variable, place, storage.bytes)
                self.added.setdefault(storage.end, []).append(end)
        if all(storage.last is not None for storage, _ in members):
            last = max(storage.end for storage, _ in members)
            self.added.setdefault(last, []).append(ArenaEndLine(self.wrapper, variable))

    def _same(self, storage: _Storage) -> bool:
        """Whether the variable that is dropped last covers the storage from its start."""
        return storage.reusable and not isinstance(storage.node, WorkspaceArg)

    def _hand_on(self, earlier: _Storage, later: _Storage) -> None:
        free = self.lines[earlier.end]
        free.is_reused = True
        line = stock_lines.ReuseLine(self.wrapper, free.node, later.node)
        self.replaced[later.start] = [line]


_NAMED_LINES = (
    stock_lines.AllocateLine,
    stock_lines.FreeIfNotReusedLine,
    stock_lines.ReuseLine,
)


_ENDS = (stock_lines.FreeIfNotReusedLine, stock_lines.NullLine, ArenaEndLine)


def _plans(line: Any) -> bool:
    return isinstance(line, stock_lines.MemoryPlanningLine)


_arena_counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def _arena_name(wrapper: Any) -> str:
    root = _root(wrapper)
    count = _arena_counts.get(root, 0)
    _arena_counts[root] = count + 1
    return f"pool{count}"


def _module(node: Any) -> str:
    """Return the path of the module that a buffer was made in: the deepest one of its origins."""
    paths = [events.module_path(origin.meta) for origin in getattr(node, "origins", None) or ()]
    # A kernel writes the result of its last operator.
    return max(paths, key=lambda path: (path.count("."), path), default="")


def _operator(node: Any) -> str:
    names = {
        getattr(target, "__name__", str(target)).split(".")[0]
        for origin in getattr(node, "origins", None) or ()
        if origin.op == "call_function"
        for target in (origin.target,)
    }
    return ", ".join(sorted(names)) or (
        "" if isinstance(node, ir.InputBuffer) else type(node).__name__
    )


def _rows(
    reading: _Reading, decision: placement_policy.Decision | None, inputs: bool
) -> tuple[PlannedStorage, ...]:
    """Return the storages for the record; a reused storage ends where its reuse starts."""
    place: dict[int, tuple[int, int]] = {}
    until: dict[int, int] = {}
    if decision is not None:
        for number, arena in enumerate(decision.arenas):
            defined: dict[Any, int] = {}
            for symbol, value in arena.definitions:
                defined[symbol] = _hint(value.xreplace(defined))
            for placed in arena.members:
                offset = sympy.sympify(placed.offset).xreplace(defined)
                place[int(placed.request.name)] = (number, _hint(offset))
        until = {old: reading.storages[new].start for new, old in decision.taken_over.items()}
    rows = []
    for index, storage in enumerate([*reading.storages, *(reading.inputs if inputs else ())]):
        arena_number, offset = place.get(index, (None, None))
        rows.append(
            PlannedStorage(
                name=storage.node.get_name(),
                bytes=storage.hint,
                start=storage.start,
                end=until.get(index, storage.end),
                kind=storage.kind,
                device=str(storage.device),
                arena=arena_number,
                offset=offset,
                operator=_operator(storage.node),
                module=_module(storage.node),
            )
        )
    inner = [(start, end, peaks, "subgraph") for start, end, peaks in reading.calls]
    inner += [(at, at + 1, {device: size}, "scratch") for at, device, size in reading.scratch]
    for start, end, peaks, name in inner:
        for device, size in peaks.items():
            rows.append(
                PlannedStorage(
                    name=name,
                    bytes=size,
                    start=start,
                    end=end,
                    kind="subgraph" if name == "subgraph" else "extern",
                    device=device,
                    arena=None,
                    offset=None,
                    operator="",
                    module="",
                )
            )
    return tuple(rows)


def _kind(is_inference: bool) -> str:
    if V.graph.aot_mode:
        return "aot"
    if V.graph.is_backward:
        return "backward"
    return "inference" if is_inference else "forward"


def plan_wrapper(
    stock: Callable[[Any, bool], None], wrapper: Any, is_inference: bool, settings: Settings
) -> None:
    """Decide how the buffers of a wrapper's generated code share memory.

    `wrapper.lines` must be final.

    Args:
        stock: Inductor's `run_wrapper_ir_passes`.
        wrapper: a PythonWrapperCodegen or an instance of a subclass.
        is_inference: whether no backward graph belongs to this one.
        settings: settings of the current compile.

    Raises:
        exc.MemoryBudgetError: the planned peak on a device is above `memory_budget`.
    """
    if inductor_config.test_configs.track_memory_lifecycle:
        what = "test_configs.track_memory_lifecycle, which traces allocations"
        _warn_unless_idle(settings, what)
        _warn_of_unchecked_budget(settings, what)
        stock(wrapper, is_inference)
        return
    if V.graph.fx_wrapper:
        _warn_unless_idle(settings, "fx_wrapper, which has no code for them")
    start = time.process_time()
    lines = wrapper.lines
    kind = _kind(is_inference)
    reason = _reason_against(lines, settings)
    if reason:
        stock(wrapper, is_inference)
        name = wrapper.launcher_fn_name
        _subgraph_peaks.setdefault(_root(wrapper), {})[name] = None
        _warn_of_unchecked_budget(settings, reason)
        events.emit(_unread(name, kind, reason, start), event_log=settings.event_log)
        return
    V.graph.never_reuse_buffers.update(_objects())
    wrapper.lines = [copy.copy(line) if _plans(line) else line for line in lines]
    if inductor_config.allow_buffer_reuse:
        wrapper.estimate_peak = stock_lines.EfficientPeakEstimate()
    wrapper.memory_plan_reuse()
    if getattr(wrapper, "allow_stack_allocation", None):
        # Everything fits on the stack: there are no allocations to plan.
        return
    planner = _Planner(wrapper, lines, wrapper.lines, kind, settings)
    record = planner.run(start)
    if settings.memory_budget is not None:
        if planner.reading.unread:
            _warn_of_unchecked_budget(settings, f"a call of {planner.reading.unread}")
        _check_budget(record, settings)
    events.emit(record, event_log=settings.event_log)


_PACKING = (
    "_quantized::_wrapped_linear_prepack",
    "_quantized::wrapped_fbgemm_pack_gemm_matrix_fp16",
)
"""Operators whose result's memory contains an object that is destroyed with the tensor."""


def _objects() -> set[str]:
    """Return the buffers that contain such objects; overwriting one crashes, in Inductor too."""
    names: set[str] = set()
    for buffer in V.graph.buffers:
        operator = getattr(buffer, "op_overload", None)
        made = operator is not None and operator.name().split(".")[0] in _PACKING
        if made or (isinstance(buffer, ir.MultiOutput) and buffer.input_name(0) in names):
            names.add(buffer.get_name())
    return names


def _reason_against(lines: Sequence[Any], settings: Settings) -> str:
    """Return why a function gets Inductor's plan; empty if the extension plans it."""
    operations = (operation for graph in _graphs(lines) for operation in graph.operations)
    unknown = known_ir.unplannable_operation(operations)
    if unknown is not None:
        return known_ir.warn_unknown(unknown, "memory plan")
    found = known_ir.unplannable_line(lines, cpp=V.graph.cpp_wrapper)
    if found is None:
        return ""
    cls, why = found
    if not why:
        return known_ir.warn_unknown(cls, "memory plan")
    reason = f"{cls.__name__}: {why}"
    _warn_unless_idle(settings, reason)
    return reason


def _unread(name: str, kind: str, reason: str, start: float) -> MemoryPlanRecord:
    """Return the record of a function that gets Inductor's plan without being read."""
    return MemoryPlanRecord(
        graph=name,
        kind=kind,
        cache_key=None,
        strategy="stock",
        peak_before=0,
        peak=0,
        lower_bound=0,
        steps=0,
        calls_before=0,
        calls=0,
        peak_reordered_from=reorder_kernels.peak_before_reorder(V.graph),
        seconds=round(time.process_time() - start, 4),
        arenas=(),
        storages=(),
        reason=reason,
    )


def _warn_of_unchecked_budget(settings: Settings, what: str) -> None:
    """Warn once that a budget is set but the peak is not known."""
    if settings.memory_budget is not None:
        events.warn_once(
            f"budget:{what}",
            f"memory_budget cannot be checked for a graph, whose peak is not known: {what}",
        )


def _warn_unless_idle(settings: Settings, what: str) -> None:
    """Warn once that arenas were requested where none can be made."""
    if _forced(settings):
        events.warn_once(f"arenas:{what}", f"arenas were asked for, and are not made with {what}")


def _forced(settings: Settings) -> bool:
    return bool(inductor_config.memory_planning) or settings.memory_arenas == "always"


def _check_budget(record: MemoryPlanRecord, settings: Settings) -> None:
    budget = parse_bytes(settings.memory_budget or 0)
    for device in peak_report.devices(record):
        needed = max(peak_report.held(record, device), default=0)
        if needed > budget:
            raise exc.MemoryBudgetError(
                graph=record.graph,
                device=device,
                peak=peak_report.human_bytes(needed),
                budget=peak_report.human_bytes(budget),
                table=peak_report.peak_table(record),
            )


class _Planner:
    """Plans the memory of one wrapper."""

    def __init__(
        self,
        wrapper: Any,
        lines: list[Any],
        by_stock: list[Any],
        kind: str,
        settings: Settings,
    ) -> None:
        self.wrapper = wrapper
        self.lines = lines
        self.by_stock = by_stock
        self.numbers = itertools.count()
        self.kind = kind
        self.settings = settings
        self.reading = _Reader(wrapper, lines, lines).reading
        self.before = _Reader(wrapper, by_stock, lines).reading
        self.held = _held(self.reading, backward=kind == "backward")
        self.known = _first_uses(self.reading.storages)
        self.samples = _samples(self.reading.storages)
        # The value of a size without a hint is unknown, so its live range is treated like unbounded
        # workspace.
        self.rigid = self.reading.rigid.union(
            *(range(s.start, s.end) for s in self.reading.storages if _unbacked(s.bytes))
        )
        self.reuse = inductor_config.allow_buffer_reuse
        self.force = _forced(settings)
        self.place = (
            settings.memory_arenas != "never"
            and inductor_config.memory_pool != "none"
            and (self.reuse or self.force)
            and not V.graph.fx_wrapper
        )
        # The assumption of `_held` that the record reports.
        self.assumption = -1 if kind == "backward" else 0

    def run(self, start: float) -> MemoryPlanRecord:
        """Replace the wrapper's lines and return the record."""
        decision = self._decide()
        stock = _planned(self.before)
        held = _held(self.before, backward=self.kind == "backward")
        peak_before = _peaks(stock, held, self.before.steps, self.assumption)
        calls_before = placement_policy.count_calls(stock)
        plain = _planned(self.reading)
        bound = _peaks(plain, self.held, self.reading.steps, self.assumption)
        after = decision.peaks[self.assumption]
        better = (sum(after.values()), decision.calls) <= (sum(peak_before.values()), calls_before)
        # The extension's plan also keeps the lower bound at sizes other than the hint, and keeps
        # headroom for unbounded workspace. The comparison does not see either.
        better |= bool(self.known or self.samples or self.rigid)
        reading = self.reading
        shown: placement_policy.Decision | None = decision
        if self.force or not self.reuse or better:
            writer = _Writer(
                self.wrapper,
                self.lines,
                reading,
                decision,
                debug=self.settings.memory_debug,
                replan=self.settings.memory_replan,
            )
            self.wrapper.lines = writer.result()
            strategy = "arenas" if decision.arenas else "reuse" if decision.taken_over else "plain"
            drawn = tuple(map(_arena_row, writer.variables, decision.arenas))
            calls = decision.calls
        else:
            self.wrapper.lines = self.by_stock
            strategy, after, calls, drawn = "stock", peak_before, calls_before, ()
            reading, shown = self.before, None
        name = self.wrapper.launcher_fn_name
        _subgraph_peaks.setdefault(_root(self.wrapper), {})[name] = after
        return MemoryPlanRecord(
            graph=name,
            kind=self.kind,
            cache_key=None,
            strategy=strategy,
            peak_before=sum(peak_before.values()),
            peak=sum(after.values()),
            lower_bound=sum(bound.values()),
            steps=reading.steps,
            calls_before=calls_before,
            calls=calls,
            peak_reordered_from=reorder_kernels.peak_before_reorder(V.graph),
            seconds=round(time.process_time() - start, 4),
            arenas=drawn,
            storages=_rows(reading, shown, inputs=self.kind == "backward"),
        )

    def _decide(self) -> placement_policy.Decision:
        pool = inductor_config.memory_pool
        decision = self._decide_for(pool if pool != "combined" else "outputs")
        if decision.arenas and not self.force:
            without = self._decide_for(pool, place=False)
            if without.calls <= decision.calls:
                return without
        if pool == "combined" and self.force:
            # An arena lives as long as any output in it. Share one between outputs and
            # intermediates only if it keeps no more memory live than the outputs alone.
            combined = self._decide_for("combined")
            outputs = sum(storage.hint for storage in self.reading.storages if storage.output)
            kept = sum(
                arena.peak_hint
                for arena in combined.arenas
                if any(self.reading.storages[int(m.request.name)].output for m in arena.members)
            )
            if kept <= outputs:
                return combined
        return decision

    def _decide_for(self, pool: str, *, place: bool | None = None) -> placement_policy.Decision:
        place = self.place if place is None else place
        return placement_policy.decide(
            _planned(
                self.reading,
                pool=pool,
                place=place,
                reuse=self.reuse,
                known=self.known,
                samples=self.samples,
            ),
            self.reading.steps,
            plan=self._place,
            sizes=self._sizes,
            held=self.held,
            rigid=self.rigid,
            place=place,
            force=self.force,
            smallest=SMALLEST,
        )

    def _sizes(self, arena: arenas.Arena) -> list[int]:
        program = symbolic.Program([arena.size], arena.definitions)
        return [program(sample)[0] for sample in self.samples]

    def _place(self, requests: Sequence[arenas.Request]) -> tuple[arenas.Arena, ...]:
        return arenas.plan_arenas(
            requests,
            hint=_hint,
            make_max=lambda values: Max(*values),
            make_align=_aligned,
            prefix=f"arena{next(self.numbers)}_",
        )


def _arena_row(variable: ArenaVariable, arena: arenas.Arena) -> PlannedArena:
    return PlannedArena(
        name=variable.name,
        device=str(variable.device),
        bytes=arena.peak_hint,
        lower_bound=arena.lower_bound,
        start=arena.start,
        end=arena.end,
        size=str(arena.size),
    )
