"""The zip format of .pt2 packages: entry names, headers, checksums.

Used by the other modules `zip_*`. No settings; does not import torch.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import os
import re
import stat
import struct
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

MODELS_FOLDER = "data/aotinductor/"
"""Prefix of the entries of compiled models, followed by the model name."""

CONSTANTS_FOLDER = "data/constants/"
"""Prefix of the entries of pickled objects (TorchBind)."""

PAGE = 65536
"""Alignment in bytes of entries to be memory-mapped: the largest page size in use."""

ALIGNMENT = 64
"""Alignment in bytes of all other entries, the same as in torch's writer."""

CHUNK = 1 << 20
"""Bytes read at a time: small enough to stay in the CPU cache between hashing and writing."""

LARGE = 8 << 20
"""Minimum size in bytes for which starting a second thread pays off."""

FOLDERS = frozenset({".data", "data", "extra", "models", "xl_model_weights"})
"""Folders allowed directly below the root folder of a .pt2 package."""

TOP_FILES = frozenset({"archive_format", "archive_version", "byteorder", "version"})
"""Files allowed directly below the root folder."""

BOOKKEEPING = (
    "archive_format",
    "archive_version",
    "byteorder",
    ".data/version",
    ".data/serialization_id",
)
"""Entries added by `Writer.finish`, by which torch's reader identifies the format."""

SIGNATURES = "extra/inductor_ext/signatures.json"
"""Entry with the signatures of a package (`signing`). No digest covers it."""

LOCAL = struct.Struct("<4s5H3L2H")
CENTRAL = struct.Struct("<4s4B4HL2L5H2L")
END = struct.Struct("<4s4H2LH")
END64 = struct.Struct("<4sQ2H2L4Q")
LOCATOR64 = struct.Struct("<4sLQL")
LOCAL_SIGNATURE = b"PK\x03\x04"
CENTRAL_SIGNATURE = b"PK\x01\x02"
END_SIGNATURE = b"PK\x05\x06"
END64_SIGNATURE = b"PK\x06\x06"
LOCATOR64_SIGNATURE = b"PK\x06\x07"
STORED, DEFLATED = 0, 8
ENCRYPTED, SIZES_FOLLOW, UTF8 = 1 << 0, 1 << 3, 1 << 11
FULL16, FULL32 = 0xFFFF, 0xFFFFFFFF
ZIP64_FIELD = 1
PADDING_FIELD = 0x4246
"""ID of the zip extra field that torch's writer uses for padding."""
FIRST_DATE = 1 << 5 | 1
"""1980-01-01 in zip encoding, the earliest date that zip can represent."""
REGULAR_FILE = (stat.S_IFREG | 0o644) << 16
UNIX = 3

Buffer: TypeAlias = bytes | bytearray | memoryview


@dataclasses.dataclass(frozen=True)
class Entry:
    """A file in a package."""

    name: str
    """Path relative to the root folder, with slashes."""
    offset: int
    """Offset of the content in the package file, in bytes; 0 for a file of an unpacked package."""
    size: int
    """Uncompressed size in bytes."""
    packed_size: int
    """Size in the package file in bytes; equal to `size` unless the entry is compressed."""
    crc32: int | None
    """None for a file of an unpacked package."""
    sha256: str | None = None
    """Hex digest of an entry that was written; None for an entry of an opened package."""
    stored: bool = True
    """Whether the content is stored without compression."""


def find_name_error(name: str) -> str | None:
    """Return why an entry name is not allowed, or None."""
    if not name or name.endswith("/"):
        return "names a folder, not a file"
    if re.search(r"[\x00-\x1f\x7f\\]", name):
        return "has a backslash or a control character"
    if name.startswith("/") or re.match(r"[A-Za-z]:", name):
        return "is absolute"
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return 'has an empty part, or a part "." or ".."'
    if any(len(part.encode("utf-8", "surrogatepass")) > 255 for part in parts):
        return "has a part of more than 255 bytes"
    return None


def check_name(name: str) -> None:
    """Check that an entry of a package may have this name.

    Args:
        name: path relative to the root folder.

    Raises:
        ValueError: the name is not allowed; the error text says why.
    """
    why = find_name_error(name)
    if why is None:
        top, slash, _ = name.partition("/")
        if top not in (FOLDERS if slash else TOP_FILES):
            why = "is outside the folders of a .pt2 archive"
    if why is not None:
        raise ValueError(f"the name {name!r} {why}")


class Checksums:
    """CRC-32 and SHA-256 of a stream. With a thread pool, SHA-256 is computed in another thread."""

    def __init__(self, pool: concurrent.futures.Executor | None = None) -> None:
        self._pool = pool
        self._pending: concurrent.futures.Future[None] | None = None
        self._sha256 = hashlib.sha256()
        self.crc32 = 0
        self.size = 0

    def update(self, data: Buffer) -> None:
        """Add the next bytes. They must not change before the next `update` or `wait`."""
        self.wait()
        self.size += len(data)
        if self._pool is None:
            self._sha256.update(data)
        else:
            self._pending = self._pool.submit(self._sha256.update, data)
        self.crc32 = zlib.crc32(data, self.crc32)

    def wait(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def sha256(self) -> str:
        self.wait()
        return self._sha256.hexdigest()


def read_file_chunks(descriptor: int, offset: int, size: int) -> Iterator[memoryview]:
    """Yield chunks of a file range. A chunk is valid until the second chunk after it is read."""
    buffers = [memoryview(bytearray(min(CHUNK, size))) for _ in range(2)]
    end, turn = offset + size, 0
    while offset < end:
        view = buffers[turn][: min(CHUNK, end - offset)]
        count = os.preadv(descriptor, [view], offset)
        if count == 0:
            return  # The file was truncated; the caller checks the size.
        yield view[:count]
        offset += count
        turn = 1 - turn


def file_sha256(path: str, offset: int, size: int) -> str:
    """Compute the SHA-256 of a byte range of a file, truncated at its end, as a hex digest.

    Args:
        path: path of the file.
        offset: start of the range in bytes.
        size: size of the range in bytes.

    Raises:
        OSError: the file cannot be read.
    """
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        for part in read_file_chunks(file.fileno(), offset, size):
            digest.update(part)
    return digest.hexdigest()


def model_names(entries: Iterable[str]) -> list[str]:
    """Return the names of the compiled models in a package with these entry names."""
    names = {
        name.split("/")[2]: None
        for name in entries
        if name.startswith(MODELS_FOLDER) and name.count("/") > 2
    }
    return list(names)


def serialization_id(digests: Mapping[str, str]) -> str:
    """Compute the content of `.data/serialization_id`: 40 decimal digits.

    It does not depend on the order of entries, nor on those in `BOOKKEEPING` or `SIGNATURES`.

    Args:
        digests: SHA-256 in hex by entry name.
    """
    total = hashlib.sha256()
    for name in sorted(digests.keys() - {*BOOKKEEPING, SIGNATURES}):
        total.update(f"{name}\0{digests[name]}\n".encode())
    return f"{int.from_bytes(total.digest(), 'big'):078d}"[-40:]


def bookkeeping(identity: str) -> dict[str, bytes]:
    """Return the content of the entries in `BOOKKEEPING`.

    Args:
        identity: what `serialization_id` returns.
    """
    values = ("pt2", "0", sys.byteorder, "6\n", identity)
    return {name: value.encode() for name, value in zip(BOOKKEEPING, values, strict=True)}
