"""Fixes for `any`, and for `all`, which is computed by `any`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inductor_ext.hooks import lowering_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from inductor_ext.hooks.registry import Hook

HOOKS: tuple[Hook, ...] = ()


def install_hooks() -> None:
    """Register the lowerings, once per process."""
    import torch

    overloads = torch.ops.aten.any
    lowering_table.register_once(_lower_any, overloads.default, overloads.dim, overloads.dims)


def _lower_any(stock: Callable[..., Any], x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """Lower `any` to a result of eager mode's dtype and shape.

    Inductor returns bool for uint8, and reduces over all dimensions if the list of them is empty.
    """
    import torch
    from torch._inductor.lowering import to_dtype

    if isinstance(dim, (list, tuple)) and not dim:
        result = to_dtype(x, torch.bool)
    else:
        result = stock(x, dim, keepdim)
    return to_dtype(result, torch.uint8) if x.get_dtype() == torch.uint8 else result
