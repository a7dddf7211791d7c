"""A fix for the mean of an empty tensor where it is computed along with a variance."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from inductor_ext.hooks import context, registry
from inductor_ext.hooks.registry import Hook

HOOKS = (
    Hook(
        "empty_mean",
        "replaced",
        ("torch._inductor.lowering.use_two_step_variance",),
        "hooks.upstream_fixes.empty_reductions",
        "Welford's algorithm begins with a mean of 0, which is its result if there is no element; "
        "it is NaN if the sum is divided by the number of elements.",
        parameters=("x", "axis"),
        upstream="197108",
    ),
)


def install_hooks() -> None:
    """Install the dispatchers, once per process."""
    registry.install(HOOKS, {"empty_mean": _dispatch_empty_mean})


def _dispatch_empty_mean(stock: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(stock)
    def use_two_step_variance(x: Any, axis: Any, *args: Any, **kwargs: Any) -> bool:
        if context.settings() is not None and _may_be_empty(x, axis):
            return True
        return stock(x, axis, *args, **kwargs)

    return use_two_step_variance


def _may_be_empty(x: Any, axis: Any) -> bool:
    """Whether a reduction has no elements, or a number of them that only the run determines."""
    from torch._inductor.lowering import _validate_reduction_axis
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    sizes = x.get_size()
    reduced = [sizes[i] for i in _validate_reduction_axis(x, axis)]
    return any(size == 0 for size in reduced) or bool(free_unbacked_symbols(reduced))
