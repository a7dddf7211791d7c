"""Restrictions on Inductor's matmul padding: it must not change result strides or branch results.

On a GPU Inductor times matmuls of unaligned sizes with and without padding, and takes a slice of
the padded matmul if that is faster. A slice has other strides than the matmul. If the slice is a
result of an exported program, that breaks the strides on which its users rely, those of export. If
it is a result of one of two `cond` branches, the branches no longer agree on their results, which
is an error. Both depend on timings and are therefore not reproducible.

A slice also prevents fusions, such as a matmul with its norm or gate, and extension kernels need no
padding of M: `is_only_m_unaligned` says whether M is the only unaligned size.

Joint graph passes run inside `track_control_flow`. `may_pad` says whether padding is allowed, and
`restore_strides` later copies the results whose strides have changed. None of them adds a guard on
symbolic sizes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from inductor_ext.hooks import context
from inductor_ext.lowerings import node_info

if TYPE_CHECKING:
    import torch

_CONTROL_FLOW = frozenset({"cond", "while_loop", "scan", "associative_scan", "map_impl"})


@contextlib.contextmanager
def track_control_flow(module: torch.fx.GraphModule) -> Iterator[None]:
    """Wrap the passes over a graph, which run the passes over its subgraphs."""
    outer = context.current()
    with context.enter(
        in_control_flow=outer.in_control_flow or outer.has_control_flow,
        has_control_flow=_has_control_flow(module),
    ):
        yield


def may_pad() -> bool:
    """Whether matmuls of the current graph may be padded."""
    return not context.current().in_control_flow


def is_only_m_unaligned(mat1: torch.Tensor, mat2: torch.Tensor) -> bool:
    """Whether M is the only unaligned size of a matmul, and the rows of `mat1` are contiguous.

    Args:
        mat1: [..., M, K], as passed to Inductor's padding check.
        mat2: [..., K, N].
    """
    from torch._inductor.fx_passes import pad_mm

    alignment = pad_mm.get_alignment_size(mat1)
    inner = mat1.stride()[-1]
    return (
        isinstance(inner, int)
        and inner == 1
        and not any(
            pad_mm.get_padded_length(size, alignment) for size in (mat1.shape[-1], mat2.shape[-1])
        )
    )


def result_strides(module: torch.fx.GraphModule) -> list[Any]:
    """Return the strides of a graph's results; None for results that are not tensors."""
    (output,) = module.graph.find_nodes(op="output")
    results = output.args[0] if isinstance(output.args[0], (list, tuple)) else output.args
    values: list[Any] = [getattr(result, "meta", {}).get("val") for result in results]
    return [value.stride() if hasattr(value, "stride") else None for value in values]


def record_strides(module: torch.fx.GraphModule, before: Sequence[Any]) -> None:
    """Store the strides that the results had before the passes, for `restore_strides`."""
    (output,) = module.graph.find_nodes(op="output")
    node_info.update(output, strides=before)


def restore_strides(module: torch.fx.GraphModule) -> None:
    """Copy the results whose strides padding has changed, and record their previous strides.

    Called after Inductor has recorded the strides of the results. Lowering keeps those strides, but
    for a view only their order. From torch 2.14 on Inductor records the strides before the passes,
    and for the padded result, which is a view, keeps only their order unless
    `strict_output_strides` is set. The effect of the passes is therefore read from the graph.
    """
    import torch

    (output,) = module.graph.find_nodes(op="output")
    before = node_info.get(output).strides
    original = output.meta.get("original_output_strides")
    if before is None or original is None:
        return
    after = result_strides(module)
    if not len(before) == len(original) == len(after):
        return
    padded = [
        index for index, pair in enumerate(zip(before, after, strict=True)) if _is_padded(*pair)
    ]
    if not padded:
        return
    results = list(output.args[0])
    with module.graph.inserting_before(output):
        for index in padded:
            copy = module.graph.call_function(torch.ops.aten.clone.default, (results[index],))
            copy.meta["val"] = torch.ops.aten.clone.default(results[index].meta["val"])
            results[index] = copy
    output.args = (type(output.args[0])(results),)
    module.recompile()
    output.meta["original_output_strides"] = [
        before[index] if index in padded else stride for index, stride in enumerate(original)
    ]


def _is_padded(old: Sequence[Any] | None, new: Sequence[Any] | None) -> bool:
    """Whether `new` strides have the same dimension order as `old` ones and are larger."""
    if old is None or new is None or len(old) != len(new):
        return False
    pairs = list(zip(old, new, strict=True))
    static = [(a, b) for a, b in pairs if type(a) is int and type(b) is int]
    if len(static) < len(pairs):
        return False
    dimensions = range(len(pairs))
    same_order = sorted(dimensions, key=old.__getitem__) == sorted(dimensions, key=new.__getitem__)
    return same_order and old != new and all(a <= b for a, b in static)


def _has_control_flow(module: torch.fx.GraphModule) -> bool:
    return any(
        node.op == "call_function" and getattr(node.target, "__name__", None) in _CONTROL_FLOW
        for node in module.graph.nodes
    )
