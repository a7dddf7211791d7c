"""Describes the nodes that Inductor may make in-place, as `aliasing.Write`.

The FX graph is the one that Inductor's in-place pass reads: functional operators,
auto-functionalized custom operators, functional Triton kernels, and copies back to inputs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from inductor_ext.hooks.upstream_fixes import aliasing
from inductor_ext.hooks.upstream_fixes.aliasing import Path, Write

Reads = tuple[tuple[Path, Node], ...]

_VIEW_PREFIX, _BASE_INDEX = "_", "_base_index"


def find_writes(graph: Graph) -> list[Write]:
    """Return the operands that Inductor may let the nodes of a graph overwrite."""
    from torch._inductor.fx_passes import reinplace

    describe: dict[Any, Callable[[Node], Iterator[Write]]] = {
        **dict.fromkeys(reinplace.inplaceable_ops, _describe_operator),
        **dict.fromkeys(reinplace.inplaceable_foreach_ops, _describe_foreach),
        **_custom_operators(),
        torch.ops.aten.copy_.default: _describe_copy,
    }
    return [
        write
        for node in graph.nodes
        if node.op == "call_function" and node.target in describe
        for write in describe[node.target](node)
    ]


def find_custom_writes(graph: Graph) -> list[Write]:
    """Return the operands that custom operators and Triton kernels of the user overwrite."""
    return [
        write
        for target, describe in _custom_operators().items()
        for node in graph.find_nodes(op="call_function", target=target)
        for write in describe(node)
    ]


def overlaps_itself(write: Write) -> bool:
    """Whether elements of an operand share memory, as those of expanded and unfolded tensors.

    A custom operator overwrites such an operand if the program says so. A functional operator,
    which is made in-place, must not.
    """
    return write.node.target not in _custom_operators() and _overlaps(write.operand.meta["val"])


def _overlaps(value: torch.Tensor) -> bool:
    overlap = torch._debug_has_internal_overlap(value)
    if overlap < 2:
        return bool(overlap)
    # The answer is not simple. Whether views overlap does not depend on sizes in practice.
    sizes, strides = (
        [item.node.hint if isinstance(item, torch.SymInt) else item for item in items]
        for items in (value.shape, value.stride())
    )
    if None in sizes or None in strides:
        return True
    extent = 0
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size != 1:
            if stride <= extent:
                return True
            extent += stride * (size - 1)
    return False


def _describe_copy(node: Node) -> Iterator[Write]:
    target, source = node.args[:2]
    assert isinstance(target, Node)
    if target.op in ("placeholder", "get_attr") and isinstance(source, Node):
        yield Write(node, (), target, (target.meta["val"],), (), ((("args", 1), source),))


def _describe_operator(node: Node) -> Iterator[Write]:
    from torch._inductor.fx_passes import reinplace

    inplaceable_ops: dict[Any, Any] = reinplace.inplaceable_ops
    written = [("args", index) for index in inplaceable_ops[node.target].mutated_args]
    reads = tuple(
        (path, read) for path, read in aliasing.find_operands(node) if path[:2] not in written
    )
    for path in written:
        for place, operand in _flatten(aliasing.get_operand(node, path), path):
            if node.target is reinplace._generalized_scatter:
                # The nodes in the list of views are sizes.
                reads = tuple((path, read) for path, read in reads if path == ("args", 1))
                region = _find_scattered_region(operand, node.args[2])
            else:
                region = operand.meta["val"]
            yield Write(node, place, operand, (region,), (node,), reads)


def _find_scattered_region(operand: Node, views: Any) -> Any:
    """Return a fake tensor of the memory that a `_generalized_scatter` overwrites."""
    from torch._inductor.virtualized import V

    whole = region = operand.meta["val"]
    shape_env = V.fake_mode.shape_env
    try:
        with V.fake_mode:
            for view in views:
                args, kwargs = torch.fx.map_arg((view.args, view.kwargs), lambda n: n.meta["val"])
                if shape_env is None:
                    region = view.target(region, *args, **kwargs)
                else:
                    with shape_env.ignore_fresh_unbacked_symbols():
                        region = view.target(region, *args, **kwargs)
    except Exception:
        # A size that depends on data.
        return whole
    return region


def _describe_foreach(node: Node) -> Iterator[Write]:
    operands = node.args[0]
    assert isinstance(operands, (list, tuple))
    others = [
        (path, read) for path, read in aliasing.find_operands(node) if path[:2] != ("args", 0)
    ]
    for index, operand in enumerate(operands):
        assert isinstance(operand, Node)
        # An element that is read where it is written is the operand itself.
        reads = tuple(
            (path, read) for path, read in others if not (read is operand and path[-1] == index)
        )
        path = ("args", 0, index)
        results = aliasing.find_results(node, index)
        region = (operand.meta["val"],)
        yield Write(node, path, operand, region, results, reads, is_fused=True)


def _describe_triton_kernel(node: Node) -> Iterator[Write]:
    kwargs: Any = node.kwargs["kwargs"]
    written: Any = node.kwargs["tensors_to_clone"]
    reads = tuple(
        (("kwargs", "kwargs", name), value)
        for name, value in kwargs.items()
        if name not in written and isinstance(value, Node)
    )
    for name in written:
        operand = kwargs[name]
        path, results = ("kwargs", "kwargs", name), aliasing.find_results(node, name)
        yield Write(node, path, operand, (operand.meta["val"],), results, reads)


def _describe_functionalized(node: Node) -> Iterator[Write]:
    from torch._higher_order_ops.auto_functionalize import get_mutable_args

    op: Any = node.args[0]
    names, _ = get_mutable_args(op)
    reads = tuple(
        (path, read)
        for path, read in aliasing.find_operands(node)
        if path[0] == "kwargs" and path[1] not in names
    )
    first = len(node.meta["val"]) - len(names)
    for position, name in enumerate(names):
        results = _find_nested_results(node, first + position)
        for path, operand in _flatten(node.kwargs[name], ("kwargs", name)):
            yield Write(node, path, operand, (operand.meta["val"],), results, reads)


def _describe_functionalized_v2(node: Node) -> Iterator[Write]:
    bases: Any = node.kwargs.get("_all_bases", ())
    reads = tuple(
        (path, read)
        for path, read in aliasing.find_operands(node)
        if path[0] == "kwargs" and not path[1].startswith(_VIEW_PREFIX)
    )
    inputs: dict[int | None, torch.dtype] = {
        storage: placeholder.meta["val"].dtype
        for placeholder in node.graph.find_nodes(op="placeholder")
        if (storage := _storage(placeholder)) is not None
    }
    first = len(node.meta["val"]) - len(bases)
    for index, base in enumerate(bases):
        if not isinstance(base, Node):
            continue
        dtype = inputs.get(_storage(base))
        yield Write(
            node,
            ("kwargs", "_all_bases", index),
            base,
            _find_overwritten_views(node, index, base),
            aliasing.find_results(node, first + index),
            reads,
            # Inductor does not copy a view of an input with another dtype.
            is_unchecked=dtype is not None and dtype != base.meta["val"].dtype,
        )


def _custom_operators() -> dict[Any, Callable[[Node], Iterator[Write]]]:
    from torch._higher_order_ops import auto_functionalize, triton_kernel_wrap

    return {
        auto_functionalize.auto_functionalized: _describe_functionalized,
        auto_functionalize.auto_functionalized_v2: _describe_functionalized_v2,
        triton_kernel_wrap.triton_kernel_wrapper_functional: _describe_triton_kernel,
    }


def find_view_prefixes(kwargs: Mapping[str, Any], index: int) -> list[str]:
    """Return the names under which the views of a base are recorded that a custom operator
    overwrites.

    Args:
        kwargs: those of the operator's node.
        index: of the base in "_all_bases".
    """
    return [
        key.removesuffix(_BASE_INDEX)
        for key, value in kwargs.items()
        if key.endswith(_BASE_INDEX) and value == index
    ]


def _find_overwritten_views(node: Node, index: int, base: Node) -> tuple[Any, ...]:
    """Return fake tensors of the views of a base that a custom operator overwrites."""
    from torch._inductor.virtualized import V

    kwargs: dict[str, Any] = torch.fx.map_arg(dict(node.kwargs), lambda n: n.meta["val"])
    prefixes = find_view_prefixes(kwargs, index)
    whole = base.meta["val"]
    regions = []
    try:
        with V.fake_mode:
            for prefix in prefixes:
                if f"{prefix}_storage_offset" in kwargs:
                    names = ("size", "stride", "storage_offset")
                    regions.append(whole.as_strided(*(kwargs[f"{prefix}_{n}"] for n in names)))
                elif f"{prefix}_slice_dim" in kwargs:
                    args = [kwargs[f"{prefix}_slice_{name}"] for name in ("dim", "start", "end")]
                    regions.append(torch.ops.aten.slice.Tensor(whole, *args))
                else:
                    regions.append(whole)
    except Exception:
        # A size that depends on data.
        return (whole,)
    return tuple(regions)


def _find_nested_results(node: Node, index: int) -> tuple[Node, ...]:
    results = aliasing.find_results(node, index)
    items = (user for result in results for user in result.users if user.target is operator.getitem)
    return (*results, *items)


def _flatten(value: Any, path: Path) -> Iterator[tuple[Path, Node]]:
    if isinstance(value, Node):
        yield path, value
    elif isinstance(value, Sequence):
        for index, item in enumerate(value):
            yield from _flatten(item, (*path, index))


def _storage(node: Node) -> int | None:
    from torch._inductor.fx_utils import get_node_storage

    return get_node_storage(node)
