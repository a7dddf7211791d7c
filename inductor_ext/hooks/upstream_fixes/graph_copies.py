"""Inserts the copies that `aliasing` finds into an FX graph, before Inductor's in-place pass."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from inductor_ext.hooks.upstream_fixes import (
    aliasing,
    graph_nodes,
    graph_strides,
    graph_writes,
    saved_inputs,
)
from inductor_ext.hooks.upstream_fixes.aliasing import Path, Values
from inductor_ext.hooks.upstream_fixes.graph_nodes import ResultKinds

_SHARED = "inductor_ext_shared_operands"
"""Key of a node's `meta`: the operands that share memory in the user's program, by what is
overwritten."""

_COPIED_BASES = "inductor_ext_copied_bases"
"""Key of a node's `meta`: indices of the operands that a custom operator must not overwrite."""

_VIEWS_OF_INPUTS = "inductor_ext_views_of_inputs"
"""Key of the output node's `meta`: positions of results that share memory with an input before
copies are removed."""

_STORAGES_OF_RESULTS = "inductor_ext_storages_of_results"
"""Key of the output node's `meta`: the storage of each result before copies are removed."""

_COPY_BACK = torch.ops.aten.copy_.default

_aten = torch.ops.aten
_HIDDEN_VIEWS = frozenset(
    {
        *(_aten.split.Tensor, _aten.split.sizes, _aten.split_with_sizes.default),
        *(_aten.chunk.default, _aten.unbind.int, _aten.unsafe_chunk.default),
        *(_aten.unsafe_split.Tensor, _aten.unsafe_split_with_sizes.default),
    }
)
"""Operators whose results AOTAutograd does not report as views: autograd does not let a program
write several views of one operator, and the schema of the unsafe operators does not tell."""


class _FakeMemory:
    """The memory of nodes, by their fake tensors."""

    def __init__(self) -> None:
        from torch._inductor.fx_passes.reinplace import META_ONLY_OPS
        from torch._inductor.fx_utils import get_node_storage
        from torch.fx.passes.reinplace import _is_view_op

        self._meta_only_ops, self._is_view_op = META_ONLY_OPS, _is_view_op
        self.storage = get_node_storage

    def overlaps(self, tensor: Any, other: Any) -> bool:
        from torch._C._dynamo.guards import compute_overlapping_tensors
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        if tensor.dtype != other.dtype:
            return True
        (start, end), (other_start, other_end) = _extent(tensor), _extent(other)
        if statically_known_true(end < other_start) or statically_known_true(other_end < start):
            return False
        # An answer for the example's sizes would be a condition of a package.
        numbers = (*_layout(tensor), *_layout(other))
        if not all(isinstance(number, int) for number in numbers):
            return True
        return len(compute_overlapping_tensors([tensor, other])) != 0

    def is_same_view(self, node: Node, other: Node) -> bool:
        from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

        tensor, other_tensor = node.meta["val"], other.meta["val"]
        return tensor.dtype == other_tensor.dtype and all(
            len(sizes) == len(others) and statically_known_true(sym_eq(sizes, others))
            for sizes, others in (
                (tuple(tensor.size()), tuple(other_tensor.size())),
                (tensor.stride(), other_tensor.stride()),
                ((tensor.storage_offset(),), (other_tensor.storage_offset(),)),
            )
        )

    def is_view(self, node: Node) -> bool:
        return bool(self._is_view_op(node.target))

    def reads_data(self, node: Node) -> bool:
        return node.target not in self._meta_only_ops


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (*tensor.shape, *tensor.stride(), tensor.storage_offset())


def _extent(tensor: torch.Tensor) -> tuple[Any, Any]:
    """Return the positions of the first and the last element of a tensor in its memory."""
    start = tensor.storage_offset()
    lengths = zip(tensor.shape, tensor.stride(), strict=True)
    return start, start + sum((size - 1) * stride for size, stride in lengths)


def record_aliases(graph: Graph) -> None:
    """Record, before copies are removed, which operands and results share memory in the program."""
    memory = _FakeMemory()
    output, inputs = graph.output_node(), _input_storages(graph, memory)
    output.meta[_VIEWS_OF_INPUTS] = {
        index
        for index, node in enumerate(_results(output))
        if isinstance(node, Node) and memory.storage(node) in inputs
    }
    output.meta[_STORAGES_OF_RESULTS] = _storages_of_results(output, memory)
    graph_strides.record_layouts(graph)
    writes = graph_writes.find_custom_writes(graph)
    if not writes:
        return
    values = Values(graph, memory, _COPY_BACK)
    for write in writes:
        shared = write.node.meta.setdefault(_SHARED, {})
        shared.setdefault(write.path, aliasing.find_aliased_reads(write, values))


def describe_aliases(gm: GraphModule) -> str:
    """Return a text for what `record_aliases` recorded in a graph and its subgraphs."""
    return "".join(
        f"{node.name}{node.meta[_SHARED]}"
        for module in gm.modules()
        if isinstance(module, GraphModule)
        for node in module.graph.nodes
        if any(node.meta.get(_SHARED, {}).values())
    )


@contextlib.contextmanager
def keep_copies(graph: Graph) -> Iterator[None]:
    """Keep Inductor from removing copies that a program can tell from what they copy.

    Without some, two results, or a result and a constant of the graph, are the same tensor.
    Inductor keeps such copies of inputs; in an AOT package buffers are constants. Without others,
    the backward reads an input that has been overwritten (`saved_inputs`), or an operand of
    `as_strided` or of a custom operator begins at another offset than recorded.
    """
    memory = _FakeMemory()
    copies = _find_removable_copies(graph, memory)
    kept = []
    if copies:
        kept = _find_copies_of_results(graph, memory, copies)
        kept += _find_copies_with_offsets(graph, memory, copies)
    with _hiding(kept):
        yield


@contextlib.contextmanager
def keep_neutral_operations(
    graph: Graph, zeros: Container[Node], ones: Container[Node]
) -> Iterator[None]:
    """Keep Inductor from removing `x + 0`, `x * 1` and the like if they and `x` are results.

    Args:
        graph: before it is partitioned.
        zeros: nodes that are filled with 0.
        ones: nodes that are filled with 1.
    """
    memory = _FakeMemory()
    copies: _Copies = {}
    for operator_, neutral, commutes in (
        (_aten.add.Tensor, zeros, True),
        (_aten.sub.Tensor, zeros, False),
        (_aten.mul.Tensor, ones, True),
        (_aten.div.Tensor, ones, False),
    ):
        for node in graph.find_nodes(op="call_function", target=operator_):
            left, right, *_ = node.args
            source = right if commutes and left in neutral else left
            if isinstance(source, Node) and (right in neutral or source is right):
                copies[memory.storage(node)] = node, source
    with _hiding(_find_copies_of_results(graph, memory, copies) if copies else ()):
        yield


@contextlib.contextmanager
def _hiding(nodes: Iterable[Node]) -> Iterator[None]:
    """Change the targets of nodes, so that no pass finds them."""
    targets = {node: node.target for node in nodes}
    for node in targets:
        node.target = _kept_copy
    try:
        yield
    finally:
        for node, target in targets.items():
            node.target = target


_Copies = dict[int | None, tuple[Node, Node]]
"""Copies and what they copy, by the storage of the copy."""


def _find_removable_copies(graph: Graph, memory: _FakeMemory) -> _Copies:
    from torch._inductor.fx_passes.post_grad import noop_registry

    copies: _Copies = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target in noop_registry:
            index = noop_registry[node.target][1]
            source = node.args[index] if isinstance(index, int) else index(node.args)
            if isinstance(source, Node) and memory.storage(source) != memory.storage(node):
                copies[memory.storage(node)] = node, source
    return copies


def _find_copies_of_results(graph: Graph, memory: _FakeMemory, copies: _Copies) -> list[Node]:
    taken = {memory.storage(node) for node in graph.find_nodes(op="get_attr")}
    if not graph_nodes.has_tangents(graph):
        # A gradient may be the gradient of a result.
        taken |= _input_storages(graph, memory)
    kept = []
    results = dict.fromkeys(memory.storage(node) for node in _result_nodes(graph))
    taken |= {storage for storage in results if storage not in copies}
    for storage in results:
        root = storage
        is_needed = False
        while root in copies:
            is_needed |= saved_inputs.IS_NEEDED in copies[root][0].meta
            root = memory.storage(copies[root][1])
        if storage in copies and (is_needed or root in taken):
            kept.append(copies[storage][0])
        taken.add(root)
    return kept


def _find_copies_with_offsets(graph: Graph, memory: _FakeMemory, copies: _Copies) -> list[Node]:
    return [
        copies[storage][0]
        for _, operands in graph_strides.find_operands(graph)
        for operand in operands
        if isinstance(operand, Node)
        and (storage := memory.storage(operand)) in copies
        and graph_strides.begins_elsewhere(*copies[storage])
    ]


def _kept_copy(*args: Any, **kwargs: Any) -> None:
    """Replace the target of a copy that Inductor must not find."""


def add_copies(graph: Graph, kinds: ResultKinds) -> None:
    """Insert copies of the operands without which writing in place changes the graph.

    Args:
        graph: the graph, to which copies are added.
        kinds: what is known about the memory of its results.
    """
    memory = _FakeMemory()
    writes = graph_writes.find_writes(graph)
    output = graph.output_node()
    graph_strides.refuse_as_strided(graph)
    if graph_strides.copy_bases_of_other_layouts(graph, writes):
        writes = graph_writes.find_writes(graph)
    _copy_returned_inputs(graph, output, kinds.fresh, memory)
    _copy_joined_results(output, kinds, memory)
    if not writes:
        return
    values = Values(graph, memory, _COPY_BACK)
    late_reads = aliasing.find_late_reads(values)
    if late_reads:
        for user, node in late_reads:
            user.replace_input_with(node, _copy_early(node, values))
        values, writes = Values(graph, memory, _COPY_BACK), graph_writes.find_writes(graph)

    owned = {
        node
        for index, node in enumerate(_results(output))
        if isinstance(node, Node) and index not in kinds.views
    }
    copied = [
        write
        for write in writes
        if aliasing.needs_copy(write, writes, values, owned) or graph_writes.overlaps_itself(write)
    ]
    reads: dict[tuple[Node, Path], None] = {}
    for write in writes:
        shared = write.node.meta.get(_SHARED, {}).get(write.path, ())
        paths = [path for path in aliasing.find_aliased_reads(write, values) if path not in shared]
        if paths and write.is_fused:
            copied.append(write)
        elif write not in copied:
            reads.update(((write.node, path), None) for path in paths)
    for node, path in reads:
        copy = graph_strides.copy_read(aliasing.get_operand(node, path), node)
        aliasing.replace_operand(node, path, copy)
    for write in copied:
        if write.path[:2] == ("kwargs", "_all_bases"):
            write.node.meta.setdefault(_COPIED_BASES, set()).add(write.path[2])
        else:
            copy = graph_strides.copy_written(write)
            aliasing.replace_operand(write.node, write.path, copy)


def restore_copied_bases(graph: Graph) -> None:
    """Have the custom operators of a graph copy the operands that they must not overwrite."""
    for node in graph.find_nodes(op="call_function", target=graph_strides.CUSTOM_OPERATOR):
        copied = node.meta.get(graph_strides.COPIED)
        if copied is not None and _COPIED_BASES in node.meta:
            node.meta[graph_strides.COPIED] = sorted({*copied, *node.meta[_COPIED_BASES]})
    graph_strides.copy_operands_as_they_are(graph)


def use_known_sizes(graph: Graph) -> None:
    """Have custom operators' recorded operands use the sizes that are known by now.

    Inductor decomposes such a node by tracing it with the recorded operands and again with the
    current ones, and asserts that both have as many nodes. Copies of a base compute with its sizes:
    with a symbol in the first trace, but with its number, if torch.export found one, in the second.
    """
    for node in graph.find_nodes(op="call_function", target=graph_strides.CUSTOM_OPERATOR):
        if "eager_input_vals" in node.meta:
            node.meta["eager_input_vals"] = torch.utils._pytree.tree_map_only(
                torch.Tensor, _use_known_sizes, node.meta["eager_input_vals"]
            )


def _use_known_sizes(value: torch.Tensor) -> torch.Tensor:
    from torch._inductor.virtualized import V

    sizes, strides = ([_known(s) for s in sizes] for sizes in (value.shape, value.stride()))
    if not any(
        isinstance(old, torch.SymInt) and isinstance(new, int)
        for old, new in zip((*value.shape, *value.stride()), (*sizes, *strides), strict=True)
    ):
        return value
    with V.fake_mode:
        return torch.as_strided(value, sizes, strides, _known(value.storage_offset()))


def _known(size: int | torch.SymInt) -> int | torch.SymInt:
    number = size.node.maybe_as_int() if isinstance(size, torch.SymInt) else None
    return size if number is None else number


def _result_nodes(graph: Graph) -> list[Node]:
    return [node for node in _results(graph.output_node()) if isinstance(node, Node)]


def _results(output: Node) -> tuple[Any, ...]:
    results = output.args[0]
    return tuple(results) if isinstance(results, (list, tuple)) else (results,)


def _copy_returned_inputs(
    graph: Graph, output: Node, fresh: tuple[int, ...], memory: _FakeMemory
) -> None:
    """Copy results that are views of inputs, although they own their memory in the program."""
    inputs = _input_storages(graph, memory)
    views = output.meta.get(_VIEWS_OF_INPUTS, ())
    for index, node in enumerate(_results(output)):
        if (
            index in fresh
            and isinstance(node, Node)
            and node.target is not _COPY_BACK
            and memory.storage(node) in inputs
            and not (index in views and _is_hidden_view(node, memory))
        ):
            copy = graph_strides.copy(node, before=output)
            aliasing.replace_operand(output, ("args", 0, index), copy)


def _copy_joined_results(output: Node, kinds: ResultKinds, memory: _FakeMemory) -> None:
    """Copy results that share memory, although they do not in the program.

    `canonicalize_view_scatter_ops` replaces `slice_scatter(x[:-1], ...)` by a view of the new value
    of `x`. The program may return both.
    """
    before = output.meta.get(_STORAGES_OF_RESULTS, ())
    if len(before) != len(_results(output)):
        return
    now = _storages_of_results(output, memory)
    # AOTAutograd replaces views of inputs, and tensors that are saved may share memory.
    owned = [
        index
        for index in range(len(now))[: kinds.saved_from]
        if now[index] is not None and index not in kinds.views
    ]
    for index in owned:
        if any(now[i] == now[index] and before[i] != before[index] for i in owned):
            copy = _copy_result(_results(output)[index], before=output)
            aliasing.replace_operand(output, ("args", 0, index), copy)
            now[index] = memory.storage(copy)


def _copy_result(node: Node, before: Node) -> Node:
    """Insert a copy of a node in front of another one; that of an expanded tensor is expanded."""
    from torch._inductor.virtualized import V

    if node.target is not _aten.expand.default:
        return graph_strides.copy(node, before)
    copy = graph_strides.copy(node.args[0], before)  # type: ignore[arg-type]
    with node.graph.inserting_before(before):
        result = node.graph.call_function(node.target, (copy, *node.args[1:]), node.kwargs)
    with V.fake_mode:
        result.meta["val"] = copy.meta["val"].expand(node.meta["val"].shape)
    return result


def _storages_of_results(output: Node, memory: _FakeMemory) -> list[int | None]:
    return [memory.storage(node) if isinstance(node, Node) else None for node in _results(output)]


def _input_storages(graph: Graph, memory: _FakeMemory) -> set[int | None]:
    return {memory.storage(node) for node in graph.find_nodes(op="placeholder")} - {None}


def _is_hidden_view(node: Node, memory: _FakeMemory) -> bool:
    """Whether a node is a view by an operator of `_HIDDEN_VIEWS`."""
    while node.op == "call_function":
        if node.target in _HIDDEN_VIEWS or node.meta.get("original_aten") in _HIDDEN_VIEWS:
            return True
        source = node.args[0] if node.args else None
        is_view = isinstance(source, Node) and (
            memory.storage(source) == memory.storage(node) or node.target is operator.getitem
        )
        if not is_view:
            return False
        node = source  # type: ignore[assignment]
    return False


def _copy_early(node: Node, values: Values) -> Node:
    """Insert a copy of an input or a view of it, in front of what may overwrite the input."""
    storage = values.storage(node)
    assert storage is not None
    _move_before(node, values.copies[storage], values)
    following = node.next
    while following.op == "placeholder":
        following = following.next
    return graph_strides.copy(node, before=following)


def _move_before(node: Node, place: Node, values: Values) -> None:
    """Move a view of an input in front of a node that overwrites the input."""
    if values.order[node] > values.order[place] and values.memory.is_view(node):
        for operand in node.all_input_nodes:
            _move_before(operand, place, values)
        place.prepend(node)
