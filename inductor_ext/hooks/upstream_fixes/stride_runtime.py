"""The function that generated Python code calls for the result of a fallback operator."""

from __future__ import annotations

import torch

_assert_size_stride = torch._C._dynamo.guards.assert_size_stride


def match_strides(
    tensor: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...], op_name: str
) -> torch.Tensor:
    """Return a copy of `tensor`, whose strides differ from `stride`, with these strides.

    Args:
        tensor: the result of an operator.
        size: the predicted size.
        stride: the predicted stride, in elements; dimensions of size one may have any other.
        op_name: the operator, for the error.

    Raises:
        AssertionError: the size differs.
    """
    if tensor.shape != size:
        _assert_size_stride(tensor, size, stride, op_name)
    copy = torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)
