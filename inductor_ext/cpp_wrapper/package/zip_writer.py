"""Writing .pt2 packages with large entries that can be memory-mapped in place.

`Writer` writes the format of torch's own writer, so that torch's loaders can read it. In addition,
it aligns selected entries to `zip_format.PAGE`, streams large entries in constant memory, and is
deterministic: the same entries give the same bytes. No settings; does not import torch.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import struct
from collections.abc import Iterable, Iterator
from typing import IO, TypeAlias

from inductor_ext.cpp_wrapper.package import zip_format as fmt
from inductor_ext.cpp_wrapper.package import zip_structure
from inductor_ext.cpp_wrapper.package.zip_format import (
    Buffer,
    Checksums,
    Entry,
    check_name,
    find_name_error,
    read_file_chunks,
    serialization_id,
)


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Content that is generated while it is written."""

    size: int
    """Total size in bytes."""
    parts: Iterable[Buffer]
    """Consecutive chunks. A chunk must not change until the second chunk after it is requested."""


Source: TypeAlias = Buffer | str | os.PathLike[str] | Chunks
"""The content of an entry; a str is the path of a file."""


class Writer:
    """Writer of a package, entry by entry.

    The caller opens the file, publishes it (`atomic_write`) and closes it. After an
    error, the file is invalid and must be discarded.
    """

    def __init__(self, file: IO[bytes], root: str) -> None:
        """Start a package.

        Args:
            file: writable and seekable, positioned at its beginning.
            root: name of the root folder of all entries: the package's file name without .pt2.

        Raises:
            ValueError: `root` is not allowed.
        """
        why = find_name_error(root) or ("has a slash" if "/" in root else None)
        if why is not None:
            raise ValueError(f"the root folder's name {root!r} {why}")
        self.root = root
        self.entries: dict[str, Entry] = {}
        self._file = file
        self._position = 0
        self._directory: list[bytes] = []

    def add(self, name: str, source: Source, *, aligned: bool = False) -> Entry:
        """Write one entry without compression.

        Args:
            name: path relative to the root folder, with slashes.
            source: the content. Files and `Chunks` are streamed, never loaded as a whole.
            aligned: whether to align the content to `zip_format.PAGE` instead of 64 bytes. Default:
                False.

        Returns:
            The entry, including its SHA-256.

        Raises:
            ValueError: the name is not allowed or already exists, or the size of the source differs
                from its declared size.
            OSError: the source cannot be read or the package cannot be written.
        """
        check_name(name)
        if name in self.entries:
            raise ValueError(f"there is an entry {name!r} already")
        with _open_source(source) as (size, parts):
            path = f"{self.root}/{name}".encode()
            header_at, header = zip_structure.local_header(
                self._position, path, size, 0, fmt.PAGE if aligned else fmt.ALIGNMENT
            )
            offset = header_at + len(header)
            self._file.write(b"\0" * (header_at - self._position))
            self._file.write(header)
            sums = self._copy(size, parts)
        if sums.size != size:
            raise ValueError(f"the source of {name!r} gave {sums.size} bytes and not {size}")
        entry = Entry(name, offset, size, size, sums.crc32, sums.sha256())
        # Patch the CRC-32, at byte 14 of the local header; it is known only now.
        self._file.seek(header_at + 14)
        self._file.write(struct.pack("<L", sums.crc32))
        self._file.seek(offset + size)
        self._position = offset + size
        self._directory.append(zip_structure.central_header(path, header_at, entry))
        self.entries[name] = entry
        return entry

    def _copy(self, size: int, parts: Iterable[Buffer]) -> Checksums:
        pool = concurrent.futures.ThreadPoolExecutor(1) if size >= fmt.LARGE else None
        sums = Checksums(pool)
        try:
            for part in parts:
                sums.update(part)
                self._file.write(part)
            sums.wait()
        finally:
            if pool is not None:
                pool.shutdown()
        return sums

    def finish(self) -> None:
        """Write the missing entries of `zip_format.BOOKKEEPING` and the zip central directory.

        The serialization ID is derived from the content. torch's writer uses a random number or
        derives it from the names alone.
        """
        written = {name: entry.sha256 or "" for name, entry in self.entries.items()}
        for name, value in fmt.bookkeeping(serialization_id(written)).items():
            if name not in self.entries:
                self.add(name, value)
        self._file.write(zip_structure.directory_and_end(self._position, self._directory))
        self._file.flush()


@contextlib.contextmanager
def _open_source(source: Source) -> Iterator[tuple[int, Iterable[Buffer]]]:
    """Open a source and yield (size in bytes, iterable of chunks)."""
    if isinstance(source, Chunks):
        yield source.size, (memoryview(part).cast("B") for part in source.parts)
        return
    if isinstance(source, (bytes, bytearray, memoryview)):
        view = memoryview(source).cast("B")
        yield (
            len(view),
            (view[position : position + fmt.CHUNK] for position in range(0, len(view), fmt.CHUNK)),
        )
        return
    with open(source, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        yield size, read_file_chunks(file.fileno(), 0, size)
