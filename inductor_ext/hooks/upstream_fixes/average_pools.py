"""Fix for the gradient of average pools whose last windows are cut off (`ceil_mode`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inductor_ext.hooks import lowering_table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from inductor_ext.hooks.registry import Hook

HOOKS: tuple[Hook, ...] = ()


def install_hooks() -> None:
    """Register the lowerings, once per process."""
    import torch

    aten = torch.ops.aten
    operators = aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default
    lowering_table.register_once(_lower_backward, *operators)


def _lower_backward(
    stock: Callable[..., Any],
    grad_output: Any,
    x: Any,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None = None,
) -> Any:
    """Lower the gradient of an average pool of two or three dimensions.

    A window that is cut off at the end of the padded input is averaged over the elements that are
    left. Inductor divides by the size of a whole window. Torch's operator is called instead.
    """
    import torch
    from torch._inductor import lowering

    sizes = (kernel_size, stride, padding)
    arguments = (grad_output, x, *sizes, ceil_mode, count_include_pad, divisor_override)
    if not count_include_pad or divisor_override is not None:
        return stock(*arguments)
    dims = len(kernel_size)
    step, pad = list(stride) or kernel_size, list(padding) or [0] * dims
    if not any(
        lowering.pooling_size(size, dim, kernel_size, step, pad, ceil_mode)[1]
        for dim, size in enumerate(x.get_size()[-dims:])
    ):
        return stock(*arguments)
    name = f"avg_pool{dims}d_backward"
    operator = getattr(torch.ops.aten, name).default
    return lowering.fallback_handler(operator, add_to_fallback_set=False)(*arguments)
