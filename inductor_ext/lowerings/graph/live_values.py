"""Estimates how many bytes of a graph's values are live at each of its nodes.

The estimate is for comparing graphs and for finding the values that make the peak, before Inductor
lowers a graph. It assumes that nodes run in order. A value has memory of its own unless it is a
view, or is computed by the loops that read it, as Inductor does with a pointwise operator that
reads little. What `aten.cat` joins is written into its result. No operator overwrites its operands,
as Inductor's may or may not do. Inputs of the graph count nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

from inductor_ext.lowerings.graph import operator_kinds

if TYPE_CHECKING:
    from torch import fx

_MAX_READS = 4
"""A pointwise operator that reads more values, and whose result is read more than once, gets
memory of its own, as with Inductor's `realize_reads_threshold`."""

REALIZED = "inductor_realize_to_strides"
"""Key in `node.meta` by which Inductor gives a value memory of its own."""


@dataclasses.dataclass(frozen=True)
class LiveValues:
    """The live values of a graph."""

    nodes: list[fx.Node]
    """All nodes of the graph."""
    place: dict[fx.Node, int]
    """The index of each node."""
    peak: int
    """Bytes."""
    at_peak: dict[fx.Node, int]
    """Bytes of each value that is live at the peak."""
    roots: dict[fx.Node, fx.Node]
    """The value whose memory a node is in, for each node with memory."""
    reads: dict[fx.Node, set[fx.Node]]
    """The values whose memory is read to read a node: itself, if it has memory of its own."""

    def find_at_peak(self, node: fx.Node) -> int:
        """Return the bytes of a node that reads what is live at the peak, or is in its memory.

        A node without memory of its own would get it if it were read elsewhere.
        """
        if self.reads.get(node, set()).isdisjoint(self.at_peak):
            return 0
        return count_bytes(node)


def estimate(graph: fx.Graph) -> LiveValues:
    """Estimate the peak of a graph and what is live there.

    Args:
        graph: a graph of ATen operators with fake tensors in `meta["val"]`.
    """
    place = {node: index for index, node in enumerate(graph.nodes)}
    roots: dict[fx.Node, fx.Node] = {}
    reads: dict[fx.Node, set[fx.Node]] = {}
    first: dict[fx.Node, int] = {}
    last: dict[fx.Node, int] = {}
    for node in place:
        sources = set().union(*(reads.get(source, ()) for source in node.all_input_nodes))
        for source in sources:
            last[source] = place[node]
        if node.op != "call_function" or not _has_tensor(node):
            continue
        if operator_kinds.is_view_or_part(node):
            reads[node] = sources
            root = roots.get(node.all_input_nodes[0])
            if root is not None:
                roots[node] = root
        elif _is_inlined(node, sources):
            reads[node] = sources
        else:
            reads[node] = {node}
            roots[node] = node
            first[node] = last[node] = place[node]
            if _writes_in_place(node):
                for source in dict.fromkeys(node.all_input_nodes):
                    if source in first and set(source.users) == {node}:
                        first[node] = min(first[node], first.pop(source))
    return _find_peak(place, first, last, roots, reads)


def _find_peak(
    place: dict[fx.Node, int],
    first: dict[fx.Node, int],
    last: dict[fx.Node, int],
    roots: dict[fx.Node, fx.Node],
    reads: dict[fx.Node, set[fx.Node]],
) -> LiveValues:
    sizes = {node: count_bytes(node) for node in first}
    change = [0] * (len(place) + 1)
    for node, size in sizes.items():
        change[first[node]] += size
        change[last[node] + 1] -= size
    profile = list(itertools.accumulate(change[: len(place)]))
    peak = max(profile, default=0)
    step = profile.index(peak) if profile else 0
    live = {node: size for node, size in sizes.items() if first[node] <= step <= last[node]}
    return LiveValues(list(place), place, peak, live, roots, reads)


def count_bytes(node: fx.Node) -> int:
    """Return the bytes of a node's tensors, at the size hints."""
    import torch
    from torch.utils import _pytree as pytree

    total = 0
    for value in pytree.tree_leaves(node.meta.get("val")):
        if isinstance(value, torch.Tensor):
            count: Any = value.numel()
            total += (count if isinstance(count, int) else count.node.hint or 0) * value.itemsize
    return total


def _has_tensor(node: fx.Node) -> bool:
    import torch

    value: Any = node.meta.get("val")
    return isinstance(value, torch.Tensor) or (
        isinstance(value, (tuple, list)) and any(isinstance(part, torch.Tensor) for part in value)
    )


def _is_inlined(node: fx.Node, sources: set[fx.Node]) -> bool:
    """Whether the loops that read a value compute it."""
    if not (operator_kinds.is_pointwise(node) or operator_kinds.is_creation(node)):
        return False
    if node.meta.get(REALIZED):
        return False
    if len(node.users) > 1 and len(sources) >= _MAX_READS:
        return False
    return all(_is_read_by_loops(user) for user in node.users)


def _is_read_by_loops(user: fx.Node) -> bool:
    if operator_kinds.is_view(user):
        return all(_is_read_by_loops(next_user) for next_user in user.users)
    return operator_kinds.is_fusible(user)


def _writes_in_place(node: fx.Node) -> bool:
    import torch

    return node.target is torch.ops.aten.cat.default
