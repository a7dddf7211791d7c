"""Operands with which torch computes attention in a fused kernel.

`scaled_dot_product_attention` selects a kernel by its operands. If none of its fused kernels
supports them, it computes and stores all scores, in float32. Two kinds of operands that models have
without need are replaced here, before AOTAutograd decomposes the operator:

- Masks that are known when the model is compiled. transformers makes a mask for every model that is
  traced. If it masks nothing, it is removed; if it is causal, `is_causal` replaces it.
- Operands whose last dimension is not dense, such as a mask that is expanded along the keys, or
  queries that are a transposed result of a convolution. They are copied.

The operator's result is the same up to rounding. Setting: `fuse_attention`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from inductor_ext import events, numerics
from inductor_ext.lowerings.graph.constant_values import evaluate, fake_value
from inductor_ext.lowerings.records import AttentionRecord
from inductor_ext.settings import Settings

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_HALF = (torch.float16, torch.bfloat16)
_TARGETS = (
    torch._C._nn.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
)


def replace_operands(gm: fx.GraphModule, settings: Settings) -> None:
    """Replace the operands of a graph's calls of attention, without those of its subgraphs."""
    if not settings.fuse_attention or numerics.gemm_obstacle() or numerics.is_deterministic():
        return
    masks: dict[fx.Node, str | None] = {}
    changed = False
    for node in list(_find_calls(gm.graph)):
        changes = tuple(_replace(node, masks))
        if changes:
            changed = True
            record = AttentionRecord(module=events.module_path(node.meta), changes=changes)
            events.emit(record, event_log=settings.event_log)
    if changed:
        gm.recompile()


def _find_calls(graph: fx.Graph) -> Iterator[fx.Node]:
    for target in _TARGETS:
        yield from graph.find_nodes(op="call_function", target=target)


def _replace(node: fx.Node, masks: dict[fx.Node, str | None]) -> Iterator[str]:
    """Replace operands of one call; yield what has been done, in words.

    Args:
        node: the call.
        masks: what is known of masks; results are added.
    """
    arguments = {**dict(zip(_NAMES, node.args, strict=False)), **node.kwargs}
    query, key = (fake_value(arguments.get(name)) for name in ("query", "key"))
    if query is None or key is None or not query.dtype.is_floating_point:
        return
    if _is_overwritten(node):
        return
    mask = arguments.get("attn_mask")
    if isinstance(mask, fx.Node):
        if mask not in masks:
            masks[mask] = _describe_mask(mask)
        if masks[mask] == "all":
            arguments["attn_mask"] = None
            yield "a constant mask that masks nothing is removed"
        elif (
            masks[mask] == "causal"
            and not arguments.get("is_causal")
            and _is_square(query.shape[-2], key.shape[-2], fake_value(mask))
        ):
            arguments |= {"attn_mask": None, "is_causal": True}
            yield "a constant causal mask is replaced by is_causal"
    for name in ("query", "key", "value", "attn_mask"):
        operand: Any = arguments.get(name)
        if _needs_copy(operand, is_mask=name == "attn_mask"):
            arguments[name] = _copy(operand, node)
            yield f"{name} is copied, because its last dimension is not dense"
    tensors = tuple(arguments.pop(name) for name in ("query", "key", "value"))
    node.args, node.kwargs = tensors, arguments


def _is_overwritten(node: fx.Node) -> bool:
    """Whether the result of a call is overwritten, although the call's gradient may be needed.

    The gradient of a fused kernel reads the result, and autograd refuses to compute it.
    """
    result = fake_value(node)
    # Views of a tensor share its version.
    return result is not None and result.requires_grad and result._version > 0


def _is_square(queries: Any, keys: Any, mask: torch.Tensor | None) -> bool:
    return (
        isinstance(queries, int)
        and mask is not None
        and tuple(mask.shape[-2:]) == (queries, keys) == (keys, queries)
    )


def _describe_mask(node: fx.Node) -> str | None:
    """Return what is known of a mask: "all" if it masks nothing, "causal", or None."""
    mask = evaluate(node)
    if mask is None or mask.dim() < 2:
        return None
    for dim, stride in enumerate(mask.stride()):
        if stride == 0 and dim < mask.dim() - 2:
            mask = mask.narrow(dim, 0, 1)
    visible = mask if mask.dtype == torch.bool else mask == 0
    if visible.all():
        return "all"
    if mask.dtype != torch.bool:
        if not mask.dtype.is_floating_point:
            return None
        # A smaller bias than any score, so that the weight is 0.
        hidden = mask <= torch.finfo(mask.dtype).min
        if not (visible | hidden).all():
            return None
    causal = torch.ones(mask.shape[-2:], dtype=torch.bool).tril()
    return "causal" if torch.equal(visible, causal.expand_as(visible)) else None


def _needs_copy(operand: Any, *, is_mask: bool) -> bool:
    """Whether torch has no fused kernel for an operand because of its last dimension.

    On a CPU the fused kernel supports every mask; on a GPU only one of 16 bits is faster than
    the matmuls for sure.
    """
    value = fake_value(operand)
    if value is None or value.dim() < 2 or value.layout != torch.strided:
        return False
    if value.device.type == "cuda":
        is_supported = value.dtype in (*_HALF, torch.bool) if is_mask else value.dtype in _HALF
    else:
        is_supported = value.device.type == "cpu" and not is_mask
    return is_supported and _hint(value.stride(-1)) != 1 and _hint(value.shape[-1]) != 1


def _hint(size: Any) -> Any:
    return size.node.hint if isinstance(size, torch.SymInt) else size


def _copy(operand: fx.Node, call: fx.Node) -> fx.Node:
    """Insert a dense copy in front of a call. Expanded batches and heads are not copied."""
    value = fake_value(operand)
    assert value is not None
    for dim, stride in enumerate(value.stride()[:-2]):
        if isinstance(stride, int) and stride == 0:
            operand = _add(call, torch.ops.aten.narrow.default, operand, dim, 0, 1)
    return _add(call, torch.ops.aten.contiguous.default, operand)


def _add(call: fx.Node, target: Any, operand: fx.Node, *args: int) -> fx.Node:
    value: Any = fake_value(operand)
    with call.graph.inserting_before(call):
        node = call.graph.call_function(target, (operand, *args))
    with torch.no_grad(), getattr(value, "fake_mode", contextlib.nullcontext()):
        result = target(value, *args)
    node.meta.update({key: result for key in ("example_value", "val") if key in operand.meta})
    return node
