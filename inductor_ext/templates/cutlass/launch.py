"""Launching CUTLASS kernels that have been built, through the two functions of their sources.

`load` gives a `Kernel` in this process. Tensors are torch's, of which only sizes, strides and
addresses are asked, so that torch is not imported here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inductor_ext import cache
from inductor_ext.templates.cutlass import build
from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.cutlass.source import CALL_FIELDS, RASTER, TENSOR_FIELDS, Source
from inductor_ext.templates.problem import ceiling

__all__ = ["Call", "Kernel", "call", "load"]

_CTYPES: dict[str, Any] = {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64}


def _structure(name: str, fields: tuple[tuple[str, str], ...]) -> Any:
    members = [(field, _CTYPES.get(kind, ctypes.c_void_p)) for kind, field in fields]
    return type(name, (ctypes.Structure,), {"_fields_": members})


_Operand = _structure("_Operand", TENSOR_FIELDS)
_Call = _structure("_Call", CALL_FIELDS)


@dataclass(frozen=True)
class Call:
    """The arguments of a launch."""

    structure: ctypes.Structure
    kept: tuple[Any, ...]
    """What the structure points to."""


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
        b: [K, N] or [batch, K, N]; of a grouped product, [groups, K, N].
        out: [M, N] or [batch, M, N], with elements of a row side by side.
        inputs: the epilogue's, in its order: [M, N], [1, N] or [N], [M, 1], one element; or with
            the batch in front.
        outputs: the epilogue's others.
        ends: of a grouped product, the row after each group's last, int32 [groups].
        scalars: the epilogue's parameters.
        sms: multiprocessors of the device; 0 for asking it.
    """
    m, k = a.shape[-2:]
    n = b.shape[-1]
    batch = b.shape[0] if ends is not None else out.shape[0] if out.dim() == 3 else 1
    first, second = config.layouts[0], config.layouts[1]
    if config.swap:
        # The kernel's A is b's transpose, and its B a's.
        factors = [_factor(b, first == "n"), _factor(a, second == "n")]
        m, n = n, m
    else:
        factors = [_factor(a, first == "t"), _factor(b, second == "t")]
    tensors = [*factors, _matrix(out)]
    if ends is not None:
        tensors.append((ends.data_ptr(), 0, 0))
    tensors += [_matrix(each) for each in (*inputs, *outputs)]
    operands = (_Operand * len(tensors))(*(_Operand(*each) for each in tensors))
    numbers = (ctypes.c_float * max(1, len(scalars)))(*scalars)
    structure = _Call(
        m,
        n,
        k,
        batch,
        config.swizzle,
        RASTER[config.raster],
        config.split_k,
        sms,
        ctypes.cast(operands, ctypes.c_void_p),
        ctypes.cast(numbers, ctypes.c_void_p),
    )
    return Call(structure, (operands, numbers))


def _factor(tensor: Any, rows: bool) -> tuple[int, int, int]:
    """Address, elements from row to row, or from column to column if rows are not what lies side by
    side, and from matrix to matrix.

    What only has one row has some stride that TMA takes, which its own need not be.
    """
    *batch, row, column = tensor.stride()
    count, inner = tensor.shape[-2:] if rows else (tensor.shape[-1], tensor.shape[-2])
    stride = row if rows else column
    if count == 1:
        stride = ceiling(inner, _TMA_ELEMENTS) * _TMA_ELEMENTS
    return tensor.data_ptr(), stride, _of_batch(tensor, batch)


_TMA_ELEMENTS = 16
"""Of 8 bits and more, of which so many are a stride that TMA takes."""


def _matrix(tensor: Any) -> tuple[int, int, int]:
    strides = tensor.stride()
    if tensor.dim() < 2:
        return tensor.data_ptr(), 0, 0
    return tensor.data_ptr(), strides[-2], _of_batch(tensor, strides[:-2])


def _of_batch(tensor: Any, strides: Sequence[int]) -> int:
    return strides[0] if strides and tensor.shape[0] > 1 else 0


class Kernel:
    """A kernel in this process."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self.name = name
        self._size = library.inductor_ext_workspace_size
        self._size.restype = ctypes.c_int64
        self._size.argtypes = [ctypes.c_void_p]
        self._run = library.inductor_ext_run
        self._run.restype = ctypes.c_int32
        self._run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]

    def workspace_size(self, arguments: Call) -> int | None:
        """Bytes of the workspace of a launch; None if the kernel cannot run it."""
        size = int(self._size(ctypes.addressof(arguments.structure)))
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
        return int(self._run(ctypes.addressof(arguments.structure), workspace, stream))


def load(
    source: Source,
    store: cache.Store,
    toolchain: build.Toolchain | None = None,
    limit: int | None = None,
) -> Kernel:
    """A kernel in this process, built if it has not been.

    Raises:
        exc.MissingToolchainError, exc.KernelBuildError: see `build.built`.
    """
    with build.built(source, store, toolchain, "library", limit) as file:
        return Kernel(ctypes.CDLL(str(file)), source.name)
