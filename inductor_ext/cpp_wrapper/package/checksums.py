"""The checksums of weights in a manifest, which libraries check while they read the weights.

A checksum of 64 bits belongs to each block of a weights file (runtime/checksum.h). Computing it
takes a tenth of the time of SHA-256, of which the manifest has a digest too. It finds damage. If
weights and manifest were both changed on purpose, only a signature tells.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable

BLOCK = 2 << 20
"""Size of the block that a checksum belongs to, in bytes: `kChecksumBlock` of checksum.h."""

_DIGITS = 16
"""Hexadecimal digits of a checksum."""

Function = Callable[[int, int], int]
"""Returns the checksum of a block by its address and size in bytes: `build.checksum_library`."""


def compute(parts: Iterable[bytes | memoryview], function: Function) -> str:
    """Return the checksums of all blocks of a file, one after the other, in hexadecimal.

    Args:
        parts: the content of the file.
        function: see `Function`.
    """
    checksums = []
    buffer = bytearray(BLOCK)
    address = ctypes.addressof((ctypes.c_char * BLOCK).from_buffer(buffer))
    filled = 0
    for part in parts:
        view = memoryview(part).cast("B")
        while view:
            count = min(len(view), BLOCK - filled)
            buffer[filled : filled + count] = view[:count]
            filled, view = filled + count, view[count:]
            if filled == BLOCK:
                checksums.append(function(address, BLOCK))
                filled = 0
    if filled:
        checksums.append(function(address, filled))
    return "".join(f"{checksum:0{_DIGITS}x}" for checksum in checksums)


def parse(text: str, size: int) -> list[int] | None:
    """Return the checksums of a file's blocks; None if the text has not one for each block.

    Args:
        text: returned by `compute`.
        size: size of the file in bytes.
    """
    if len(text) != _DIGITS * -(-size // BLOCK) or not re.fullmatch("[0-9a-f]*", text):
        return None
    return [int(text[i : i + _DIGITS], 16) for i in range(0, len(text), _DIGITS)]
