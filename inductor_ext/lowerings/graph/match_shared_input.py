"""Matching of matmuls with the same operand A, such as Q, K and V (`gemm_fuse_shared_input`).

No matmul of a group is computed from another one of it, also not through other fusions.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from inductor_ext.lowerings.graph.cleanup import is_pure
from inductor_ext.lowerings.graph.fusible_matmuls import FusibleMatmuls, group_key
from inductor_ext.lowerings.graph.fusion import Fusion, is_written_between
from inductor_ext.lowerings.graph.fx_nodes import is_read_by_strides
from inductor_ext.lowerings.graph.rewrite import computed_after

if TYPE_CHECKING:
    from torch import fx

MOST_PARTS = 8
"""Limit on the weights of one launch: every tile selects its weight among them."""


def find_shared_input_fusions(
    matmuls: FusibleMatmuls, others: Sequence[Fusion], used: set[fx.Node]
) -> list[Fusion]:
    """Return groups of compatible matmuls with the same operand A.

    Args:
        matmuls: of the graph.
        others: other fusions that may be applied.
        used: nodes of matmuls that are not to be fused.
    """
    groups: dict[Hashable, list[fx.Node]] = {}
    for node, matmul in matmuls.by_output.items():
        # The results share one allocation, so their strides change.
        if node not in used and not is_read_by_strides(node):
            groups.setdefault(group_key(matmul), []).append(node)
    fusions: list[Fusion] = []
    for group in groups.values():
        while group:
            selected = _independent(matmuls, group, [*others, *fusions])
            group = [node for node in group if node not in selected]
            fusion = _fuse(matmuls, selected)
            if fusion is not None:
                fusions.append(fusion)
    return fusions


def _independent(
    matmuls: FusibleMatmuls, group: Sequence[fx.Node], fusions: Sequence[Fusion]
) -> list[fx.Node]:
    """Return the first matmul of a group and others that can be computed together with it.

    Args:
        group: matmuls in graph order.
        fusions: other fusions that may be applied.
    """
    selected = [group[0]]
    for node in group[1:]:
        members = [*selected, node]
        nodes = {node for member in members for node in matmuls.by_output[member].nodes}
        if (
            len(members) <= MOST_PARTS
            and not is_written_between(nodes)
            and not _is_cyclic(matmuls, members, fusions)
        ):
            selected = members
    return selected


def _is_cyclic(
    matmuls: FusibleMatmuls, nodes: Sequence[fx.Node], fusions: Sequence[Fusion]
) -> bool:
    """Whether one of the nodes is computed from another if all fusions are applied."""
    whole: dict[fx.Node, set[fx.Node]] = {}
    for fusion in fusions:
        for node in fusion.nodes:
            whole.setdefault(node, set()).update(fusion.nodes)
    spans = [(fusion.nodes[0], fusion.nodes[-1]) for fusion in fusions]
    # No fusion spans this position.
    begin = nodes[0]
    while spanning := [first for first, last in spans if first < begin <= last]:
        begin = min(spanning)
    visited: set[fx.Node] = set()
    pending = [source for node in nodes for source in node.all_input_nodes]
    while pending:
        node = pending.pop()
        if node in visited or node < begin:
            continue
        if node in nodes:
            return True
        together = whole.get(node, {node})
        visited.update(together)
        pending.extend(node for member in together for node in member.all_input_nodes)
    return False


def _fuse(matmuls: FusibleMatmuls, nodes: Sequence[fx.Node]) -> Fusion | None:
    """Return matmuls with the same operand A as one fusion, at the position of the first."""
    problem = matmuls.common_problem(nodes, halves=False) if len(nodes) > 1 else None
    if problem is None:
        return None
    fusion = matmuls.fuse(problem, nodes)
    hoisted = computed_after(nodes[0], fusion.inputs)
    if not all(node.op != "call_function" or _is_movable(node, nodes[0]) for node in hoisted):
        return None
    return fusion


def _is_movable(node: fx.Node, place: fx.Node) -> bool:
    """Whether a node can be moved to the position of another."""
    return is_pure(node) and not is_written_between((node, place))
