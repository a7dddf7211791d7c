"""Digests of buffers and files, and the key of this version of the extension's code."""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import threading
from collections.abc import Callable
from typing import Any

PACKAGE = pathlib.Path(__file__).parent.parent


_BLOCK = 1 << 20
"""Block size of hashes in bytes, small enough that a block stays in the CPU cache between being
read and being hashed. Part of the format: digests depend on it."""


@functools.cache
def source_key() -> str:
    """Return a hex digest of the package's files, by relative name and content.

    It is part of every cache key, so that nothing compiled by another version is ever reused.
    """
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0")
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def hash_buffer(data: Any) -> str:
    """Return the hex digest of a C-contiguous buffer: SHA-256 over the SHA-256 of its blocks.

    Several threads hash the blocks. With the CPU's SHA-256 instructions, one thread hashes 1.8
    GB/s, twice as fast as BLAKE2b.
    """
    view = memoryview(data).cast("B")

    def hash_blocks(blocks: range, digests: list[bytes]) -> None:
        for block in blocks:
            chunk = view[block * _BLOCK : (block + 1) * _BLOCK]
            digests[block] = hashlib.sha256(chunk).digest()

    return _tree_digest(view.nbytes, hash_blocks)


def hash_file(source: int, size: int) -> str:
    """Return the `hash_buffer` of the first `size` bytes of an open file.

    Raises:
        OSError: the file cannot be read, or is shorter.
    """

    def hash_blocks(blocks: range, digests: list[bytes]) -> None:
        buffer = memoryview(bytearray(min(_BLOCK, max(size, 1))))
        for block in blocks:
            start = block * _BLOCK
            chunk = buffer[: min(_BLOCK, size - start)]
            _read(source, chunk, start)
            digests[block] = hashlib.sha256(chunk).digest()

    return _tree_digest(size, hash_blocks)


def _read(descriptor: int, chunk: memoryview, offset: int) -> None:
    position = 0
    while position < len(chunk):
        count = os.preadv(descriptor, [chunk[position:]], offset + position)
        if count == 0:
            raise OSError("the file has become shorter")
        position += count


def _tree_digest(size: int, hash_blocks: Callable[[range, list[bytes]], None]) -> str:
    """Return the SHA-256 over block digests, which `hash_blocks(blocks, digests)` computes."""
    count = -(-size // _BLOCK)
    digests = [b""] * count
    workers = min(count // 2, len(os.sched_getaffinity(0)), 8)
    if workers < 2:
        hash_blocks(range(count), digests)
    else:
        errors: list[BaseException] = []

        def work(first: int) -> None:
            try:
                hash_blocks(range(first, count, workers), digests)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(first,)) for first in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
    return hashlib.sha256(b"".join([size.to_bytes(8, "little"), *digests])).hexdigest()
