"""What Inductor's padding of matrix products may not change: results' strides, branches' results.

On a GPU Inductor times products of odd sizes with and without padding, and takes a slice of the
padded product where that is faster. A slice has other strides than the product. For a result of an
exported program that breaks what its users go by, export's strides; and two branches of a `cond`,
of which one was faster padded, no longer agree on their results, which is an error. Both would come
and go with the clock.

A slice also ends what can become one kernel, such as a product with its norm or gate, and a kernel
of ours takes every number of rows as it is: `rows_alone` says which products have nothing else to
pad.

`guarded` is what joint graph passes run inside; `allowed` says where nothing may be padded, and
`recorded` copies the results that have other strides afterwards. None of them asks the sizes of
symbolic dimensions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from inductor_ext.hooks import context

if TYPE_CHECKING:
    import torch

__all__ = ["allowed", "guarded", "keep_strides", "recorded", "rows_alone"]

_STRIDES = "inductor_ext_strides"

_CONTROL_FLOW = frozenset({"cond", "while_loop", "scan", "associative_scan", "map_impl"})


@contextlib.contextmanager
def guarded(module: torch.fx.GraphModule) -> Iterator[None]:
    """Around the passes over a graph, which run those over its subgraphs."""
    outer = context.current()
    with context.enter(
        in_control_flow=outer.in_control_flow or outer.has_control_flow,
        has_control_flow=_has_control_flow(module),
    ):
        yield


def allowed() -> bool:
    """Whether products of the graph at hand may be padded."""
    return not context.current().in_control_flow


def rows_alone(mat1: torch.Tensor, mat2: torch.Tensor) -> bool:
    """Whether a product has no odd size but its number of rows, and the rows of `mat1` are vectors.

    Args:
        mat1: [..., M, K], as Inductor's padding is asked about it.
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


def strides(module: torch.fx.GraphModule) -> list[Any]:
    """The strides of a graph's results; None for what is no tensor."""
    (output,) = module.graph.find_nodes(op="output")
    results = output.args[0] if isinstance(output.args[0], (list, tuple)) else output.args
    values: list[Any] = [getattr(result, "meta", {}).get("val") for result in results]
    return [value.stride() if hasattr(value, "stride") else None for value in values]


def keep_strides(module: torch.fx.GraphModule, before: Sequence[Any]) -> None:
    """Note what the results' strides were before the passes, for `recorded`."""
    (output,) = module.graph.find_nodes(op="output")
    output.meta[_STRIDES] = before


def recorded(module: torch.fx.GraphModule) -> None:
    """Copy the results whose strides padding has changed; record the strides of before.

    Called when Inductor has recorded results' strides: those that lowering keeps, of a view their
    order only. From torch 2.14 on it records those before the passes, and keeps for the padded
    result, which is a view, no more than their order, unless `strict_output_strides` is set. So
    what the passes have made of the results is read off the graph.
    """
    import torch

    (output,) = module.graph.find_nodes(op="output")
    before = output.meta.get(_STRIDES)
    original = output.meta.get("original_output_strides")
    if before is None or original is None:
        return
    after = strides(module)
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
    """Whether `new` strides order the dimensions as `old` ones do, and are further apart."""
    if old is None or new is None or len(old) != len(new):
        return False
    pairs = list(zip(old, new, strict=True))
    known = [(a, b) for a, b in pairs if type(a) is int and type(b) is int]
    if len(known) < len(pairs):
        return False
    dimensions = range(len(pairs))
    same_order = sorted(dimensions, key=old.__getitem__) == sorted(dimensions, key=new.__getitem__)
    return same_order and old != new and all(a <= b for a, b in known)


def _has_control_flow(module: torch.fx.GraphModule) -> bool:
    return any(
        node.op == "call_function" and getattr(node.target, "__name__", None) in _CONTROL_FLOW
        for node in module.graph.nodes
    )
