"""Fix for gradients of views whose base is transposed in-place later, as by `x.t_()`.

AOTAutograd computes the gradient of a view with the sizes that its base has at the end of the
graph. That raises an error, or, if the base is square, gives the transposed gradient. Here an
intermediate tensor is not changed: what follows the operator uses a new view instead.

Inputs of the graph keep the operator, because the caller sees their new sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from inductor_ext.hooks import context, registry
from inductor_ext.hooks.registry import Hook

if TYPE_CHECKING:
    from torch.fx import Graph, Node

HOOKS = (
    Hook(
        "inplace_views",
        "replaced",
        ("torch._inductor.compile_fx._recursive_pre_grad_passes",),
        "hooks.upstream_fixes.inplace_views",
        "AOTAutograd computes the gradient of a view with the sizes that its base has after "
        "`t_()`. Operators that change the sizes of an intermediate tensor in-place become views.",
        parameters=("gm",),
    ),
)

_VIEWS = frozenset(
    {"t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "as_strided_"}
)
"""Methods that change the sizes or strides of a tensor in-place."""


def install_hooks() -> None:
    """Install the dispatcher, once per process."""
    registry.install(HOOKS, {"inplace_views": _dispatch_pre_grad_passes})


def _dispatch_pre_grad_passes(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def _recursive_pre_grad_passes(gm: Any, *args: Any, **kwargs: Any) -> Any:
        if context.settings() is not None and replace_inplace_views(gm.graph):
            gm.recompile()
        return stock(gm, *args, **kwargs)

    return _recursive_pre_grad_passes


def replace_inplace_views(graph: Graph) -> bool:
    """Replace methods that change the sizes of intermediate tensors in-place by views.

    Args:
        graph: of dynamo. Nodes that are the same tensor, such as the result of `x.add_(1)` and `x`,
            have the same object as example value.

    Returns:
        Whether the graph has changed.
    """
    import torch

    if not any(_is_inplace_view(node) for node in graph.nodes):
        return False
    inputs = {_tensor_of(node) for node in graph.nodes if node.op in ("placeholder", "get_attr")}
    views: dict[int, Node] = {}
    """The view that has replaced a tensor."""

    def resolve(node: Node) -> Node:
        return views.get(_tensor_of(node), node)

    for node in list(graph.nodes):
        node.args = torch.fx.map_arg(node.args, resolve)
        node.kwargs = torch.fx.map_arg(node.kwargs, resolve)
        if _is_inplace_view(node) and _tensor_of(node) not in inputs:
            with graph.inserting_before(node):
                view = graph.call_method(node.target.removesuffix("_"), node.args, node.kwargs)
            view.meta = dict(node.meta)
            views[_tensor_of(node)] = view
            node.replace_all_uses_with(view)
            graph.erase_node(node)
    return bool(views)


def _is_inplace_view(node: Node) -> bool:
    return node.op == "call_method" and node.target in _VIEWS and "example_value" in node.meta


def _tensor_of(node: Node) -> int:
    """Return a number that the nodes that are the same tensor have in common."""
    value = node.meta.get("example_value")
    return id(node if value is None else value)
