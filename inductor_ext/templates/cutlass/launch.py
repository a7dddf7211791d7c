"""Launching CUTLASS kernels that have been built, through the two functions of their sources.

`geometry` says what a launch is told of sizes and strides, which may be expressions; `packing` how
that lies in memory. `load` gives a `Kernel` in this process, and `call` its arguments for tensors:
torch's, of which only sizes, strides and addresses are asked, so that torch is not imported here.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inductor_ext.storage import artifact_store
from inductor_ext.templates.cutlass import nvcc_build
from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.cutlass.source import CALL_FIELDS, RASTER, TENSOR_FIELDS, Source
from inductor_ext.templates.problem import INT4, ceiling

__all__ = [
    "CUDA_ERRORS",
    "OPERANDS_AT",
    "OPERAND_BYTES",
    "Call",
    "Geometry",
    "Kernel",
    "Shape",
    "call",
    "functions",
    "geometry",
    "load",
    "ordered",
    "packing",
    "reason",
    "settled",
]

_FORMATS = {"int32_t": "i", "int64_t": "q", "float": "f"}
"""Of `struct`; everything else is an address."""


def _format(fields: tuple[tuple[str, str], ...]) -> str:
    return "".join(_FORMATS.get(kind, "P") for kind, _ in fields)


OPERANDS_AT = struct.calcsize(f"@{_format(CALL_FIELDS)}")
"""Bytes from a call's structure on where its operands begin in `packing`."""

OPERAND_BYTES = struct.calcsize(f"@{_format(TENSOR_FIELDS)}")


def packing(operands: int, scalars: int) -> struct.Struct:
    """How a call, its operands and its scalars lie behind each other: all fields, in their order.

    The call's last two are the addresses of the first operand and of the first scalar.
    """
    operand = _format(TENSOR_FIELDS)
    return struct.Struct(f"@{_format(CALL_FIELDS)}{operand * operands}{'f' * scalars}")


Shape = tuple[Sequence[Any], Sequence[Any]]
"""A tensor's sizes and strides: numbers, or expressions that can be computed with."""


@dataclass(frozen=True)
class Geometry:
    """What a launch is told of sizes and strides."""

    sizes: tuple[Any, Any, Any, Any]
    """M, N and K as the kernel sees them, and matrices or groups."""
    strides: tuple[tuple[Any, Any], ...]
    """Of each operand, in the call's order: elements from row to row (or from column to column)
    and from matrix to matrix."""


@dataclass(frozen=True)
class Call:
    """The arguments of a launch."""

    memory: Any
    """As `packing` has it."""

    @property
    def address(self) -> int:
        """Of the structure."""
        return ctypes.addressof(self.memory)


def ordered(
    config: CutlassConfig,
    a: Any,
    b: Any,
    out: Any,
    inputs: Sequence[Any] = (),
    outputs: Sequence[Any] = (),
    ends: Any = None,
) -> list[Any]:
    """Operands in the order in which a call has them; arguments are as of `call`."""
    factors = [b, a] if config.swap else [a, b]
    return [*factors, out, *(() if ends is None else (ends,)), *inputs, *outputs]


def geometry(
    config: CutlassConfig,
    a: Shape,
    b: Shape,
    out: Shape,
    inputs: Sequence[Shape] = (),
    outputs: Sequence[Shape] = (),
    ends: Shape | None = None,
) -> Geometry:
    """Sizes and strides of a launch; arguments are as of `call`, but of each only the shape."""
    m, k = a[0][-2:]
    n = b[0][-1]
    batch = b[0][0] if ends is not None else out[0][0] if len(out[0]) == 3 else 1
    # With operands exchanged, the kernel's A is b's transpose, and its B a's.
    rows_of_a, rows_of_b = config.layouts[0] == "t", config.layouts[1] == "t"
    if config.swap:
        rows_of_a, rows_of_b = not rows_of_b, not rows_of_a
        sizes = (n, m, k, batch)
    else:
        sizes = (m, n, k, batch)
    stride, batch_stride = _factor(b, rows_of_b)
    if config.a in INT4:
        # Two elements in a byte, as which tensors have them.
        stride, batch_stride = 2 * stride, 2 * batch_stride
    strides = ordered(
        config,
        _factor(a, rows_of_a),
        (stride, batch_stride),
        _matrix(out),
        [_matrix(each) for each in inputs],
        [_matrix(each) for each in outputs],
        None if ends is None else (0, 0),
    )
    return Geometry(sizes, tuple(strides))


def settled(config: CutlassConfig) -> tuple[int, int, int]:
    """The fields of a call that a configuration decides: swizzle, order of tiles, splits."""
    return config.swizzle, RASTER[config.raster], config.split_k


def call(
    config: CutlassConfig,
    a: Any,
    b: Any,
    out: Any,
    inputs: Sequence[Any] = (),
    outputs: Sequence[Any] = (),
    *,
    ends: Any = None,
    scalars: Sequence[float] = (),
    sms: int = 0,
) -> Call:
    """The arguments of a launch for tensors.

    Args:
        config: of the kernel, with what a launch decides: splits, swizzle, order of tiles.
        a: [M, K] or [batch, M, K]; of a grouped product, all rows, [M, K].
        b: [K, N] or [batch, K, N]; of a grouped product, [groups, K, N]; of 4 bits, [K / 2, N].
        out: [M, N] or [batch, M, N], with elements of a row side by side.
        inputs: the epilogue's, in its order: [M, N], [1, N] or [N], [M, 1], one element; or with
            the batch in front; scales of groups, [N, groups].
        outputs: the epilogue's others.
        ends: of a grouped product, the row after each group's last, int32 [groups].
        scalars: the epilogue's parameters.
        sms: multiprocessors of the device; 0 for asking it.
    """

    def shape(tensor: Any) -> Shape:
        return tensor.shape, tensor.stride()

    found = geometry(
        config,
        shape(a),
        shape(b),
        shape(out),
        [shape(each) for each in inputs],
        [shape(each) for each in outputs],
        None if ends is None else shape(ends),
    )
    tensors = ordered(config, a, b, out, inputs, outputs, ends)
    layout = packing(len(tensors), len(scalars))
    memory = ctypes.create_string_buffer(layout.size)
    operands = ctypes.addressof(memory) + OPERANDS_AT
    fields: list[float] = []
    for tensor, (stride, batch) in zip(tensors, found.strides, strict=True):
        fields += [tensor.data_ptr(), stride, batch]
    numbers = operands + OPERAND_BYTES * len(tensors)
    head = (*found.sizes, *settled(config), sms, operands, numbers)
    layout.pack_into(memory, 0, *head, *fields, *scalars)
    return Call(memory)


def _factor(tensor: Shape, rows: bool) -> tuple[Any, Any]:
    """Elements from row to row, or from column to column if rows are not what lies side by side,
    and from matrix to matrix.

    What only has one row has some stride that TMA takes, which its own need not be.
    """
    sizes, strides = tensor
    count, inner = sizes[-2:] if rows else (sizes[-1], sizes[-2])
    stride = strides[-2] if rows else strides[-1]
    if count == 1:
        stride = ceiling(inner, _TMA_ELEMENTS) * _TMA_ELEMENTS
    return stride, _of_batch(tensor)


_TMA_ELEMENTS = 16
"""Of 8 bits and more, of which so many are a stride that TMA takes."""


def _matrix(tensor: Shape) -> tuple[Any, Any]:
    if len(tensor[0]) < 2:
        return 0, 0
    return tensor[1][-2], _of_batch(tensor)


def _of_batch(tensor: Shape) -> Any:
    sizes, strides = tensor
    return strides[0] if len(sizes) > 2 and sizes[0] != 1 else 0


def functions(library: ctypes.CDLL) -> tuple[Any, Any]:
    """The two functions of a kernel, which take addresses: of the workspace's size and of running.

    See `source` for what they give.
    """
    size, run = library.inductor_ext_workspace_size, library.inductor_ext_run
    size.restype, size.argtypes = ctypes.c_int64, [ctypes.c_void_p]
    run.restype, run.argtypes = ctypes.c_int32, [ctypes.c_void_p] * 3
    return size, run


def reason(error: int) -> str:
    """What an error of `Kernel.run` is, in words."""
    if error > CUDA_ERRORS:
        return f"CUDA's error is {error - CUDA_ERRORS}"
    return f"CUTLASS's status is {error}"


CUDA_ERRORS = 1000
"""What is added to CUDA's own code in an error."""


class Kernel:
    """A kernel in this process."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self.name = name
        self._size, self._run = functions(library)

    def workspace_size(self, arguments: Call) -> int | None:
        """Bytes of the workspace of a launch; None if the kernel cannot run it."""
        size = int(self._size(arguments.address))
        return None if size < 0 else size

    def run(self, arguments: Call, workspace: int, stream: int) -> int:
        """Launch.

        Args:
            arguments: made by `call`.
            workspace: address of memory of the device, of `workspace_size` bytes.
            stream: CUDA's handle.

        Returns:
            0, or an error as `source` describes.
        """
        return int(self._run(arguments.address, workspace, stream))


def load(
    source: Source,
    store: artifact_store.Store,
    toolchain: nvcc_build.Toolchain | None = None,
    limit: int | None = None,
) -> Kernel:
    """A kernel in this process, built if it has not been.

    Raises:
        exc.MissingToolchainError, exc.KernelBuildError: see `build.built`.
    """
    with nvcc_build.built(source, store, toolchain, "library", limit) as file:
        return Kernel(ctypes.CDLL(str(file)), source.name)
