"""The folder of tuning results that processes share: one file per problem and source.

A file holds the results of a problem in all environments. It is replaced as a whole under a lock,
so a process may be killed at any time. A damaged file is ignored, with one warning per folder. An
error of the folder is a warning, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Literal

from inductor_ext import events, exc
from inductor_ext.autotune.results import FORMAT, TuningResult, merge_results
from inductor_ext.storage.atomic import TEMPORARY, SharedFolder, atomic_write, is_old
from inductor_ext.templates.problem import GemmProblem

Source = Literal["measured", "imported"]

SOURCES: tuple[Source, ...] = ("measured", "imported")

_ENVIRONMENTS = 16
"""Maximum number of results per problem; the newest are kept. Each upgrade of Triton adds one."""

_UNFINISHED = "+"
"""Suffix of a source's token during a write. It remains if the writer was killed. The next write
then renews the token even if it adds nothing new, because the interrupted write may have added
results after a graph was cached under a key with this token."""

_OWN = re.compile(r"[0-9a-f]{40}")
"""Names of the problems' files, without suffix, and of locks. Other files in the folder are
not touched."""

_WRITE_TIMEOUT = 60.0
"""Seconds to wait for the write lock."""


class ResultsFolder(SharedFolder):
    """Tuning results in files, by source and problem."""

    def __init__(self, folder: str | os.PathLike[str], max_entries: int) -> None:
        """Describe a folder without touching the file system.

        Args:
            folder: created on the first write.
            max_entries: maximum number of problems per source, within 2 %. Above it the oldest are
                removed until 10 % fewer are left. Results of the current write are never removed,
                however many they are.
        """
        super().__init__(folder, self._warn_of_error)
        self.max_entries = max_entries
        self._until_collected: Counter[Source] = Counter()

    def _warn_of_error(self, action: str, error: Exception) -> None:
        events.warn_once(
            f"tuning_cache:{self.path}",
            f"the folder of tuning results {self.path} cannot be {action}; GEMMs are tuned "
            f"again: {error}",
        )

    def values(self, source: Source, problem: GemmProblem | None = None) -> list[Any]:
        """Return the results of a problem, or of all problems, as JSON values."""
        paths = self._paths(source) if problem is None else [self.path_of(source, problem)]
        return [value for path in paths for value in self._load(path)]

    def path_of(self, source: Source, problem: GemmProblem) -> pathlib.Path:
        """Return the file of a problem."""
        return self.path / source / f"{hash_texts(problem.key)}.json"

    def _load(self, path: pathlib.Path) -> list[Any]:
        """Return the entries of a file as JSON values; empty if the file is missing or damaged."""
        with self.warn_on_error("read"):
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                return []
            check, _, text = data.partition(b"\n")
            if checksum(text) == check:
                with contextlib.suppress(ValueError, RecursionError):
                    values = json.loads(text)
                    if isinstance(values, list):
                        return values
            events.warn_once(
                f"tuning_cache_damage:{self.path}",
                f"{path} is damaged and ignored; other files in that folder may be damaged, too",
            )
        return []

    def _paths(self, source: Source) -> list[pathlib.Path]:
        with self.warn_on_error("read"):
            paths = sorted((self.path / source).glob("*.json"))
            return [path for path in paths if _OWN.fullmatch(path.stem)]
        return []

    def merge(self, source: Source, entries: Sequence[TuningResult]) -> Counter[str]:
        """Add results to a source; return how many were `new`, `updated` and `ignored`.

        Results that could not be written are not counted.
        """
        count: Counter[str] = Counter()
        if not entries:
            return count
        by_problem: dict[GemmProblem, list[TuningResult]] = {}
        for entry in entries:
            by_problem.setdefault(entry.problem, []).append(entry)
        with self.warn_on_error("written"), self._lock_for_writing():
            self.make(source)
            changes = {}
            for problem, added in by_problem.items():
                path = self.path_of(source, problem)
                newest, outcome = self._merge_file(path, added)
                if outcome["new"] or outcome["updated"]:
                    changes[path] = newest, outcome
                else:
                    count += outcome
            if changes or self.token(source).endswith(_UNFINISHED):
                self.renew_token(source, _UNFINISHED)
                try:
                    for path, (newest, outcome) in changes.items():
                        self._write(path, newest)
                        count += outcome
                    # Listing the folder costs more than adding a file.
                    self._until_collected[source] -= len(changes)
                    if self._until_collected[source] < 0:
                        self._remove_oldest(source, changes)
                        self._until_collected[source] = self.max_entries // 50
                finally:
                    self.renew_token(source)
        return count

    def clear(self, sources: Iterable[Source]) -> Counter[str]:
        """Remove sources; return how many problems were `removed` and are `left`."""
        count: Counter[str] = Counter()
        if not self.path.is_dir():
            return count
        paths = [path for source in sources for path in self._paths(source)]
        count["left"] = len(paths)
        with self.warn_on_error("emptied"), self._lock_for_writing():
            try:
                for path in paths:
                    path.unlink(missing_ok=True)
                    count.update(removed=1, left=-1)
            finally:
                for source in SOURCES:
                    # A compile that tunes must not hit the graph cache for what was tuned before,
                    # either.
                    self.renew_token(source)
        return count

    def _merge_file(
        self, path: pathlib.Path, added: Sequence[TuningResult]
    ) -> tuple[list[TuningResult], Counter[str]]:
        """Return the new content of a problem's file, and the counts for the added entries."""
        before = []
        for value in self._load(path):
            with contextlib.suppress(exc.BadGemmError):
                before.append(TuningResult.from_json(value))
        newest = merge_results([*before, *added])
        newest.sort(key=lambda entry: (entry.measured, entry.line), reverse=True)
        del newest[_ENVIRONMENTS:]
        environments = {entry.environment for entry in before}
        count: Counter[str] = Counter()
        for entry in added:
            if entry in before or entry not in newest:
                count["ignored"] += 1
            else:
                count["updated" if entry.environment in environments else "new"] += 1
        return newest, count

    def _write(self, path: pathlib.Path, entries: Iterable[TuningResult]) -> None:
        text = ("[" + ",\n".join(entry.line for entry in entries) + "]\n").encode()
        with atomic_write(path) as temporary:
            pathlib.Path(temporary).write_bytes(checksum(text) + b"\n" + text)

    def _remove_oldest(self, source: Source, added: Collection[pathlib.Path]) -> None:
        """Remove the oldest files above the limit, except `added`, and what dead writers left."""
        folder = self.make(source)
        for name in os.listdir(folder):
            # Only the holder of the write lock creates temporary folders here.
            if name.startswith(TEMPORARY):
                shutil.rmtree(folder / name, ignore_errors=True)
        paths = self._paths(source)
        if len(paths) > self.max_entries:
            old = [path for path in paths if path not in added]
            old.sort(key=lambda path: (path.stat().st_mtime_ns, path.name))
            # Remove more than needed, so that not every write has to list all files.
            for path in old[: len(paths) - self.max_entries * 9 // 10]:
                path.unlink()
        self.remove_old_locks(_OWN)
        # Temporary folders of tokens. Recent ones may belong to others who use this folder.
        for path in self.make(".").glob(f"{TEMPORARY}*"):
            with contextlib.suppress(OSError):
                if is_old(path):
                    shutil.rmtree(path)

    def token(self, source: Source) -> str:
        """Return random text that each change of a source replaces; empty before the first."""
        with contextlib.suppress(OSError):
            return (self.path / f"{source}.token").read_text("utf-8", "replace")
        return ""

    def renew_token(self, source: Source, mark: str = "") -> None:
        with atomic_write(self.path / f"{source}.token") as temporary:
            pathlib.Path(temporary).write_text(secrets.token_hex(8) + mark)

    @contextlib.contextmanager
    def _lock_for_writing(self) -> Iterator[None]:
        import filelock

        # The lock is held for milliseconds, unless its holder was stopped.
        path = self.make(".") / "writing"
        with filelock.FileLock(path, timeout=_WRITE_TIMEOUT, poll_interval=0.005):
            yield


def hash_texts(*texts: str) -> str:
    """Return the name of the file or lock for these texts."""
    # The format is part of each name, so that versions with different formats do not share files.
    return hashlib.sha256("\0".join((str(FORMAT), *texts)).encode()).hexdigest()[:40]


def checksum(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest().encode()
