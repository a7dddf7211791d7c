"""A store of built artifacts by key, in a folder that many processes share.

It returns only what was stored, and never makes a compile fail: if it cannot read or write, it
warns once and behaves as an empty store. The settings `artifact_cache`, `artifact_cache_dir` and
`artifact_cache_size` apply.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import logging
import os
import pathlib
import re
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping

from inductor_ext.storage.atomic import SharedFolder, atomic_write
from inductor_ext.storage.digest import hash_file
from inductor_ext.storage.file_copy import (
    copy_bytes,
    delete,
    file_sizes,
    has_digest,
    list_folder,
    open_for_reading,
    open_for_writing,
)

_RECORD = ".entry"
_KEY = re.compile(r"[0-9a-f]{16,128}")


@dataclasses.dataclass(frozen=True)
class Usage:
    """The entries that a store holds, or that were removed from it."""

    entries: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class _Record:
    """The expected files of an entry: relative name to size in bytes and digest."""

    key: str
    files: dict[str, tuple[int, str]]

    def as_bytes(self) -> bytes:
        text = json.dumps(dataclasses.asdict(self), sort_keys=True).encode()
        # The record has its own checksum, so that a damaged record is detected, too.
        return hashlib.sha256(text).hexdigest().encode() + b"\n" + text

    @classmethod
    def read(cls, data: bytes) -> _Record | None:
        """Parse a record; return None if it is damaged."""
        check, _, text = data.partition(b"\n")
        if hashlib.sha256(text).hexdigest().encode() != check:
            return None
        fields = json.loads(text)
        files = {name: (size, digest) for name, (size, digest) in fields["files"].items()}
        return cls(fields["key"], files)


def _log(key: str, message: str) -> None:
    logging.getLogger("inductor_ext").warning("%s", message)


class ArtifactStore:
    """Artifacts by key, in a folder that processes share, with LRU eviction above a size limit.

        with store.lock(key):
            if not store.fetch(key, {"model.pt2": path}):
                build(path)
                store.put(key, {"model.pt2": path})

    An entry is a folder of files with a record of their sizes and digests. It is filled under a
    temporary name and published by a rename, so a process may be killed at any time. Nothing is
    flushed to disk: after a power failure, the digests reveal incomplete entries. A damaged entry
    is treated as missing, and removed.

    Files are copied in and out, which is cheap if the file system can clone. They are never hard
    links: a user may write into the package at their path (`zipfile` can append to it), which would
    change the entry and every other copy of the package.

    The folder is meant for one user: its content is executed, so it is accessible to its owner
    only. Symbolic links in it are never followed.

    If the folder cannot be created, read, written or locked, `warn` is called and the store behaves
    as an empty one: `get` and `fetch` find nothing, `lock` does not wait, and published files are
    dropped.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        max_bytes: int,
        warn: Callable[[str, str], None] = _log,
    ) -> None:
        """Create a store without touching the file system.

        Args:
            folder: created on the first write.
            max_bytes: above this, the least recently used entries are removed.
            warn: called with a key, always the same for this folder, and a line for the user; for
                instance `events.warn_once`.
        """
        self._shared = SharedFolder(folder, self._warn_of_error)
        self.folder = self._shared.path
        self.max_bytes = max_bytes
        self._warn = warn
        self._entries = self.folder / "entries"
        self._building = self.folder / "building"

    def _warn_of_error(self, action: str, error: Exception) -> None:
        self._warn(
            f"artifact_cache:{self.folder}",
            f"the artifact cache {self.folder} cannot be {action}, and artifacts are built "
            f"without it: {error}",
        )

    @contextlib.contextmanager
    def get(self, key: str) -> Iterator[pathlib.Path | None]:
        """Yield the folder of an entry after verifying its files, or None.

        The entry is not removed inside the context. Its files may be read, but not written, linked
        or moved.

        Raises:
            ValueError: `key` is not 16 to 128 hexadecimal digits.
        """
        with self._opened(key) as record:
            folder = self._entry(key)
            is_intact = False
            if record is not None:
                with self._shared.warn_on_error("read"):
                    is_intact = all(
                        has_digest(folder / name, size, digest)
                        for name, (size, digest) in record.files.items()
                    )
            if is_intact:
                yield folder
                return
        if record is not None:
            self._remove(key)
        yield None

    def fetch(self, key: str, files: Mapping[str, str | os.PathLike[str]]) -> bool:
        """Copy files of an entry to paths outside, each atomically; verify the copies.

        Args:
            files: target path by name in the entry.

        Returns:
            Whether the entry existed and was intact. If not, no path has been touched.

        Raises:
            ValueError: see `get`.
        """
        complete = False
        try:
            with self._opened(key) as record:
                if record is None or not files.keys() <= record.files.keys():
                    return False
                with self._shared.warn_on_error("copied from"), contextlib.ExitStack() as stack:
                    # The stack renames the files to their targets on exit, when all of them are
                    # complete.
                    for name, target in files.items():
                        temporary = stack.enter_context(atomic_write(target))
                        if not has_digest(self._entry(key) / name, *record.files[name], temporary):
                            raise _DamagedError
                    complete = True
        except _DamagedError:
            self._remove(key)
        return complete

    @contextlib.contextmanager
    def publish(self, key: str) -> Iterator[pathlib.Path]:
        """Yield an empty folder to fill; on exit, its files become the entry.

        An existing entry is kept, as is everything if an exception is raised inside.

        Raises:
            ValueError: see `get`.
        """
        self._entry(key)
        with contextlib.ExitStack() as stack:
            place = None
            with self._shared.warn_on_error("written"):
                place = stack.enter_context(self._workplace())
            if place is None:
                yield pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
                return
            folder = place / key
            folder.mkdir(mode=0o700)
            yield folder
            with self._shared.warn_on_error("written"):
                self._seal(key, folder)
        self.collect()

    def put(self, key: str, files: Mapping[str, str | os.PathLike[str]]) -> None:
        """Copy files into an entry.

        Args:
            files: source path by name in the entry.

        Raises:
            ValueError: see `get`.
        """
        with self._shared.warn_on_error("written"), self.publish(key) as folder:
            for name, source in files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                with (
                    open_for_reading(source, follow=True) as (source_file, size),
                    open_for_writing(folder / name) as target_file,
                ):
                    copy_bytes(source_file, target_file, size)

    @contextlib.contextmanager
    def lock(self, key: str, *, wait: bool = True) -> Iterator[bool]:
        """Acquire the right to build an entry; other processes that request it wait.

        This avoids duplicate work and is not needed for correctness. The lock ends with the process
        that holds it.

        Args:
            wait: whether to wait for a process that holds the lock. Default: True.

        Yields:
            Whether the lock was acquired.

        Raises:
            ValueError: see `get`.
        """
        self._entry(key)
        with contextlib.ExitStack() as stack:
            held = False
            with self._shared.warn_on_error("locked"):
                held = stack.enter_context(self._shared.lock(key, -1 if wait else 0))
            yield held

    def entry_keys(self) -> list[str]:
        """Return the keys of all entries, sorted, without verifying their files."""
        with self._shared.warn_on_error("read"):
            return sorted(key for _, _, key in self._listing())
        return []

    def usage(self) -> Usage:
        """Return the current size of the store."""
        sizes: list[int] = []
        with self._shared.warn_on_error("read"):
            sizes += [size for _, size, _ in self._listing()]
        return Usage(len(sizes), sum(sizes))

    def clear(self) -> Usage:
        """Remove every entry that is not being read; return what was removed."""
        return self.collect(0)

    def collect(self, max_bytes: int | None = None) -> Usage:
        """Remove least recently used entries until at most `max_bytes` are left.

        Entries that are being read are kept. Unfinished builds of processes that died are also
        removed. If another process is collecting, nothing is done. Called after each publication.

        Args:
            max_bytes: None for the limit of the store.

        Returns:
            What was removed.
        """
        import filelock

        limit = self.max_bytes if max_bytes is None else max_bytes
        removed: list[int] = []
        with self._shared.warn_on_error("tidied up"):
            if not self.folder.is_dir():
                return Usage(0, 0)
            try:
                with filelock.FileLock(self.folder / "collecting", timeout=0):
                    self._collect_leftovers()
                    listing = sorted(self._listing())
                    total = sum(size for _, size, _ in listing)
                    for _, size, key in listing:
                        if total <= limit:
                            break
                        if self._remove(key):
                            total -= size
                            removed.append(size)
            except filelock.Timeout:
                pass
        return Usage(len(removed), sum(removed))

    # --- entries ---

    def _entry(self, key: str) -> pathlib.Path:
        if not _KEY.fullmatch(key):
            raise ValueError(f"{key!r} is not 16 to 128 hexadecimal digits")
        return self._entries / key

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[_Record | None]:
        """Yield the record of an entry whose files all exist with the right sizes; None otherwise.

        The entry is locked for reading inside the context. A damaged entry has been removed on
        entry.
        """
        record = None
        with contextlib.ExitStack() as stack:
            with self._shared.warn_on_error("read"):
                descriptor = self._hold(stack, key, fcntl.LOCK_SH)
                if descriptor is not None:
                    record = self._read_record(key, descriptor)
                    if record is None:
                        stack.close()
                        self._remove(key)
                    else:
                        # The modification time of the record is the time of the last use. In a
                        # read-only folder it cannot be updated, and eviction is up to the owner.
                        with contextlib.suppress(OSError):
                            os.utime(descriptor)
            yield record

    def _hold(self, stack: contextlib.ExitStack, key: str, kind: int) -> int | None:
        """Lock an entry through its record, which is renamed with it, until the stack closes.

        Args:
            kind: LOCK_SH for reading, LOCK_EX for removing.

        Returns:
            A descriptor of the record; None if there is no entry, or if it is locked in a
            conflicting way.
        """
        path = self._entry(key) / _RECORD
        # Some network file systems require a file opened for writing for an exclusive lock.
        mode = os.O_RDONLY if kind == fcntl.LOCK_SH else os.O_RDWR
        try:
            if not _has_record(path.parent):
                return None
            descriptor = os.open(path, mode | os.O_NOFOLLOW | os.O_CLOEXEC)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            # It may have been removed between opening and locking.
            if not os.path.samestat(os.fstat(descriptor), os.lstat(path)):
                return None
        except (FileNotFoundError, BlockingIOError):
            return None
        return descriptor

    def _read_record(self, key: str, descriptor: int) -> _Record | None:
        """Return the record of a locked entry; None if it does not match the files."""
        with open(descriptor, "rb", closefd=False) as file:
            record = _Record.read(file.read())
        if record is None or record.key != key:
            return None
        sizes = file_sizes(self._entry(key))
        sizes.pop(_RECORD, None)
        return record if sizes == {name: size for name, (size, _) in record.files.items()} else None

    def _seal(self, key: str, folder: pathlib.Path) -> None:
        """Write the record of a filled folder, and rename the folder to the entry."""
        files = {}
        for name in sorted(file_sizes(folder)):
            with open_for_reading(folder / name) as (source, size):
                files[name] = (size, hash_file(source, size))
        total = sum(size for size, _ in files.values())
        if total > self.max_bytes:
            self._warn(
                f"artifact_cache_size:{self.folder}",
                f"an artifact of {total} bytes is not cached: artifact_cache_size is only "
                f"{self.max_bytes} bytes",
            )
            return
        (folder / _RECORD).write_bytes(_Record(key, files).as_bytes())
        self._shared.make("entries")
        try:
            os.rename(folder, self._entry(key))
        except OSError:
            # The rename fails if the target is not empty: another process was faster.
            if not os.path.lexists(self._entry(key)):
                raise

    def _remove(self, key: str) -> bool:
        """Remove an entry that is not being read; return whether it was removed."""
        with self._shared.warn_on_error("tidied up"), contextlib.ExitStack() as stack:
            entry = self._entry(key)
            place = stack.enter_context(self._workplace())
            held = self._hold(stack, key, fcntl.LOCK_EX) is not None
            # A folder without a record is not an entry, and is never read.
            if held or (os.path.lexists(entry) and not _has_record(entry)):
                with contextlib.suppress(FileNotFoundError):
                    os.rename(entry, place / key)
                    return True
        return False

    def _listing(self) -> list[tuple[float, int, str]]:
        """Return (time of last use, bytes, key) of each entry."""
        listing = []
        for path in list_folder(self._entries):
            with contextlib.suppress(FileNotFoundError):
                if _has_record(path):
                    last_use = os.lstat(path / _RECORD).st_mtime
                    listing.append((last_use, sum(file_sizes(path).values()), path.name))
        return listing

    # --- builds in progress ---

    @contextlib.contextmanager
    def _workplace(self) -> Iterator[pathlib.Path]:
        """Yield a folder for this process; it will be removed even if the process dies.

        A lock file beside it, released when the process ends, shows whether its owner is alive.
        """
        self._shared.make("building")
        with contextlib.ExitStack() as stack:
            while True:
                place = self._building / secrets.token_hex(8)
                if self._own(stack, place):
                    break
            stack.callback(delete, place)
            place.mkdir(mode=0o700)
            yield place

    def _own(self, stack: contextlib.ExitStack, place: pathlib.Path) -> bool:
        """Take the lock of a workplace until the stack closes; return False if it has an owner."""
        path = place.with_suffix(".lock")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        keep = stack.enter_context(contextlib.ExitStack())
        keep.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous owner may have removed it between the two calls.
            if os.path.samestat(os.fstat(descriptor), os.lstat(path)):
                keep.callback(delete, path)
                return True
        except (BlockingIOError, FileNotFoundError):
            pass
        keep.close()
        return False

    def _collect_leftovers(self) -> None:
        places = {path.with_suffix("") for path in list_folder(self._building)}
        for place in places:
            with contextlib.ExitStack() as stack:
                if self._own(stack, place):
                    delete(place)
        for entry in list_folder(self._entries):
            if not _has_record(entry) and _KEY.fullmatch(entry.name):
                self._remove(entry.name)
        self._shared.remove_old_locks(re.compile(".*"))


class _DamagedError(Exception):
    """A file of an entry does not match its record."""


def _has_record(entry: pathlib.Path) -> bool:
    """Whether this is the folder of an entry and not a link to one."""
    with contextlib.suppress(FileNotFoundError):
        return stat.S_ISDIR(os.lstat(entry).st_mode) and os.path.lexists(entry / _RECORD)
    return False
