"""The tensors of a GEMM: dtypes, the layout of the operands, and what an epilogue reads.

Dtypes have torch's names (`"bfloat16"`); sizes, strides and alignments count elements.
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from inductor_ext import exc

DTYPE_BITS: Mapping[str, int] = types.MappingProxyType(
    {
        "float64": 64,
        "int64": 64,
        "float32": 32,
        "int32": 32,
        "float16": 16,
        "bfloat16": 16,
        "int16": 16,
        "float8_e4m3fn": 8,
        "float8_e5m2": 8,
        "int8": 8,
        "uint8": 8,
        "bool": 8,
        "int4": 4,
        "uint4": 4,
    }
)
"""Bits per element. 4-bit dtypes are packed two to a byte; they count as one element per value."""

FP8 = frozenset({"float8_e4m3fn", "float8_e5m2"})
HALF = frozenset({"float16", "bfloat16"})
INT4 = frozenset({"int4", "uint4"})
QUANTIZED = FP8 | {"int8"}
"""Dtypes to which an epilogue quantizes rows by their row amax."""

VECTOR_BYTES = 16
"""The widest load of a thread, and the alignment that a TMA descriptor requires, in bytes."""

INT32_MAX = 2**31 - 1


def require(ok: bool, record: str, field: str, value: object, allowed: str) -> None:
    if not ok:
        raise exc.BadGemmError(record=record, field=field, value=value, allowed=allowed)


def require_dtype(dtype: str, record: str, field: str) -> None:
    require(dtype in DTYPE_BITS, record, field, dtype, f"one of {', '.join(DTYPE_BITS)}")


def size_of(count: int, dtype: str) -> int:
    """Return the bytes of `count` elements."""
    return (count * DTYPE_BITS[dtype] + 7) // 8


def ceiling(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def is_power_of_two(value: int) -> bool:
    return value > 0 and not value & (value - 1)


def next_power_of_two(value: int) -> int:
    """Return the smallest power of two >= `value`; `value` must be 1 or more."""
    return 1 << (value - 1).bit_length()


@dataclass(frozen=True)
class Operand:
    """One of the two operands: dtype, strides and alignment.

    `Operand.of` creates one from a tensor's sizes and strides. It replaces the strides of
    dimensions of size 1, which are never used, by fixed values, so that they do not affect cache
    keys.

    Raises:
        exc.BadGemmError: an unknown dtype, a negative stride, or an alignment that is not a power
            of two or exceeds 16 bytes.
    """

    dtype: str
    strides: tuple[int, int]
    """Row and column stride, in elements."""
    alignment: int
    """In elements: the largest power of two, of at most 16 bytes, that divides the address and
    every stride other than that of the contiguous dimension."""
    batch_stride: int = 0
    """Batch stride, in elements; 0 if the whole batch shares one matrix."""

    def __post_init__(self) -> None:
        require_dtype(self.dtype, "operand", "dtype")
        require(
            len(self.strides) == 2 and min(*self.strides, self.batch_stride) >= 0,
            "operand",
            "strides",
            (*self.strides, self.batch_stride),
            "two strides of rows and columns and one of matrices, each 0 or more",
        )
        require(
            is_power_of_two(self.alignment) and self.alignment <= _vector(self.dtype),
            "operand",
            "alignment",
            self.alignment,
            f"a power of two of at most {_vector(self.dtype)} elements",
        )

    @classmethod
    def of(
        cls,
        dtype: str,
        shape: tuple[int, int],
        strides: tuple[int, int],
        *,
        batch: int = 1,
        batch_stride: int = 0,
        offset: int = 0,
        base: int = VECTOR_BYTES,
    ) -> Operand:
        """Return the operand for a tensor.

        Args:
            dtype: element dtype; strides and offset of packed dtypes are in unpacked elements.
            shape: rows and columns.
            strides: row and column stride, in elements.
            batch: batch size.
            batch_stride: in elements.
            offset: storage offset, in elements.
            base: alignment of the storage's address in bytes, a power of two.
        """
        require_dtype(dtype, "operand", "dtype")
        vector = _vector(dtype)
        rows, columns = shape
        row, column = strides
        if columns == 1 and (row == 1 or rows == 1):
            row, column = (1, ceiling(rows, vector) * vector) if rows > 1 else (vector, 1)
        elif columns == 1:
            column = 1
        elif rows == 1:
            row = ceiling(columns, vector) * vector if column == 1 else 1
        if batch == 1:
            batch_stride = 0
        if column == 1:
            outer_strides = [row]
        elif row == 1:
            outer_strides = [column]
        else:
            outer_strides = [row, column]
        alignment = 1
        if len(outer_strides) == 1:
            alignment = aligned(dtype, offset, batch_stride, *outer_strides, base=base)
        return cls(dtype, (row, column), alignment, batch_stride)

    @property
    def layout(self) -> Literal["row", "column", "strided"]:
        """`row`: the elements of a row are contiguous; `column`: those of a column; `strided`:
        neither.
        """
        if self.strides[1] == 1:
            return "row"
        return "column" if self.strides[0] == 1 else "strided"

    @property
    def leading(self) -> int:
        """Leading dimension in elements: the row stride in layout `row`, the column stride in
        `column`.
        """
        return self.strides[1] if self.layout == "column" else self.strides[0]

    @property
    def vector_bytes(self) -> float:
        """Alignment in bytes, which limits the width of vectorized loads."""
        return self.alignment * DTYPE_BITS[self.dtype] / 8

    def align(self, rows: int, columns: int, batch: int) -> Operand:
        """Return the layout of a copy padded so that every row (or column, depending on the layout)
        is 16-byte aligned; self if already aligned.

        Args:
            rows: rows of a matrix.
            columns: columns of a matrix.
            batch: batch size.
        """
        vector = _vector(self.dtype)
        if self.alignment == vector:
            return self
        by_column = self.layout == "column"
        inner, outer = (rows, columns) if by_column else (columns, rows)
        leading = ceiling(inner, vector) * vector
        strides = (1, leading) if by_column else (leading, 1)
        distance = leading * outer if self.batch_stride else 0
        return Operand.of(self.dtype, (rows, columns), strides, batch=batch, batch_stride=distance)

    def span(self, rows: int, columns: int, batch: int) -> int:
        """Return the number of elements from the first to the last of `batch` matrices,
        inclusive.
        """
        row, column = self.strides
        return (batch - 1) * self.batch_stride + (rows - 1) * row + (columns - 1) * column + 1


def aligned(dtype: str, *counts: int, base: int = VECTOR_BYTES) -> int:
    """Return the alignment in elements that strides, offsets and the base address guarantee.

    It is the largest power of two, of at most 16 bytes, that divides all of `counts` and an address
    with an alignment of `base` bytes (a power of two).

    Raises:
        exc.BadGemmError: an unknown dtype.
    """
    require_dtype(dtype, "operand", "dtype")
    return math.gcd(_vector(dtype), max(1, base * 8 // DTYPE_BITS[dtype]), *counts)


def _vector(dtype: str) -> int:
    return VECTOR_BYTES * 8 // DTYPE_BITS[dtype]


@dataclass(frozen=True)
class EpilogueInput:
    """A tensor that the epilogue reads.

    Raises:
        exc.BadGemmError: an unknown dtype.
    """

    dtype: str
    broadcast: Literal["matrix", "row", "column", "scalar"]
    """Shape: `matrix`: [M, N]; `row`: [N], broadcast over rows; `column`: [M, 1]; `scalar`."""

    def __post_init__(self) -> None:
        require_dtype(self.dtype, "epilogue", "dtype")

    def size(self, m: int, n: int) -> int:
        """Return the bytes read for an m x n output."""
        count = {"matrix": m * n, "row": n, "column": m, "scalar": 1}[self.broadcast]
        return size_of(count, self.dtype)
