"""Reading and validating the central directory of a .pt2 package.

`read_directory` checks the names, sizes and offsets of all entries, and that all records of the
file agree with each other, before the content of any entry is used. No settings; does not import
torch.
"""

from __future__ import annotations

import dataclasses
import stat
import struct
from collections.abc import Callable
from typing import Any, NoReturn

from inductor_ext import exc
from inductor_ext.cpp_wrapper.package import zip_format as fmt
from inductor_ext.cpp_wrapper.package.zip_format import Entry, check_name, find_name_error


def read_directory(
    read: Callable[[int, int], bytes], size: int, where: str
) -> tuple[str, dict[str, Entry]]:
    """Read the central directory of a zip file.

    Args:
        read: returns exactly the bytes at (offset, size), or raises `exc.BadPackageError`.
        size: size of the file in bytes.
        where: the package's location for error messages.

    Returns:
        The name of the root folder, and the entries by their name below it.

    Raises:
        exc.NotAPackageError: the file is not a zip file.
        exc.BadPackageError: a record is damaged, contradicts another one, or has an invalid name,
            size or offset.
    """
    return _Directory(read, size, where).read()


class _Directory:
    def __init__(self, read: Callable[[int, int], bytes], size: int, where: str) -> None:
        self._pread = read
        self._size = size
        self._where = where

    def _fail(self, why: str) -> NoReturn:
        raise exc.BadPackageError(path=self._where, why=why)

    def _read_end(self) -> tuple[int, int, int]:
        """Return (begin, end, number of entries) of the zip central directory."""
        end_at = self._size - fmt.END.size
        end = fmt.END.unpack(self._pread(end_at, fmt.END.size)) if end_at >= 0 else None
        if end is None or end[0] != fmt.END_SIGNATURE:
            if self._pread(0, min(4, self._size)) != fmt.LOCAL_SIGNATURE:
                raise exc.NotAPackageError(path=self._where, why="it is not a zip file")
            self._fail("it was truncated, or other bytes were appended to it")
        _, disk, first_disk, disk_count, count, size, begin, comment = end
        follows = end_at
        locator_at = end_at - fmt.LOCATOR64.size
        if locator_at >= 0:
            signature, disk64, end64_at, disks = fmt.LOCATOR64.unpack(
                self._pread(locator_at, fmt.LOCATOR64.size)
            )
            if signature == fmt.LOCATOR64_SIGNATURE:
                if disk64 or disks > 1 or end64_at + fmt.END64.size > locator_at:
                    self._fail("its zip64 end record is damaged")
                record = fmt.END64.unpack(self._pread(end64_at, fmt.END64.size))
                if record[0] != fmt.END64_SIGNATURE:
                    self._fail("its zip64 end record is damaged")
                # The values in both records must agree, because a reader may use either.
                narrow = (disk, first_disk, disk_count, count, size, begin)
                disk, first_disk, disk_count, count, size, begin = record[4:]
                limits = (fmt.FULL16,) * 4 + (fmt.FULL32,) * 2
                for short, wide, full in zip(narrow, record[4:], limits, strict=True):
                    if short not in (full, wide):
                        self._fail("its two end records contradict each other")
                follows = end64_at
        if disk or first_disk or disk_count != count or comment:
            self._fail("its end record is damaged")
        if begin + size != follows:
            self._fail("its central directory does not end at the recorded position")
        return begin, follows, count

    def read(self) -> tuple[str, dict[str, Entry]]:
        begin, end, count = self._read_end()
        directory = self._pread(begin, end - begin)
        root = ""
        entries: dict[str, Entry] = {}
        ranges: list[tuple[int, int, str]] = []
        position = 0
        for _ in range(count):
            if position + fmt.CENTRAL.size > len(directory):
                self._fail("its central directory is truncated")
            fields = fmt.CENTRAL.unpack_from(directory, position)
            path_at = position + fmt.CENTRAL.size
            path_bytes, extra_bytes, comment_bytes = fields[12:15]
            extra_at = path_at + path_bytes
            position = extra_at + extra_bytes + comment_bytes
            if fields[0] != fmt.CENTRAL_SIGNATURE or position > len(directory):
                self._fail("its central directory is damaged")
            path = directory[path_at:extra_at]
            folder, name = self._split_path(path)
            if not entries:
                root = folder
            elif folder != root:
                self._fail(f"its entries are below several root folders, {root!r} and {folder!r}")
            if name in entries:
                self._fail(f"it has two entries {name!r}")
            header_at, entry = self._central_entry(name, fields, directory[extra_at:position])
            entry, header_end = self._local_entry(path, header_at, fields[5], entry)
            ranges.append((header_at, header_end + entry.packed_size, name))
            entries[name] = entry
        if position != len(directory):
            self._fail("its central directory has more entries than recorded")
        if not entries:
            self._fail("it is empty")
        ranges.sort()
        for (_, one_end, one), (other_begin, _, other) in zip(
            ranges, [*ranges[1:], (begin, begin, "the directory")], strict=True
        ):
            if one_end > other_begin:
                self._fail(f"{one} and {other} overlap")
        return root, entries

    def _split_path(self, path: bytes) -> tuple[str, str]:
        try:
            text = path.decode()
        except UnicodeDecodeError:
            self._fail(f"the name {path!r} is not UTF-8")
        why = find_name_error(text)
        if why is not None:
            self._fail(f"the name {text!r} {why}")
        root, _, name = text.partition("/")
        if not name:
            self._fail(f"{text!r} is not below a root folder")
        try:
            check_name(name)
        except ValueError as error:
            self._fail(str(error))
        return root, name

    def _central_entry(self, name: str, fields: tuple[Any, ...], extra: bytes) -> tuple[int, Entry]:
        """Return (offset of the local header, entry as described by the central directory)."""
        system, flags, method, crc32 = fields[2], fields[5], fields[6], fields[9]
        packed, size, first_disk = fields[10], fields[11], fields[15]
        attributes, header_at = fields[17:]
        extra = extra[: fields[13]]
        wide = iter(self._zip64(name, extra))
        try:
            size = next(wide) if size == fmt.FULL32 else size
            packed = next(wide) if packed == fmt.FULL32 else packed
            header_at = next(wide) if header_at == fmt.FULL32 else header_at
        except StopIteration:
            self._fail(f"{name} lacks its zip64 sizes")
        if flags & fmt.ENCRYPTED:
            self._fail(f"{name} is encrypted")
        if method not in (fmt.STORED, fmt.DEFLATED):
            self._fail(f"{name} is compressed by method {method}, which is not supported")
        if method == fmt.STORED and size != packed:
            self._fail(f"{name} has two sizes, {size} and {packed}")
        if first_disk not in (0, fmt.FULL16):
            self._fail(f"{name} is in another file of a multi-part archive")
        kind = stat.S_IFMT(attributes >> 16)
        if system == fmt.UNIX and kind not in (0, stat.S_IFREG):
            self._fail(f"{name} is a link or a device, not a file")
        return header_at, Entry(name, 0, size, packed, crc32, None, method == fmt.STORED)

    def _zip64(self, name: str, extra: bytes) -> list[int]:
        position = 0
        while position + 4 <= len(extra):
            kind, size = struct.unpack_from("<2H", extra, position)
            position += 4
            if position + size > len(extra):
                self._fail(f"the extra fields of {name} are damaged")
            if kind == fmt.ZIP64_FIELD:
                count = min(size // 8, 3)
                return list(struct.unpack_from(f"<{count}Q", extra, position))
            position += size
        return []

    def _local_entry(
        self, path: bytes, header_at: int, flags: int, entry: Entry
    ) -> tuple[Entry, int]:
        """Return (entry with its offset, offset of its content).

        Checks that the local header agrees with the central directory, because torch's loaders read
        some fields from each.
        """
        head = fmt.LOCAL.unpack(self._pread(header_at, fmt.LOCAL.size))
        method, crc32, packed, size = head[3], head[6], head[7], head[8]
        path_bytes, extra_bytes = head[9:]
        rest = self._pread(header_at + fmt.LOCAL.size, path_bytes + extra_bytes)
        if head[0] != fmt.LOCAL_SIGNATURE or rest[:path_bytes] != path:
            self._fail(f"the header of {entry.name} is damaged, or that of another entry")
        wide = self._zip64(entry.name, rest[path_bytes:])
        if size == packed == fmt.FULL32 and len(wide) >= 2:
            size, packed = wide[:2]
        expected = (entry.crc32, entry.packed_size, entry.size)
        is_later = flags & fmt.SIZES_FOLLOW and (crc32, packed, size) == (0, 0, 0)
        if method != (fmt.STORED if entry.stored else fmt.DEFLATED) or not (
            is_later or (crc32, packed, size) == expected
        ):
            self._fail(f"the header of {entry.name} contradicts the central directory")
        offset = header_at + fmt.LOCAL.size + path_bytes + extra_bytes
        if offset + entry.packed_size > self._size:
            self._fail(f"{entry.name} is truncated")
        return dataclasses.replace(entry, offset=offset), offset
