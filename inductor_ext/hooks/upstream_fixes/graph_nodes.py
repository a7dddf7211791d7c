"""Questions about FX nodes and dtypes that several fixes ask."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch.fx import Node


def operator_name(node: Node) -> str:
    """Return the name of a node's operator, without namespace and overload; empty if none."""
    packet = getattr(node.target, "overloadpacket", None)
    return getattr(packet, "__name__", "")


def keeps_value(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether every number of a floating-point dtype is one of another."""
    import torch

    if not (source.is_floating_point and target.is_floating_point):
        return False
    narrow, wide = torch.finfo(source), torch.finfo(target)
    return wide.eps <= narrow.eps and wide.max >= narrow.max and wide.tiny <= narrow.tiny
