"""Where a model's constants lie in the file of its weights, and how the file is written.

Constants that share a storage (tied weights, views of one buffer) share its place in the file, so
that they share memory again when the file is mapped, and what one of them is changed to is seen
through the other. Storages are written one after the other, straight from memory: the file is never
held as a whole.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator, Mapping
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = [
    "ALIGNMENT",
    "Plan",
    "StorageBytes",
    "append",
    "footer",
    "nbytes",
    "parts",
    "plan",
    "storage_bytes",
    "write",
]

ALIGNMENT = 64
"""Bytes to which storages are aligned, as the CPU allocator of torch aligns its own."""

PAGE = 65536
"""Bytes to which weights at the end of a shared object are aligned: the largest page in use."""

_FOOTER_MAGIC = b"inductor_weights"


@dataclasses.dataclass(frozen=True)
class Plan:
    """The places of all constants that have a value when the model is compiled."""

    offsets: Mapping[str, int]
    """By constant: where its storage begins, in bytes."""
    sizes: Mapping[str, int]
    """By constant: bytes of its storage."""
    bytes: int
    """Of the whole file."""


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes of the memory that has to be kept of a constant: that of its whole storage."""
    import torch

    if tensor.numel() == 0:
        return 0
    if tensor.is_mkldnn:
        return int(torch.ops.mkldnn._nbytes(tensor))
    return tensor.untyped_storage().nbytes()


def plan(constants: Mapping[str, torch.Tensor]) -> Plan:
    """Place the storages of `constants`, in their order, each once."""
    offsets: dict[str, int] = {}
    sizes: dict[str, int] = {}
    seen: dict[tuple[str, int, int], int] = {}
    end = 0
    for name, tensor in constants.items():
        size = nbytes(tensor)
        sizes[name] = size
        start = -(-end // ALIGNMENT) * ALIGNMENT
        if size and not tensor.is_mkldnn:
            key = (str(tensor.device), tensor.untyped_storage().data_ptr(), size)
            start = seen.setdefault(key, start)
        offsets[name] = start if size else 0
        end = max(end, start + size)
    return Plan(offsets, sizes, end)


def write(file: IO[bytes], constants: Mapping[str, torch.Tensor], places: Plan) -> None:
    """Write the weights of `places` to `file` from its current position on."""
    for part in parts(constants, places):
        file.write(part)


def parts(constants: Mapping[str, torch.Tensor], places: Plan) -> Iterator[bytes | memoryview]:
    """The bytes of the file of weights, piece by piece, as they lie in memory."""
    position = 0
    kept: tuple[StorageBytes, ...] = ()
    for name, tensor in constants.items():
        start, size = places.offsets[name], places.sizes[name]
        if not size or start < position:
            continue
        yield b"\0" * (start - position)
        # A reader may still be at work on a piece when it asks for the next but one.
        kept = (*kept[-1:], storage_bytes(tensor, size))
        yield kept[-1].view
        position = start + size


@dataclasses.dataclass(frozen=True)
class StorageBytes:
    """The bytes of a storage, as long as this object lives."""

    view: memoryview
    owner: object


def storage_bytes(tensor: torch.Tensor, size: int) -> StorageBytes:
    """The `size` bytes of a tensor's storage; of one on a GPU a copy."""
    import torch

    if tensor.is_mkldnn:
        return StorageBytes(_view(int(torch.ops.mkldnn.data_ptr(tensor)), size), tensor)
    storage = tensor.untyped_storage().cpu()
    return StorageBytes(_view(storage.data_ptr(), size), storage)


def footer(places: Plan) -> bytes:
    """What follows the weights where they are the end of a shared object, for it to find them."""
    return places.bytes.to_bytes(8, "little") + _FOOTER_MAGIC


def append(path: str, constants: Mapping[str, torch.Tensor], places: Plan) -> None:
    """Put the weights behind the end of a shared object, where its runtime looks for them."""
    with open(path, "ab") as file:
        offset = -(-file.tell() // PAGE) * PAGE
        file.write(b"\0" * (offset - file.tell()))
        write(file, constants, places)
        file.write(footer(places))


def _view(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * size).from_address(address))
