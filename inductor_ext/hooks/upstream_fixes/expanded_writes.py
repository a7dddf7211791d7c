"""Fix for writes into expanded tensors, such as `x.expand(2, 3)[1, 0] = 5`.

The elements of an expanded tensor share memory. For a write into it, AOTAutograd computes the
tensor that was expanded as `base + (written - base).sum(expanded dimensions)`. If an element is
written through several positions, as by `masked_fill_`, each of them adds its difference. Even if
it is written through one, rounding loses small values beside large ones, and infinite values give
NaN. Here each element has the value of the last position that was changed, as in eager mode.

torch itself refuses gradients of what was written through several positions.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.fx import Graph, Node


@dataclasses.dataclass(frozen=True)
class _Sum:
    """The nodes of `base + (written - base).sum(dims)`."""

    result: Node
    base: Node
    written: Node
    dims: tuple[int, ...]
    """The expanded dimensions of `written`."""


def replace_sums(graph: Graph) -> None:
    """Let a graph of AOTAutograd select what was written last into expanded tensors."""
    import torch

    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
        found = _match(node)
        if found is not None:
            _replace(graph, found)


def _match(node: Node) -> _Sum | None:
    import torch

    aten = torch.ops.aten
    if len(node.args) != 2 or node.kwargs or len(node.all_input_nodes) != 2:
        return None
    base, total = node.all_input_nodes
    if total.target is aten.view.default:
        total = total.all_input_nodes[0]
    if total.target is not aten.sum.dim_IntList or total.args[2:] != (True,):
        return None
    difference = total.all_input_nodes[0]
    if difference.target is not aten.sub.Tensor or difference.args[1:] != (base,):
        return None
    written: Any = difference.args[0]
    dims: Any = total.args[1]
    # A program may contain the same formula, but not in one of its operators.
    names = {_find_source(part) for part in (node, total, difference)}
    if len(names) > 1 or None in names or not dims:
        return None
    count = written.meta["val"].dim()
    positions = tuple(sorted(dim % count for dim in dims))
    return _Sum(node, base, written, positions)


def _find_source(node: Node) -> str | None:
    """Return the name of the operator of the program that a node belongs to, if it is known."""
    sources = node.meta.get("source_fn_stack")
    return sources[-1][0] if sources else None


def _replace(graph: Graph, found: _Sum) -> None:
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V
    from torch.fx.experimental.proxy_tensor import make_fx

    operands = (found.base, found.written)
    shape = found.result.meta["val"].shape

    def select(base: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
        return _select_last(base, written, found.dims).view(shape)

    with V.fake_mode:
        trace = make_fx(select, decomposition_table=select_decomp_table())
        selection = trace(*(operand.meta["val"] for operand in operands)).graph
    kept = {key: found.result.meta[key] for key in _KEPT if key in found.result.meta}
    for node in selection.nodes:
        node.meta |= kept
    places = dict(zip(selection.find_nodes(op="placeholder"), operands, strict=True))
    with graph.inserting_before(found.result):
        result: Any = graph.graph_copy(selection, places)
    found.result.replace_all_uses_with(result)
    graph.erase_node(found.result)


def _select_last(base: torch.Tensor, written: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Return, for each element of the base, the value of the last position that was changed.

    Args:
        base: the values before the write.
        written: the expanded values after it.
        dims: the expanded dimensions; the result has size 1 there.
    """
    import torch

    changed = (written != base) & ~(written.isnan() & base.isnan())
    # Writes go through the positions in order, the last dimension fastest.
    for dim in reversed(dims):
        position = torch.arange(1, written.shape[dim] + 1, device=written.device)
        position = position.view([-1] + [1] * (written.dim() - dim - 1))
        # 0 if no position was changed.
        last = (changed * position).amax(dim, keepdim=True)
        changed = last > 0
        # At most one term is not zero, so the sum is exact.
        terms = torch.where(position == last, written, 0)
        written = terms.sum(dim, keepdim=True, dtype=written.dtype)
    return torch.where(changed, written, base)


_KEPT = ("stack_trace", "source_fn_stack", "seq_nr", "nn_module_stack", "partitioner_tag")
"""Metadata of the sum that the new nodes get."""
