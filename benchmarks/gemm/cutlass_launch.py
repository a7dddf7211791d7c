"""Launch a built CUTLASS kernel on torch tensors, for benchmarks and tests.

Generated code launches kernels through `templates.cutlass.runtime`, which packs the arguments from
numbers that are known when the code is generated.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inductor_ext.storage.artifact_store import ArtifactStore
from inductor_ext.templates.cutlass import nvcc_build
from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.cutlass.launch import (
    OPERAND_BYTES,
    OPERANDS_AT,
    Shape,
    bind_functions,
    compute_geometry,
    list_config_fields,
    make_call_layout,
    order_operands,
)
from inductor_ext.templates.cutlass.source import Source

__all__ = ["Call", "Kernel", "call", "load"]


@dataclass(frozen=True)
class Call:
    """The packed arguments of a launch."""

    memory: Any
    """A ctypes buffer with the layout of `make_call_layout`."""

    @property
    def address(self) -> int:
        """Address of the `Call` struct."""
        return ctypes.addressof(self.memory)


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
    """Pack the arguments of a launch on tensors.

    Args:
        config: of the kernel, with the launch parameters: splits, swizzle, raster order.
        a: [M, K] or [batch, M, K]; [M, K] with the rows of all groups for a grouped GEMM.
        b: [K, N] or [batch, K, N]; [groups, K, N] for a grouped GEMM; [K / 2, N] if b is 4-bit.
        out: [M, N] or [batch, M, N], row-major.
        inputs: of the epilogue, in its order: [M, N], [1, N] or [N], [M, 1], or one element, each
            optionally with a leading batch dimension; group scales are [N, groups].
        outputs: the epilogue's outputs other than `out`.
        ends: end offsets of the groups of a grouped GEMM (exclusive), int32 [groups].
        scalars: parameters of the epilogue.
        sms: number of SMs of the device; 0 to query it.
    """

    def shape(tensor: Any) -> Shape:
        return tensor.shape, tensor.stride()

    launch_geometry = compute_geometry(
        config,
        shape(a),
        shape(b),
        shape(out),
        [shape(inp) for inp in inputs],
        [shape(output) for output in outputs],
        None if ends is None else shape(ends),
    )
    tensors = order_operands(config, a, b, out, inputs, outputs, ends)
    layout = make_call_layout(len(tensors), len(scalars))
    memory = ctypes.create_string_buffer(layout.size)
    operands = ctypes.addressof(memory) + OPERANDS_AT
    fields: list[float] = []
    for tensor, (stride, batch) in zip(tensors, launch_geometry.strides, strict=True):
        fields += [tensor.data_ptr(), stride, batch]
    scalars_at = operands + OPERAND_BYTES * len(tensors)
    head = (*launch_geometry.sizes, *list_config_fields(config), sms, operands, scalars_at)
    layout.pack_into(memory, 0, *head, *fields, *scalars)
    return Call(memory)


class Kernel:
    """A kernel that is loaded in this process."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self.name = name
        self._size, self._run = bind_functions(library)

    def workspace_size(self, arguments: Call) -> int | None:
        """Return the bytes of a launch's workspace; None if the kernel cannot run the launch."""
        size = int(self._size(arguments.address))
        return None if size < 0 else size

    def run(self, arguments: Call, workspace: int, stream: int) -> int:
        """Launch the kernel.

        Args:
            arguments: from `call`.
            workspace: address of `workspace_size` bytes of device memory.
            stream: CUDA stream handle.

        Returns:
            0, or an error code as described in `source`.
        """
        return int(self._run(arguments.address, workspace, stream))


def load(
    source: Source,
    store: ArtifactStore,
    toolchain: nvcc_build.Toolchain | None = None,
    limit: int | None = None,
) -> Kernel:
    """Load a kernel into this process; build it if necessary.

    Raises:
        exc.MissingToolchainError, exc.KernelBuildError: see `nvcc_build.built`.
    """
    with nvcc_build.built(source, store, toolchain, "library", limit) as file:
        return Kernel(ctypes.CDLL(str(file)), source.name)
