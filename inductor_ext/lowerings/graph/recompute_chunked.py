"""Marks large values of a training graph that the backward computes again, in chunks.

A forward that computes a value in chunks must not save it for the backward, where it would be
whole. The logits of a language model are the case in mind: the backward computes them again from
the last hidden state, chunk by chunk, with one matmul more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inductor_ext.lowerings.graph import chunks
from inductor_ext.lowerings.graph.cleanup import is_pure
from inductor_ext.lowerings.graph.live_values import count_bytes, estimate
from inductor_ext.lowerings.graph.recompute_segments import list_forward

if TYPE_CHECKING:
    from torch import fx

_SEGMENT = 1 << 30
"""Number of the marked values' segment, behind those of `recompute_segments`: what it reads of them
is saved."""


def mark_chunked_values(graph: fx.Graph, saved: int) -> None:
    """Mark the large values of the forward around which a graph can be computed in chunks.

    Args:
        graph: a joint graph of forward and backward, after joint passes. Nothing is marked in a
            graph without a backward.
        saved: bytes by which the peak should fall.
    """
    from torch.utils.checkpoint import CheckpointPolicy

    forward = {node.name: node for node in list_forward(graph)}
    if not any("tangents" in node.name for node in graph.find_nodes(op="placeholder")):
        return
    peak = estimate(graph).peak
    _, regions = chunks.divide(graph, peak - saved, chunks.COUNTS[-1])
    returned = set(graph.output_node().all_input_nodes)
    for name in (name for names in regions for name in names):
        node = forward.get(name)
        if node is None or node in returned or not is_pure(node):
            continue
        if count_bytes(node) >= chunks.LARGE * peak:
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
            node.meta["ac_graph_id"] = _SEGMENT
