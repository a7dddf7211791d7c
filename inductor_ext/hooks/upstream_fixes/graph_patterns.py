"""Fixes for rewrites of graphs that Inductor applies to dtypes or values that they do not fit."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

from inductor_ext.hooks import context, registry
from inductor_ext.hooks.registry import Hook
from inductor_ext.hooks.upstream_fixes.graph_nodes import keeps_value

_JOINT_GRAPH = "torch._inductor.fx_passes.joint_graph"
_POST_GRAD = "torch._inductor.fx_passes.post_grad"

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
    Hook(
        "zero_factors",
        "replaced",
        (f"{_JOINT_GRAPH}.UniformValueConstantFolder._add_peephole_patterns",),
        "hooks.upstream_fixes.graph_patterns",
        "`x * 0` becomes 0 also where `x` is NaN or infinite, and -0.0 becomes 0.0.",
        relies_on=(f"{_JOINT_GRAPH}.UniformValueConstantFolder.add_node_replacement",),
        until="2.14",
    ),
    Hook(
        "uniform_cumsum",
        "replaced",
        (f"{_POST_GRAD}.pointless_cumsum_replacement",),
        "hooks.upstream_fixes.graph_patterns",
        "`cumsum(full(value))` becomes multiples of `value`, without the conversion of `value` to "
        "the dtype of `full` (until torch 2.14), without a dtype given to `cumsum` (the same), and "
        "of a tensor without dimensions, which is an error.",
        parameters=("match", "shape", "fill_value", "device", "dtype", "dim"),
        relies_on=(f"{_POST_GRAD}.pass_patterns",),
    ),
)


def install_hooks() -> None:
    """Install the dispatchers, once per process."""
    from torch._inductor.fx_passes import joint_graph, post_grad

    check = joint_graph._other_is_broadcasted_in_dim
    replace = post_grad.pointless_cumsum_replacement
    dispatchers: dict[str, registry.MakeDispatcher] = {
        "scaled_softmax": _dispatch_scaled_softmax,
        "uniform_view": _dispatch_uniform_view,
        "zero_factors": _dispatch_peephole_patterns,
        "uniform_cumsum": _dispatch_uniform_cumsum,
    }
    registry.install(HOOKS, dispatchers)
    # The registered patterns refer to the functions themselves.
    for entry in itertools.chain.from_iterable(joint_graph.pass_patterns[1].patterns.values()):
        if entry.extra_check is check:
            entry.extra_check = joint_graph._other_is_broadcasted_in_dim
    for entry in itertools.chain.from_iterable(post_grad.pass_patterns[1].patterns.values()):
        if getattr(entry, "handler", None) is replace:
            entry.handler = post_grad.pointless_cumsum_replacement  # type: ignore[attr-defined]


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


def _dispatch_peephole_patterns(stock: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(stock)
    def _add_peephole_patterns(self: Any) -> None:
        stock(self)
        if context.settings() is None:
            return
        for node in list(self.node_replacements):
            dtype = node.meta["val"].dtype
            if dtype.is_floating_point or dtype.is_complex:
                del self.node_replacements[node]
                del self.node_replacements_shapes[node]
                del self.constant_data_ptrs[node]

    return _add_peephole_patterns


def _dispatch_uniform_cumsum(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def pointless_cumsum_replacement(
        match: Any, shape: Any, fill_value: Any, device: Any, dtype: Any, dim: int
    ) -> None:
        if context.settings() is None or _are_multiples(match, shape, fill_value, dtype):
            stock(match, shape, fill_value, device, dtype, dim)

    return pointless_cumsum_replacement


def _are_multiples(match: Any, shape: Any, value: Any, dtype: Any) -> bool:
    """Whether Inductor's multiples of `value` are the sums of `full(shape, value, dtype)`."""
    import torch

    if not shape or dtype.is_complex:
        return False
    if dtype.is_floating_point:
        return bool(match.output_node().meta["val"].dtype == dtype)
    is_stored_exactly = value in (0, 1) if dtype == torch.bool else isinstance(value, int)
    return is_stored_exactly and match.output_node().meta["val"].dtype == torch.int64
