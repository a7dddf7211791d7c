"""The layout of a model's constants in its weights file, and how the file is written.

Constants that share a storage (tied weights, views of one buffer) share one offset in the file.
They therefore share memory again when the file is mapped, and a change to one is visible through
the other. Storages are written one after the other, directly from memory: the file is never held in
memory as a whole.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator, Mapping
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ALIGNMENT = 64
"""Alignment of storages in bytes, the same as that of torch's CPU allocator."""

PAGE = 65536
"""Alignment in bytes of weights appended to a shared object: the largest page size in use."""

_FOOTER_MAGIC = b"inductor_weights"


@dataclasses.dataclass(frozen=True)
class Plan:
    """Offsets and sizes of all constants that have a value at compile time."""

    offsets: Mapping[str, int]
    """Offset of the constant's storage, in bytes, by constant name."""
    sizes: Mapping[str, int]
    """Size of the constant's storage, in bytes, by constant name."""
    bytes: int
    """Size of the whole file, in bytes."""


def nbytes(tensor: torch.Tensor) -> int:
    """Return the number of bytes to store for a constant: those of its whole storage."""
    import torch

    if tensor.numel() == 0:
        return 0
    if tensor.is_mkldnn:
        return int(torch.ops.mkldnn._nbytes(tensor))
    return tensor.untyped_storage().nbytes()


def plan(constants: Mapping[str, torch.Tensor]) -> Plan:
    """Assign offsets to the storages of `constants`, in order, once per storage."""
    offsets: dict[str, int] = {}
    sizes: dict[str, int] = {}
    starts: dict[tuple[str, int, int], int] = {}
    end = 0
    for name, tensor in constants.items():
        size = nbytes(tensor)
        sizes[name] = size
        start = -(-end // ALIGNMENT) * ALIGNMENT
        if size and not tensor.is_mkldnn:
            key = (str(tensor.device), tensor.untyped_storage().data_ptr(), size)
            start = starts.setdefault(key, start)
        offsets[name] = start if size else 0
        end = max(end, offsets[name] + size)
    return Plan(offsets, sizes, end)


def write(file: IO[bytes], constants: Mapping[str, torch.Tensor], layout: Plan) -> None:
    """Write the weights of `layout` to `file`, starting at its current position."""
    for part in parts(constants, layout):
        file.write(part)


def parts(constants: Mapping[str, torch.Tensor], layout: Plan) -> Iterator[bytes | memoryview]:
    """Yield the contents of the weights file in pieces that are views of memory where possible."""
    position = 0
    for name, tensor in constants.items():
        start, size = layout.offsets[name], layout.sizes[name]
        if not size or start < position:
            continue
        yield b"\0" * (start - position)
        yield storage_bytes(tensor, size)
        position = start + size


def storage_bytes(tensor: torch.Tensor, size: int) -> memoryview:
    """Return the `size` bytes of a tensor's storage; a GPU storage is copied to the CPU.

    The memory lives as long as the view.
    """
    import torch

    if tensor.is_mkldnn:
        return _view(int(torch.ops.mkldnn.data_ptr(tensor)), size, tensor)
    storage = tensor.untyped_storage().cpu()
    return _view(storage.data_ptr(), size, storage)


def footer(layout: Plan) -> bytes:
    """Return the bytes after weights appended to a shared object, by which it locates them."""
    return layout.bytes.to_bytes(8, "little") + _FOOTER_MAGIC


def append(path: str, constants: Mapping[str, torch.Tensor], layout: Plan) -> None:
    """Append the weights to a shared object, where its runtime looks for them."""
    with open(path, "ab") as file:
        offset = -(-file.tell() // PAGE) * PAGE
        file.write(b"\0" * (offset - file.tell()))
        write(file, constants, layout)
        file.write(footer(layout))


def _view(address: int, size: int, owner: object) -> memoryview:
    memory = (ctypes.c_ubyte * size).from_address(address)
    memory.owner = owner  # type: ignore[attr-defined]
    return memoryview(memory)
