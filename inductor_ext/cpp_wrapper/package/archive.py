"""The zip format of .pt2 packages, with large entries that can be memory-mapped in place.

`Writer` writes the format of torch's own writer, so that torch's loaders can read it. In addition,
it aligns selected entries to `PAGE`, streams large entries in constant memory, and is
deterministic: the same entries give the same bytes. `open_package` reads a package written by
`Writer` or by torch, or a folder into which one was unpacked. It validates the names, sizes and
offsets of all entries first; an invalid package raises `exc.BadPackageError` before anything is
written. This module has no settings and does not import torch.
"""

from __future__ import annotations

import abc
import concurrent.futures
import contextlib
import dataclasses
import errno
import hashlib
import io
import os
import re
import stat
import struct
import sys
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any, NoReturn, TypeAlias

from inductor_ext import exc

__all__ = [
    "AOTI",
    "BOOKKEEPING",
    "PAGE",
    "Buffer",
    "Chunks",
    "Entry",
    "FileRange",
    "Package",
    "Source",
    "Writer",
    "check_name",
    "file_sha256",
    "identity",
    "models",
    "open_package",
]

AOTI = "data/aotinductor/"
"""Prefix of the entries of compiled models, followed by the model name."""

PAGE = 65536
"""Alignment in bytes of entries to be memory-mapped: the largest page size in use."""

_ALIGNMENT = 64
"""Alignment in bytes of all other entries, the same as in torch's writer."""

_CHUNK = 1 << 20
"""Bytes read at a time: small enough to stay in the CPU cache between hashing and writing."""

_LARGE = 8 << 20
"""Minimum size in bytes for which starting a second thread pays off."""

_FOLDERS = frozenset({".data", "data", "extra", "models", "xl_model_weights"})
"""Folders allowed directly below the root folder of a .pt2 package."""

_TOP_FILES = frozenset({"archive_format", "archive_version", "byteorder", "version"})
"""Files allowed directly below the root folder."""

BOOKKEEPING = (
    "archive_format",
    "archive_version",
    "byteorder",
    ".data/version",
    ".data/serialization_id",
)
"""Entries added by `Writer.finish`, by which torch's reader identifies the format."""

_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s4B4HL2L5H2L")
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_LOCAL_SIGNATURE = b"PK\x03\x04"
_CENTRAL_SIGNATURE = b"PK\x01\x02"
_END_SIGNATURE = b"PK\x05\x06"
_END64_SIGNATURE = b"PK\x06\x06"
_LOCATOR64_SIGNATURE = b"PK\x06\x07"
_STORED, _DEFLATED = 0, 8
_ENCRYPTED, _SIZES_FOLLOW, _UTF8 = 1 << 0, 1 << 3, 1 << 11
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF
_ZIP64_FIELD = 1
_PADDING_FIELD = 0x4246
"""ID of the zip extra field that torch's writer uses for padding."""
_FIRST_DATE = 1 << 5 | 1
"""1980-01-01 in zip encoding, the earliest date that zip can represent."""
_REGULAR_FILE = (stat.S_IFREG | 0o644) << 16
_UNIX = 3

Buffer: TypeAlias = bytes | bytearray | memoryview


@dataclasses.dataclass(frozen=True)
class FileRange:
    """A byte range of a file."""

    path: str | os.PathLike[str]
    offset: int = 0
    """In bytes."""
    size: int | None = None
    """In bytes; None means up to the end of the file."""


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Content that is generated while it is written."""

    size: int
    """Total size in bytes."""
    parts: Iterable[Buffer]
    """Consecutive chunks. A chunk must not change until the second chunk after it is requested."""


Source: TypeAlias = Buffer | str | os.PathLike[str] | FileRange | Chunks
"""The content of an entry; a str is the path of a file."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A file in a package."""

    name: str
    """Path relative to the root folder, with slashes."""
    offset: int
    """Offset of the content in the package file, in bytes; 0 for a file of an unpacked package."""
    size: int
    """Uncompressed size in bytes."""
    packed: int
    """Size in the package file in bytes; equal to `size` unless the entry is compressed."""
    crc32: int | None
    """None for a file of an unpacked package."""
    sha256: str | None = None
    """Hex digest of an entry that was written; None for an entry of an opened package."""
    stored: bool = True
    """Whether the content is stored without compression."""


def _refuse_name(name: str) -> str | None:
    """Return why an entry name is not allowed, or None."""
    if not name or name.endswith("/"):
        return "names a folder, not a file"
    if re.search(r"[\x00-\x1f\x7f\\]", name):
        return "has a backslash or a control character"
    if name.startswith("/") or re.match(r"[A-Za-z]:", name):
        return "is absolute"
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "leads out of its folder or through an empty one"
    if any(len(part.encode("utf-8", "surrogatepass")) > 255 for part in parts):
        return "is longer than a file's name can be"
    return None


def check_name(name: str) -> None:
    """Check that an entry of a package may have this name.

    Args:
        name: path relative to the root folder.

    Raises:
        ValueError: the name is not allowed; the error text says why.
    """
    why = _refuse_name(name)
    if why is None:
        top, slash, _ = name.partition("/")
        if top not in (_FOLDERS if slash else _TOP_FILES):
            why = "lies outside of the folders that a .pt2 archive has"
    if why is not None:
        raise ValueError(f"the name {name!r} {why}")


class _Sums:
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


class Writer:
    """Writer of a package, entry by entry.

    The caller opens the file, publishes it (`artifact_store.publish`) and closes it. After an
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
        why = _refuse_name(root) or ("has a slash" if "/" in root else None)
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
            aligned: whether to align the content to `PAGE` instead of 64 bytes. Default: False.

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
        with _reading(source) as (size, parts):
            path = f"{self.root}/{name}".encode()
            header_at, header = self._local_header(path, size, PAGE if aligned else _ALIGNMENT)
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
        self._directory.append(self._central_header(path, header_at, entry))
        self.entries[name] = entry
        return entry

    def _copy(self, size: int, parts: Iterable[Buffer]) -> _Sums:
        pool = concurrent.futures.ThreadPoolExecutor(1) if size >= _LARGE else None
        sums = _Sums(pool)
        try:
            for part in parts:
                sums.update(part)
                self._file.write(part)
            sums.wait()
        finally:
            if pool is not None:
                pool.shutdown()
        return sums

    def _local_header(self, path: bytes, size: int, alignment: int) -> tuple[int, bytes]:
        """Return (offset of the header, header) such that the content after it is aligned."""
        extra = b""
        if size >= _FULL32:
            extra = struct.pack("<2H2Q", _ZIP64_FIELD, 16, size, size)
        fixed = _LOCAL.size + len(path) + len(extra) + 4
        padding = -(self._position + fixed) % alignment
        # An extra field holds up to 65535 bytes plus its 4-byte head. Padding that does not fit
        # goes before the header.
        most = _FULL16 - len(extra) - 4
        gap = max(0, padding - most)
        extra += struct.pack("<2H", _PADDING_FIELD, padding - gap) + b"\0" * (padding - gap)
        shown = min(size, _FULL32)
        head = _LOCAL.pack(
            _LOCAL_SIGNATURE,
            45 if size >= _FULL32 else 20,
            _flags(path),
            _STORED,
            0,
            _FIRST_DATE,
            0,
            shown,
            shown,
            len(path),
            len(extra),
        )
        return self._position + gap, head + path + extra

    def _central_header(self, path: bytes, header_at: int, entry: Entry) -> bytes:
        large = [value for value in (entry.size, entry.size, header_at) if value >= _FULL32]
        extra = b""
        if large:
            extra = struct.pack(f"<2H{len(large)}Q", _ZIP64_FIELD, 8 * len(large), *large)
        version = 45 if large else 20
        shown = min(entry.size, _FULL32)
        head = _CENTRAL.pack(
            _CENTRAL_SIGNATURE,
            version,
            _UNIX,
            version,
            0,
            _flags(path),
            _STORED,
            0,
            _FIRST_DATE,
            entry.crc32 or 0,
            shown,
            shown,
            len(path),
            len(extra),
            0,
            0,
            0,
            _REGULAR_FILE,
            min(header_at, _FULL32),
        )
        return head + path + extra

    def finish(self) -> None:
        """Write the missing entries of `BOOKKEEPING` and the zip central directory.

        The serialization ID is derived from the content. torch's writer uses a random number or
        derives it from the names alone.
        """
        written = {name: entry.sha256 or "" for name, entry in self.entries.items()}
        values = ("pt2", "0", sys.byteorder, "6\n", identity(written))
        for name, value in zip(BOOKKEEPING, values, strict=True):
            if name not in self.entries:
                self.add(name, value.encode())
        begin, count = self._position, len(self._directory)
        directory = b"".join(self._directory)
        self._file.write(directory)
        end = begin + len(directory)
        if count >= _FULL16 or begin >= _FULL32 or len(directory) >= _FULL32:
            record = (45, 45, 0, 0, count, count, len(directory), begin)
            self._file.write(_END64.pack(_END64_SIGNATURE, _END64.size - 12, *record))
            self._file.write(_LOCATOR64.pack(_LOCATOR64_SIGNATURE, 0, end, 1))
        self._file.write(
            _END.pack(
                _END_SIGNATURE,
                0,
                0,
                min(count, _FULL16),
                min(count, _FULL16),
                min(len(directory), _FULL32),
                min(begin, _FULL32),
                0,
            )
        )
        self._file.flush()


def identity(digests: Mapping[str, str]) -> str:
    """Compute the content of `.data/serialization_id`: 40 decimal digits.

    It does not depend on the entries in `BOOKKEEPING` or on the order of entries.

    Args:
        digests: SHA-256 in hex by entry name.
    """
    total = hashlib.sha256()
    for name in sorted(digests.keys() - set(BOOKKEEPING)):
        total.update(f"{name}\0{digests[name]}\n".encode())
    return f"{int.from_bytes(total.digest(), 'big'):078d}"[-40:]


def _flags(path: bytes) -> int:
    return 0 if path.isascii() else _UTF8


@contextlib.contextmanager
def _reading(source: Source) -> Iterator[tuple[int, Iterable[Buffer]]]:
    """Open a source and yield (size in bytes, iterable of chunks)."""
    if isinstance(source, Chunks):
        yield source.size, (memoryview(part).cast("B") for part in source.parts)
        return
    if isinstance(source, (bytes, bytearray, memoryview)):
        view = memoryview(source).cast("B")
        yield len(view), (view[at : at + _CHUNK] for at in range(0, len(view), _CHUNK))
        return
    given = source if isinstance(source, FileRange) else FileRange(source)
    with open(given.path, "rb", buffering=0) as file:
        whole = os.fstat(file.fileno()).st_size
        size = whole - given.offset if given.size is None else given.size
        if not 0 <= given.offset <= given.offset + size <= whole:
            raise ValueError(f"{os.fspath(given.path)} has {whole} bytes, too few for {given}")
        yield size, _file_parts(file.fileno(), given.offset, size)


def _file_parts(descriptor: int, offset: int, size: int) -> Iterator[memoryview]:
    """Yield chunks of a file range. A chunk is valid until the second chunk after it is read."""
    buffers = [memoryview(bytearray(min(_CHUNK, size))) for _ in range(2)]
    end, turn = offset + size, 0
    while offset < end:
        view = buffers[turn][: min(_CHUNK, end - offset)]
        count = os.preadv(descriptor, [view], offset)
        if count == 0:
            return  # The file was truncated; the caller checks the size.
        yield view[:count]
        offset += count
        turn = 1 - turn


def file_sha256(path: str, offset: int = 0, size: int | None = None) -> str:
    """Compute the SHA-256 of a byte range of a file, reading it in chunks.

    Args:
        path: path of the file.
        offset: start of the range in bytes. Default: 0.
        size: size of the range in bytes, truncated at the end of the file. Default: None, up to
            the end of the file.

    Returns:
        The hex digest.

    Raises:
        OSError: the file cannot be read.
    """
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        whole = os.fstat(file.fileno()).st_size
        for part in _file_parts(file.fileno(), offset, whole - offset if size is None else size):
            digest.update(part)
    return digest.hexdigest()


def models(entries: Iterable[str]) -> list[str]:
    """Return the names of the compiled models in a package with these entry names."""
    found = {
        name.split("/")[2]: None
        for name in entries
        if name.startswith(AOTI) and name.count("/") > 2
    }
    return list(found)


class Package(abc.ABC):
    """An open package whose entry names, sizes and offsets have been validated."""

    path: str
    """Path of the .pt2 file or folder; empty for a buffer."""
    root: str
    """Name of the root folder of all entries; empty for an unpacked package."""
    entries: Mapping[str, Entry]
    """Entries by name (path relative to the root folder)."""

    def __enter__(self) -> Package:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abc.abstractmethod
    def close(self) -> None:
        """Close the file."""

    @abc.abstractmethod
    def locate(self, name: str) -> tuple[str, int, int] | None:
        """Return (file path, offset, size) for memory-mapping an entry, offset and size in bytes.

        None if no file contains the uncompressed content.
        """

    @abc.abstractmethod
    def _parts(self, entry: Entry) -> Iterator[Buffer]:
        """Yield the content in chunks. A chunk is valid until the second chunk after it is read."""

    @property
    def where(self) -> str:
        """Description of the package's location for error messages."""
        return self.path or "in a buffer"

    def _fail(self, why: str) -> NoReturn:
        raise exc.BadPackageError(path=self.where, why=why)

    def _entry(self, name: str) -> Entry:
        if name not in self.entries:
            self._fail(f"it has no entry {name!r}")
        return self.entries[name]

    def _judge(self, entry: Entry, sums: _Sums, expected: str | None) -> None:
        if sums.size != entry.size:
            self._fail(f"{entry.name} has {sums.size} bytes and not {entry.size}")
        if entry.crc32 is not None and sums.crc32 != entry.crc32:
            self._fail(f"{entry.name} is damaged: its content does not fit its CRC-32")
        if expected is not None and sums.sha256() != expected:
            self._fail(f"{entry.name} is damaged: its content does not fit its SHA-256")

    def read(self, name: str, *, limit: int = 1 << 30) -> bytes:
        """Return the content of an entry after checking its CRC-32.

        Args:
            name: name of the entry.
            limit: maximum size in bytes. Default: 1 GiB.

        Raises:
            exc.BadPackageError: there is no such entry, or it is damaged or larger than `limit`.
        """
        entry = self._entry(name)
        if entry.size > limit:
            self._fail(f"{name} has {entry.size} bytes, which is too much for what it is")
        parts = [bytes(part) for part in self._parts(entry)]
        sums = _Sums()
        for part in parts:
            sums.update(part)
        self._judge(entry, sums, None)
        return b"".join(parts)

    def parts(self, name: str) -> Iterator[Buffer]:
        """Yield the content of an entry in chunks.

        A chunk is valid until the second chunk after it is read. The CRC-32 is checked after the
        last chunk.

        Raises:
            exc.BadPackageError: there is no such entry; or, after the last chunk, it is damaged.
        """
        entry = self._entry(name)
        sums = _Sums()
        for part in self._parts(entry):
            sums.update(part)
            yield part
        self._judge(entry, sums, None)

    def sha256(self, name: str, expected: str | None = None) -> str:
        """Compute the SHA-256 of an entry's content. Also checks its CRC-32.

        Args:
            name: name of the entry.
            expected: the expected hex digest. Default: None, not compared.

        Returns:
            The hex digest.

        Raises:
            exc.BadPackageError: there is no such entry, or it is damaged.
        """
        entry = self._entry(name)
        sums = _Sums()
        for part in self._parts(entry):
            sums.update(part)
        self._judge(entry, sums, expected)
        return sums.sha256()

    def verify(self, digests: Mapping[str, str]) -> None:
        """Verify all entries: those in `digests` by SHA-256, the others by CRC-32.

        Large packages are read by several threads.

        Args:
            digests: SHA-256 in hex by entry name.

        Raises:
            exc.BadPackageError: an entry is missing or damaged.
        """
        names = sorted({*digests, *self.entries}, key=lambda name: -self._entry(name).size)

        def check(name: str) -> None:
            self.sha256(name, digests.get(name))

        if len(names) < 2 or sum(entry.size for entry in self.entries.values()) < _LARGE:
            for name in names:
                check(name)
            return
        workers = min(4, len(os.sched_getaffinity(0)))
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            list(pool.map(check, names))

    def extract(self, name: str, target: str | os.PathLike[str], sha256: str | None = None) -> None:
        """Write an entry to a new file with mode 0600.

        Args:
            name: name of the entry.
            target: path of the new file, in a folder private to the caller.
            sha256: the expected hex digest. Default: None, only the CRC-32 is checked.

        Raises:
            exc.BadPackageError: there is no such entry, or it is damaged. No file is left behind.
            OSError: the file exists or cannot be written.
        """
        entry = self._entry(name)
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            with open(descriptor, "wb") as file:
                sums = _Sums()
                for part in self._parts(entry):
                    sums.update(part)
                    file.write(part)
            self._judge(entry, sums, sha256)
        except BaseException:
            os.unlink(target)
            raise


class _Zip(Package):
    """A package in a .pt2 file or a buffer."""

    def __init__(self, source: str | IO[bytes]) -> None:
        self.path = source if isinstance(source, str) else ""
        self._buffer = None if isinstance(source, str) else source
        self._lock = threading.Lock()
        self._descriptor = -1
        if isinstance(source, str):
            self._descriptor = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if self._buffer is None:
                self._size = os.fstat(self._descriptor).st_size
            else:
                self._size = self._buffer.seek(0, io.SEEK_END)
            self.root, self.entries = self._read_directory()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _pread(self, offset: int, size: int) -> bytes:
        """Read exactly `size` bytes."""
        if not 0 <= offset <= offset + size <= self._size:
            self._fail("it is cut off, or its directory points beyond its end")
        if self._buffer is None:
            data = os.pread(self._descriptor, size, offset)
        else:
            with self._lock:
                self._buffer.seek(offset)
                data = self._buffer.read(size)
        if len(data) != size:
            self._fail("it has become shorter while it was read")
        return data

    def _read_end(self) -> tuple[int, int, int]:
        """Return (begin, end, number of entries) of the zip central directory."""
        end_at = self._size - _END.size
        end = _END.unpack(self._pread(end_at, _END.size)) if end_at >= 0 else None
        if end is None or end[0] != _END_SIGNATURE:
            self._fail("it is no zip file, or its end is missing")
        _, disk, first_disk, here, count, size, begin, comment = end
        follows = end_at
        locator_at = end_at - _LOCATOR64.size
        if locator_at >= 0:
            signature, disk64, end64_at, disks = _LOCATOR64.unpack(
                self._pread(locator_at, _LOCATOR64.size)
            )
            if signature == _LOCATOR64_SIGNATURE:
                if disk64 or disks > 1 or end64_at + _END64.size > locator_at:
                    self._fail("its zip64 end is damaged")
                record = _END64.unpack(self._pread(end64_at, _END64.size))
                if record[0] != _END64_SIGNATURE:
                    self._fail("its zip64 end is damaged")
                # The values in both records must agree, because a reader may use either.
                narrow = (disk, first_disk, here, count, size, begin)
                disk, first_disk, here, count, size, begin = record[4:]
                limits = (_FULL16,) * 4 + (_FULL32,) * 2
                for short, wide, full in zip(narrow, record[4:], limits, strict=True):
                    if short not in (full, wide):
                        self._fail("its zip64 end contradicts its end")
                follows = end64_at
        if disk or first_disk or here != count or comment:
            self._fail("its end is damaged")
        if begin + size != follows:
            self._fail("its directory does not end where its end says")
        return begin, follows, count

    def _read_directory(self) -> tuple[str, dict[str, Entry]]:
        begin, end, count = self._read_end()
        directory = self._pread(begin, end - begin)
        root = ""
        entries: dict[str, Entry] = {}
        taken: list[tuple[int, int, str]] = []
        at = 0
        for _ in range(count):
            if at + _CENTRAL.size > len(directory):
                self._fail("its directory is cut off")
            fields = _CENTRAL.unpack_from(directory, at)
            path_at = at + _CENTRAL.size
            path_bytes, extra_bytes, comment_bytes = fields[12:15]
            extra_at = path_at + path_bytes
            at = extra_at + extra_bytes + comment_bytes
            if fields[0] != _CENTRAL_SIGNATURE or at > len(directory):
                self._fail("its directory is damaged")
            path = directory[path_at:extra_at]
            folder, name = self._split(path)
            if not entries:
                root = folder
            elif folder != root:
                self._fail(f"its entries lie below several roots, {root!r} and {folder!r}")
            if name in entries:
                self._fail(f"it has two entries {name!r}")
            header_at, entry = self._central_entry(name, fields, directory[extra_at:at])
            entry, header_end = self._local_entry(path, header_at, fields[5], entry)
            taken.append((header_at, header_end + entry.packed, name))
            entries[name] = entry
        if at != len(directory):
            self._fail("its directory has more in it than its end says")
        if not entries:
            self._fail("it is empty")
        taken.sort()
        for (_, one_end, one), (other_begin, _, other) in zip(
            taken, [*taken[1:], (begin, begin, "the directory")], strict=True
        ):
            if one_end > other_begin:
                self._fail(f"{one} and {other} overlap")
        return root, entries

    def _split(self, path: bytes) -> tuple[str, str]:
        try:
            text = path.decode()
        except UnicodeDecodeError:
            self._fail(f"the name {path!r} is not UTF-8")
        why = _refuse_name(text)
        if why is not None:
            self._fail(f"the name {text!r} {why}")
        root, _, name = text.partition("/")
        if not name:
            self._fail(f"{text!r} lies below no root folder")
        try:
            check_name(name)
        except ValueError as error:
            self._fail(str(error))
        return root, name

    def _central_entry(self, name: str, fields: tuple[Any, ...], extra: bytes) -> tuple[int, Entry]:
        """Return (offset of the local header, entry as described by the central directory)."""
        system, flags, method, crc32 = fields[2], fields[5], fields[6], fields[9]
        packed, size, first_disk, attributes, header_at = (
            fields[10],
            fields[11],
            fields[15],
            fields[17],
            fields[18],
        )
        extra = extra[: fields[13]]
        wide = iter(self._zip64(name, extra))
        try:
            size = next(wide) if size == _FULL32 else size
            packed = next(wide) if packed == _FULL32 else packed
            header_at = next(wide) if header_at == _FULL32 else header_at
        except StopIteration:
            self._fail(f"{name} lacks its zip64 sizes")
        if flags & _ENCRYPTED:
            self._fail(f"{name} is encrypted")
        if method not in (_STORED, _DEFLATED):
            self._fail(f"{name} is compressed by method {method}, which is not known")
        if method == _STORED and size != packed:
            self._fail(f"{name} has two sizes, {size} and {packed}")
        if first_disk not in (0, _FULL16):
            self._fail(f"{name} lies in another file")
        kind = stat.S_IFMT(attributes >> 16)
        if system == _UNIX and kind not in (0, stat.S_IFREG):
            self._fail(f"{name} is a link or a device, not a file")
        return header_at, Entry(name, 0, size, packed, crc32, None, method == _STORED)

    def _zip64(self, name: str, extra: bytes) -> list[int]:
        at = 0
        while at + 4 <= len(extra):
            kind, size = struct.unpack_from("<2H", extra, at)
            at += 4
            if at + size > len(extra):
                self._fail(f"the extra fields of {name} are damaged")
            if kind == _ZIP64_FIELD:
                count = min(size // 8, 3)
                return list(struct.unpack_from(f"<{count}Q", extra, at))
            at += size
        return []

    def _local_entry(
        self, path: bytes, header_at: int, flags: int, entry: Entry
    ) -> tuple[Entry, int]:
        """Return (entry with its offset, offset of its content).

        Checks that the local header agrees with the central directory, because torch's loaders read
        some fields from each.
        """
        head = _LOCAL.unpack(self._pread(header_at, _LOCAL.size))
        method, crc32, packed, size = head[3], head[6], head[7], head[8]
        path_bytes, extra_bytes = head[9:]
        rest = self._pread(header_at + _LOCAL.size, path_bytes + extra_bytes)
        if head[0] != _LOCAL_SIGNATURE or rest[:path_bytes] != path:
            self._fail(f"the header of {entry.name} is damaged, or that of another entry")
        wide = self._zip64(entry.name, rest[path_bytes:])
        if size == packed == _FULL32 and len(wide) >= 2:
            size, packed = wide[:2]
        said = (method, crc32, packed, size)
        known = (_STORED if entry.stored else _DEFLATED, entry.crc32, entry.packed, entry.size)
        later = flags & _SIZES_FOLLOW and said[1:] == (0, 0, 0)
        if said[0] != known[0] or not (later or said == known):
            self._fail(f"the header of {entry.name} contradicts the directory")
        offset = header_at + _LOCAL.size + path_bytes + extra_bytes
        if offset + entry.packed > self._size:
            self._fail(f"{entry.name} is cut off")
        return dataclasses.replace(entry, offset=offset), offset

    def locate(self, name: str) -> tuple[str, int, int] | None:
        entry = self._entry(name)
        if not entry.stored or not self.path:
            return None
        return self.path, entry.offset, entry.size

    def _raw(self, entry: Entry) -> Iterator[Buffer]:
        if self._buffer is None:
            yield from _file_parts(self._descriptor, entry.offset, entry.packed)
            return
        end = entry.offset + entry.packed
        for at in range(entry.offset, end, _CHUNK):
            yield self._pread(at, min(_CHUNK, end - at))

    def _parts(self, entry: Entry) -> Iterator[Buffer]:
        if entry.stored:
            yield from self._raw(entry)
            return
        inflate = zlib.decompressobj(-zlib.MAX_WBITS)
        left = entry.size
        try:
            for packed in self._raw(entry):
                while packed and not inflate.eof:
                    part = inflate.decompress(packed, _CHUNK)
                    packed = inflate.unconsumed_tail
                    left -= len(part)
                    if left < 0:
                        self._fail(f"{entry.name} has more than the {entry.size} bytes it says")
                    yield part
        except zlib.error:
            self._fail(f"{entry.name} is damaged: it cannot be decompressed")


class _Folder(Package):
    """An unpacked package: its root folder, or a folder that contains only the root folder."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.root = ""
        inside = os.listdir(path)
        if len(inside) == 1 and os.path.isdir(os.path.join(path, inside[0])):
            path = os.path.join(path, inside[0])
            if os.path.islink(path):
                self._fail(f"{inside[0]} is a link")
        self._folder = path
        self.entries = {entry.name: entry for entry in self._walk(path, "")}
        if not self.entries:
            self._fail("the folder has no file of a package in it")

    def _walk(self, folder: str, prefix: str) -> Iterator[Entry]:
        for item in sorted(os.scandir(folder), key=lambda item: item.name):
            name = prefix + item.name
            if item.is_dir(follow_symlinks=False):
                # Ignore unrelated folders next to those of the package.
                if prefix or item.name in _FOLDERS:
                    yield from self._walk(item.path, f"{name}/")
            elif item.is_file(follow_symlinks=False):
                if prefix or item.name in _TOP_FILES:
                    size = item.stat(follow_symlinks=False).st_size
                    yield Entry(name, 0, size, size, None)
            else:
                self._fail(f"{name} is a link or a device, not a file")

    def close(self) -> None:
        """Do nothing: no file is open."""

    def locate(self, name: str) -> tuple[str, int, int] | None:
        entry = self._entry(name)
        return os.path.join(self._folder, *name.split("/")), 0, entry.size

    def _parts(self, entry: Entry) -> Iterator[Buffer]:
        path = os.path.join(self._folder, *entry.name.split("/"))
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            yield from _file_parts(descriptor, 0, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)


def open_package(source: str | os.PathLike[str] | IO[bytes]) -> Package:
    """Open a package and validate the names, sizes and offsets of all entries.

    Does not check contents: `read`, `parts`, `extract`, `sha256` and `verify` do that.

    Args:
        source: path of a .pt2 file, path of a folder into which one was unpacked, or a readable and
            seekable buffer, which must not be used otherwise until `close`.

    Raises:
        exc.BadPackageError: `source` is not a package, cannot be read, or has entries with invalid
            names, sizes or offsets.
        exc.BadArgumentError: `source` is neither a path nor a readable and seekable buffer.
    """
    if not isinstance(source, (str, os.PathLike)):
        if not (hasattr(source, "read") and hasattr(source, "seek")):
            raise exc.BadArgumentError(
                name="path", given=repr(source), allowed="a path, or a readable buffer"
            )
        return _Zip(source)
    path = os.path.abspath(os.fspath(source))
    try:
        return _Folder(path) if os.path.isdir(path) else _Zip(path)
    except OSError as error:
        why = f"it cannot be read ({os.strerror(error.errno or errno.EIO)})"
        raise exc.BadPackageError(path=path, why=why) from None
