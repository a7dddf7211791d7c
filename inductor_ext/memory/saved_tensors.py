"""Which of the tensors that a forward saves for its backward share memory.

The backward graph alone does not tell: every saved tensor is an input of its own. A saved view of a
parameter is not freed when the backward drops it, and two saved views of one tensor are freed
together.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING

from inductor_ext.hooks import context

if TYPE_CHECKING:
    from torch import fx


def find_bases(graph: fx.Graph) -> dict[str, str]:
    """Map the results of a forward graph that are views to the tensors whose memory they share.

    Args:
        graph: a forward graph of ATen operators. An input of the backward graph has the name of the
            result that was saved.
    """
    bases = {}
    for node in graph.output_node().all_input_nodes:
        base = node
        while _is_view(base):
            base = base.all_input_nodes[0]
        if base is not node:
            bases[node.name] = base.name
    return bases


def current_bases() -> Mapping[str, str]:
    """Return `find_bases` of the forward to which the backward that is being compiled belongs."""
    return context.current().saved_bases or {}


def _is_view(node: fx.Node) -> bool:
    import torch

    if node.target is operator.getitem:
        node = node.all_input_nodes[0]
    # Its operand is always contiguous, and the result shares its memory.
    unsafe_view = torch.ops.aten._unsafe_view.default
    return node.target is unsafe_view or getattr(node.target, "is_view", False)
