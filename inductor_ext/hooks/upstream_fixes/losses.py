"""A fix for the loss of several labels per row, some of which are padding."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from inductor_ext.hooks import context, registry
from inductor_ext.hooks.registry import Hook

if TYPE_CHECKING:
    import torch

HOOKS = (
    Hook(
        "padded_labels",
        "replaced",
        ("torch._decomp.decompositions.multilabel_margin_loss_forward",),
        "hooks.upstream_fixes.losses",
        "The decomposition of multilabel_margin_loss adds the margins of label 0 for each place "
        "after the last label of a row, which the target -1 ends (until torch 2.14), and the loss "
        "of one row has a dimension.",
        relies_on=(
            "torch._inductor.decomposition.decompositions",
            "torch._inductor.decomposition.fast_random_decomps",
            "torch._ops.OperatorBase",
        ),
    ),
)


def install_hooks() -> None:
    """Install the dispatcher, once per process."""
    import torch
    from torch._decomp import decompositions
    from torch._inductor import decomposition

    registry.install(HOOKS, {"padded_labels": _dispatch_multilabel_margin_loss})
    # Tables and the operator refer to the function itself.
    function = decompositions.multilabel_margin_loss_forward
    operator = torch.ops.aten.multilabel_margin_loss_forward.default
    for table in (decomposition.decompositions, decomposition.fast_random_decomps()):
        table[operator] = function
    operator.py_kernels[torch._C.DispatchKey.Autograd] = function
    operator._dispatch_cache.clear()


def _dispatch_multilabel_margin_loss(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def multilabel_margin_loss_forward(
        x: Any, target: Any, reduction: int, *args: Any, **kwargs: Any
    ) -> Any:
        if context.settings() is None:
            return stock(x, target, reduction, *args, **kwargs)
        return multilabel_margin_loss(x, target, reduction)

    return multilabel_margin_loss_forward


def multilabel_margin_loss(
    x: torch.Tensor, target: torch.Tensor, reduction: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decompose `multilabel_margin_loss_forward`.

    The loss of a row of C scores is the sum of max(0, 1 - x[label] + x[i]) / C over its labels and
    over all i that are no label. The labels are the targets before the first -1.

    Args:
        x: scores, [N, C] or [C].
        target: of the same shape.
        reduction: 0 for the loss of each row, 1 for the mean, 2 for the sum.

    Returns:
        The loss, and a tensor like `x` that is 1 for labels and 0 for others.
    """
    import torch

    shape = x.shape
    rows, targets = torch.atleast_2d(x), torch.atleast_2d(target)
    size = rows.shape[1]
    place = torch.arange(size, device=x.device)
    end = torch.where(targets < 0, place, size).amin(1, keepdim=True)
    is_valid = place < end
    labels = torch.where(is_valid, targets, 0)
    is_label = (is_valid[:, :, None] & (labels[:, :, None] == place)).any(1)
    margins = (1 - rows.gather(1, labels)[:, :, None] + rows[:, None, :]).clamp_min(0)
    counted = is_valid[:, :, None] & ~is_label[:, None, :]
    loss = torch.where(counted, margins, 0).sum((1, 2)) / size
    if reduction == 1:
        loss = loss.mean()
    elif reduction == 2:
        loss = loss.sum()
    else:
        loss = loss.reshape(shape[:-1])
    return loss, is_label.to(x.dtype).reshape(shape)
