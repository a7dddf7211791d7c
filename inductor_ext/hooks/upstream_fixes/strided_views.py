"""A fix for `as_strided` without an offset.

Until torch 2.13 Inductor takes the offset for 0, the beginning of the memory. It is that of the
operand, which may be a view.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from inductor_ext import _compat
from inductor_ext.hooks import lowering_table
from inductor_ext.hooks.registry import Hook

HOOKS: tuple[Hook, ...] = ()


def install_hooks() -> None:
    """Register the lowering, once per process."""
    import torch

    if _compat.minor_version(_compat.torch_version()) < (2, 13):
        lowering_table.register_once(_lower_as_strided, torch.ops.aten.as_strided.default)


def _lower_as_strided(
    stock: Callable[..., Any], x: Any, size: Any, stride: Any, storage_offset: Any = None
) -> Any:
    from torch._inductor import ir

    if storage_offset is None and ir.is_storage_and_layout(x):
        _, layout = ir.as_storage_and_layout(x, freeze=False)
        storage_offset = layout.offset
    return stock(x, size, stride, storage_offset)
