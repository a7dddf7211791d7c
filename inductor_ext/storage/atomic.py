"""Folders that processes share: atomic writes, locks, and errors that become warnings."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator

TEMPORARY = ".inductor_ext-"
"""Prefix of the folders that `atomic_write` creates; a process that is killed leaves one behind."""

_DAY = 86400.0


@contextlib.contextmanager
def atomic_write(target: str | os.PathLike[str]) -> Iterator[str]:
    """Yield a temporary path to write to; on success, rename it to `target`.

    The temporary file has the same name as `target`, in a hidden folder beside it: writers that
    derive names from the path see the right one, and the rename stays on one file system. An
    exception inside leaves `target` unchanged. An OSError without a file gets `target` as its file.
    """
    target = os.path.abspath(os.fspath(target))
    folder = tempfile.mkdtemp(prefix=TEMPORARY, dir=os.path.dirname(target))
    try:
        with name_in_errors(target):
            temporary = os.path.join(folder, os.path.basename(target))
            yield temporary
            os.replace(temporary, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def name_in_errors(path: str) -> Iterator[None]:
    """Give an OSError without a file this one: a write to a full disk does not know its file."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = path
        raise


class SharedFolder:
    """A folder of one user that several processes read and write at the same time."""

    def __init__(
        self, folder: str | os.PathLike[str], warn: Callable[[str, Exception], None]
    ) -> None:
        """Describe a folder without touching the file system.

        Args:
            folder: created on the first write, accessible to its owner only.
            warn: called with an action and a file system error, see `warn_on_error`.
        """
        self.path = pathlib.Path(folder).absolute()
        self._warn = warn

    @contextlib.contextmanager
    def warn_on_error(self, action: str) -> Iterator[None]:
        """Turn a file system error into a warning.

        Args:
            action: what failed, as in "the folder cannot be read".
        """
        try:
            yield
        except (OSError, NotImplementedError) as error:
            self._warn(action, error)

    def make(self, name: str) -> pathlib.Path:
        """Create a subfolder if there is none, and return its path."""
        path = self.path / name
        if not path.is_dir():
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
        return path

    @contextlib.contextmanager
    def lock(self, name: str, timeout: float = -1) -> Iterator[bool]:
        """Acquire the lock of this name; yield False if another process holds it all the time.

        The lock ends with the context, or with the process.

        Args:
            name: name of the lock's file, in the subfolder "locks".
            timeout: in seconds; below 0 for none.
        """
        import filelock

        with contextlib.ExitStack() as stack:
            held = False
            with contextlib.suppress(filelock.Timeout):
                stack.enter_context(filelock.FileLock(self.make("locks") / name, timeout=timeout))
                held = True
            yield held

    def remove_old_locks(self, names: re.Pattern[str]) -> None:
        """Remove the files of locks that no process has held for a day.

        Another process may be about to take one. If two then hold it, work is done twice.
        """
        with contextlib.suppress(FileNotFoundError):
            for path in (self.path / "locks").iterdir():
                with contextlib.suppress(OSError):
                    if names.fullmatch(path.name) and is_old(path):
                        path.unlink()


def is_old(path: pathlib.Path) -> bool:
    """Whether a file, or the link itself, has not been modified for a day."""
    return path.lstat().st_mtime < time.time() - _DAY
