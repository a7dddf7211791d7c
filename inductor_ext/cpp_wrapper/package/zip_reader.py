"""Reading .pt2 packages, written by `zip_writer` or by torch, and folders of unpacked ones.

`open_package` validates the names, sizes and offsets of all entries first; an invalid package
raises `exc.BadPackageError` before anything is written. No settings; does not import torch.
"""

from __future__ import annotations

import abc
import concurrent.futures
import errno
import io
import os
import threading
import zlib
from collections.abc import Iterator, Mapping
from typing import IO, NoReturn

from inductor_ext import exc
from inductor_ext.cpp_wrapper.package import zip_format as fmt
from inductor_ext.cpp_wrapper.package import zip_structure
from inductor_ext.cpp_wrapper.package.zip_directory import read_directory
from inductor_ext.cpp_wrapper.package.zip_format import Buffer, Checksums, Entry, read_file_chunks


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
    def _content(self, entry: Entry) -> Iterator[Buffer]:
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

    def _check_sums(self, entry: Entry, sums: Checksums, expected: str | None) -> None:
        if sums.size != entry.size:
            self._fail(f"{entry.name} has {sums.size} bytes and not {entry.size}")
        if entry.crc32 is not None and sums.crc32 != entry.crc32:
            self._fail(f"{entry.name} is damaged: its content does not match its CRC-32")
        if expected is not None and sums.sha256() != expected:
            self._fail(f"{entry.name} is damaged: its content does not match its SHA-256")

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
            self._fail(f"{name} has {entry.size} bytes, which is too large for this kind of file")
        return b"".join(bytes(part) for part in self.read_chunks(name))

    def read_chunks(self, name: str, sha256: str | None = None) -> Iterator[Buffer]:
        """Yield the content of an entry in chunks, and check it after the last one.

        A chunk is valid until the second chunk after it is read.

        Args:
            name: name of the entry.
            sha256: the expected hex digest. Default: None, only the CRC-32 is checked.

        Raises:
            exc.BadPackageError: there is no such entry; or, after the last chunk, it is damaged.
        """
        entry = self._entry(name)
        sums = Checksums()
        for part in self._content(entry):
            sums.update(part)
            yield part
        self._check_sums(entry, sums, sha256)

    def find_damage(self, digests: Mapping[str, str]) -> dict[str, str]:
        """Return why entries are damaged, by name.

        Entries in `digests` are checked by SHA-256, others by CRC-32. Large packages are read by
        several threads.

        Args:
            digests: SHA-256 in hex by entry name.

        Raises:
            exc.BadPackageError: an entry of `digests` is missing.
        """
        names = sorted({*digests, *self.entries}, key=lambda name: -self._entry(name).size)

        def check(name: str) -> str | None:
            try:
                for _ in self.read_chunks(name, digests.get(name)):
                    pass
            except exc.BadPackageError as error:
                return str(error.fields["why"])
            return None

        is_large = sum(entry.size for entry in self.entries.values()) >= fmt.LARGE
        workers = min(4, len(os.sched_getaffinity(0))) if is_large else 1
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            reasons = zip(names, pool.map(check, names), strict=True)
            return {name: why for name, why in reasons if why is not None}

    def verify(self, digests: Mapping[str, str]) -> None:
        """Verify all entries: those in `digests` by SHA-256, the others by CRC-32.

        Args:
            digests: SHA-256 in hex by entry name.

        Raises:
            exc.BadPackageError: an entry is missing or damaged.
        """
        for why in self.find_damage(digests).values():
            self._fail(why)

    @abc.abstractmethod
    def verify_structure(self, *, is_own: bool) -> None:
        """Verify the bytes of the file outside of the entries' contents.

        Args:
            is_own: whether `zip_writer` wrote the package, so that each of these bytes is known.
                Otherwise, they must agree with each other.

        Raises:
            exc.BadPackageError: a byte was changed.
        """

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
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            with open(descriptor, "wb") as file:
                for part in self.read_chunks(name, sha256):
                    file.write(part)
        except BaseException:
            os.unlink(target)
            raise


class _ZipPackage(Package):
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
            self.root, self.entries = read_directory(self._pread, self._size, self.where)
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
            self._fail("it is truncated, or its central directory points beyond its end")
        if self._buffer is None:
            data = os.pread(self._descriptor, size, offset)
        else:
            with self._lock:
                self._buffer.seek(offset)
                data = self._buffer.read(size)
        if len(data) != size:
            self._fail("it has become shorter while it was read")
        return data

    def locate(self, name: str) -> tuple[str, int, int] | None:
        entry = self._entry(name)
        if not entry.stored or not self.path:
            return None
        return self.path, entry.offset, entry.size

    def verify_structure(self, *, is_own: bool) -> None:
        find = zip_structure.find_change if is_own else zip_structure.find_contradiction
        part = find(self._pread, self._size, self.root, self.entries)
        if part is not None:
            self._fail(f"it was changed after it was written: {part}")

    def _packed(self, entry: Entry) -> Iterator[Buffer]:
        if self._buffer is None:
            yield from read_file_chunks(self._descriptor, entry.offset, entry.packed_size)
            return
        end = entry.offset + entry.packed_size
        for position in range(entry.offset, end, fmt.CHUNK):
            yield self._pread(position, min(fmt.CHUNK, end - position))

    def _content(self, entry: Entry) -> Iterator[Buffer]:
        if entry.stored:
            yield from self._packed(entry)
            return
        inflate = zlib.decompressobj(-zlib.MAX_WBITS)
        remaining = entry.size
        try:
            for packed in self._packed(entry):
                if inflate.eof:
                    self._fail(f"{entry.name} is damaged: it is followed by other data")
                while packed and not inflate.eof:
                    part = inflate.decompress(packed, fmt.CHUNK)
                    packed = inflate.unconsumed_tail
                    remaining -= len(part)
                    if remaining < 0:
                        self._fail(f"{entry.name} has more than the recorded {entry.size} bytes")
                    yield part
                if inflate.unused_data:
                    self._fail(f"{entry.name} is damaged: it is followed by other data")
        except zlib.error:
            self._fail(f"{entry.name} is damaged: it cannot be decompressed")


class _FolderPackage(Package):
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
            raise exc.NotAPackageError(path=path, why="the folder has no file of a package in it")

    def _walk(self, folder: str, prefix: str) -> Iterator[Entry]:
        for dir_entry in sorted(os.scandir(folder), key=lambda dir_entry: dir_entry.name):
            name = prefix + dir_entry.name
            if dir_entry.is_dir(follow_symlinks=False):
                # Ignore unrelated folders next to those of the package.
                if prefix or dir_entry.name in fmt.FOLDERS:
                    yield from self._walk(dir_entry.path, f"{name}/")
            elif dir_entry.is_file(follow_symlinks=False):
                if prefix or dir_entry.name in fmt.TOP_FILES:
                    size = dir_entry.stat(follow_symlinks=False).st_size
                    yield Entry(name, 0, size, size, None)
            else:
                self._fail(f"{name} is a link or a device, not a file")

    def close(self) -> None:
        """Do nothing: no file is open."""

    def verify_structure(self, *, is_own: bool) -> None:
        """Do nothing: a folder has no bytes outside of its files."""

    def locate(self, name: str) -> tuple[str, int, int] | None:
        entry = self._entry(name)
        return os.path.join(self._folder, *name.split("/")), 0, entry.size

    def _content(self, entry: Entry) -> Iterator[Buffer]:
        path = os.path.join(self._folder, *entry.name.split("/"))
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            yield from read_file_chunks(descriptor, 0, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)


def open_package(source: str | os.PathLike[str] | IO[bytes]) -> Package:
    """Open a package and validate the names, sizes and offsets of all entries.

    Does not check contents: `read`, `read_chunks`, `extract` and `verify` do that.

    Args:
        source: path of a .pt2 file, path of a folder into which one was unpacked, or a readable and
            seekable buffer, which must not be used otherwise until `close`.

    Raises:
        exc.PackageNotFoundError: there is no file or folder at this path.
        exc.BadPackageError: `source` is not a package (`NotAPackageError`), cannot be read
            (`UnreadablePackageError`), is truncated, or has entries with invalid names, sizes or
            offsets.
        exc.BadArgumentError: `source` is neither a path nor a readable and seekable buffer.
    """
    if not isinstance(source, (str, os.PathLike)):
        if not (hasattr(source, "read") and hasattr(source, "seek")):
            raise exc.BadArgumentError(
                name="path", actual=repr(source), allowed="a path, or a readable buffer"
            )
        return _ZipPackage(source)
    path = os.path.abspath(os.fspath(source))
    try:
        return _FolderPackage(path) if os.path.isdir(path) else _ZipPackage(path)
    except FileNotFoundError:
        raise exc.PackageNotFoundError(path=path) from None
    except OSError as error:
        why = os.strerror(error.errno or errno.EIO)
        raise exc.UnreadablePackageError(path=path, why=why) from None
