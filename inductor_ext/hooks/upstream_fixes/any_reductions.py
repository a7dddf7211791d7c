"""Fixes for `any`, for `all`, which is computed by `any`, and for `sum` and `prod` of Booleans."""

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

    aten = torch.ops.aten
    lowering_table.register_once(_lower_any, aten.any.default, aten.any.dim, aten.any.dims)
    lowering_table.register_once(_lower_sum, aten.sum.default, aten.sum.dim_IntList)
    lowering_table.register_once(_lower_prod, aten.prod.default, aten.prod.dim_int)


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


def _lower_sum(
    stock: Callable[..., Any], x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """Lower `sum`; with `dtype=torch.bool` it is whether any element is true.

    Inductor adds Booleans: modulo 2 in Triton kernels, and C++ kernels do not compile.
    """
    import torch
    from torch._inductor import lowering

    if dtype != torch.bool:
        return stock(x, dim, keepdim, dtype=dtype)
    # An empty list of dimensions means all of them.
    return lowering.reduce_any(x, None if dim in ([], ()) else dim, keepdim)


def _lower_prod(
    stock: Callable[..., Any], x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """Lower `prod`; with `dtype=torch.bool` it is whether all elements are true."""
    import torch
    from torch._inductor import lowering

    if dtype != torch.bool:
        return stock(x, dim, keepdim, dtype=dtype)
    return lowering.logical_not(lowering.reduce_any(lowering.logical_not(x), dim, keepdim))
