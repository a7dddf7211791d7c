"""The store of tuning results: measurements of this machine, and tables.

There are three sources, searched in this order: `measured` on this machine, `imported` by
`inductor-ext tune import`, and `shipped` with the package (`autotune/tables/`). The first two are
in a folder that processes share, with one file per problem, which holds the problem's entries of
all environments. A file is replaced as a whole under a lock, so a process may be killed at any
time. A damaged file is ignored, with one warning per folder. An error of the folder never makes a
compile fail.

A result is usable in two ways, and `lookup` returns which one applies:

- exact: measured in this environment (device, SMs, Triton, CUDA, version of the templates for this
  operation). Nothing has to be measured again.
- advice: measured on a device of the same name, or of the same capability and number of SMs, with
  other versions or other template versions. A legal configuration is correct whatever it was
  measured with; only its speed may have changed, and usually the fastest stays the fastest. A
  compile that may not tune therefore uses advice, and a compile that may tune measures again.

Exact results are preferred to advice, then the same device to a similar one, fewer differences to
more, the earlier source, the newer entry. An entry whose choice is not legal for the problem on
this device is skipped.

The settings `tuning_cache`, `tuning_cache_dir`, `tuning_cache_entries` and `tuning_wait` apply.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import re
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from inductor_ext import events, exc
from inductor_ext.autotune.decision import STOCK, Decision
from inductor_ext.autotune.results import (
    FORMAT,
    Entry,
    Environment,
    Environments,
    merged,
    raw_table,
)
from inductor_ext.settings import Settings
from inductor_ext.storage import json_codec
from inductor_ext.storage.atomic import TEMPORARY, atomic_write
from inductor_ext.storage.paths import artifact_folder
from inductor_ext.templates.device import Device
from inductor_ext.templates.kernels import legal
from inductor_ext.templates.problem import GemmProblem, read

__all__ = ["KEPT", "SOURCES", "TABLES", "Known", "Source", "Store", "Tune", "folder", "of_settings"]

Source = Literal["measured", "imported", "shipped"]

SOURCES: tuple[Source, ...] = ("measured", "imported", "shipped")
"""In the order in which they are searched."""

KEPT: tuple[Source, ...] = ("measured", "imported")
"""The sources that are stored in the folder."""

Tune = Callable[[Sequence[GemmProblem]], Mapping[GemmProblem, Decision]]
"""Benchmarks problems and returns decisions."""

TABLES = pathlib.Path(__file__).parent / "tables"
"""The folder of the shipped tables."""

_ENVIRONMENTS = 16
"""Maximum number of entries per problem; the newest are kept. Each upgrade of Triton adds one."""

_UNFINISHED = "+"
"""Suffix of a source's token during a write. It remains if the writer was killed. The next write
then renews the token even if it adds nothing new, because the interrupted write may have added
results after a graph was cached under a key with this token."""

_OWN = re.compile(r"[0-9a-f]{40}")
"""Names of the problems' files, without suffix, and of locks. Other files in the folder are
not touched."""

_POLL = 0.05
"""Seconds between two checks of what other processes are tuning."""

_PATIENCE = 60.0
"""Timeout in seconds for the write lock."""

_DAY = 86400.0


@dataclass(frozen=True)
class Known:
    """A lookup result."""

    entry: Entry
    source: Source
    differences: tuple[str, ...]
    """The differences between the environment of the measurement and this one, as text; empty if
    the result is exact."""

    @property
    def exact(self) -> bool:
        """Whether the result was measured in this environment; measuring again would repeat it."""
        return not self.differences

    @property
    def decision(self) -> Decision:
        """The decision that the entry records."""
        return self.entry.decision("cache" if self.source == "measured" else "table")

    @property
    def origin(self) -> str:
        """The source and the differences, such as `imported, with Triton 3.6.0, here 3.7.1`."""
        return ", ".join((self.source, *self.differences))


def folder(chosen: str | None = None) -> pathlib.Path:
    """Return the folder of tuning results: `chosen`, or else a folder in Inductor's cache folder.

    Does not import torch or create the folder.
    """
    if chosen is not None:
        return pathlib.Path(chosen).absolute()
    return artifact_folder().parent / "tuning"


def of_settings(settings: Settings) -> Store:
    """Return the store that settings describe; torch's `force_disable_caches` also disables it."""
    import torch.compiler.config

    kept = settings.tuning_cache and not torch.compiler.config.force_disable_caches
    return Store(
        folder(settings.tuning_cache_dir) if kept else None,
        max_entries=settings.tuning_cache_entries,
        wait=settings.tuning_wait,
    )


class Store:
    """Tuning results, and the locks that let one process tune a problem at a time.

    `lookup` returns the stored result of a problem; `settle` tunes problems without an exact
    result.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        *,
        max_entries: int = 20_000,
        wait: float = 300.0,
        tables: str | os.PathLike[str] | None = None,
    ) -> None:
        """Create a store without touching the file system.

        Args:
            folder: created on the first write. With None nothing is stored, and only shipped
                results are found.
            max_entries: maximum number of problems per source, within 2 %. Above it the oldest are
                removed until 10 % fewer are left. Entries of the current write are never removed,
                however many they are.
            wait: seconds without a result after which this process no longer waits for other
                processes that tune.
            tables: the folder of the shipped tables, by default `TABLES`.
        """
        self.folder = None if folder is None else pathlib.Path(folder).absolute()
        self.max_entries = max_entries
        self.wait = wait
        self._tables = TABLES if tables is None else pathlib.Path(tables)
        self._until_collected: Counter[Source] = Counter()

    # --- lookup ---

    def lookup(
        self, problem: GemmProblem, device: Device, environments: Environments | None = None
    ) -> Known | None:
        """Return the best result for a problem, by the rules above; None if there is none.

        Args:
            problem: exactly this problem; another M is another problem.
            device: the device to run on.
            environments: of this process by default.
        """
        here = _environments(device, environments)(problem)
        found: list[tuple[Any, Source, Any]] = []
        for order, source in enumerate(SOURCES):
            for value in self._values(source, problem):
                # Rank by the environment only. A complete entry is parsed only if it is the best.
                with contextlib.suppress(exc.BadGemmError, KeyError, TypeError):
                    there = read(Environment, value["environment"], "environment")
                    if there.resembles(here):
                        different = there.differences(here)
                        other = there.device != here.device
                        rank = (other, len(different), order, -value["measured"], different)
                        found.append((rank, source, value))
        for (*_, different), source, value in sorted(found, key=lambda x: x[0]):
            with contextlib.suppress(exc.BadGemmError):
                entry = Entry.from_json(value)
                usable = entry.config is None or legal(problem, entry.config, device)
                if usable and entry.problem == problem:
                    return Known(entry, source, different)
        return None

    def entries(self, source: Source) -> list[Entry]:
        """Return all entries of a source, sorted by problem; unreadable entries are left out."""
        found = []
        if source == "shipped":
            values = [value for values in _shipped(self._tables).values() for value in values]
        else:
            values = [value for path in self._files(source) for value in self._load(path)]
        for value in values:
            with contextlib.suppress(exc.BadGemmError):
                found.append(Entry.from_json(value))
        return merged(found)

    def generation(self, *, tuning: bool) -> str:
        """Return text for cache keys that changes when a compile could find other results.

        It also changes when the compile has to store its measurements in another folder. It reads
        two small files. Shipped tables are covered by the package's source key.

        Args:
            tuning: whether the compile tunes problems without a result. Then new measurements do
                not change the text, only imports and removals do, so that a graph whose GEMMs were
                tuned is a cache hit under the same key. Another folder does change it, because
                otherwise that folder would never receive the measurements. The default folder adds
                nothing to the text: it is inside Inductor's cache folder and moves with it.
        """
        if not tuning:
            return "-".join(self._token(source) for source in KEPT)
        if self.folder is None:
            place = "none"
        else:
            place = "" if self.folder == folder() else _hash(str(self.folder))
        return f"{place}-{self._token('imported')}"

    # --- updates ---

    def put(
        self,
        decisions: Mapping[GemmProblem, Decision],
        device: Device,
        environments: Environments | None = None,
    ) -> None:
        """Store the decisions that were just measured; decisions without timings are not stored."""
        here = _environments(device, environments)
        entries = [
            Entry.of(problem, decision, here(problem))
            for problem, decision in decisions.items()
            if decision.timings
        ]
        self._merge("measured", entries)

    def add(self, entries: Iterable[Entry]) -> Counter[str]:
        """Store entries of tables.

        Returns:
            The number of entries that were `new`, `updated` (an older entry existed) and `ignored`
            (this entry or a newer one existed). Entries that could not be written are not counted.
        """
        return self._merge("imported", merged(entries))

    def clear(self, sources: Iterable[Source] = KEPT) -> Counter[str]:
        """Remove what was measured, imported or both.

        Returns:
            The number of problems that were `removed`, and that are `left` because they could not
            be removed.
        """
        count: Counter[str] = Counter()
        if self.folder is None or not self.folder.is_dir():
            return count
        paths = [path for source in sources for path in self._files(source)]
        count["left"] = len(paths)
        with self._degrading("emptied"), self._writing():
            try:
                for path in paths:
                    path.unlink(missing_ok=True)
                    count.update(removed=1, left=-1)
            finally:
                for source in KEPT:
                    # A compile that tunes must not hit the graph cache for what was tuned before,
                    # either.
                    self._renew(source)
        return count

    # --- tuning ---

    def settle(
        self,
        problems: Iterable[GemmProblem],
        device: Device,
        tune: Tune,
        environments: Environments | None = None,
    ) -> dict[GemmProblem, Decision]:
        """Tune problems without an exact result, store the results, and return the decisions.

        If several processes or threads need the same problem, one of them measures it and all get
        its result.

        Args:
            problems: each is tuned at most once.
            device: the device to measure on.
            tune: called once or several times, each time with some of the problems. A problem for
                which it returns no decision gets Inductor's path.
            environments: of this process by default.
        """
        settled: dict[GemmProblem, Decision] = {}
        pending = list(dict.fromkeys(problems))
        while pending:
            with self.claim(pending, device, environments) as batch:
                if batch:
                    decisions = tune(batch)
                    self.put(decisions, device, environments)
                    settled.update((problem, decisions.get(problem, STOCK)) for problem in batch)
            pending = [problem for problem in pending if problem not in settled]
            for problem in pending:
                known = self._exact(problem, device, environments)
                if known is not None:
                    settled[problem] = known.decision
            pending = [problem for problem in pending if problem not in settled]
        return settled

    @contextlib.contextmanager
    def claim(
        self,
        problems: Sequence[GemmProblem],
        device: Device,
        environments: Environments | None = None,
    ) -> Iterator[list[GemmProblem]]:
        """Acquire the right to tune some of the problems, and yield these.

        Waits until no other process tunes at least one of them, or until all have exact results;
        then it yields an empty list. The right ends with the block, or with the process that holds
        it. A holder of rights never waits for others, so claims cannot deadlock. A process may
        however hold a right while its GPU waits for another rank; so after `wait` seconds without
        any new result for this process, all remaining problems are yielded, whoever holds them.
        """
        here = _environments(device, environments)
        with contextlib.ExitStack() as stack:
            mine: list[GemmProblem] = []
            left = list(problems)
            seen: str | None = None
            since = time.monotonic()
            while left and not mine:
                before, seen = seen, self._token("measured")
                # Whether another process has stored a result, possibly one that this process waits
                # for.
                changed = seen != before
                late = time.monotonic() - since > self.wait
                for problem in tuple(left):
                    with contextlib.ExitStack() as attempt:
                        owned = self._own(attempt, problem, here(problem)) or late
                        if (owned or changed) and self._exact(problem, device, here):
                            left.remove(problem)
                            since = time.monotonic()
                        elif owned:
                            left.remove(problem)
                            mine.append(problem)
                            # Keep the lock only now: a process that waits must not hold any.
                            stack.push(attempt.pop_all())
                if left and not mine:
                    time.sleep(_POLL)
            yield mine

    def _exact(
        self, problem: GemmProblem, device: Device, environments: Environments | None
    ) -> Known | None:
        known = self.lookup(problem, device, environments)
        return known if known is not None and known.exact else None

    def _own(
        self, stack: contextlib.ExitStack, problem: GemmProblem, environment: Environment
    ) -> bool:
        """Lock a problem for tuning until the stack closes; False if another process holds it."""
        import filelock

        if self.folder is None:
            return True
        with self._degrading("locked"):
            name = _hash(problem.key, json.dumps(json_codec.encode(environment)))
            locks = self._make("locks")
            try:
                stack.enter_context(filelock.FileLock(locks / name, timeout=0))
            except filelock.Timeout:
                return False
        return True

    # --- files ---

    def _values(self, source: Source, problem: GemmProblem) -> list[Any]:
        if source == "shipped":
            return _shipped(self._tables).get(problem.key, [])
        if self.folder is None:
            return []
        return self._load(self._path(source, problem))

    def _path(self, source: Source, problem: GemmProblem) -> pathlib.Path:
        assert self.folder is not None
        return self.folder / source / f"{_hash(problem.key)}.json"

    def _load(self, path: pathlib.Path) -> list[Any]:
        """Return the entries of a file as JSON values; empty if the file is missing or damaged."""
        with self._degrading("read"):
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                return []
            check, _, text = data.partition(b"\n")
            if _check(text) == check:
                with contextlib.suppress(ValueError, RecursionError):
                    values = json.loads(text)
                    if isinstance(values, list):
                        return values
            events.warn_once(
                f"tuning_cache_damage:{self.folder}",
                f"{path} is damaged and ignored; other files in that folder may be damaged, too",
            )
        return []

    def _files(self, source: Source) -> list[pathlib.Path]:
        if self.folder is None:
            return []
        with self._degrading("read"):
            paths = sorted((self.folder / source).glob("*.json"))
            return [path for path in paths if _OWN.fullmatch(path.stem)]
        return []

    def _merge(self, source: Source, entries: Sequence[Entry]) -> Counter[str]:
        """Add entries to a source; return how many were new, updated and ignored."""
        count: Counter[str] = Counter()
        if self.folder is None or not entries:
            return count
        by_problem: dict[GemmProblem, list[Entry]] = {}
        for entry in entries:
            by_problem.setdefault(entry.problem, []).append(entry)
        with self._degrading("written"), self._writing():
            self._make(source)
            changes = {}
            for problem, added in by_problem.items():
                path = self._path(source, problem)
                newest, became = self._merged(path, added)
                if became["new"] or became["updated"]:
                    changes[path] = newest, became
                else:
                    count += became
            if changes or self._token(source).endswith(_UNFINISHED):
                self._renew(source, _UNFINISHED)
                try:
                    for path, (newest, became) in changes.items():
                        self._write(path, newest)
                        count += became
                    # Listing the folder costs more than adding a file.
                    self._until_collected[source] -= len(changes)
                    if self._until_collected[source] < 0:
                        self._collect(source, changes)
                        self._until_collected[source] = self.max_entries // 50
                finally:
                    self._renew(source)
        return count

    def _merged(
        self, path: pathlib.Path, added: Sequence[Entry]
    ) -> tuple[list[Entry], Counter[str]]:
        """Return the new content of a problem's file, and the counts for the added entries."""
        before = []
        for value in self._load(path):
            with contextlib.suppress(exc.BadGemmError):
                before.append(Entry.from_json(value))
        newest = sorted(
            merged([*before, *added]), key=lambda entry: (entry.measured, entry.line), reverse=True
        )[:_ENVIRONMENTS]
        known = {entry.environment for entry in before}
        count: Counter[str] = Counter()
        for entry in added:
            if entry in before or entry not in newest:
                count["ignored"] += 1
            else:
                count["updated" if entry.environment in known else "new"] += 1
        return newest, count

    def _write(self, path: pathlib.Path, entries: Iterable[Entry]) -> None:
        text = ("[" + ",\n".join(entry.line for entry in entries) + "]\n").encode()
        with atomic_write(path) as temporary:
            pathlib.Path(temporary).write_bytes(_check(text) + b"\n" + text)

    def _collect(self, source: Source, added: Collection[pathlib.Path]) -> None:
        """Remove the oldest files above the limit, except `added`, and what dead writers left."""
        place = self._make(source)
        for name in os.listdir(place):
            # Only the holder of the write lock creates temporary folders here.
            if name.startswith(TEMPORARY):
                shutil.rmtree(place / name, ignore_errors=True)
        paths = self._files(source)
        if len(paths) > self.max_entries:
            old = [path for path in paths if path not in added]
            old.sort(key=lambda path: (path.stat().st_mtime_ns, path.name))
            # Remove more than needed, so that not every write has to list all files.
            for path in old[: len(paths) - self.max_entries * 9 // 10]:
                path.unlink()
        for lock in self._make("locks").iterdir():
            # Another process may be about to take it; at worst a problem is measured twice.
            with contextlib.suppress(OSError):
                if _OWN.fullmatch(lock.name) and _is_old(lock):
                    lock.unlink()
        # Temporary folders of tokens. Recent ones may belong to others who use this folder.
        for path in self._make(".").glob(f"{TEMPORARY}*"):
            with contextlib.suppress(OSError):
                if _is_old(path):
                    shutil.rmtree(path)

    # --- the folder ---

    def _token(self, source: Source) -> str:
        """Return random text that each change of a source replaces; empty before the first."""
        if self.folder is not None:
            with contextlib.suppress(OSError):
                return (self.folder / f"{source}.token").read_text("utf-8", "replace")
        return ""

    def _renew(self, source: Source, mark: str = "") -> None:
        assert self.folder is not None
        with atomic_write(self.folder / f"{source}.token") as temporary:
            pathlib.Path(temporary).write_text(secrets.token_hex(8) + mark)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        import filelock

        # The lock is held for milliseconds, unless its holder was stopped.
        path = self._make(".") / "writing"
        with filelock.FileLock(path, timeout=_PATIENCE, poll_interval=0.005):
            yield

    def _make(self, name: str) -> pathlib.Path:
        assert self.folder is not None
        path = self.folder / name
        if not path.is_dir():
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
        return path

    @contextlib.contextmanager
    def _degrading(self, done: str) -> Iterator[None]:
        """Turn a file system error into a warning.

        Args:
            done: what could not be done with the folder, as in "the folder cannot be read".
        """
        try:
            yield
        except (OSError, NotImplementedError) as error:
            events.warn_once(
                f"tuning_cache:{self.folder}",
                f"the folder of tuning results {self.folder} cannot be {done}; GEMMs are tuned "
                f"again: {error}",
            )


def _environments(device: Device, given: Environments | None) -> Environments:
    return given or (lambda problem: Environment.of(device, problem.operation))


@functools.cache
def _shipped(folder: pathlib.Path) -> dict[str, list[Any]]:
    """Return the entries of the tables in a folder as JSON values, by the key of their problem."""
    found: dict[str, list[Any]] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            for value in raw_table(path):
                key = json.dumps(value["problem"], sort_keys=True, separators=(",", ":"))
                found.setdefault(key, []).append(value)
        except (exc.BadTuningFileError, KeyError, TypeError) as error:
            events.warn_once(f"tuning_table:{path}", f"{path} is damaged and ignored: {error}")
    return found


def _is_old(path: pathlib.Path) -> bool:
    """Whether the file has not been modified for a day."""
    return path.stat().st_mtime < time.time() - _DAY


def _hash(*texts: str) -> str:
    # The format is part of each name, so that versions with different formats do not share files.
    return hashlib.sha256("\0".join((str(FORMAT), *texts)).encode()).hexdigest()[:40]


def _check(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest().encode()
