"""The memory of the tensors that a forward saves for its backward.

The backward graph alone does not tell: every saved tensor is an input of its own. A saved view of a
parameter is not freed when the backward drops it, two saved views of one tensor are freed together,
and a view of a part keeps all of its tensor.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Container, Mapping
from typing import TYPE_CHECKING

from inductor_ext.hooks import context

if TYPE_CHECKING:
    from torch import fx


@dataclasses.dataclass(frozen=True)
class SavedMemory:
    """The memory of a saved tensor."""

    base: str
    """Name of the tensor in the forward graph that owns it."""
    bytes: int | None
    """Its size; None if it depends on a symbol."""
    is_static: bool
    """Whether it belongs to a parameter or a buffer of the model."""


def find_memory(graph: fx.Graph, static_inputs: Container[int]) -> dict[str, SavedMemory]:
    """Map the results of a forward graph to their memory.

    Args:
        graph: a forward graph of ATen operators. An input of the backward graph has the name of the
            result that was saved.
        static_inputs: positions of parameters and buffers among the graph's inputs.
    """
    inputs = enumerate(graph.find_nodes(op="placeholder"))
    static = {node for index, node in inputs if index in static_inputs}
    memory = {}
    for node in graph.output_node().all_input_nodes:
        base = node
        while _is_view(base):
            base = base.all_input_nodes[0]
        memory[node.name] = SavedMemory(base.name, _count_bytes(base), base in static)
    return memory


def current() -> Mapping[str, SavedMemory]:
    """Return `find_memory` of the forward to which the backward that is being compiled belongs."""
    return context.current().saved_memory or {}


def _count_bytes(node: fx.Node) -> int | None:
    """Return the size of a tensor's storage; None if it is not known."""
    import torch

    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    size = value.untyped_storage().nbytes()
    return size if isinstance(size, int) else None


def _is_view(node: fx.Node) -> bool:
    import torch

    if node.target is operator.getitem:
        node = node.all_input_nodes[0]
    # Its operand is always contiguous, and the result shares its memory.
    unsafe_view = torch.ops.aten._unsafe_view.default
    return node.target is unsafe_view or getattr(node.target, "is_view", False)
