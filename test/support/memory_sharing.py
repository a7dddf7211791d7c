"""Which tensors share memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def find_sharing(tensors: Sequence[torch.Tensor]) -> list[list[bool]]:
    """Return which pairs of tensors share their memory."""
    pointers = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return [[pointer == other for other in pointers] for pointer in pointers]
