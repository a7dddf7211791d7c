"""Arguments of CUTLASS kernels, which are called through the two C functions of their sources.

`compute_geometry` computes the sizes and strides of a launch, which may be symbolic;
`make_call_layout` describes the memory layout of its arguments.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.cutlass.source import CALL_FIELDS, RASTER, TENSOR_FIELDS
from inductor_ext.templates.tensors import INT4, ceiling

_FORMATS = {"int32_t": "i", "int64_t": "q", "float": "f"}
"""`struct` format characters of C types; every other type is a pointer."""


def _format(fields: tuple[tuple[str, str], ...]) -> str:
    return "".join(_FORMATS.get(kind, "P") for kind, _ in fields)


OPERANDS_AT = struct.calcsize(f"@{_format(CALL_FIELDS)}")
"""Offset of the operands in a call's layout, in bytes from the start of the `Call` struct."""

OPERAND_BYTES = struct.calcsize(f"@{_format(TENSOR_FIELDS)}")


def make_call_layout(operands: int, scalars: int) -> struct.Struct:
    """Return the layout of a `Call` struct, its operands and its scalars in one block of memory.

    The last two fields of the `Call` are the addresses of the first operand and the first scalar.
    """
    operand = _format(TENSOR_FIELDS)
    return struct.Struct(f"@{_format(CALL_FIELDS)}{operand * operands}{'f' * scalars}")


Shape = tuple[Sequence[Any], Sequence[Any]]
"""A tensor's sizes and strides: numbers or symbolic expressions."""


@dataclass(frozen=True)
class Geometry:
    """The sizes and strides of a launch."""

    sizes: tuple[Any, Any, Any, Any]
    """M, N and K in the kernel's order, and the number of matrices or groups."""
    strides: tuple[tuple[Any, Any], ...]
    """Leading stride and batch stride of each operand, in elements, in the call's order."""


def order_operands(
    config: CutlassConfig,
    a: Any,
    b: Any,
    out: Any,
    inputs: Sequence[Any] = (),
    outputs: Sequence[Any] = (),
    ends: Any = None,
) -> list[Any]:
    """Return the operands in the call's order:
    A, B, the output, the end offsets of the groups, the epilogue's inputs and its other outputs.
    """
    operands = [b, a] if config.swap_ab else [a, b]
    return [*operands, out, *(() if ends is None else (ends,)), *inputs, *outputs]


def compute_geometry(
    config: CutlassConfig,
    a: Shape,
    b: Shape,
    out: Shape,
    inputs: Sequence[Shape] = (),
    outputs: Sequence[Shape] = (),
    ends: Shape | None = None,
) -> Geometry:
    """Return the sizes and strides of a launch, for shapes of the operands of `order_operands`."""
    m, k = a[0][-2:]
    n = b[0][-1]
    batch = b[0][0] if ends is not None else out[0][0] if len(out[0]) == 3 else 1
    # With `swap_ab`, the kernel's A is b transposed, and its B is a transposed.
    rows_of_a, rows_of_b = config.layouts[0] == "t", config.layouts[1] == "t"
    if config.swap_ab:
        rows_of_a, rows_of_b = not rows_of_b, not rows_of_a
        sizes = (n, m, k, batch)
    else:
        sizes = (m, n, k, batch)
    stride, batch_stride = _operand(b, rows_of_b)
    if config.a in INT4:
        # The tensor has bytes with two elements each; the kernel counts elements.
        stride, batch_stride = 2 * stride, 2 * batch_stride
    strides = order_operands(
        config,
        _operand(a, rows_of_a),
        (stride, batch_stride),
        _matrix(out),
        [_matrix(inp) for inp in inputs],
        [_matrix(output) for output in outputs],
        None if ends is None else (0, 0),
    )
    return Geometry(sizes, tuple(strides))


def list_config_fields(config: CutlassConfig) -> tuple[int, int, int]:
    """Return the fields of a call that the configuration determines: swizzle, raster, splits."""
    return config.swizzle, RASTER[config.raster], config.split_k


def _operand(tensor: Shape, rows: bool) -> tuple[Any, Any]:
    """Return leading stride and batch stride of operand A or B, in elements.

    The leading stride is between rows if `rows`, else between columns. For a single row (or column)
    it is one that TMA accepts, as the tensor's own is arbitrary and may not be.
    """
    sizes, strides = tensor
    count, inner = sizes[-2:] if rows else (sizes[-1], sizes[-2])
    stride = strides[-2] if rows else strides[-1]
    if count == 1:
        stride = ceiling(inner, _TMA_ELEMENTS) * _TMA_ELEMENTS
    return stride, _of_batch(tensor)


_TMA_ELEMENTS = 16
"""A multiple of this many elements, of 8 bits or more, is a stride that TMA accepts (16 bytes)."""


def _matrix(tensor: Shape) -> tuple[Any, Any]:
    if len(tensor[0]) < 2:
        return 0, 0
    return tensor[1][-2], _of_batch(tensor)


def _of_batch(tensor: Shape) -> Any:
    sizes, strides = tensor
    return strides[0] if len(sizes) > 2 and sizes[0] != 1 else 0


def bind_functions(library: ctypes.CDLL) -> tuple[Any, Any]:
    """Return a kernel's two C functions, workspace size and run, which take addresses.

    See `source` for their results.
    """
    size, run = library.inductor_ext_workspace_size, library.inductor_ext_run
    size.restype, size.argtypes = ctypes.c_int64, [ctypes.c_void_p]
    run.restype, run.argtypes = ctypes.c_int32, [ctypes.c_void_p] * 3
    return size, run


def describe_error(error: int) -> str:
    """Return the message for an error code of a kernel."""
    if error > CUDA_ERRORS:
        return f"CUDA error {error - CUDA_ERRORS}"
    return f"CUTLASS status {error}"


CUDA_ERRORS = 1000
"""Offset that is added to CUDA error codes."""
