"""Compiles that the extension leaves to Inductor although an activation holds, with one warning.

`torch.compiler.precompile` (torch 2.14) returns the source of a module that has to run where this
package may be missing, and the extension's code imports modules of the package. It also compiles by
`compile_fx_inner`, which has no place for the extension's settings. So does a
`nested_compile_region` whose options name compilers of its own.

`compile_by_inductor` is put before these functions. Without an activation it only calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from inductor_ext import events

__all__ = ["FUNCTIONS", "compile_by_inductor"]

FUNCTIONS: Mapping[tuple[str, str], str] = {
    ("torch._functorch.aot_autograd", "compile_to_python"): "torch.compiler.precompile",
    ("torch._inductor", "compile_to_python"): "torch.compiler.precompile",
    (
        "torch._higher_order_ops.invoke_subgraph",
        "invoke_subgraph_inductor_compile",
    ): "a nested_compile_region with a compiler of its own",
}
"""Module and function -> what calls it, for the warning. torch 2.11 to 2.13 lack the first two."""


def compile_by_inductor(stock: Callable[..., Any], feature: str, *args: Any, **kwargs: Any) -> Any:
    """Call a compile function of Inductor's as if no activation held.

    Args:
        stock: the function.
        feature: what calls it, as in `FUNCTIONS`.
        args, kwargs: its arguments.
    """
    from inductor_ext import activation, config

    overrides = activation.requested()
    if overrides is None or not config.snapshot(overrides).enabled:
        return stock(*args, **kwargs)
    events.warn_once(
        f"direct_compile:{feature}",
        f"{feature} is compiled by Inductor alone: the extension does not take part in it.",
    )
    with activation.activate(enabled=False):
        return stock(*args, **kwargs)
