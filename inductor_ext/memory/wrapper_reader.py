"""Reads the lines of a generated wrapper: which storages they use, and from which line to which.

`read_wrapper` walks over the lines once. It finds what allocates a storage, which buffers reuse it
(in-place reuse, views, aliasing fallbacks), what frees it, and what kernels and called subgraphs
allocate themselves. A storage is `placeable` in an arena only if every way to reach its memory is
understood: the wrapper must allocate it and free it in the same scope; it must be used on one
stream only; it must not be pinned, used for communication, or passed to a subgraph, a stateful
operator or a custom operator.
"""

from __future__ import annotations

import dataclasses
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._inductor import ir
from torch._inductor.codegen import wrapper as wrapper_ir
from torch._inductor.codegen.common import WorkspaceArg
from torch._inductor.virtualized import V

from inductor_ext.hooks.wrapper_codegen import root_wrapper
from inductor_ext.memory import extern_memory, graph_buffers, saved_tensors
from inductor_ext.memory.extern_memory import size_hint
from inductor_ext.memory.planner.interval import round_up

ALIGNMENT = {"cpu": 64, "cuda": 512}
"""Bytes to which the allocator of each device type rounds sizes and aligns addresses.

Arena members get the same alignment as separately allocated memory, so kernels see no difference.
Device types that are not listed have no arenas.
"""


@dataclasses.dataclass(eq=False)
class Storage:
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
    all_refs: set[str] = dataclasses.field(default_factory=set)
    """All variables that ever referenced it."""
    names: list[str] = dataclasses.field(default_factory=list)
    """Buffers that use it from its start offset, one after the other."""
    freed_by: Any = None
    """The line that freed it."""
    lifetime_known: bool = True
    """Whether it is freed in the scope that allocates it and nothing else can keep it."""
    placeable: bool = False
    is_output: bool = False
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
    def is_allocated_by_code(self) -> bool:
        """Whether the generated code allocates it."""
        return self.kind in ("intermediate", "output")

    @property
    def is_reusable(self) -> bool:
        """Whether another buffer can reuse it through the variable that is dropped last."""
        return (
            isinstance(self.freed_by, wrapper_ir.FreeIfNotReusedLine)
            and self.freed_by.node.get_name() in self.names
            and self.lifetime_known
            and not self.is_output
        )


@dataclasses.dataclass
class WrapperMemory:
    """The storages and memory needs that the lines of one wrapper describe."""

    storages: list[Storage]
    inputs: list[Storage]
    """Inputs that the code drops: free from then on."""
    held_inputs: list[Storage]
    """The same, except that the caller may keep them."""
    calls: list[tuple[int, int, dict[str, int]]]
    """Called subgraphs: first step, end, peak by device."""
    scratch: list[tuple[int, str, Any]]
    """Workspace that a kernel needs while it runs: step, device, bytes (int or expression)."""
    unbounded_steps: set[int]
    """Steps whose kernels may need an unknown amount of workspace."""
    removed: set[str]
    """Buffers that were removed because nothing needs them, even if lines mention them."""
    steps: int
    unknown_callee: str = ""
    """Name of a called function whose memory use is unknown."""
    callees: list[str] = dataclasses.field(default_factory=list)
    """Name of the function of each element of `calls`."""


def read_wrapper(wrapper: Any, lines: Sequence[Any], unplanned: Sequence[Any]) -> WrapperMemory:
    """Return the storages of a wrapper's function and their live ranges.

    Args:
        wrapper: a PythonWrapperCodegen or an instance of a subclass.
        lines: its lines; the index of a line is the step in the live ranges.
        unplanned: the lines before Inductor removed the frees at the end of a function; they
            mention every buffer that a kernel allocates.
    """
    return _Reader(wrapper, lines, unplanned).memory


class _Reader:
    """Walks over the lines once and stores the result in `memory`."""

    def __init__(self, wrapper: Any, lines: Sequence[Any], unplanned: Sequence[Any]) -> None:
        self.wrapper = wrapper
        graphs = graph_buffers.list_inlined_graphs(lines)
        self.outputs = graph_buffers.list_outputs(wrapper, graphs)
        self.unshareable = graph_buffers.find_unshareable(graphs)
        self.aliases = graph_buffers.find_aliases(graphs)
        self.removed = set().union(*(graph.removed_buffers for graph in graphs))
        self.holders: dict[str, list[Storage]] = {}
        self.alias_of: dict[str, list[str]] = {}
        for name, bases in self.aliases.items():
            for base in bases:
                self.alias_of.setdefault(base, []).append(name)
        self.scopes = [_Scope(V.graph, 0, len(lines))]
        self.stack = [0]
        self.streams = [0]
        self.pools: list[Any] = [None]
        self.saved_memory = saved_tensors.current()
        self.saved: dict[str, Storage] = {}
        """Dropped inputs by the name of the tensor whose memory they share."""
        self.memory = WrapperMemory([], [], [], [], [], set(), self.removed, len(lines))
        self.extracted = {
            line.result_name for line in lines if isinstance(line, wrapper_ir.MultiOutputLine)
        }
        self.extern_starts = self._find_externs(lines, unplanned)
        for step, line in enumerate(lines):
            self._read(step, line)
        self._finish()

    def _find_externs(self, lines: Sequence[Any], unplanned: Sequence[Any]) -> dict[int, list[Any]]:
        """Map a step to the buffers that a kernel allocates at it."""
        allocated: set[str] = set()
        pending: dict[str, Any] = {}
        for line in lines:
            if isinstance(line, wrapper_ir.AllocateLine):
                allocated.add(line.node.get_name())
            elif isinstance(line, (wrapper_ir.ReuseLine, wrapper_ir.ReinterpretLine)):
                allocated.add(line.reused_as.get_name())
        kinds = (
            wrapper_ir.FreeIfNotReusedLine,
            wrapper_ir.ReuseLine,
            wrapper_ir.ReinterpretLine,
        )
        used: dict[str, Any] = {
            line.node.get_name(): line.node
            for line in unplanned
            if isinstance(line, kinds)
            or (isinstance(line, wrapper_ir.FreeLine) and not isinstance(line.node, ir.InputBuffer))
        }
        if not V.graph.cpp_wrapper:
            for line in lines:
                # In Python the tuple of a kernel's outputs references them as well.
                if isinstance(line, wrapper_ir.MultiOutputLine) and line.arg_name in used:
                    self.alias_of.setdefault(line.result_name, []).append(line.arg_name)
        for name in self.outputs:
            buffer = V.graph.try_get_buffer(name)
            if buffer is not None and not isinstance(buffer, ir.TorchBindObject):
                used.setdefault(name, buffer)
        inputs = set(self.wrapper.get_graph_inputs())
        for name, node in used.items():
            if isinstance(node, WorkspaceArg) or name in allocated or name in self.removed:
                continue
            if name in V.graph.constants or name in self.aliases:
                continue
            if isinstance(node, ir.InputBuffer) and not isinstance(node, ir.DonatedBuffer):
                continue
            if graph_buffers.owns_memory(node):
                pending[name] = node
        starts: dict[int, list[Any]] = {}
        for name in inputs & set(pending):
            starts.setdefault(0, []).append(pending.pop(name))
        children: dict[str, list[str]] = {}
        for line in lines:
            if isinstance(line, wrapper_ir.MultiOutputLine):
                children.setdefault(line.arg_name, []).append(line.result_name)
        for step, line in enumerate(lines):
            names = _mentions(line)
            if isinstance(line, wrapper_ir.ExternKernelAllocLine):
                # The outputs that a kernel returns in a tuple exist before they are extracted.
                names += children.get(line.node.get_name(), [])
            for name in names:
                if name in pending:
                    starts.setdefault(step, []).append(pending.pop(name))
        return starts

    def _read(self, step: int, line: Any) -> None:
        for node in self.extern_starts.get(step, ()):
            # An input whose memory other buffers reuse.
            is_donated = isinstance(node, ir.DonatedBuffer)
            self._add_storage(node, "input" if is_donated else "extern", step)
        reader = READERS.get(type(line).__name__)
        if reader is not None:
            reader(self, step, line)

    def _read_allocation(self, step: int, line: Any) -> None:
        if line.node.get_name() not in self.removed:
            storage = self._add_storage(line.node, "intermediate", step)
            storage.placeable = not line.comm_buffer

    def _read_reuse(self, step: int, line: Any) -> None:
        if line.node.get_name() not in self.removed:
            self._reuse(step, line)

    def _read_view(self, step: int, line: Any) -> None:
        self._add_alias(line.node.get_name(), line.reused_as.get_name())

    def _read_free(self, step: int, line: Any) -> None:
        if not line.is_reused:
            self._drop_variable(line.node.get_name(), step, line)

    def _read_final_free(self, step: int, line: Any) -> None:
        name = line.node.get_name()
        if name in self.holders and name not in self.wrapper.get_graph_inputs():
            # From torch 2.15: a buffer of `never_reuse_but_free_buffers`.
            self._drop_variable(name, step, line)
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
        self._add_scratch(step, line.node, extern_memory.out_scratch_bytes(line.node))

    def _read_out_variant(self, step: int, line: Any) -> None:
        if line.node.may_allocate:
            self.memory.unbounded_steps.add(step)

    def _read_unknown_need(self, step: int, line: Any) -> None:
        self.memory.unbounded_steps.add(step)

    def _read_name(self, step: int, line: Any) -> None:
        """Do nothing: `_mentions` has read the line."""

    def _read_text(self, step: int, line: Any) -> None:
        text = getattr(line, "line", line)
        if extern_memory.may_allocate(text):
            self.memory.unbounded_steps.add(step)
        elif (call := _CALL.search(text)) is not None:
            name = call["graph"] or f"partition_{call['partition']}"
            peaks = _subgraph_peaks.get(root_wrapper(self.wrapper), {})
            callee = peaks.get(name)
            if callee is not None:
                self.memory.calls.append((step, step + 1, callee))
                self.memory.callees.append(name)
            elif name in peaks:
                self.memory.unbounded_steps.add(step)
                self.memory.unknown_callee = name

    def _read_kernel(self, step: int, node: Any) -> None:
        """Record the unused outputs and the workspace of a kernel that allocates its outputs."""
        for unused in _flatten(getattr(node, "outputs", ())):
            name = unused.get_name()
            if (
                name not in self.extracted
                and name not in self.aliases
                and graph_buffers.owns_memory(unused)
            ):
                # In Python the tuple of the outputs references it.
                storage = self._add_storage(unused, "extern", step)
                if not V.graph.cpp_wrapper:
                    self._add_holder(storage, node.get_name())
                    self._drop_variable(name, step, None)
        self._add_scratch(step, node, extern_memory.scratch_bytes(node))

    def _add_scratch(self, step: int, node: Any, scratch: Any) -> None:
        """Record the workspace bytes of a kernel; None stands for an unknown number."""
        if scratch is None:
            self.memory.unbounded_steps.add(step)
        elif scratch != 0:
            self.memory.scratch.append((step, str(node.get_device()), scratch))

    def _add_storage(self, node: Any, kind: str, step: int) -> Storage:
        name = node.get_name()
        context = (self.streams[-1], self.pools[-1])
        storage = Storage(node, kind, self.stack[-1], context, step, names=[name])
        for holder in (name, *self.alias_of.get(name, ())):
            self._add_holder(storage, holder)
        _set_size(storage, self.scopes[storage.scope].graph)
        self.memory.storages.append(storage)
        return storage

    def _add_alias(self, name: str, by: str) -> list[Storage]:
        storages = list(self.holders.get(name, ()))
        for storage in storages:
            for holder in (by, *self.alias_of.get(by, ())):
                self._add_holder(storage, holder)
        return storages

    def _add_holder(self, storage: Storage, name: str) -> None:
        storage.refs.add(name)
        if name not in storage.all_refs:
            storage.all_refs.add(name)
            self.holders.setdefault(name, []).append(storage)

    def _reuse(self, step: int, line: Any) -> None:
        old, new = line.node.get_name(), line.reused_as.get_name()
        for storage in self._add_alias(old, new):
            storage.names.append(new)
            storage.lifetime_known &= self.stack[-1] == storage.scope
        if line.delete_old and old not in self.outputs:
            self._drop_variable(old, step, line)

    def _drop_variable(self, name: str, step: int, line: Any) -> None:
        for storage in self.holders.get(name, ()):
            if self.stack[-1] != storage.scope:
                # It is freed on one path only.
                storage.lifetime_known = False
                continue
            storage.refs.discard(name)
            if not storage.refs and storage.end < 0:
                storage.end, storage.freed_by = step, line

    def _drop_input(self, node: Any, step: int) -> None:
        name = node.get_name()
        memory = self.saved_memory.get(name)
        base = name if memory is None else memory.base
        if base.startswith(_FORWARD_INPUTS) and (memory is None or memory.is_static):
            return
        if isinstance(node, ir.Buffer) and isinstance(node.layout, ir.Layout):
            storage = Storage(node, "input", 0, (0, None), 0, end=step)
            _set_size(storage, V.graph, None if memory is None else memory.bytes)
            shared = self.saved.setdefault(base, storage)
            if shared is storage:
                is_held = base.startswith(_FORWARD_INPUTS)
                (self.memory.held_inputs if is_held else self.memory.inputs).append(storage)
            else:
                # Both are freed together.
                shared.end = step
                if storage.hint > shared.hint:
                    shared.bytes, shared.hint = storage.bytes, storage.hint

    def _finish(self) -> None:
        for storage in self.memory.storages:
            storage.is_output = bool(storage.all_refs & self.outputs)
            if storage.is_output:
                storage.kind = "output" if storage.kind == "intermediate" else storage.kind
            storage.lifetime_known &= not storage.all_refs & self.unshareable
            storage.placeable = (
                storage.placeable
                and storage.lifetime_known
                and (storage.end >= 0 or storage.is_output)
                and storage.device.type in ALIGNMENT
                and graph_buffers.has_plain_layout(storage.node)
            )
            if storage.end < 0:
                storage.end = self.scopes[storage.scope].end


READERS: Mapping[str, Callable[[_Reader, int, Any], None]] = {
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
    "OutVariantLine": _Reader._read_out_variant,
    "str": _Reader._read_text,
    "DeferredLine": _Reader._read_text,
    "DelayReplaceLine": _Reader._read_text,
}
"""Reader of each line class that `known_ir` marks as read, by class name."""


@dataclasses.dataclass
class _Scope:
    """Lines that run together: a function, or a subgraph that is inlined into it."""

    graph: Any
    start: int
    end: int = -1


def _set_size(storage: Storage, graph: Any, known: int | None = None) -> None:
    """Set the size: `known` bytes, or what the layout of the buffer needs."""
    node = storage.node
    with V.set_graph_handler(graph):
        if known is None:
            length = V.graph.get_allocation_storage_size(node)
            nbytes = V.graph.sizevars.simplify(sympy.sympify(length) * node.get_dtype().itemsize)
            known = int(nbytes) if nbytes.is_number else nbytes
        storage.bytes = known
        hint = max(size_hint(storage.bytes), 0)
    storage.hint = round_up(hint, ALIGNMENT.get(storage.device.type, 1))


def _flatten(outputs: Any) -> list[Any]:
    if isinstance(outputs, (list, tuple)):
        return [leaf for output in outputs for leaf in _flatten(output)]
    return [outputs] if isinstance(outputs, ir.MultiOutput) else []


_FORWARD_INPUTS = ("primals_", "fwd_rng_state")
"""Name prefixes of the forward's inputs among a backward's inputs. Parameters outlive it."""

_WORD = re.compile(r"\w+")


def _mentions(line: Any) -> list[str]:
    """Return the names of buffers that a line may define."""
    if isinstance(line, wrapper_ir.ExternKernelAllocLine):
        return [line.node.get_name()]
    if isinstance(line, wrapper_ir.MultiOutputLine):
        return [line.result_name]
    text = getattr(line, "line", line)
    if isinstance(text, str):
        return [word.removesuffix("_handle") for word in _WORD.findall(text)]
    return []


_CALL = re.compile(r"= (?:self\.partitions\[(?P<partition>\d+)\]|(?P<graph>\w+))\((?:\w+)_args\)")

_subgraph_peaks: weakref.WeakKeyDictionary[Any, dict[str, dict[str, int] | None]] = (
    weakref.WeakKeyDictionary()
)
"""Per root wrapper: peak by device of the functions generated so far; None for a function that was
not read."""


def record_peaks(wrapper: Any, peaks: dict[str, int] | None) -> None:
    """Store the peak bytes by device of a function, for the functions that call it.

    Args:
        wrapper: its wrapper.
        peaks: None if its memory use is unknown.
    """
    _subgraph_peaks.setdefault(root_wrapper(wrapper), {})[wrapper.launcher_fn_name] = peaks
