"""Fixes for programs that write into memory which is also read, or which a result shares.

AOTAutograd makes a graph functional. Inductor removes copies from it, which is right as long as the
graph is functional, and then lets operators write in place. It checks later uses of the operand,
but neither what the operator itself reads, nor results that must not share memory, nor the order of
the final writes to inputs. Before the operators are made in-place, `graph_copies` inserts a copy of
each operand for which that matters (`aliasing` decides which). Graphs without such operands are
unchanged.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

from inductor_ext.hooks import context, registry
from inductor_ext.hooks.registry import Hook

_PASSES = "torch._inductor.fx_passes"
_OWNER = "hooks.upstream_fixes.mutation"

HOOKS = (
    Hook(
        "copies_before_writes",
        "replaced",
        (f"{_PASSES}.reinplace.reinplace_inplaceable_ops_core",),
        _OWNER,
        "Operators are made in-place although they read the memory that they write, although a "
        "result of the graph shares it, or although an input gets another value afterwards.",
        parameters=("graph",),
        relies_on=(
            f"{_PASSES}.reinplace.inplaceable_ops",
            f"{_PASSES}.reinplace.inplaceable_foreach_ops",
            f"{_PASSES}.reinplace._generalized_scatter",
            f"{_PASSES}.reinplace._same_tensor_metadata|torch.fx.passes.reinplace._is_view_op",
        ),
        upstream="197829, 198031, 195451, 198094, 198131",
    ),
    Hook(
        "strides_of_scatters",
        "replaced",
        (f"{_PASSES}.reinplace.canonicalize_view_scatter_ops",),
        _OWNER,
        "The result of a scatter into a tensor with gaps is taken for one without. The offset of a "
        "view of it is computed from the wrong strides. Sizes that are nodes of the graph are read "
        "from a node after it has been erased, and are None.",
        parameters=("graph",),
        relies_on=(
            "torch.fx.Graph.erase_node",
            f"{_PASSES}.reinplace._generalized_scatter",
            f"{_PASSES}.reinplace._inplace_generalized_scatter",
        ),
    ),
    Hook(
        "neutral_operations",
        "replaced",
        (f"{_PASSES}.joint_graph.remove_no_ops",),
        _OWNER,
        "`x + 0` is replaced by `x`, also if both are results, which then are one tensor.",
        parameters=("gm", "zeros", "ones"),
    ),
    Hook(
        "aliases_of_users",
        "replaced",
        (f"{_PASSES}.post_grad.remove_noop_ops",),
        _OWNER,
        "Copies are removed here. A custom operator that a program calls with operands which share "
        "memory differs from one whose operands share memory because a copy was removed. A copy of "
        "`x[1:]` begins at offset 0; views of it by size, stride and offset keep that offset.",
        parameters=("graph",),
        upstream="198031",
    ),
    Hook(
        "copied_bases",
        "replaced",
        (f"{_PASSES}.post_grad.decompose_auto_functionalized",),
        _OWNER,
        "The in-place pass decides which operands of a custom operator are copied, and a later "
        "pass removes the copies of views with another dtype. Copies are made by the recorded "
        "offset, also if the operand begins elsewhere by now.",
        parameters=("graph",),
        upstream="198031, 195451",
    ),
    Hook(
        "sizes_of_replacements",
        "replaced",
        ("torch._inductor.pattern_matcher.Match.replace_by_example",),
        _OWNER,
        "The call of a custom operator is traced twice, and the two graphs must have as many "
        "nodes. One of them may have computed a size that nothing uses.",
        parameters=("replacement_fn", "args", "trace_fn", "run_functional_passes"),
        relies_on=("torch._inductor.pattern_matcher.fwd_only",),
    ),
    Hook(
        "fused_writes",
        "replaced",
        ("torch._inductor.scheduler.Scheduler.can_fuse_vertical",),
        _OWNER,
        "A kernel that overwrites a buffer is fused with one that reads it at other positions, if "
        "the buffer was written before or if the loops were reordered.",
        parameters=("node1", "node2"),
        relies_on=("torch._inductor.dependencies.MemoryDep.normalize",),
        upstream="198270, 198280",
    ),
    Hook(
        "reads_of_the_target",
        "replaced",
        ("torch._inductor.ir.MutationLayoutSHOULDREMOVE.realize_into",),
        _OWNER,
        "One kernel computes new values from a buffer and writes them into it, also if it reads "
        "elements that another iteration overwrites.",
        parameters=("src", "dst", "unsafe_alias"),
        relies_on=("torch._inductor.dependencies.extract_read_writes",),
    ),
    Hook(
        "indices_from_the_target",
        "replaced",
        ("torch._inductor.lowering.index_put_impl_",),
        _OWNER,
        "The kernel of index_put_ computes the indices, also if it overwrites what they depend on.",
        parameters=("self", "indices"),
    ),
    Hook(
        "reads_before_writes",
        "replaced",
        ("torch._inductor.ir.MutationOutput.__init__",),
        _OWNER,
        "An operator that overwrites a buffer is registered before the pending reads of the old "
        "value are computed. The changed operand of a while_loop is taken for another buffer.",
        parameters=("layout", "mutated_node", "mutating_node"),
        relies_on=(
            "torch._inductor.graph.GraphLowering.mark_buffer_mutated",
            "torch._inductor.graph.GraphLowering.never_reuse_buffers",
        ),
    ),
    Hook(
        "order_of_writes",
        "replaced",
        ("torch._inductor.scheduler.SchedulerNode.recompute_size_and_body",),
        _OWNER,
        "New loops lose the dependencies that only keep the order: a kernel overwrites a buffer "
        "before others have read it. Reads get the names of buffers before their writes.",
        relies_on=(
            "torch._inductor.dependencies.ReadWrites.with_read",
            "torch._inductor.dependencies.ReadWrites.rename",
            "torch._inductor.scheduler.BaseSchedulerNode.set_read_writes",
        ),
        upstream="177631, 174969, 175530",
        until="2.14",
    ),
)


def install_hooks() -> None:
    """Install the dispatchers, once per process."""
    dispatchers: dict[str, registry.MakeDispatcher] = {
        "copies_before_writes": _dispatch_reinplace,
        "strides_of_scatters": _dispatch_canonicalize,
        "neutral_operations": _dispatch_remove_no_ops,
        "aliases_of_users": _dispatch_remove_noop_ops,
        "copied_bases": _dispatch_decompose,
        "sizes_of_replacements": _dispatch_replace_by_example,
        "fused_writes": _dispatch_can_fuse_vertical,
        "reads_of_the_target": _dispatch_realize_into,
        "indices_from_the_target": _dispatch_index_put,
        "reads_before_writes": _dispatch_mutation_output,
        "order_of_writes": _dispatch_recompute_loops,
    }
    registry.install(HOOKS, dispatchers)


def cache_key(gm: Any) -> str:
    """Return a text for what generated code depends on besides the graph.

    Args:
        gm: a `torch.fx.GraphModule`.
    """
    from inductor_ext.hooks.upstream_fixes import graph_copies, graph_nodes, graph_strides

    kinds = dataclasses.astuple(graph_nodes.find_result_kinds(gm.graph))
    layouts = graph_strides.describe_layouts(gm)
    return f"{kinds}{graph_copies.describe_aliases(gm)}{layouts}"


def _dispatch_reinplace(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def reinplace_inplaceable_ops_core(graph: Any) -> None:
        if context.settings() is not None:
            from inductor_ext.hooks.upstream_fixes import graph_copies, graph_nodes, graph_strides

            graph_strides.restore_scatters(graph)
            graph_copies.add_copies(graph, graph_nodes.find_result_kinds(graph))
        stock(graph)

    return reinplace_inplaceable_ops_core


def _dispatch_canonicalize(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def canonicalize_view_scatter_ops(graph: Any) -> None:
        if context.settings() is None:
            stock(graph)
            return
        from inductor_ext.hooks.upstream_fixes import graph_nodes, graph_strides

        with graph_nodes.keep_arguments_of_erased(graph):
            stock(graph)
        # The fake results are computed again after this.
        graph_strides.keep_strides_of_scatters(graph)

    return canonicalize_view_scatter_ops


def _dispatch_remove_no_ops(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def remove_no_ops(gm: Any, zeros: Any, ones: Any) -> None:
        if context.settings() is None:
            stock(gm, zeros, ones)
            return
        from inductor_ext.hooks.upstream_fixes import graph_copies

        with graph_copies.keep_neutral_operations(gm.graph, zeros, ones):
            stock(gm, zeros, ones)

    return remove_no_ops


def _dispatch_remove_noop_ops(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def remove_noop_ops(graph: Any) -> None:
        if context.settings() is None:
            stock(graph)
            return
        from inductor_ext.hooks.upstream_fixes import graph_copies

        graph_copies.record_aliases(graph)
        with graph_copies.keep_copies(graph):
            stock(graph)

    return remove_noop_ops


def _dispatch_decompose(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def decompose_auto_functionalized(graph: Any) -> None:
        if context.settings() is not None:
            from inductor_ext.hooks.upstream_fixes import graph_copies

            graph_copies.restore_copied_bases(graph)
            graph_copies.use_known_sizes(graph)
        stock(graph)

    return decompose_auto_functionalized


def _dispatch_replace_by_example(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def replace_by_example(
        self: Any,
        replacement_fn: Any,
        args: Any,
        trace_fn: Any = None,
        run_functional_passes: bool = True,
    ) -> Any:
        if context.settings() is not None and trace_fn is None and not run_functional_passes:
            trace_fn = trace_without_unused_sizes
        return stock(self, replacement_fn, args, trace_fn, run_functional_passes)

    return replace_by_example


def trace_without_unused_sizes(function: Any, args: Any) -> Any:
    """Return the graph of a function, without sizes that nothing uses.

    Operators without a result, such as Triton kernels, stay. The second trace, which is one of the
    graph of the first, may know a size that the first has computed; then it is the same graph, with
    new values.
    """
    import copy

    import torch
    from torch._inductor.pattern_matcher import fwd_only
    from torch._inductor.virtualized import V
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    gm = fwd_only(function, args, run_functional_passes=False)
    for node in reversed(gm.graph.nodes):
        value = node.meta.get("val")
        if node.op == "call_function" and not node.users and isinstance(value, (int, torch.SymInt)):
            gm.graph.erase_node(node)
    gm.recompile()
    is_second = isinstance(function, torch.fx.GraphModule)
    if is_second and len(gm.graph.nodes) != len(function.graph.nodes):
        gm = copy.deepcopy(function)
        FakeTensorProp(gm, V.fake_mode).propagate_dont_convert_inputs(*args)
    return gm


def _dispatch_can_fuse_vertical(stock: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(stock)
    def can_fuse_vertical(self: Any, node1: Any, node2: Any, *args: Any, **kwargs: Any) -> bool:
        if not stock(self, node1, node2, *args, **kwargs):
            return False
        return context.settings() is None or _reads_where_it_writes(self, node1, node2)

    return can_fuse_vertical


def _reads_where_it_writes(scheduler: Any, node1: Any, node2: Any) -> bool:
    """Whether the buffers that node2 overwrites are read by node1 at the same positions only."""
    real_names = scheduler.mutation_real_name
    if not real_names:
        return True
    writes: dict[str, list[Any]] = {}
    for write in node2.read_writes.writes:
        real_name = real_names.get(write.name)
        if real_name is not None:
            writes.setdefault(real_name, []).append(write)
    if not writes:
        return True
    return all(
        _is_same_access(read, write)
        for read in node1.read_writes.reads
        for write in writes.get(real_names.get(read.name, read.name), ())
    )


def _is_same_access(read: Any, write: Any) -> bool:
    """Whether a read and a write of a buffer access the same element in each iteration."""
    from torch._inductor.dependencies import MemoryDep, WeakDep
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    if isinstance(read, WeakDep):
        return True  # only the order; the buffer is not read
    if not (isinstance(read, MemoryDep) and isinstance(write, MemoryDep)):
        return False
    if any(symbol_is_type(symbol, SymT.TMP) for symbol in read.index.free_symbols):
        return False
    if (read.index, read.size) == (write.index, write.size):
        return True
    read, write = read.normalize(), write.normalize()
    return bool((read.index, read.size) == (write.index, write.size))


def _dispatch_realize_into(stock: Callable[..., Any]) -> Callable[..., Any]:
    # `stock` is bound to its class: the dispatcher replaces a class method.
    @functools.wraps(stock)
    def realize_into(src: Any, dst: Any, unsafe_alias: bool = False) -> Any:
        if context.settings() is not None and _reads_elsewhere(src, dst):
            src.realize()
            # Values in a buffer of their own are copied by a kernel of its own.
            unsafe_alias = False
        return stock(src, dst, unsafe_alias=unsafe_alias)

    return realize_into


def _reads_elsewhere(src: Any, dst: Any) -> bool:
    """Whether values that are not in memory yet depend on elements of dst at other positions."""
    from torch._inductor import dependencies, ir

    values = src.data if isinstance(src, ir.TensorBox) else src
    if not (isinstance(values, ir.StorageBox) and isinstance(values.data, ir.Pointwise)):
        return False
    dst.realize()
    name = dst.get_name()
    if name not in values.get_read_names():
        return False
    # The layout of dst may not be decided yet. Reads and writes then assume the same strides.
    with mock.patch.object(ir.FlexibleLayout, "allow_indexing", True):
        (write,) = dependencies.extract_read_writes(dst.make_loader(), values.get_size()).reads
    reads = values.data.get_reads()
    return not all(_is_same_access(read, write) for read in reads if read.name == name)


def _dispatch_index_put(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def index_put_impl_(self: Any, indices: Any, *args: Any, **kwargs: Any) -> Any:
        if context.settings() is not None:
            from torch._inductor import ir

            name = ir.try_get_name(self)
            for index in indices:
                if index is not None and name in index.get_read_names():
                    index.realize()
        return stock(self, indices, *args, **kwargs)

    return index_put_impl_


def _dispatch_mutation_output(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def __init__(self: Any, layout: Any, mutated_node: Any, mutating_node: Any) -> None:
        if context.settings() is None:
            stock(self, layout, mutated_node, mutating_node)
            return
        from torch._inductor.virtualized import V

        earlier = list(V.graph.operations)
        stock(self, layout, mutated_node, mutating_node)
        # It stands for the operand's memory. A loop gives it a layout, as if it had its own.
        V.graph.never_reuse_buffers.add(self.get_name())
        # Inductor has now appended what reads the old value.
        reads = V.graph.operations[len(earlier) :]
        if reads and mutating_node in earlier:
            place = earlier.index(mutating_node)
            V.graph.operations[:] = [*earlier[:place], *reads, *earlier[place:]]

    return __init__


def _dispatch_recompute_loops(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def recompute_size_and_body(self: Any, *args: Any, **kwargs: Any) -> None:
        if context.settings() is None:
            stock(self, *args, **kwargs)
            return
        from torch._inductor.dependencies import StarDep, WeakDep

        added = type(self.read_writes.reads)(
            read for read in self.read_writes.reads if isinstance(read, (StarDep, WeakDep))
        )
        stock(self, *args, **kwargs)
        if added or self.mutation_renames:
            reads_and_writes = self.read_writes.with_read(added)
            self.set_read_writes(reads_and_writes.rename(self.mutation_renames))

    return recompute_size_and_body
