"""Fix for gradients that depend on an input which the forward graph overwrites.

A buffer that is read and then updated, such as a running statistic, gets its new value by a copy at
the end of the forward graph. torch's partitioner may save the buffer itself for the backward, which
then computes with the new value. An input that requires gradients gets it after the graph; then the
backward raises an error. Here everything reads a copy of the input that must be saved, unless the
backward needs only what is computed from it. Inductor removes the copy if it is not saved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.fx import Graph, Node

IS_NEEDED = "inductor_ext_copy_of_overwritten"
"""Key of a node's `meta`: whether the node is a copy that must not be removed if it is a result."""


def copy_overwritten_inputs(graph: Graph) -> None:
    """Let a joint graph read copies of the inputs that it overwrites."""
    import torch
    from torch._inductor.virtualized import V

    inputs = graph.find_nodes(op="placeholder")
    overwritten = dict.fromkeys(_find_written_later(graph, inputs))
    for write in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        target: Any = write.args[0]
        if target.op == "placeholder" and isinstance(target.meta.get("val"), torch.Tensor):
            overwritten[target] = None
    if not overwritten or not any("tangents" in str(node.target) for node in inputs):
        return
    for node in overwritten:
        readers = [user for user in node.users if not _only_writes(user, node)]
        if not readers:
            continue
        with graph.inserting_after(inputs[-1]):
            copy = graph.call_function(torch.ops.aten.clone.default, (node,))
        with V.fake_mode:
            copy.meta["val"] = torch.ops.aten.clone.default(node.meta["val"])
        if copy.meta["val"].stride() != node.meta["val"].stride():
            # Views of the input are recorded with its strides.
            graph.erase_node(copy)
            _save_results(readers)
            continue
        _must_save(copy)
        copy.meta[IS_NEEDED] = True
        for reader in readers:
            reader.replace_input_with(node, copy)


def _find_written_later(graph: Graph, inputs: list[Node]) -> list[Node]:
    """Return the inputs that AOTAutograd overwrites with results of the forward graph."""
    results = graph.output_node().meta.get("desc") or ()
    written = [result.mutated_input for result in results if hasattr(result, "mutated_input")]
    return [node for node in inputs if node.meta.get("desc") in written]


def _only_writes(user: Node, node: Node) -> bool:
    """Whether a user overwrites a node without reading it, or returns it."""
    import torch

    if user.op == "output":
        return True
    is_copy = user.target is torch.ops.aten.copy_.default
    return is_copy and user.args[0] is node and node not in user.args[1:]


def _save_results(readers: list[Node]) -> None:
    """Keep what is computed from an input from being computed again in the backward."""
    from torch.fx.passes.reinplace import _is_view_op

    pending = list(readers)
    while pending:
        reader = pending.pop()
        if _is_view_op(reader.target):
            pending += reader.users
        elif reader.op == "call_function":
            _must_save(reader)


def _must_save(node: Node) -> None:
    from torch.utils.checkpoint import CheckpointPolicy

    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
