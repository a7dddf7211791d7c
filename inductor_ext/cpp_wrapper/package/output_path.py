"""Where a package is written: checks before the compile, the default path, atomic writing."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any

from inductor_ext import exc
from inductor_ext.storage.atomic import atomic_write
from inductor_ext.storage.digest import hash_buffer

if TYPE_CHECKING:
    from inductor_ext.cpp_wrapper.build.artifact import Artifact

PackagePath = str | os.PathLike[str] | IO[bytes]
"""The path of a package, or a writable and seekable binary buffer."""


def check_package_path(path: PackagePath | None) -> None:
    """Check, before a compile, that a package can be written; None is allowed.

    Raises:
        exc.BadPackagePathError: it cannot, as far as that is known in advance.
    """
    if path is None:
        return
    if not isinstance(path, (str, os.PathLike)):
        if not (isinstance(path, (io.IOBase, IO)) and path.writable() and path.seekable()):
            raise exc.BadPackagePathError(
                path=path, why="it is neither a path nor a writable, seekable buffer"
            )
        return
    text = os.fspath(path)
    if not text.endswith(".pt2"):
        raise exc.BadPackagePathError(path=text, why="its name does not end in .pt2")
    if why := _find_obstacle(text):
        raise exc.BadPackagePathError(path=text, why=why)


def check_weights_path(path: str | None) -> None:
    """Check, before a compile, that a weights file can be written; None is allowed.

    Raises:
        exc.BadWeightsFileError: it cannot, as far as that is known in advance.
    """
    if path is not None and (why := _find_obstacle(path)):
        raise exc.BadWeightsFileError(path=path, why=why)


def _find_obstacle(path: str) -> str | None:
    """Return why a file cannot be written to `path`, as far as can be checked in advance."""
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path):
        return "it is a folder"
    if not os.path.isdir(folder):
        return f"the folder {folder} does not exist"
    if not os.access(folder, os.W_OK):
        return f"the folder {folder} is not writable"
    return None


def choose_path(files: Mapping[str, list[Any]], artifacts: Mapping[str, Artifact]) -> str:
    """Return a package path in the folder of the first model's library or C++ source.

    The file name is a digest over the whole package content. The names of the files alone depend
    on the code only, not on the weights.
    """
    from inductor_ext.cpp_wrapper.build import artifact as build

    paths = [file for group in files.values() for file in group if isinstance(file, str)]
    (first, *_) = [path for path in paths if path.endswith((".so", ".cpp"))]
    content = [os.path.basename(path) for path in paths]
    for artifact in artifacts.values():
        content += build.digests(artifact.constants, artifact.plan)
    name = hash_buffer("\0".join(content).encode())
    return os.path.join(os.path.dirname(first), f"{name}.pt2")


@contextlib.contextmanager
def publish_package(path: str | os.PathLike[str]) -> Iterator[str]:
    """Like `atomic_write`, but raise `exc.BadPackagePathError` instead of OSError."""
    try:
        with atomic_write(path) as temporary:
            yield temporary
    except OSError as error:
        why = error.strerror or str(error)
        raise exc.BadPackagePathError(path=os.fspath(path), why=why) from error


@contextlib.contextmanager
def open_for_writing(path: PackagePath) -> Iterator[IO[bytes]]:
    """Yield a file that becomes the package if no error is raised, or the given buffer.

    Raises:
        exc.BadPackagePathError: the file cannot be written.
    """
    if not isinstance(path, (str, os.PathLike)):
        yield path
        return
    with publish_package(path) as temporary, open(temporary, "wb") as file:
        yield file


def root_folder(path: PackagePath) -> str:
    """Return the package's root folder: the file name without .pt2, as torch's writer uses."""
    if not isinstance(path, (str, os.PathLike)):
        return "archive"
    return os.path.basename(os.fspath(path)).removesuffix(".pt2") or "archive"
