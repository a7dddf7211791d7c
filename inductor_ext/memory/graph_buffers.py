"""Facts about the buffers of a graph: aliases, outputs, and which must have their own memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch._inductor import ir
from torch._inductor.codegen import wrapper as wrapper_ir
from torch._inductor.codegen.common import WorkspaceArg
from torch._inductor.scheduler import OutputNode
from torch._inductor.virtualized import V

from inductor_ext.memory import known_ir


def list_inlined_graphs(lines: Iterable[Any]) -> list[Any]:
    """Return the current graph and the subgraphs that are inlined into its function."""
    graphs = [V.graph]
    for line in lines:
        if isinstance(line, wrapper_ir.EnterSubgraphLine) and line.graph not in graphs:
            graphs.append(line.graph)
    return graphs


def find_aliases(graphs: Iterable[Any]) -> dict[str, set[str]]:
    """Map a buffer to the buffers whose memory it may share, as declared by its kernel."""
    direct = {
        buffer.get_name(): set(buffer.get_inputs_that_alias_output())
        for graph in graphs
        for buffer in graph.buffers
        # The body of a template has no name: it is inlined into the kernel.
        if buffer.name is not None
    }
    closed: dict[str, set[str]] = {}

    def close(name: str) -> set[str]:
        if name not in closed:
            closed[name] = set()
            for base in direct.get(name, ()):
                closed[name] |= {base} | close(base)
        return closed[name]

    return {name: bases for name in direct if (bases := close(name))}


def find_unshareable(graphs: Sequence[Any]) -> set[str]:
    """Return the buffers that must have their own memory."""
    unshareable: set[str] = set()
    for graph in graphs:
        unshareable |= set(graph.never_reuse_buffers)
        # From torch 2.15: inputs of effectful operators, which are freed but never reused.
        unshareable |= set(getattr(graph, "never_reuse_but_free_buffers", ()))
        for operation in graph.operations:
            stateful = any(
                isinstance(value, ir.TorchBindObject)
                for value in getattr(operation, "inputs", None) or ()
            )
            keeps = known_ir.may_keep_memory(operation) or known_ir.is_custom(operation)
            if stateful or keeps:
                # `get_read_names` of an operation that is a buffer returns its own name.
                unshareable.update(dep.name for dep in operation.get_read_writes().reads)
                unshareable.update(buffer.get_name() for buffer in operation.get_outputs())
        unshareable |= _find_used_across_streams(graph.scheduler)
    return unshareable | find_pinned(graphs)


def find_pinned(graphs: Iterable[Any]) -> set[str]:
    """Return the buffers in pinned memory.

    A copy between it and a GPU may run after the last line that mentions the buffer. The allocator
    waits for the copy before it gives the memory to another tensor; an arena does not wait.
    """
    return {
        buffer.get_name()
        for graph in graphs
        for buffer in graph.buffers
        if buffer.name is not None and is_pinned(buffer)
    }


def is_pinned(node: Any) -> bool:
    """Whether a buffer is in pinned memory."""
    layout = node.layout if isinstance(node, ir.Buffer) else None
    return isinstance(layout, ir.Layout) and bool(layout.is_pinned)


def _find_used_across_streams(scheduler: Any) -> set[str]:
    """Return the buffers with a user on another stream than their producer (torch >= 2.13)."""
    if not getattr(scheduler, "_multi_stream_nodes", False):
        return set()
    return {
        name
        for name, buffer in scheduler.name_to_buf.items()
        for user in buffer.users
        if _node_stream(scheduler, user.node) != scheduler.get_buf_stream(name)
    }


def _node_stream(scheduler: Any, node: Any) -> int | None:
    """Return the stream of a scheduler node; None if it is not known."""
    if isinstance(node, OutputNode):
        return 0
    stream: int | None = scheduler.node_to_stream.get(node)
    if stream is None and hasattr(scheduler, "get_node_stream"):
        # From torch 2.14: nodes that were created after the streams were assigned.
        stream = scheduler.get_node_stream(node)
    return stream


def list_outputs(wrapper: Any, graphs: Iterable[Any]) -> set[str]:
    """Return the names of the buffers that the function and its inlined subgraphs return."""
    names = set(V.graph._get_output_names(wrapper.get_graph_outputs()))
    for graph in graphs:
        names |= set(graph.get_output_names())
    return names


def owns_memory(node: Any) -> bool:
    """Whether a buffer has memory of its own, as opposed to a view."""
    layout = node.layout if isinstance(node, ir.Buffer) else None
    return isinstance(layout, ir.Layout) and not isinstance(layout, ir.NonOwningLayout)


def has_plain_layout(node: Any) -> bool:
    """Whether a view of an arena can stand for a buffer."""
    if isinstance(node, WorkspaceArg):
        return True
    layout = node.get_layout()
    viewable = not str(layout.dtype).startswith(_NO_VIEWS)
    return layout.offset == 0 and viewable and not node.get_is_pinned()


_NO_VIEWS = ("torch.q", "torch.bits", "torch.float4")
"""Prefixes of dtypes that an arena cannot be viewed as."""
