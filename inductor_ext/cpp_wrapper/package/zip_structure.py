"""The bytes of a .pt2 package outside of its entries' contents: as they are written, and checked.

`zip_writer` writes these bytes. They are a function of the entries, so `find_change` finds every
byte that was changed afterwards, also those that no reader uses: dates, padding, alignment. A
package that another program wrote has other bytes; `find_contradiction` finds where the records of
such a file disagree. No settings; does not import torch.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence

from inductor_ext.cpp_wrapper.package import zip_format as fmt
from inductor_ext.cpp_wrapper.package.zip_format import Entry

_DESCRIPTOR_SIGNATURE = b"PK\x07\x08"

Read = Callable[[int, int], bytes]
"""Returns exactly the bytes at (offset, size)."""


def local_header(
    position: int, path: bytes, size: int, crc32: int, alignment: int
) -> tuple[int, bytes]:
    """Return (offset of the header, header) such that the content after it is aligned.

    Args:
        position: end of the previous entry, in bytes.
        path: name of the entry, below the root folder.
        size: size of the content in bytes.
        crc32: CRC-32 of the content.
        alignment: of the content, in bytes.
    """
    extra = b""
    if size >= fmt.FULL32:
        extra = struct.pack("<2H2Q", fmt.ZIP64_FIELD, 16, size, size)
    fixed = fmt.LOCAL.size + len(path) + len(extra) + 4
    padding = -(position + fixed) % alignment
    # An extra field holds up to 65535 bytes plus its 4-byte head. Padding that does not fit
    # goes before the header.
    most = fmt.FULL16 - len(extra) - 4
    gap = max(0, padding - most)
    extra += struct.pack("<2H", fmt.PADDING_FIELD, padding - gap) + b"\0" * (padding - gap)
    version = 45 if size >= fmt.FULL32 else 20
    # Time, date, CRC-32, both sizes, lengths of what follows.
    fields = (0, fmt.FIRST_DATE, crc32, *[min(size, fmt.FULL32)] * 2, len(path), len(extra))
    head = fmt.LOCAL.pack(fmt.LOCAL_SIGNATURE, version, _flags(path), fmt.STORED, *fields)
    return position + gap, head + path + extra


def central_header(path: bytes, header_at: int, entry: Entry) -> bytes:
    """Return the record of an entry in the zip central directory."""
    large = [value for value in (entry.size, entry.size, header_at) if value >= fmt.FULL32]
    extra = b""
    if large:
        extra = struct.pack(f"<2H{len(large)}Q", fmt.ZIP64_FIELD, 8 * len(large), *large)
    version = 45 if large else 20
    size_field = min(entry.size, fmt.FULL32)
    attributes = (0, 0, 0, fmt.REGULAR_FILE, min(header_at, fmt.FULL32))
    head = fmt.CENTRAL.pack(
        *(fmt.CENTRAL_SIGNATURE, version, fmt.UNIX, version, 0, _flags(path), fmt.STORED),
        *(0, fmt.FIRST_DATE, entry.crc32 or 0, size_field, size_field, len(path), len(extra)),
        *attributes,
    )
    return head + path + extra


def directory_and_end(begin: int, headers: Sequence[bytes]) -> bytes:
    """Return the zip central directory at offset `begin`, and the records that end the file."""
    directory, count = b"".join(headers), len(headers)
    end = begin + len(directory)
    wide = b""
    if count >= fmt.FULL16 or begin >= fmt.FULL32 or len(directory) >= fmt.FULL32:
        record = (45, 45, 0, 0, count, count, len(directory), begin)
        wide = fmt.END64.pack(fmt.END64_SIGNATURE, fmt.END64.size - 12, *record)
        wide += fmt.LOCATOR64.pack(fmt.LOCATOR64_SIGNATURE, 0, end, 1)
    counts = (0, 0, min(count, fmt.FULL16), min(count, fmt.FULL16))
    sizes = (min(len(directory), fmt.FULL32), min(begin, fmt.FULL32), 0)
    return directory + wide + fmt.END.pack(fmt.END_SIGNATURE, *counts, *sizes)


def _flags(path: bytes) -> int:
    return 0 if path.isascii() else fmt.UTF8


def find_change(read: Read, size: int, root: str, entries: Mapping[str, Entry]) -> str | None:
    """Return which part of a file is not as `zip_writer` writes it; None if all bytes are.

    Does not read the contents of entries.

    Args:
        read: reads the file.
        size: size of the file in bytes.
        root: name of the root folder.
        entries: the entries, as read from the file.
    """
    position, headers = 0, []
    for entry in sorted(entries.values(), key=lambda entry: entry.offset):
        path = f"{root}/{entry.name}".encode()
        for alignment in (fmt.ALIGNMENT, fmt.PAGE):
            at, header = local_header(position, path, entry.size, entry.crc32 or 0, alignment)
            if at + len(header) == entry.offset:
                break
        else:
            return f"the position of {entry.name}"
        if read(position, entry.offset - position) != b"\0" * (at - position) + header:
            return f"the bytes between the content of {entry.name} and what precedes it"
        headers.append(central_header(path, at, entry))
        position = entry.offset + entry.size
    end = directory_and_end(position, headers)
    if size != position + len(end) or read(position, len(end)) != end:
        return "the central directory or the end of the file"
    return None


def find_contradiction(
    read: Read, size: int, root: str, entries: Mapping[str, Entry]
) -> str | None:
    """Return which part of a file its other records do not confirm; None if there is none.

    For a file of torch's writer or of Python's `zipfile`, whose dates, versions and attributes are
    not known: they must be the same in both records of an entry, or the same in all entries.

    Args:
        read, size, root, entries: see `find_change`.
    """
    begin, directory, why = _read_directory(read, size)
    if why is not None:
        return why
    ends, starts = {0}, {begin}
    uniform: set[object] = set()
    fillings: set[int] = set()
    position = 0
    while position < len(directory):
        fields = fmt.CENTRAL.unpack_from(directory, position)
        name_at = position + fmt.CENTRAL.size
        extra_at = name_at + fields[12]
        position = extra_at + fields[13] + fields[14]
        name = directory[name_at:extra_at].decode().removeprefix(f"{root}/")
        entry = entries[name]
        kinds = _extra_fields(directory[extra_at:position])
        if kinds is None or kinds.keys() - {fmt.ZIP64_FIELD} or fields[14] or fields[15]:
            return f"the record of {name} in the central directory"
        header_at = fields[18]
        if header_at == fmt.FULL32:
            (header_at,) = struct.unpack("<Q", kinds[fmt.ZIP64_FIELD][-8:])
        head = fmt.LOCAL.unpack(read(header_at, fmt.LOCAL.size))
        extra_size = head[10]
        kinds = _extra_fields(read(entry.offset - extra_size, extra_size))
        padding = (kinds or {}).pop(fmt.PADDING_FIELD, b"")
        wide = (kinds or {}).pop(fmt.ZIP64_FIELD, b"")
        known = {0, entry.size, entry.packed_size, header_at}
        if (
            head[1:6] != (fields[3] | fields[4] << 8, *fields[5:9])
            or kinds != {}
            or len(wide) % 8
            or not known.issuperset(struct.unpack(f"<{len(wide) // 8}Q", wide))
        ):
            return f"the header of {name}"
        end = _end_of_content(read, entry, fields[5], begin)
        if end is None:
            return f"the bytes after the content of {name}"
        uniform.add((fields[1:3], fields[16:18]))
        fillings |= set(padding)
        starts.add(header_at)
        ends.add(end)
    if len(uniform) > 1 or len(fillings) > 1:
        return (
            "the versions, attributes or padding of some entry, which differ from those of others"
        )
    for end, start in zip(sorted(ends), sorted(starts), strict=True):
        if read(end, start - end).strip(b"\0"):
            return f"the bytes from {end} to {start}"
    return None


def _read_directory(read: Read, size: int) -> tuple[int, bytes, str | None]:
    """Return (offset, content) of the central directory, and what is wrong with its end."""
    end_at = size - fmt.END.size
    _, _, _, _, _, bytes_, begin, _ = fmt.END.unpack(read(end_at, fmt.END.size))
    wide_at = end_at - fmt.LOCATOR64.size - fmt.END64.size
    wide = fmt.END64.unpack(read(wide_at, fmt.END64.size)) if wide_at >= 0 else None
    if wide is not None and wide[0] == fmt.END64_SIGNATURE:
        locator = fmt.LOCATOR64.unpack(read(wide_at + fmt.END64.size, fmt.LOCATOR64.size))
        if (
            locator != (fmt.LOCATOR64_SIGNATURE, 0, wide_at, 1)
            or wide[1] != fmt.END64.size - 12
            or wide[2] & 0xFF not in (30, 45)
            or wide[2] >> 8 not in (0, fmt.UNIX)
            or wide[3] != 45
        ):
            return begin, b"", "the zip64 end records"
        bytes_, begin, end_at = wide[8], wide[9], wide_at
    if begin + bytes_ != end_at:
        return begin, b"", "the bytes after the central directory"
    return begin, read(begin, bytes_), None


def _extra_fields(extra: bytes) -> dict[int, bytes] | None:
    """Return the extra fields of a header by kind; None if they are damaged or repeated."""
    kinds: dict[int, bytes] = {}
    position = 0
    while position < len(extra):
        if position + 4 > len(extra):
            return None
        kind, size = struct.unpack_from("<2H", extra, position)
        position += 4
        if kind in kinds or position + size > len(extra):
            return None
        kinds[kind] = extra[position : position + size]
        position += size
    return kinds


def _end_of_content(read: Read, entry: Entry, flags: int, limit: int) -> int | None:
    """Return where an entry ends, data descriptor included; None if the latter is wrong."""
    end = entry.offset + entry.packed_size
    if not flags & fmt.SIZES_FOLLOW:
        return end
    for sizes in ("<4s3L", "<4sL2Q"):
        size = struct.calcsize(sizes)
        values = (_DESCRIPTOR_SIGNATURE, entry.crc32, entry.packed_size, entry.size)
        if end + size <= limit and struct.unpack(sizes, read(end, size)) == values:
            return end + size
    return None
