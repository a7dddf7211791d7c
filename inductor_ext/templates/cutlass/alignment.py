"""The widest vector access, in elements, that a tensor's sizes, strides and address allow.

`alignment` takes static sizes, `of_layout` an Inductor layout with possibly symbolic ones: its
result then holds for all values of the symbols, and no guard is added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from inductor_ext.templates.tensors import aligned


def alignment(
    dtype: str, sizes: Sequence[int], strides: Sequence[int], offset: int = 0, base: int = 16
) -> int:
    """Return the largest alignment of a tensor.

    It divides the size of the contiguous dimension (which CUTLASS requires to be whole vectors),
    all other strides, and the address. Strides of dimensions of size 1 are ignored.

    Args:
        dtype: torch's name of the element type.
        sizes: of each dimension.
        strides: of each dimension, in elements.
        offset: storage offset, in elements.
        base: alignment of the storage's address: bytes, a power of two.

    Returns:
        Elements: a power of two, at most 16 bytes; 1 if no dimension is contiguous.

    Raises:
        exc.BadGemmError: an unknown dtype.
    """
    axes = [axis for axis, size in enumerate(sizes) if size != 1]
    inner = next((axis for axis in axes if strides[axis] == 1), None)
    if inner is None:
        # A single element, or no dimension of stride 1.
        return 1
    outer = [strides[axis] for axis in axes if axis != inner]
    return aligned(dtype, sizes[inner], offset, *outer, base=base)


def of_layout(layout: Any, base: int = 16) -> int:
    """Return the largest alignment of an Inductor layout that holds for all values of its symbols.

    Args:
        layout: has `dtype`, and `size`, `stride` and `offset` as numbers or sympy expressions.
        base: alignment of the storage's address: bytes, a power of two.

    Returns:
        See `alignment`.
    """
    return alignment(
        str(layout.dtype).removeprefix("torch."),
        [_divisor(size) for size in layout.size],
        [_divisor(stride) for stride in layout.stride],
        _divisor(layout.offset),
        base,
    )


def _divisor(value: Any) -> int:
    """Return a number itself, and for an expression the largest known divisor of all its values.

    If that is 1 or unknown, return `_UNKNOWN`.
    """
    if isinstance(value, int) or value.is_number:
        return int(value)
    terms = value.expand().as_ordered_terms()
    pairs = [term.as_coeff_Mul() for term in terms]
    if not all(symbols.is_integer for _, symbols in pairs):
        return _UNKNOWN
    common = math.gcd(*(int(coefficient) for coefficient, _ in pairs))
    return common if common > 1 else _UNKNOWN


_UNKNOWN = 3
"""Stands for an expression without known divisor: odd, so that it allows an alignment of 1 only,
but not 1, which as a size or stride has a special meaning."""
