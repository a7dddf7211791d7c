"""How many neighbouring elements of a tensor every access can take at once.

`alignment` is for numbers, `of_layout` for an Inductor layout, whose sizes may be symbols: what it
answers then holds for all sizes, and no guard is added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from inductor_ext.templates.problem import aligned

__all__ = ["alignment", "of_layout"]


def alignment(
    dtype: str, sizes: Sequence[int], strides: Sequence[int], offset: int = 0, base: int = 16
) -> int:
    """The largest alignment that a tensor allows.

    It divides the size of the contiguous dimension (CUTLASS counts that one in vectors), every
    other stride that is used, and the address. Strides of dimensions of size 1 are not used.

    Args:
        dtype: of an element, as torch names it.
        sizes: of each dimension.
        strides: elements, of each dimension.
        offset: elements from the start of the storage.
        base: bytes, a power of two, that divide the address of the storage.

    Returns:
        Elements: a power of two, of 16 bytes at most; 1 where no dimension is contiguous.

    Raises:
        exc.BadGemmError: an unknown dtype.
    """
    used = [axis for axis, size in enumerate(sizes) if size != 1]
    inner = next((axis for axis in used if strides[axis] == 1), None)
    if inner is None:
        # One element, or a column of them, with nothing beside any.
        return 1
    outer = [strides[axis] for axis in used if axis != inner]
    return aligned(dtype, sizes[inner], offset, *outer, base=base)


def of_layout(layout: Any, base: int = 16) -> int:
    """The largest alignment that an Inductor layout allows, whatever values its symbols take.

    Args:
        layout: has `dtype`, `size`, `stride` and `offset`, each a number or a sympy expression.
        base: bytes, a power of two, that divide the address of the storage.

    Returns:
        As `alignment` does.
    """
    return alignment(
        str(layout.dtype).removeprefix("torch."),
        [_divisor(size) for size in layout.size],
        [_divisor(stride) for stride in layout.stride],
        _divisor(layout.offset),
        base,
    )


def _divisor(value: Any) -> int:
    """A number as it is; of an expression, the largest number that divides all of its values.

    Of one that may have any value it is a number that allows nothing, but is not the 1 of a size or
    a stride.
    """
    if isinstance(value, int) or value.is_number:
        return int(value)
    terms = value.expand().as_ordered_terms()
    whole = [term.as_coeff_Mul() for term in terms]
    if not all(rest.is_integer for _, rest in whole):
        return _UNKNOWN
    common = math.gcd(*(int(factor) for factor, _ in whole))
    return common if common > 1 else _UNKNOWN


_UNKNOWN = 3
"""Odd, and not 1."""
