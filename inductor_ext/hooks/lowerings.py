"""Hooks into Inductor's table of lowerings: a dispatcher per operator that the extension lowers."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from inductor_ext.hooks import lowering_table, scope

_lock = threading.Lock()
_replaced: dict[Any, Callable[..., Any]] = {}
"""Maps an operator to the lowering that was in the table before."""


def install_hooks() -> None:
    """Install a dispatcher over the lowering of every operator that is registered so far."""
    from torch._inductor import lowering as module

    # Importing these modules registers their lowerings.
    from inductor_ext.lowerings import aten, fused  # noqa: F401
    from inductor_ext.lowerings.pointwise import erf  # noqa: F401
    from inductor_ext.memory import out_variants  # noqa: F401

    with _lock:
        for operator in lowering_table.registered():
            if operator not in _replaced:
                _replaced[operator] = module.lowerings[operator]
                module.lowerings[operator] = _dispatch(operator)


def _dispatch(operator: Any) -> Callable[..., Any]:
    stock = _replaced[operator]

    @functools.wraps(stock)
    def lower(*args: Any, **kwargs: Any) -> Any:
        lowering = lowering_table.registered().get(operator)
        if lowering is None or scope.settings() is None:
            return stock(*args, **kwargs)
        return lowering(stock, *args, **kwargs)

    return lower
