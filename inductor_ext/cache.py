"""What our caches and files have in common: the key of our own source, and atomic publication.

`source_key` identifies this version of the extension's code, so that nothing compiled by another
version is ever reused. `publish` makes a file appear at its path complete or not at all, also when
the process is killed half way.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

__all__ = ["publish", "source_key"]

_PACKAGE = pathlib.Path(__file__).parent


@functools.cache
def source_key() -> str:
    """Hex digest over the package's files, by relative name and content."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(path.relative_to(_PACKAGE).as_posix().encode() + b"\0")
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def publish(target: str | os.PathLike[str]) -> Iterator[str]:
    """Yield a temporary path to write to; on success, rename it to `target`.

    The temporary file has `target`'s own name, in a hidden folder beside it, so that writers which
    derive names from the path see the right one and the rename stays on one file system. An
    exception inside leaves `target` as it was.
    """
    target = os.path.abspath(os.fspath(target))
    folder = tempfile.mkdtemp(prefix=".inductor_ext-", dir=os.path.dirname(target))
    try:
        temporary = os.path.join(folder, os.path.basename(target))
        yield temporary
        os.replace(temporary, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
