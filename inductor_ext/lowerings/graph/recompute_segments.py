"""Marks parts of a training graph whose activations the backward computes again.

The forward is divided into segments. Between two segments few bytes are live, as between the layers
of a transformer. `mark_segments` marks the first segments for recomputation: the forward then saves
only what crosses their boundaries, and the backward computes a segment again right before it needs
its activations, as activation checkpointing does (Chen et al., "Training Deep Nets with Sublinear
Memory Cost", 2016). The other segments are left to AOTAutograd's partitioner.

The first segments are the ones whose recomputation lowers the peak: when the backward reaches them,
the activations of the others are free again.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from inductor_ext.lowerings.graph.cleanup import is_pure
from inductor_ext.lowerings.graph.fx_nodes import is_view_operator
from inductor_ext.lowerings.graph.live_values import count_bytes

if TYPE_CHECKING:
    from torch import fx

_MAX_POSITIONS = 160
"""Maximum number of positions between operators that are considered as boundaries."""

_MAX_LIMITS = 200
"""Maximum number of limits for the bytes of a segment that are tried."""

_GLOBAL_SPAN = 0.5
"""A value that is live for a larger share of the forward, such as a mask, crosses most boundaries
wherever they are."""


@dataclasses.dataclass(frozen=True)
class Value:
    """A tensor that the forward computes."""

    start: int
    """Index of the operator that computes it."""
    end: int
    """Index of the last operator of the forward that reads it, or a view of it."""
    bytes: int


def mark_segments(graph: fx.Graph, share: float) -> None:
    """Mark operators of the first segments of the forward, and what crosses their boundaries.

    Args:
        graph: a joint graph of forward and backward, after joint passes.
        share: of the segments to recompute, from 0 to 1. The last segment is never recomputed: its
            backward comes right after it.
    """
    forward = list(list_forward(graph))
    values = _read_values(forward)
    cuts = choose_cuts(len(forward), list(values.values()))
    cuts = cuts[: round(share * len(cuts))]
    if not cuts:
        return
    crossing = {
        node
        for node, value in values.items()
        if any(value.start <= cut < value.end for cut in cuts) and not _is_global(value, forward)
    }
    from torch.utils.checkpoint import CheckpointPolicy

    returned = set(graph.output_node().all_input_nodes)
    needed_by_global = _find_global_sources(values, forward)
    for node, index in _number(forward).items():
        # The partitioner decides about operators that may return something else the next time.
        if index > cuts[-1] or not _may_recompute(node):
            continue
        if node in crossing or node in returned:
            # A tuple is not a tensor that can be saved, but its elements are.
            if node in values:
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        elif node not in needed_by_global:
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
            node.meta["ac_graph_id"] = bisect.bisect_left(cuts, index)


def _may_recompute(node: fx.Node) -> bool:
    """Whether an operator, or the one whose result it is an element of, returns the same again."""
    if node.target is operator.getitem:
        return is_pure(node.all_input_nodes[0])
    return is_pure(node)


def choose_cuts(count: int, values: Sequence[Value]) -> list[int]:
    """Choose boundaries between segments; the cut `i` is behind the operator `i`.

    They minimize the bytes that cross boundaries plus the bytes that the largest segment computes:
    what the forward saves, and what the backward needs at most to compute a segment again.

    Args:
        count: number of operators of the forward.
        values: what they compute.

    Returns:
        The boundaries in order; empty if saving everything needs no more.
    """
    local = [value for value in values if value.end - value.start <= _GLOBAL_SPAN * count]
    computed = [0] * count
    change = [0] * (count + 1)
    for value in local:
        computed[value.start] += value.bytes
        change[value.start] += value.bytes
        change[max(value.end, value.start)] -= value.bytes
    crossing = list(itertools.accumulate(change[:count]))
    total = list(itertools.accumulate(computed))
    if not total or not total[-1]:
        return []
    positions = _list_positions(crossing, total)
    best: list[int] = []
    best_cost = limit = total[-1]
    while (found := _cut_below(positions, crossing, total, limit)) is not None:
        cuts, saved = found
        bounds = [0, *(total[cut] for cut in cuts), total[-1]]
        largest = max(end - start for start, end in itertools.pairwise(bounds))
        if saved + largest < best_cost:
            best, best_cost = cuts, saved + largest
        limit = largest - max(1, total[-1] // _MAX_LIMITS)
    return best


def _list_positions(crossing: Sequence[int], total: Sequence[int]) -> list[int]:
    """Return the positions with the fewest crossing bytes, one for each equal part of the bytes."""
    parts: dict[int, int] = {}
    for position in range(len(crossing) - 1):
        part = int(_MAX_POSITIONS * total[position] / (total[-1] + 1))
        if part not in parts or crossing[position] <= crossing[parts[part]]:
            parts[part] = position
    return sorted(parts.values())


def _cut_below(
    positions: Sequence[int], crossing: Sequence[int], total: Sequence[int], limit: int
) -> tuple[list[int], int] | None:
    """Return the cuts with the fewest crossing bytes such that no segment computes more than a
    limit, and these bytes; None if there are none.

    Args:
        positions: where cuts may be.
        crossing: bytes that are live behind each operator.
        total: bytes that are computed up to each operator.
        limit: in bytes.
    """
    starts = [0, *(total[position] for position in positions)]
    ends = [*positions, len(total) - 1]
    costs: list[int | None] = [0]
    previous = [0]
    for index, end in enumerate(ends):
        options = [
            (cost, before)
            for before, cost in enumerate(costs)
            if cost is not None and total[end] - starts[before] <= limit
        ]
        if options:
            cost, before = min(options)
            costs.append(cost + (crossing[end] if index < len(positions) else 0))
        else:
            before = 0
            costs.append(None)
        previous.append(before)
    if costs[-1] is None:
        return None
    cuts = []
    index = previous[-1]
    while index > 0:
        cuts.append(positions[index - 1])
        index = previous[index]
    return cuts[::-1], costs[-1]


def list_forward(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield the operators of the forward, in order."""
    backward = {node for node in graph.find_nodes(op="placeholder") if "tangents" in node.name}
    for node in graph.nodes:
        tag = node.meta.get("partitioner_tag", "")
        if "backward" in tag or not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
        elif node.op == "call_function":
            yield node


def _number(forward: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Number the operators; elements of a tuple have the number of the operator that returns it."""
    place: dict[fx.Node, int] = {}
    for index, node in enumerate(forward):
        is_element = node.target is operator.getitem
        place[node] = place.get(node.all_input_nodes[0], index) if is_element else index
    return place


def _read_values(forward: Sequence[fx.Node]) -> dict[fx.Node, Value]:
    """Return the tensors with memory of their own that the forward computes."""
    import torch

    place = _number(forward)
    ends: dict[fx.Node, int] = {}
    # Users come later, so that their own last use is known.
    for node in reversed(forward):
        uses = [
            ends[user] if is_view_operator(user) else place[user]
            for user in node.users
            if user in place
        ]
        ends[node] = max(uses, default=place[node])
    values = {}
    for node in forward:
        value: Any = node.meta.get("val")
        if isinstance(value, torch.Tensor) and not is_view_operator(node):
            size = count_bytes(node)
            if size:
                values[node] = Value(place[node], ends[node], size)
    return values


def _is_global(value: Value, forward: Sequence[fx.Node]) -> bool:
    return value.end - value.start > _GLOBAL_SPAN * len(forward)


def _find_global_sources(values: dict[fx.Node, Value], forward: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the values that most of the forward reads, and the operators that only they need.

    The partitioner decides whether they are saved.
    """
    found = {node for node, value in values.items() if _is_global(value, forward)}
    for node in reversed(forward):
        if node.users and all(user in found for user in node.users):
            found.add(node)
    return found
