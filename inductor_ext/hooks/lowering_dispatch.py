"""Hooks into Inductor's table of lowerings: a dispatcher per operator that the extension lowers."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from inductor_ext.hooks import context, lowering_table
from inductor_ext.hooks.registry import Hook

HOOKS = (
    Hook(
        "lowerings",
        "replaced",
        ("torch._inductor.lowering.lowerings",),
        "hooks.lowering_dispatch",
        "The table, which is process-wide, gets a dispatcher for every operator that the "
        "extension has a lowering for.",
        relies_on=("torch._inductor.lowering.make_pointwise",),
    ),
)

_lock = threading.Lock()
_stock_lowerings: dict[Any, Callable[..., Any]] = {}
"""Maps an operator to the lowering that was in the table before."""


def install_hooks() -> None:
    """Install a dispatcher over the lowering of every operator that is registered so far."""
    from torch._inductor import lowering as module

    with _lock:
        for operator in lowering_table.registered():
            if operator not in _stock_lowerings:
                _stock_lowerings[operator] = module.lowerings[operator]
                module.lowerings[operator] = _dispatch(operator)


def _dispatch(operator: Any) -> Callable[..., Any]:
    stock = _stock_lowerings[operator]

    @functools.wraps(stock)
    def lower(*args: Any, **kwargs: Any) -> Any:
        lowering = lowering_table.registered().get(operator)
        if lowering is None or context.settings() is None:
            return stock(*args, **kwargs)
        return lowering(stock, *args, **kwargs)

    return lower
