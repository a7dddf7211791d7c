"""Fixes of joint graphs: forward and backward in one FX graph, before torch separates them.

Graphs without a backward go through the same passes of Inductor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from inductor_ext.hooks import context, registry
from inductor_ext.hooks.registry import Hook

HOOKS = (
    Hook(
        "joint_graphs",
        "replaced",
        ("torch._inductor.compile_fx._recursive_joint_graph_passes",),
        "hooks.upstream_fixes.joint_graphs",
        "A tensor that is compared with a value selected from it must be in memory, and the "
        "comparison must not be computed again in the backward graph. Strides and offsets of "
        "operands are recorded before the passes, which remove additions of zeros, for example. "
        "Inputs that the forward graph overwrites must not be saved for the backward. Writes into "
        "expanded tensors are sums, which are wrong if several positions were written.",
        parameters=("gm",),
        relies_on=(
            "torch.fx.passes.reinplace._is_view_op",
            "torch.utils.checkpoint.CheckpointPolicy",
        ),
        upstream="186799, 195214, 168358",
    ),
)


def install_hooks() -> None:
    """Install the dispatcher, once per process."""
    registry.install(HOOKS, {"joint_graphs": _dispatch_joint_passes})


def _dispatch_joint_passes(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def _recursive_joint_graph_passes(gm: Any, *args: Any, **kwargs: Any) -> Any:
        if context.settings() is None:
            return stock(gm, *args, **kwargs)
        from inductor_ext.hooks.upstream_fixes import (
            expanded_writes,
            graph_strides,
            saved_inputs,
            selected_values,
        )

        expanded_writes.replace_sums(gm.graph)
        # The passes remove operators, such as the addition of zeros, that copy.
        graph_strides.record_layouts(gm.graph)
        result = stock(gm, *args, **kwargs)
        selected_values.keep_selected_values(result.graph)
        saved_inputs.copy_overwritten_inputs(result.graph)
        return result

    return _recursive_joint_graph_passes
