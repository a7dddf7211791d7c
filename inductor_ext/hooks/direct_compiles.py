"""Compiles that the extension leaves to Inductor although an activation holds, with one warning.

`torch.compiler.precompile` (torch 2.14) returns the source of a module that has to run where this
package may be missing, and the extension's code imports modules of the package. Its graph is
captured through `compile_fx`, where the extension would take part, and compiled by
`compile_fx_inner`, which has no place for the extension's settings. So is a `nested_compile_region`
whose options name compilers of its own.

The dispatchers before these functions only call them where no activation holds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from inductor_ext import config, events
from inductor_ext.hooks import context, registry

__all__ = ["FEATURES", "install_hooks"]

FEATURES: Mapping[str, str] = {
    "precompile": "torch.compiler.precompile",
    "precompile_graph": "torch.compiler.precompile",
    "region_compiler": "a nested_compile_region with a compiler of its own",
}
"""Hook -> what a user calls it by, for the warning."""

Request = Callable[[], "Mapping[str, object] | None"]


def install_hooks(requested: Request) -> None:
    """Put the dispatchers before the functions that the installed torch has, once.

    Args:
        requested: `activate.requested`, the settings that an activation asks for.
    """
    for name, feature in FEATURES.items():
        if registry.has_target(name):
            registry.replace(name, functools.partial(_dispatch, requested, feature))


def _dispatch(requested: Request, feature: str, stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def compile_by_inductor(*args: Any, **kwargs: Any) -> Any:
        overrides = requested()
        if overrides is None or not config.snapshot(overrides).enabled:
            return stock(*args, **kwargs)
        events.warn_once(
            f"direct_compile:{feature}",
            f"{feature} is compiled by Inductor alone: the extension does not take part in it.",
        )
        with context.enter(overrides={**overrides, "enabled": False}):
            return stock(*args, **kwargs)

    return compile_by_inductor
