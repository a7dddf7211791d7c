"""Questions about FX nodes and dtypes that several fixes ask."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.fx import Graph, Node


def operator_name(node: Node) -> str:
    """Return the name of a node's operator, without namespace and overload; empty if none."""
    packet = getattr(node.target, "overloadpacket", None)
    return getattr(packet, "__name__", "")


def keeps_value(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether every number of a floating-point dtype is one of another."""
    import torch

    if not (source.is_floating_point and target.is_floating_point):
        return False
    narrow, wide = torch.finfo(source), torch.finfo(target)
    return wide.eps <= narrow.eps and wide.max >= narrow.max and wide.tiny <= narrow.tiny


def find_metadata(graph: Graph) -> Any:
    """Return AOTAutograd's metadata of a forward graph.

    None if nothing is known, as for backward graphs and exported programs, or if the graph lacks
    results that the metadata describe.
    """
    from torch._guards import TracingContext

    tracing = TracingContext.try_get()
    metadata = tracing.fw_metadata if tracing is not None else None
    if metadata is None or has_tangents(graph):
        return None
    results = graph.output_node().args[0]
    count = len(results) if isinstance(results, (list, tuple)) else 1
    described = len(metadata.output_info) + metadata.num_intermediate_bases
    return metadata if first_result(metadata) + described <= count else None


def has_tangents(graph: Graph) -> bool:
    """Whether gradients are among the inputs, as in joint and in backward graphs."""
    inputs = graph.find_nodes(op="placeholder")
    return any(str(node.target).startswith("tangents") for node in inputs)


def first_result(metadata: Any) -> int:
    """Return the position of the user's first result among those of a forward graph."""
    return len(metadata.tokens) + int(metadata.num_mutated_inp_runtime_indices)


@dataclasses.dataclass(frozen=True)
class ResultKinds:
    """Positions of a graph's results by whether they share memory in the user's program.

    Attributes:
        views: results that share memory with an input. AOTAutograd replaces them.
        fresh: results that share memory with nothing else.
        saved_from: the first tensor that is saved for the backward graph; None if there is none, or
            if nothing is known, as in backward graphs and exported programs.
    """

    views: tuple[int, ...] = ()
    fresh: tuple[int, ...] = ()
    saved_from: int | None = None


def find_result_kinds(graph: Graph) -> ResultKinds:
    """Return which results share memory, as far as AOTAutograd's metadata tell."""
    metadata = find_metadata(graph)
    if metadata is None:
        return ResultKinds()
    start = first_result(metadata)
    kinds = [info.output_type.name for info in metadata.output_info]
    return ResultKinds(
        views=tuple(
            start + i for i, kind in enumerate(kinds) if kind in ("alias_of_input", "is_input")
        ),
        fresh=tuple(start + i for i, kind in enumerate(kinds) if kind == "non_alias"),
        saved_from=start + len(kinds) + metadata.num_intermediate_bases,
    )


@contextlib.contextmanager
def keep_arguments_of_erased(graph: Graph) -> Iterator[None]:
    """Let nodes that are erased inside the context keep their arguments, which torch replaces by
    None.
    """
    erase = graph.erase_node

    def erase_node(node: Node) -> None:
        arguments = node.args
        erase(node)
        # The property would make it a user of them.
        setattr(node, "_args", arguments)  # noqa: B010

    setattr(graph, "erase_node", erase_node)  # noqa: B010
    try:
        yield
    finally:
        del graph.erase_node
