"""Fixes for rewrites of the joint graph that Inductor applies to dtypes that they do not fit."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

from inductor_ext.hooks import context, registry
from inductor_ext.hooks.registry import Hook
from inductor_ext.hooks.upstream_fixes.graph_nodes import keeps_value

_JOINT_GRAPH = "torch._inductor.fx_passes.joint_graph"

HOOKS = (
    Hook(
        "scaled_softmax",
        "replaced",
        (f"{_JOINT_GRAPH}._other_is_broadcasted_in_dim",),
        "hooks.upstream_fixes.graph_patterns",
        "Inductor computes `x * s - amax(x * s)` as `(x - amax(x)) * s`. That is another number if "
        "`x * s` overflows in integers, or if it is rounded to integers or to a narrower dtype "
        "before the maximum is taken.",
        parameters=("match",),
        relies_on=(f"{_JOINT_GRAPH}.pass_patterns",),
    ),
    Hook(
        "uniform_view",
        "replaced",
        (f"{_JOINT_GRAPH}.UniformValueConstantFolder._deduce_value",),
        "hooks.upstream_fixes.graph_patterns",
        "A tensor of one value is folded through a view in a dtype of another size, in which it "
        "has several values: `full(1j)`, which is added as real and imaginary parts, becomes 0.",
        parameters=("node",),
        until="2.12",
    ),
)


def install_hooks() -> None:
    """Install the dispatchers, once per process."""
    from torch._inductor.fx_passes import joint_graph

    stock = joint_graph._other_is_broadcasted_in_dim
    dispatchers = {
        "scaled_softmax": _dispatch_scaled_softmax,
        "uniform_view": _dispatch_uniform_view,
    }
    registry.install(HOOKS, dispatchers)
    # The registered patterns refer to the function itself.
    for entry in itertools.chain.from_iterable(joint_graph.pass_patterns[1].patterns.values()):
        if entry.extra_check is stock:
            entry.extra_check = joint_graph._other_is_broadcasted_in_dim


def _dispatch_scaled_softmax(stock: Callable[[Any], bool]) -> Callable[[Any], bool]:
    @functools.wraps(stock)
    def _other_is_broadcasted_in_dim(match: Any) -> bool:
        if context.settings() is not None and not _has_float_scale(match):
            return False
        return stock(match)

    return _other_is_broadcasted_in_dim


def _has_float_scale(match: Any) -> bool:
    """Whether `x * s` or `x / s` is computed in the floating-point dtype of `x`, and not rounded.

    A conversion of the result to a wider dtype does not round it.
    """
    import torch
    from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as Promotion
    from torch._prims_common import elementwise_dtypes

    x, scale = (_value(match.kwargs[name]) for name in ("inp", "other"))
    if not isinstance(x, torch.Tensor):
        return False
    if isinstance(scale, torch.Tensor) and not scale.dtype.is_floating_point:
        return False
    _, product = elementwise_dtypes(x, scale, type_promotion_kind=Promotion.DEFAULT)
    return product == x.dtype and keeps_value(product, match.kwargs.get("dtype", product))


def _value(argument: Any) -> Any:
    import torch

    return argument.meta["val"] if isinstance(argument, torch.fx.Node) else argument


def _dispatch_uniform_view(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def _deduce_value(self: Any, node: Any) -> Any:
        import torch

        if context.settings() is not None and node.target is torch.ops.aten.view.dtype:
            source, target = _value(node.args[0]), node.meta["val"]
            if source.dtype.itemsize != target.dtype.itemsize:
                return self.unknown_value
        return stock(self, node)

    return _deduce_value
