"""Copies of files that are verified by their digests, and folders that others may change."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import shutil
import stat
from collections.abc import Iterator

from inductor_ext.storage.digest import hash_file

_FICLONE = 0x40049409
"""Linux ioctl that lets a file share the blocks of another until either is written."""


@contextlib.contextmanager
def open_for_reading(
    path: str | os.PathLike[str], *, follow: bool = False
) -> Iterator[tuple[int, int]]:
    """Open a regular file; yield (descriptor, size in bytes)."""
    flags = os.O_RDONLY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    try:
        yield descriptor, os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def open_for_writing(path: str | os.PathLike[str]) -> Iterator[int]:
    """Open a file for writing, empty; yield its descriptor."""
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def has_digest(
    path: pathlib.Path, size: int, digest: str, target: str | os.PathLike[str] | None = None
) -> bool:
    """Whether a file has this size and digest; with `target`, copy the file and verify the copy."""
    with open_for_reading(path) as (source, length):
        if length != size:
            return False
        if target is None:
            return hash_file(source, size) == digest
        with open_for_writing(target) as target_file:
            copy_bytes(source, target_file, size)
            return hash_file(target_file, size) == digest


def copy_bytes(source: int, target: int, size: int) -> None:
    """Clone an open file if the file system can, else copy its bytes inside the kernel.

    Raises:
        OSError: the file cannot be read or written, or is shorter.
    """
    with contextlib.suppress(OSError):
        fcntl.ioctl(target, _FICLONE, source)
        return
    position = 0
    while position < size:
        try:
            count = os.copy_file_range(source, target, size - position, position, position)
        except OSError:
            # Not supported between these two file systems; sendfile can read any file.
            os.lseek(target, position, os.SEEK_SET)
            count = os.sendfile(target, source, position, size - position)
        if count == 0:
            raise OSError("the file has become shorter")
        position += count


def file_sizes(folder: pathlib.Path) -> dict[str, int]:
    """Return the size in bytes of every file below a folder, by relative name.

    Files that vanish meanwhile are left out. A link or device has the size -1, which matches no
    record.
    """
    by_name = {}
    for parent, folders, names in os.walk(folder):
        for name in [*names, *(name for name in folders if os.path.islink(f"{parent}/{name}"))]:
            path = os.path.join(parent, name)
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(path)
                size = status.st_size if stat.S_ISREG(status.st_mode) else -1
                by_name[os.path.relpath(path, folder)] = size
    return by_name


def list_folder(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the sorted paths in a folder; empty if there is no folder."""
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []


def delete(path: pathlib.Path) -> None:
    """Remove a file, a link, or a folder with its content, as far as possible."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError:
        shutil.rmtree(path, ignore_errors=True)
