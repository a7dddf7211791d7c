"""Fixes for operators without a kernel of Inductor that return views or write into their operand.

Inductor calls torch's operator for every view of a complex tensor, and for views in a dtype of
another size. The result is a buffer of its own, which shares memory with another buffer. Inductor
knows that for freeing memory, but orders reads and writes by the names of buffers alone: a kernel
may read a view before the base is written, or after. Here all names of one memory are ordered in
the order of the program.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from inductor_ext.hooks import context, registry
from inductor_ext.hooks.registry import Hook

_KERNEL = "torch._inductor.ir.FallbackKernel"
_OWNER = "hooks.upstream_fixes.fallback_views"

_CANDIDATES = "_inductor_ext_fallback_views"
"""Attribute of a graph: how many of its buffers were visited, and those that may share memory."""

HOOKS = (
    Hook(
        "views_by_writes",
        "replaced",
        (f"{_KERNEL}.get_inputs_that_alias_output",),
        _OWNER,
        "The result of an operator that writes into its first operand and returns it counts as new "
        "memory: reads of it are not reads of the operand.",
        relies_on=(f"{_KERNEL}.get_mutation_names",),
    ),
    Hook(
        "reads_before_operators",
        "replaced",
        (f"{_KERNEL}.__init__",),
        _OWNER,
        "What reads the old value must be computed before an operator overwrites it. Inductor does "
        "not see to that if the operator returns the operand.",
        parameters=("kernel", "tensor_args"),
        relies_on=("torch._library.utils.mutates_and_returns_first_arg",),
    ),
    Hook(
        "reads_of_views",
        "replaced",
        ("torch._inductor.graph.GraphLowering.mark_buffer_mutated",),
        _OWNER,
        "What reads the old value is computed here, unless it reads it by another buffer.",
        parameters=("name",),
        relies_on=("torch._inductor.ir.MultiOutput.get_inputs_that_alias_output",),
    ),
    Hook(
        "writes_into_views",
        "replaced",
        ("torch._inductor.lowering.mutate_to",),
        _OWNER,
        "A buffer of the graph that is written gets new memory here. If it is a view of an input, "
        "the input keeps its value. What refers to it by a view reads and writes the new memory, "
        "with the strides of the old one; other values that were computed before read the old.",
        parameters=("changed", "val"),
        relies_on=(
            "torch._inductor.ir.MutationLayoutSHOULDREMOVE.realize_into",
            "torch._inductor.ir.StorageBox",
        ),
    ),
    Hook(
        "order_of_views",
        "replaced",
        ("torch._inductor.scheduler.Scheduler.compute_dependencies",),
        _OWNER,
        "The order of reads and writes is decided here, and kept only for accesses by the name of "
        "the buffer that is written. A write that nothing reads by that name is removed.",
        relies_on=(
            "torch._inductor.dependencies.StarDep",
            "torch._inductor.dependencies.WeakDep",
            "torch._inductor.scheduler.NodeUser",
            "torch._inductor.scheduler.OutputNode",
            "torch._inductor.scheduler.SchedulerBuffer.get_aliases",
            "torch._inductor.scheduler.SchedulerBuffer.get_mutations",
        ),
    ),
    Hook(
        "copies_of_conjugates",
        "replaced",
        ("torch._inductor.ir.ExternKernel.copy_input",),
        _OWNER,
        "A kernel that copies a complex tensor to other strides reads its memory: the copy of a "
        "conjugate view (`x.conj()`) would not be conjugate.",
        parameters=("x",),
        relies_on=("torch._inductor.lowering.fallback_handler", "torch._inductor.ir.StorageBox"),
    ),
    Hook(
        "views_of_conjugates",
        "replaced",
        ("torch._inductor.ir.ExternKernel.process_kernel",),
        _OWNER,
        "The gradients that a backward graph gets may be conjugate views, unlike the tensors that "
        "it was traced with. An operator that views a complex tensor as real ones then fails.",
        parameters=("kernel",),
        relies_on=("torch._inductor.graph.GraphLowering.is_backward",),
    ),
)


def install_hooks() -> None:
    """Install the dispatchers, once per process."""
    dispatchers: dict[str, registry.MakeDispatcher] = {
        "views_by_writes": _dispatch_aliases,
        "reads_before_operators": _dispatch_init,
        "reads_of_views": _dispatch_mark_mutated,
        "writes_into_views": _dispatch_mutate_to,
        "order_of_views": _dispatch_compute_dependencies,
        "copies_of_conjugates": _dispatch_copy_input,
        "views_of_conjugates": _dispatch_process_kernel,
    }
    registry.install(HOOKS, dispatchers)


def _dispatch_aliases(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def get_inputs_that_alias_output(self: Any) -> Any:
        aliases = stock(self)
        if context.settings() is None or not _is_plain(self) or not self.mutation_names:
            return aliases
        return [*aliases, *self.mutation_names]

    return get_inputs_that_alias_output


def _is_plain(kernel: Any) -> bool:
    from torch._inductor import ir

    return type(kernel) is ir.FallbackKernel


def _dispatch_init(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def __init__(
        self: Any, layout: Any, kernel: Any, tensor_args: Any, *args: Any, **kwargs: Any
    ) -> None:
        if context.settings() is not None:
            import torch
            from torch._inductor.virtualized import V

            is_operator = isinstance(kernel, torch._ops.OpOverload)
            if is_operator and torch._library.utils.mutates_and_returns_first_arg(kernel):
                V.graph.mark_buffer_mutated(tensor_args[0].get_name())
        stock(self, layout, kernel, tensor_args, *args, **kwargs)

    return __init__


def _dispatch_mark_mutated(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def mark_buffer_mutated(self: Any, name: str) -> None:
        stock(self, name)
        if context.settings() is None:
            return
        for other in _find_names(self, name) - {name}:
            # Computing a value may add users.
            for user in list(self.name_to_users.get(other, ())):
                user.realize()

    return mark_buffer_mutated


def _dispatch_mutate_to(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def mutate_to(changed: Any, val: Any, *args: Any, **kwargs: Any) -> Any:
        if context.settings() is None or not (
            _is_view_of_memory(changed) or _has_other_references(changed, val)
        ):
            return stock(changed, val, *args, **kwargs)
        from torch._inductor import ir

        ir.MutationLayoutSHOULDREMOVE.realize_into(val, changed)
        return changed

    return mutate_to


def _is_view_of_memory(box: Any) -> bool:
    """Return whether a value is a buffer that shares memory with another one."""
    from torch._inductor import ir

    storage = _unbox(box)
    if not isinstance(storage, ir.StorageBox):
        return False
    buffer = storage.data
    return isinstance(buffer, ir.Buffer) and bool(buffer.get_inputs_that_alias_output())


def _has_other_references(box: Any, new: Any) -> bool:
    """Whether values but a box refer to its buffer, and the new values are in another one.

    A view refers to the box: with the strides of the old buffer, it would read the new one. Values
    that were computed from the box itself refer to the old buffer.
    """
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    storage, new_storage = _unbox(box), _unbox(new)
    if not isinstance(storage, ir.StorageBox) or not isinstance(storage.data, ir.Buffer):
        return False
    name = storage.get_name()
    if ir.try_get_name(new_storage) == name:
        return False
    if any(_unbox(user) is not storage for user in V.graph.name_to_users.get(name, ())):
        return True
    views = (value for value in map(_unbox, V.graph.env.values()) if isinstance(value, ir.BaseView))
    if any(view.unwrap_view() is storage for view in views):
        return True
    defining = new_storage.get_defining_op()
    others = [operation for operation in V.graph.operations if operation is not defining]
    return any(
        name in _find_read_names(operation)
        or any(name in output.get_mutation_names() for output in operation.get_outputs())
        for operation in others
    )


def _find_read_names(operation: Any) -> Any:
    """Return the names of the buffers that an operation of a graph reads."""
    from torch._inductor import ir

    if getattr(operation, "name", None) is None:
        # A Triton kernel of the user is an operation and a buffer, but has no buffer's name.
        return ir.Operation.get_read_names(operation)
    return operation.get_read_names()


def _unbox(value: Any) -> Any:
    """Return the content of a TensorBox, and any other value as it is."""
    from torch._inductor import ir

    return value.data if isinstance(value, ir.TensorBox) else value


def _find_names(graph: Any, name: str) -> set[str]:
    """Return the names of the buffers that share memory with a buffer of a graph."""
    from torch._inductor import ir

    count, candidates = getattr(graph, _CANDIDATES, (0, []))
    new = graph.buffers[count:]
    candidates += [item for item in new if isinstance(item, (ir.FallbackKernel, ir.MultiOutput))]
    setattr(graph, _CANDIDATES, (count + len(new), candidates))
    if not candidates:
        return {name}
    memory = _Memory((item.get_name(), item.get_inputs_that_alias_output()) for item in candidates)
    return memory.names(name)


class _Memory:
    """Which names of buffers stand for one memory."""

    def __init__(self, aliases: Iterable[tuple[str, Iterable[str]]]) -> None:
        self._neighbors: defaultdict[str, set[str]] = defaultdict(set)
        for name, others in aliases:
            for other in others:
                self._neighbors[name].add(other)
                self._neighbors[other].add(name)

    def names(self, name: str) -> set[str]:
        """Return all names of the memory of a buffer."""
        found, pending = {name}, [name]
        while pending:
            new = self._neighbors.get(pending.pop(), set()) - found
            found |= new
            pending += new
        return found

    def shared(self) -> dict[str, str]:
        """Return a name of the memory, by the names of the buffers that share it."""
        owners: dict[str, str] = {}
        for name in self._neighbors:
            if name not in owners:
                owners.update(dict.fromkeys(self.names(name), name))
        return owners


def _dispatch_compute_dependencies(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def compute_dependencies(self: Any, *args: Any, **kwargs: Any) -> None:
        writes = [] if context.settings() is None else _order_accesses(self.nodes)
        stock(self, *args, **kwargs)
        for buffer in writes:
            _keep(buffer)

    return compute_dependencies


def _keep(buffer: Any) -> None:
    """Keep what writes a buffer: it counts as a result of the graph."""
    from torch._inductor.dependencies import StarDep
    from torch._inductor.scheduler import NodeUser, OutputNode

    buffer.users.append(NodeUser(OutputNode(StarDep(buffer.get_name()))))


def _order_accesses(nodes: list[Any]) -> list[Any]:
    """Add dependencies between accesses of one memory by several names, if it is written.

    Returns:
        The scheduler buffers that write such memory.
    """
    owners = _Memory(_find_aliases(nodes)).shared()
    if not owners:
        return []
    from torch._inductor.virtualized import V

    writing = [
        (buffer, owners[name])
        for node in nodes
        for buffer in node.get_outputs()
        for name in buffer.get_mutations()
        if name in owners
    ]
    written = {memory for _, memory in writing}
    last_write: dict[str, str] = {}
    accesses: defaultdict[str, list[str]] = defaultdict(list)
    for node in nodes if written else ():
        reads, writes = _find_accesses(node, owners)
        outputs = node.get_outputs()
        earlier = V.graph.additional_buffer_deps[node.get_name()]
        for memory in (reads | writes) & written:
            if memory in writes:
                earlier.update(accesses[memory])
                accesses[memory].clear()
            if memory in last_write:
                earlier.add(last_write[memory])
            if outputs:
                accesses[memory].append(outputs[0].get_name())
            if memory in writes and outputs:
                last_write[memory] = outputs[0].get_name()
    return [buffer for buffer, _ in writing]


def _find_aliases(nodes: list[Any]) -> Iterator[tuple[str, Iterable[str]]]:
    from torch._inductor import ir

    for node in nodes:
        for buffer in node.get_outputs():
            aliases = buffer.get_aliases()
            # An operator that returns nothing lists operands which share no memory.
            if len(aliases) > 1 and isinstance(buffer.node.layout, ir.NoneLayout):
                continue
            if aliases:
                yield buffer.get_name(), aliases


def _find_accesses(node: Any, owners: dict[str, str]) -> tuple[set[str], set[str]]:
    """Return which memory a scheduler node reads and which it writes."""
    from torch._inductor.dependencies import WeakDep

    reads = {
        owners[dependency.name]
        for dependency in node.read_writes.reads
        if dependency.name in owners and not isinstance(dependency, WeakDep)
    }
    writes = {
        owners[name]
        for buffer in node.get_outputs()
        for name in buffer.get_mutations()
        if name in owners
    }
    return reads, writes


def _dispatch_copy_input(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def copy_input(x: Any) -> Any:
        if context.settings() is not None and x.get_dtype().is_complex:
            x = _resolve_conjugate(x)
        return stock(x)

    return copy_input


def _resolve_conjugate(x: Any) -> Any:
    """Return a realized complex tensor without the bit that marks a conjugate view.

    Only the run tells whether a tensor has the bit: gradients may have it or not.
    """
    import torch
    from torch._inductor import ir, lowering

    if not ir.is_storage_and_layout(x):
        return x
    resolve = lowering.fallback_handler(
        torch.ops.aten.resolve_conj.default, add_to_fallback_set=False
    )
    return resolve(x)


def _dispatch_process_kernel(stock: Callable[..., Any]) -> Callable[..., Any]:
    # `stock` is bound to its class: the dispatcher replaces a class method.
    @functools.wraps(stock)
    def process_kernel(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if context.settings() is not None:
            if _views_as_real(kernel, args):
                args = (_resolve_conjugate(args[0]), *args[1:])
            args = _with_recorded_strides(kernel, args)
        return stock(kernel, *args, **kwargs)

    return process_kernel


def _with_recorded_strides(kernel: Any, args: Any) -> Any:
    """Return the arguments of a view operator, of which the viewed tensor has the graph's strides.

    Inductor stores the new value of a tensor with gaps without gaps. Later operators may be
    recorded with strides and offsets in the memory with gaps.
    """
    import torch
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    node = V.current_node
    if not getattr(kernel, "is_view", False) or node.target is not kernel or not args:
        return args
    if not isinstance(node.args[0], torch.fx.Node):
        # A number, of which AOTAutograd calls `_conj`.
        return args
    viewed, recorded = args[0], node.args[0].meta["val"].stride()
    if V.graph.sizevars.statically_known_list_equals(viewed.maybe_get_stride() or (), recorded):
        return args
    return (ir.ExternKernel.require_exact_strides(viewed, recorded), *args[1:])


def _views_as_real(kernel: Any, args: Any) -> bool:
    """Whether a backward graph views a complex tensor as real numbers."""
    import torch
    from torch._inductor.virtualized import V

    operators = torch.ops.aten.view_as_real.default, torch.ops.aten.view.dtype
    return kernel in operators and V.graph.is_backward and args[0].get_dtype().is_complex
