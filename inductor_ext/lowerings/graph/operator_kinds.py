"""Kinds of operators: which are pointwise, are views, or have loops that Inductor generates."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import torch

from inductor_ext.lowerings.graph.cleanup import is_pure

if TYPE_CHECKING:
    from torch import fx

aten = torch.ops.aten

RESHAPE = (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)
PERMUTE = (aten.permute.default, aten.transpose.int, aten.t.default)
ALONG_DIM = (
    aten._softmax.default,
    aten._log_softmax.default,
    aten.cumsum.default,
    aten.cumprod.default,
    aten.sort.default,
    aten.topk.default,
    aten.slice.Tensor,
    aten.cat.default,
    aten.split.Tensor,
    aten.split_with_sizes.default,
)
INDEXED = (aten.gather.default, aten.scatter.value, aten.scatter.src)
SUMS = frozenset({aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim})
MEANS = frozenset({aten.mean.default, aten.mean.dim})
REDUCTIONS = (
    aten.amax.default,
    aten.amin.default,
    aten.argmax.default,
    aten.argmin.default,
    aten.any.dim,
    aten.all.dim,
    aten.prod.dim_int,
    aten.var.correction,
    aten.var_mean.correction,
    *SUMS,
)

_VIEWS = frozenset({*RESHAPE, *PERMUTE, aten.expand.default, aten.select.int, aten.slice.Tensor})
_PARTS = frozenset(
    {operator.getitem, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int}
)
_FUSIBLE = frozenset(
    {
        *REDUCTIONS,
        *_VIEWS,
        operator.getitem,
        aten._softmax.default,
        aten._log_softmax.default,
        aten.constant_pad_nd.default,
        aten.embedding.default,
        aten.full.default,
        aten.gather.default,
        torch.ops.prims.iota.default,
    }
)


def is_pointwise(node: fx.Node) -> bool:
    """Whether an operator computes each element from one element of each input."""
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and torch.Tag.pointwise in target.tags
        and is_pure(node)
    )


def is_fusible(node: fx.Node) -> bool:
    """Whether Inductor generates loops for an operator, rather than calling a library."""
    return is_pointwise(node) or node.target in _FUSIBLE


def is_creation(node: fx.Node) -> bool:
    """Whether an operator's result depends on no tensor."""
    return node.target in (
        aten.full.default,
        aten.scalar_tensor.default,
        torch.ops.prims.iota.default,
    )


def is_view(node: fx.Node) -> bool:
    """Whether an operator only reads its input's memory in another way."""
    return node.target in _VIEWS


def is_view_or_part(node: fx.Node) -> bool:
    """Whether an operator returns a view of its input, several, or one of several results."""
    return node.target in _VIEWS or node.target in _PARTS
