"""Cleanup of a graph before matching."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from inductor_ext.lowerings.graph.fx_nodes import is_view

if TYPE_CHECKING:
    from torch import fx


def clean_graph(graph: fx.Graph) -> None:
    """Remove dead calls and duplicate views of one tensor.

    A dead call would count as a user. Duplicate views would become separate inputs of a branch, in
    which matmuls that share their input would not be seen to share it.
    """
    for node in reversed(graph.nodes):
        if not node.users and is_pure(node):
            graph.erase_node(node)
    views: dict[object, fx.Node] = {}
    for node in list(graph.nodes):
        if is_view(node):
            first = views.setdefault((node.target, str(node.args)), node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)


def is_pure(node: fx.Node) -> bool:
    """Whether a call can be removed or moved among others."""
    import torch

    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target is operator.getitem
    return (
        target.namespace in ("aten", "prims")
        and not target._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in target.tags
        and not node.is_impure()
    )


def erase_unused(node: fx.Node) -> None:
    """Erase a node without users, and what only it used."""
    pending = [node]
    while pending:
        unused = pending.pop()
        if is_pure(unused) and not (unused.users or unused._erased):
            pending += unused.all_input_nodes
            unused.graph.erase_node(unused)
