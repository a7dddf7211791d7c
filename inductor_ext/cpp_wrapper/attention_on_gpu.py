"""Attention of a program that is moved to a GPU which need not exist.

torch selects the implementation of `scaled_dot_product_attention` in C++, by the GPU of this
machine; without one, it decomposes the operator. `use_flash_attention` selects flash attention for
the calls that torch would select it for on every GPU since compute capability 8.0.
"""

from __future__ import annotations

import operator
from typing import Any

_MAX_HEAD = 256
"""Largest size of a head that flash attention supports."""


def use_flash_attention(module: Any) -> None:
    """Replace calls of attention by flash attention where it applies, in place.

    Args:
        module: a graph module of ATen operators, with fake tensors as metadata.
    """
    import torch

    attention = torch.ops.aten.scaled_dot_product_attention.default
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    changed = False
    for node in module.graph.find_nodes(op="call_function", target=attention):
        arguments = _read(*node.args, **node.kwargs)
        if arguments is None:
            continue
        query, key, value, is_causal, scale = arguments
        with module.graph.inserting_before(node):
            call = module.graph.call_function(
                flash, (query, key, value, 0.0, is_causal, False), {"scale": scale}
            )
            result = module.graph.call_function(operator.getitem, (call, 0))
        node.replace_all_uses_with(result)
        module.graph.erase_node(node)
        changed = True
    if changed:
        module.recompile()


def _read(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Any, ...] | None:
    """Return the arguments of a call that flash attention computes; None for others."""
    tensors = [node.meta.get("val") for node in (query, key, value)]
    if attn_mask is not None or dropout_p or enable_gqa or not all(map(_is_supported, tensors)):
        return None
    q, k, v = tensors
    is_same = q.size(-1) == k.size(-1) == v.size(-1) and q.dtype == k.dtype == v.dtype
    # Sizes are compared as expressions: a guard would be a condition on the inputs.
    heads = len({str(tensor.size(1)) for tensor in tensors})
    if not is_same or heads > 1 or (is_causal and str(q.size(2)) != str(k.size(2))):
        return None
    return query, key, value, is_causal, scale


def _is_supported(tensor: Any) -> bool:
    import torch

    if not isinstance(tensor, torch.Tensor) or tensor.dim() != 4:
        return False
    head = tensor.size(-1)
    return (
        tensor.dtype in (torch.float16, torch.bfloat16)
        and isinstance(head, int)
        and head % 8 == 0
        and head <= _MAX_HEAD
        and tensor.stride(-1) == 1
    )
