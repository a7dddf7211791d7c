"""The files of one model of a package: copying those that running it needs, finding the weights.

All files are checked against the SHA-256 of the manifest, unless the user has turned that off.
Weights are located in the file that contains them, not copied, where their alignment and the user
allow it. The library reads them, and checks them against the checksums of the manifest while it
does (`package.checksums`), which takes a fraction of the time of SHA-256. SHA-256 is computed here
if a signature is to be verified, which covers it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
from collections.abc import Collection, Iterator, Sequence
from typing import NoReturn

from inductor_ext import exc
from inductor_ext.cpp_wrapper.package import checksums, manifest, zip_format, zip_reader

OTHER_FOLDER = (
    "If the folder for temporary files is full or does not allow libraries to be loaded from it "
    "(mount option noexec), set TMPDIR to another."
)
"""Remedy for errors of files in the temporary folder."""

_ALIGNMENT = 64
"""Alignment of weights in bytes that compiled code requires."""

LARGE_WEIGHTS = 64 << 20
"""Minimum size of weights in bytes for which hashing by several threads pays off."""

_UNUSED = (".c", ".cpp", ".cu", ".h", ".o", ".py", ".txt", ".weights")
"""Suffixes of files in a package that running the model does not need copies of."""

Location = tuple[str, int, int]
"""(file path, offset, size), offset and size in bytes."""


@dataclasses.dataclass(frozen=True)
class Weights:
    """The weights that a library is to read."""

    location: Location | None = None
    """None if there are none."""
    checksums: Sequence[int] = ()
    """Checksums that the library is to check; empty if they are intact, or not to be checked."""


class PackageFiles:
    """The files of a model that the extension compiled."""

    def __init__(
        self,
        package: zip_reader.Package,
        content: manifest.Manifest,
        name: str,
        verify: bool,
        *,
        map_weights: bool = True,
        signed: bool = False,
    ) -> None:
        """
        Args:
            package: the open package.
            content: its manifest.
            name: name of the model, which must have a library.
            verify: whether to check the SHA-256 of every file used.
            map_weights: whether weights may be mapped from the file that contains them. Default:
                True.
            signed: whether weights must have the SHA-256 of the manifest. Default: False, their
                checksums suffice.

        Raises:
            exc.BadPackageError: the library is not where it belongs.
        """
        self._package = package
        self._content = content
        self._model = content.models[name]
        self._name = name
        self._verify = verify
        self._signed = signed
        # Only constants on the CPU are mapped. Others are read once.
        self._map_weights = map_weights or not any(
            constant.device == "cpu" and constant.bytes for constant in self._model.constants
        )
        self._base = f"{zip_format.MODELS_FOLDER}{name}/"
        library = str(self._model.library)
        folder, _, file = library.rpartition("/")
        self._prefix = f"{folder}/"
        variant = manifest.variant_folder(str(self._model.target), name)
        if folder not in (self._base.rstrip("/"), variant):
            self.raise_bad(f"its manifest names {library!r} as a library")
        self.library = f"{self._base}{file}"
        """Path of the library in the folder of `extract`."""

    def raise_bad(self, why: str) -> NoReturn:
        raise exc.BadPackageError(path=self._package.where, why=why)

    def raise_load_error(self, why: str, remedy: str = "") -> NoReturn:
        raise exc.ArtifactLoadError(path=self._package.where, name=self._name, why=why, fix=remedy)

    def _digest(self, name: str) -> str | None:
        """Return the expected SHA-256 of an entry; None if it is not to be checked."""
        if not self._verify:
            return None
        if name not in self._content.files:
            self.raise_bad(f"its manifest does not list {name!r}")
        return self._content.files[name].sha256

    def extract(self, folder: str) -> None:
        """Copy the files that running the model needs to `folder`.

        Raises:
            exc.BadPackageError: a file is damaged or not listed in the manifest.
            exc.ArtifactLoadError: `folder` cannot be written.
        """
        names = {
            name
            for name in self._package.entries
            if name.startswith((self._prefix, zip_format.CONSTANTS_FOLDER))
            and not name.endswith(_UNUSED)
        }
        for name in sorted({*names, str(self._model.library)}):
            # A variant's files are put where torch's runner expects those of a model.
            is_own = name.startswith(self._prefix)
            path = f"{self._base}{name[len(self._prefix) :]}" if is_own else name
            target = os.path.join(folder, *path.split("/"))
            os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
            with self._writing(folder):
                self._package.extract(name, target, self._digest(name))

    @contextlib.contextmanager
    def _writing(self, folder: str) -> Iterator[None]:
        """Raise `exc.ArtifactLoadError` if a file cannot be written to `folder`."""
        try:
            yield
        except OSError as error:
            self.raise_load_error(f"{error.strerror} while writing to {folder}", OTHER_FOLDER)

    def locate_weights(
        self,
        folder: str,
        outside: str | os.PathLike[str] | None,
        constants: Collection[str] | None = None,
    ) -> Weights:
        """Return where the library finds the weights.

        Args:
            folder: where they are copied to if they cannot be mapped, or are not to be.
            outside: the weights file or package that the user named.
            constants: names in the generated code of the constants that the library reads.
                Default: None, all.

        Raises:
            exc.BadPackageError: the weights are damaged.
            exc.ArtifactLoadError: `outside` is needed, not allowed, or has other weights; or
                `folder` cannot be written.
        """
        target = os.path.join(folder, "weights")
        name = self._model.weights
        file = self._content.files.get(name) if name is not None else self._model.outside
        expected = self._find_checksums(file) if constants is None else None
        if outside is not None:
            located = self._locate_outside(os.path.abspath(os.fspath(outside)), file, expected)
            if not self._map_weights and file is not None:
                return self._copy(located, target, file)
            return located
        if name is None:
            if file is not None:
                self.raise_load_error(
                    "its weights are in a separate file", "Pass the path of that file as `weights`."
                )
            return Weights()
        location = self._package.locate(name)
        if self._map_weights and location is not None and location[1] % _ALIGNMENT == 0:
            if expected is None and self._verify:
                digest = str(self._digest(name))
                if not self._is_intact(location, digest, constants):
                    self.raise_damaged()
            return Weights(location, expected or ())
        # The package is a buffer, another tool rewrote it without alignment, or it may change.
        with self._writing(folder):
            self._package.extract(name, target, self._digest(name))
        return Weights((target, 0, self._package.entries[name].size))

    def raise_damaged(self) -> NoReturn:
        """Raise the error for weights that differ from those that the manifest describes."""
        self.raise_bad(f"{self._model.weights} is damaged: its content does not match the manifest")

    def raise_other_weights(self, path: str | os.PathLike[str]) -> NoReturn:
        """Raise the error for a file that has the weights of another model."""
        remedy = "Pass the file of this model."
        self.raise_load_error(f"{os.path.abspath(path)} has other weights", remedy)

    def _find_checksums(self, file: manifest.File | None) -> list[int] | None:
        """Return the checksums for the library to check; None if it is not to, or has none."""
        if file is None or file.checksums is None or self._signed or not self._verify:
            return None
        return checksums.parse(file.checksums, file.bytes)

    def _copy(self, weights: Weights, target: str, file: manifest.File) -> Weights:
        """Copy weights to the new file `target`, and return their location there."""
        assert weights.location is not None
        path, begin, size = weights.location
        folder = os.path.dirname(target)
        with self._writing(folder), open(path, "rb") as source, open(target, "xb") as copy:
            copy.writelines(zip_format.read_file_chunks(source.fileno(), begin, size))
            copied = copy.tell()
        location = target, 0, size
        # The file may have been changed since it was checked.
        is_checked = weights.checksums or not self._verify
        if copied != size or not (is_checked or self._is_intact(location, file.sha256)):
            self.raise_other_weights(path)
        return dataclasses.replace(weights, location=location)

    def _locate_outside(
        self, path: str, file: manifest.File | None, expected: Sequence[int] | None
    ) -> Weights:
        if file is None:
            self.raise_load_error("it has no external weights", "Do not pass `weights`.")
        if path.endswith(".pt2"):
            with zip_reader.open_package(path) as package:
                location = self._find_entry(package, file)
            if location is None:
                why = f"{path} has no entry with its weights"
                self.raise_load_error(why, "Pass the package that contains them.")
            return Weights(location)
        try:
            size = os.stat(path).st_size
        except OSError as error:
            why = f"its weights in {path} cannot be read ({error.strerror})"
            self.raise_load_error(why, "Pass the path of its weights file as `weights`.")
        location = path, 0, size
        is_checked = expected is not None or not self._verify
        if size != file.bytes or not (is_checked or self._is_intact(location, file.sha256)):
            self.raise_other_weights(path)
        return Weights(location, expected or ())

    def _find_entry(self, package: zip_reader.Package, file: manifest.File) -> Location | None:
        for name, entry in package.entries.items():
            location = package.locate(name)
            if entry.size != file.bytes or location is None or location[1] % _ALIGNMENT:
                continue
            if not self._verify or self._is_intact(location, file.sha256):
                return location
        return None

    def _is_intact(
        self, location: Location, expected: str, constants: Collection[str] | None = None
    ) -> bool:
        """Whether weights match their SHA-256. Large weights are checked by several threads.

        Args:
            location: where they are.
            expected: the SHA-256 of all weights.
            constants: the constants to check; None for all.
        """
        path, begin, size = location
        pieces = None
        if constants is not None or size >= LARGE_WEIGHTS:
            pieces = self._pieces(size, constants)
        if pieces is None:
            return zip_format.file_sha256(path, begin, size) == expected

        def check(constant: tuple[int, int, str]) -> bool:
            return zip_format.file_sha256(path, begin + constant[0], constant[1]) == constant[2]

        workers = min(8, len(os.sched_getaffinity(0)))
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            return all(pool.map(check, pieces))

    def _pieces(
        self, size: int, constants: Collection[str] | None
    ) -> list[tuple[int, int, str]] | None:
        """Return (offset, size, SHA-256) of constants; None if all do not cover the weights.

        Gaps between constants must be padding of less than a page, which is never read.
        """
        pieces = set()
        for constant in self._model.constants:
            is_needed = constants is None or constant.name in constants
            if is_needed and constant.offset is not None and constant.bytes:
                if constant.sha256 is None:
                    return None
                pieces.add((constant.offset, constant.bytes, constant.sha256))
        end = 0
        for offset, count, _ in [*sorted(pieces), (size, 0, "")]:
            if constants is None and offset - end >= zip_format.PAGE:
                return None
            end = max(end, offset + count)
        # Largest first, for a balanced load of the threads.
        return sorted(pieces, key=lambda piece: -piece[1])
