"""What is known about which kernel is best: measurements of this machine, and tables.

Three sources, in the order in which they are asked: `measured` here before, `imported` by
`inductor-ext tune import`, and `shipped` with the package (`autotune/tables/`). The first two lie
in a folder that processes share, a file for each problem, which holds the problem's entries of all
environments. A file is replaced as a whole under a lock, so a process may be killed at any moment;
a damaged file is as good as none, with one warning. Nothing that goes wrong with the folder makes a
compile fail.

What is known may be used in two ways, and `lookup` says which it is:

- exactly: measured in this very environment (device, SMs, Triton, CUDA, sources of the templates
  that compute such a product). Nothing has to be measured again.
- as advice: measured on a device of the same name, or of the same capability and number of SMs,
  with other versions or other template versions. A configuration that is legal runs whatever it was
  measured with, and its result is as right; what may have changed is only how fast it is, and
  mostly the best stays the best. So advice serves a compile that may not measure, and one that may
  measures anew.

Exact knowledge is preferred to advice, then the same device to a similar one, fewer differences to
more, the earlier source, the newer entry. An entry whose choice is not legal for the problem on
this device is passed over.

The settings `tuning_cache`, `tuning_cache_dir`, `tuning_cache_entries` and `tuning_wait` govern it.
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
from inductor_ext.storage import artifact_store
from inductor_ext.templates.device import Device
from inductor_ext.templates.kernels import legal
from inductor_ext.templates.problem import GemmProblem, plain, read

__all__ = ["KEPT", "SOURCES", "TABLES", "Known", "Source", "Store", "Tune", "folder", "of_settings"]

Source = Literal["measured", "imported", "shipped"]

SOURCES: tuple[Source, ...] = ("measured", "imported", "shipped")
"""In the order in which they are asked."""

KEPT: tuple[Source, ...] = ("measured", "imported")
"""Those that lie in the folder."""

Tune = Callable[[Sequence[GemmProblem]], Mapping[GemmProblem, Decision]]
"""Measures problems."""

TABLES = pathlib.Path(__file__).parent / "tables"
"""The folder of what is shipped."""

_ENVIRONMENTS = 16
"""Entries of one problem that are kept: the newest. Each upgrade of Triton makes a new one."""

_UNFINISHED = "+"
"""Ends the token of a source while it is written to, and stays where the writer was killed. Then
the next addition renews the token even if nothing in it is new: what was written may have come
after a graph that has this token in its key."""

_OWN = re.compile(r"[0-9a-f]{40}")
"""Names of problems' files, without their ending, and of locks. What is called otherwise belongs to
somebody else, who keeps it in the same folder."""

_POLL = 0.05
"""Seconds between two looks at what others are tuning."""

_PATIENCE = 60.0
"""Seconds that a process waits for others to write."""

_DAY = 86400.0


@dataclass(frozen=True)
class Known:
    """What is known of a problem."""

    entry: Entry
    source: Source
    differences: tuple[str, ...]
    """In what it was measured otherwise than it will be used, in words; none: it is exact."""

    @property
    def exact(self) -> bool:
        """Whether measuring again would only repeat it."""
        return not self.differences

    @property
    def decision(self) -> Decision:
        """What to do."""
        return self.entry.decision("cache" if self.source == "measured" else "table")

    @property
    def origin(self) -> str:
        """In words, such as `imported, with Triton 3.6.0, here 3.7.1`."""
        return ", ".join((self.source, *self.differences))


def folder(chosen: str | None = None) -> pathlib.Path:
    """Where tuning results are kept: `chosen`, else a folder in Inductor's cache folder.

    Neither torch is imported nor a folder made.
    """
    if chosen is not None:
        return pathlib.Path(chosen).absolute()
    return artifact_store.artifact_folder().parent / "tuning"


def of_settings(settings: Settings) -> Store:
    """The store that settings describe; torch's switch for all caches counts as well."""
    import torch.compiler.config

    kept = settings.tuning_cache and not torch.compiler.config.force_disable_caches
    return Store(
        folder(settings.tuning_cache_dir) if kept else None,
        max_entries=settings.tuning_cache_entries,
        wait=settings.tuning_wait,
    )


class Store:
    """What is known, and the right to find out more.

    `lookup` says what is known of a problem; `settle` has measured what is not known exactly.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        *,
        max_entries: int = 20_000,
        wait: float = 300.0,
        tables: str | os.PathLike[str] | None = None,
    ) -> None:
        """Nothing is touched yet.

        Args:
            folder: made when it is first written to; with None nothing is kept, and only what is
                shipped is known.
            max_entries: problems that are kept of each source, within 2 %; beyond it the oldest go,
                until a tenth less is left. What was added last stays, however much it is.
            wait: seconds without a result after which nobody waits any longer for others who tune.
            tables: the folder of what is shipped, by default `TABLES`.
        """
        self.folder = None if folder is None else pathlib.Path(folder).absolute()
        self.max_entries = max_entries
        self.wait = wait
        self._tables = TABLES if tables is None else pathlib.Path(tables)
        self._until_collected: Counter[Source] = Counter()

    # --- what is known ---

    def lookup(
        self, problem: GemmProblem, device: Device, environments: Environments | None = None
    ) -> Known | None:
        """The best that is known of a problem, by the rules above; None if nothing is.

        Args:
            problem: this very one; another M is another problem.
            device: the one to run on.
            environments: this process's by default.
        """
        here = _environments(device, environments)(problem)
        found: list[tuple[Any, Source, Any]] = []
        for order, source in enumerate(SOURCES):
            for value in self._values(source, problem):
                # An entry is read only once it is the best: its environment tells.
                with contextlib.suppress(exc.BadGemmError, KeyError, TypeError):
                    there = read(Environment, value["environment"], "environment")
                    if there.resembles(here):
                        different = there.differences(here)
                        other = there.device != here.device
                        rank = (other, len(different), order, -value["measured"], different)
                        found.append((rank, source, value))
        for (*_, different), source, value in sorted(found, key=lambda each: each[0]):
            with contextlib.suppress(exc.BadGemmError):
                entry = Entry.from_json(value)
                usable = entry.config is None or legal(problem, entry.config, device)
                if usable and entry.problem == problem:
                    return Known(entry, source, different)
        return None

    def entries(self, source: Source) -> list[Entry]:
        """All entries of a source, sorted by problem; what cannot be read is left out."""
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
        """Text that changes when a compile may find something else than before, or has to keep what
        it measures in another folder; for cache keys.

        It costs two small files. Of what is shipped the package's source key tells.

        Args:
            tuning: whether the compile measures what it does not know. Then what is measured
                meanwhile makes no difference, and only imports and removals count: a graph whose
                GEMMs were tuned is found again under the same key. With another folder it is not,
                for that one would stay without its measurements. The default folder has no name
                here: it lies with Inductor's own caches, and moves with them.
        """
        if not tuning:
            return "-".join(self._token(source) for source in KEPT)
        if self.folder is None:
            place = "none"
        else:
            place = "" if self.folder == folder() else _hash(str(self.folder))
        return f"{place}-{self._token('imported')}"

    # --- what is added and removed ---

    def put(
        self,
        decisions: Mapping[GemmProblem, Decision],
        device: Device,
        environments: Environments | None = None,
    ) -> None:
        """Keep what was measured just now; decisions without timings are not kept."""
        here = _environments(device, environments)
        entries = [
            Entry.of(problem, decision, here(problem))
            for problem, decision in decisions.items()
            if decision.timings
        ]
        self._merge("measured", entries)

    def add(self, entries: Iterable[Entry]) -> Counter[str]:
        """Keep entries of tables.

        Returns:
            How many were `new`, `updated` (an older one was known) and `ignored` (this one or a
            newer one was known). Those that could not be written are missing.
        """
        return self._merge("imported", merged(entries))

    def clear(self, sources: Iterable[Source] = KEPT) -> Counter[str]:
        """Remove what was measured, imported or both.

        Returns:
            How many problems were `removed`, and how many are `left` since they cannot be.
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
                    # Also a compile that tunes must not be served what was tuned before.
                    self._renew(source)
        return count

    # --- who finds out more ---

    def settle(
        self,
        problems: Iterable[GemmProblem],
        device: Device,
        tune: Tune,
        environments: Environments | None = None,
    ) -> dict[GemmProblem, Decision]:
        """Decisions for problems of which nothing exact is known, and which are kept.

        Of several processes (or threads) that meet the same problem one measures it, and all get
        its result.

        Args:
            problems: each is tuned at most once.
            device: the one to measure on.
            tune: called once or several times with some of them; what it does not decide on is left
                to stock's path.
            environments: this process's by default.
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
        """Hold the right to tune some of the problems; yield these.

        It waits until nobody else tunes one of them, or until all are known exactly, and then
        yields none. The right ends with the block, or with the process that holds it. Whoever holds
        one waits for nobody, so there is no deadlock among claims; and since a process may hold one
        while its GPU waits for another rank, after `wait` seconds without any result for this one
        all that is left is yielded, whoever holds it.
        """
        here = _environments(device, environments)
        with contextlib.ExitStack() as stack:
            mine: list[GemmProblem] = []
            left = list(problems)
            seen: str | None = None
            since = time.monotonic()
            while left and not mine:
                before, seen = seen, self._token("measured")
                # Whether somebody has put something, which may be what is waited for.
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
                            # Only now: who waits must hold nothing.
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
        """Take the right to tune a problem, until the stack closes, unless another has it."""
        import filelock

        if self.folder is None:
            return True
        with self._degrading("locked"):
            name = _hash(problem.key, json.dumps(plain(environment)))
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
        """The entries in a file as JSON has them; none of a file that is not there or damaged."""
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
                f"{path} is damaged, and perhaps others in that folder; what it says is ignored",
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
        """Add entries to a source; returns what became of them."""
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
                    # Looking at all names costs more than adding one.
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
        """The entries that a problem's file is to hold, and what becomes of those added."""
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
        with artifact_store.publish(path) as temporary:
            pathlib.Path(temporary).write_bytes(_check(text) + b"\n" + text)

    def _collect(self, source: Source, added: Collection[pathlib.Path]) -> None:
        """Remove the oldest files beyond the limit, but for those added just now, and what killed
        processes have left behind.
        """
        place = self._make(source)
        for name in os.listdir(place):
            # Only who holds the lock makes temporary folders.
            if name.startswith(artifact_store.TEMPORARY):
                shutil.rmtree(place / name, ignore_errors=True)
        paths = self._files(source)
        if len(paths) > self.max_entries:
            old = [path for path in paths if path not in added]
            old.sort(key=lambda path: (path.stat().st_mtime_ns, path.name))
            # Some more than needed, so that not every addition has to look at all files.
            for path in old[: len(paths) - self.max_entries * 9 // 10]:
                path.unlink()
        for lock in self._make("locks").iterdir():
            # Somebody may be about to take it; the worst is that a problem is measured twice.
            with contextlib.suppress(OSError):
                if _OWN.fullmatch(lock.name) and _is_old(lock):
                    lock.unlink()
        # Of tokens; young ones may be of somebody else, whose files lie here, too.
        for path in self._make(".").glob(f"{artifact_store.TEMPORARY}*"):
            with contextlib.suppress(OSError):
                if _is_old(path):
                    shutil.rmtree(path)

    # --- the folder ---

    def _token(self, source: Source) -> str:
        """Random text that is replaced with each change of a source; empty before the first."""
        if self.folder is not None:
            with contextlib.suppress(OSError):
                return (self.folder / f"{source}.token").read_text("utf-8", "replace")
        return ""

    def _renew(self, source: Source, mark: str = "") -> None:
        assert self.folder is not None
        with artifact_store.publish(self.folder / f"{source}.token") as temporary:
            pathlib.Path(temporary).write_text(secrets.token_hex(8) + mark)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        import filelock

        # Each holds it for milliseconds, unless somebody has stopped it.
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
        """Turn an error of the file system into a warning.

        Args:
            done: what could not be done with the folder, as in "the folder cannot be read".
        """
        try:
            yield
        except (OSError, NotImplementedError) as error:
            events.warn_once(
                f"tuning_cache:{self.folder}",
                f"the folder of tuning results {self.folder} cannot be {done}, and GEMMs are tuned "
                f"without it: {error}",
            )


def _environments(device: Device, given: Environments | None) -> Environments:
    return given or (lambda problem: Environment.of(device, problem.operation))


@functools.cache
def _shipped(folder: pathlib.Path) -> dict[str, list[Any]]:
    """The entries of the tables in a folder by their problems' keys, as JSON has them."""
    found: dict[str, list[Any]] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            for value in raw_table(path):
                key = json.dumps(value["problem"], sort_keys=True, separators=(",", ":"))
                found.setdefault(key, []).append(value)
        except (exc.BadTuningFileError, KeyError, TypeError) as error:
            events.warn_once(f"tuning_table:{path}", f"{path} is damaged and not used: {error}")
    return found


def _is_old(path: pathlib.Path) -> bool:
    """Whether it has not been changed for a day."""
    return path.stat().st_mtime < time.time() - _DAY


def _hash(*texts: str) -> str:
    # The format is part of each name: versions of other formats do not meet.
    return hashlib.sha256("\0".join((str(FORMAT), *texts)).encode()).hexdigest()[:40]


def _check(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest().encode()
