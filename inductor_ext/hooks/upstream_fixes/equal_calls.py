"""A fix for results of equal calls of one operator, in training.

AOTAutograd merges equal nodes of the graph before it is split into forward and backward, except
nodes whose memory is returned. It does not know the memory of a node with several results: with
`return x.sort()[0], x.sort()[0]` both results are one tensor.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from inductor_ext.hooks import context, registry
from inductor_ext.hooks.registry import Hook

if TYPE_CHECKING:
    from torch.fx import Graph

_SEVERAL = "inductor_ext_several_results"
"""Key of a node's `meta`: its value while AOTAutograd sees one of its results instead."""

HOOKS = (
    Hook(
        "equal_calls",
        "replaced",
        ("torch._functorch.partitioners.fx_graph_cse",),
        "hooks.upstream_fixes.equal_calls",
        "Equal calls of an operator with several results are merged although their results are "
        "returned, and are different tensors in eager mode.",
        parameters=("fx_g",),
    ),
)


def install_hooks() -> None:
    """Install the dispatcher, once per process."""
    registry.install(HOOKS, {"equal_calls": _dispatch_merge})


def _dispatch_merge(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def fx_graph_cse(fx_g: Any, *args: Any, **kwargs: Any) -> Any:
        if context.settings() is None:
            return stock(fx_g, *args, **kwargs)
        _show_results(fx_g)
        merged = stock(fx_g, *args, **kwargs)
        for graph in (fx_g, merged):
            for node in graph.nodes:
                if _SEVERAL in node.meta:
                    node.meta["val"] = node.meta.pop(_SEVERAL)
        return merged

    return fx_graph_cse


def _show_results(graph: Graph) -> None:
    """Let nodes of which a result is returned have that result as their value."""
    from torch._inductor.fx_utils import get_node_storage

    returned = {get_node_storage(node) for node in graph.output_node().all_input_nodes} - {None}
    for node in graph.find_nodes(op="call_function", target=operator.getitem):
        source = node.args[0]
        if _SEVERAL not in source.meta and get_node_storage(node) in returned:
            source.meta[_SEVERAL] = source.meta["val"]
            source.meta["val"] = node.meta["val"]
