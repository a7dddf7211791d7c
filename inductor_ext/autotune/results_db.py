"""The database of tuning results: measurements of this machine, and tables.

There are three sources, searched in this order: `measured` on this machine, `imported` by
`inductor-ext tune import`, and `shipped` with the package (`autotune/tables/`). The first two are
in a folder that processes share (`results_folder`), whose errors never make a compile fail.

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
import json
import os
import pathlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from inductor_ext import events, exc
from inductor_ext.autotune import results_folder
from inductor_ext.autotune.decision import STOCK, Decision
from inductor_ext.autotune.results import (
    Environment,
    Environments,
    TuningResult,
    merge_results,
    raw_table,
)
from inductor_ext.autotune.results_folder import ResultsFolder, hash_texts
from inductor_ext.settings import Settings
from inductor_ext.storage import json_codec
from inductor_ext.storage.paths import tuning_folder
from inductor_ext.templates.device import Device
from inductor_ext.templates.kernels import legal
from inductor_ext.templates.problem import GemmProblem, read

Source = results_folder.Source | Literal["shipped"]

SOURCES: tuple[Source, ...] = ("measured", "imported", "shipped")
"""In the order in which they are searched."""

STORED_SOURCES = results_folder.SOURCES
"""The sources that are stored in the folder."""

Tune = Callable[[Sequence[GemmProblem]], Mapping[GemmProblem, Decision]]
"""Benchmarks problems and returns decisions."""

TABLES = pathlib.Path(__file__).parent / "tables"
"""The folder of the shipped tables."""

_POLL = 0.05
"""Seconds between two checks of what other processes are tuning."""


@dataclass(frozen=True)
class LookupResult:
    """A lookup result."""

    entry: TuningResult
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


def open_database(settings: Settings) -> TuningDatabase:
    """Return the database that settings describe.

    torch's `force_disable_caches` disables it, too.
    """
    import torch.compiler.config

    enabled = settings.tuning_cache and not torch.compiler.config.force_disable_caches
    return TuningDatabase(
        tuning_folder(settings.tuning_cache_dir) if enabled else None,
        max_entries=settings.tuning_cache_entries,
        wait=settings.tuning_wait,
    )


class TuningDatabase:
    """Tuning results, and the locks that let one process tune a problem at a time.

    `lookup` returns the stored result of a problem; `tune_missing` tunes problems without an exact
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
        """Create a database without touching the file system.

        Args:
            folder: created on the first write. With None nothing is stored, and only shipped
                results are found.
            max_entries: see `ResultsFolder`.
            wait: seconds without a result after which this process no longer waits for other
                processes that tune.
            tables: the folder of the shipped tables, by default `TABLES`.
        """
        self.files = None if folder is None else ResultsFolder(folder, max_entries)
        self.wait = wait
        self._tables = TABLES if tables is None else pathlib.Path(tables)

    @property
    def folder(self) -> pathlib.Path | None:
        """The folder of results; None if nothing is stored."""
        return None if self.files is None else self.files.path

    # --- lookup ---

    def lookup(
        self, problem: GemmProblem, device: Device, environments: Environments | None = None
    ) -> LookupResult | None:
        """Return the best result for a problem, by the rules above; None if there is none.

        Args:
            problem: exactly this problem; another M is another problem.
            device: the device to run on.
            environments: of this process by default.
        """
        here = _environments(device, environments)(problem)
        matches: list[tuple[Any, Source, Any]] = []
        for order, source in enumerate(SOURCES):
            for value in self._load(source, problem):
                # Rank by the environment only. A complete entry is parsed only if it is the best.
                with contextlib.suppress(exc.BadGemmError, KeyError, TypeError):
                    environment = read(Environment, value["environment"], "environment")
                    if environment.is_similar_to(here):
                        different = environment.differences(here)
                        other = environment.device != here.device
                        rank = (other, len(different), order, -value["measured"], different)
                        matches.append((rank, source, value))
        for (*_, different), source, value in sorted(matches, key=lambda match: match[0]):
            with contextlib.suppress(exc.BadGemmError):
                entry = TuningResult.from_json(value)
                usable = entry.config is None or legal(problem, entry.config, device)
                if usable and entry.problem == problem:
                    return LookupResult(entry, source, different)
        return None

    def entries(self, source: Source) -> list[TuningResult]:
        """Return all entries of a source, sorted by problem; unreadable entries are left out."""
        results = []
        for value in self._load(source):
            with contextlib.suppress(exc.BadGemmError):
                results.append(TuningResult.from_json(value))
        return merge_results(results)

    def _load(self, source: Source, problem: GemmProblem | None = None) -> list[Any]:
        """Return the results of a problem, or of all problems, as JSON values."""
        if source != "shipped":
            return [] if self.files is None else self.files.values(source, problem)
        shipped = read_shipped_tables(self._tables)
        if problem is not None:
            return shipped.get(problem.key, [])
        return [value for values in shipped.values() for value in values]

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
            return "-".join(self._token(source) for source in STORED_SOURCES)
        if self.folder is None:
            location = "none"
        else:
            location = "" if self.folder == tuning_folder() else hash_texts(str(self.folder))
        return f"{location}-{self._token('imported')}"

    def _token(self, source: results_folder.Source) -> str:
        return "" if self.files is None else self.files.token(source)

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
            TuningResult.of(problem, decision, here(problem))
            for problem, decision in decisions.items()
            if decision.timings
        ]
        if self.files is not None:
            self.files.merge("measured", entries)

    def add(self, entries: Iterable[TuningResult]) -> Counter[str]:
        """Store entries of tables.

        Returns:
            The number of entries that were `new`, `updated` (an older entry existed) and `ignored`
            (this entry or a newer one existed). Entries that could not be written are not counted.
        """
        if self.files is None:
            return Counter()
        return self.files.merge("imported", merge_results(entries))

    def clear(self, sources: Iterable[results_folder.Source] = STORED_SOURCES) -> Counter[str]:
        """Remove what was measured, imported or both.

        Returns:
            The number of problems that were `removed`, and that are `left` because they could not
            be removed.
        """
        return Counter() if self.files is None else self.files.clear(sources)

    # --- tuning ---

    def tune_missing(
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
        decisions: dict[GemmProblem, Decision] = {}
        pending = list(dict.fromkeys(problems))
        while pending:
            with self.claim(pending, device, environments) as batch:
                if batch:
                    tuned = tune(batch)
                    self.put(tuned, device, environments)
                    decisions |= {problem: tuned.get(problem, STOCK) for problem in batch}
            for problem in pending:
                result = self.lookup_exact(problem, device, environments)
                if problem not in decisions and result is not None:
                    decisions[problem] = result.decision
            pending = [problem for problem in pending if problem not in decisions]
        return decisions

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
            claims: list[GemmProblem] = []
            pending = list(problems)
            token: str | None = None
            since = time.monotonic()
            while pending and not claims:
                previous, token = token, self._token("measured")
                # Whether another process has stored a result, possibly one that this process waits
                # for.
                changed = token != previous
                late = time.monotonic() - since > self.wait
                for problem in tuple(pending):
                    with contextlib.ExitStack() as attempt:
                        owned = self._try_lock(attempt, problem, here(problem)) or late
                        if (owned or changed) and self.lookup_exact(problem, device, here):
                            pending.remove(problem)
                            since = time.monotonic()
                        elif owned:
                            pending.remove(problem)
                            claims.append(problem)
                            # Keep the lock only now: a process that waits must not hold any.
                            stack.push(attempt.pop_all())
                if pending and not claims:
                    time.sleep(_POLL)
            yield claims

    def lookup_exact(
        self, problem: GemmProblem, device: Device, environments: Environments | None = None
    ) -> LookupResult | None:
        """Return the result of `lookup` if it is exact, else None."""
        result = self.lookup(problem, device, environments)
        return result if result is not None and result.exact else None

    def _try_lock(
        self, stack: contextlib.ExitStack, problem: GemmProblem, environment: Environment
    ) -> bool:
        """Lock a problem for tuning until the stack closes; False if another process holds it."""
        if self.files is None:
            return True
        with self.files.warn_on_error("locked"):
            name = hash_texts(problem.key, json.dumps(json_codec.encode(environment)))
            return stack.enter_context(self.files.lock(name, timeout=0))
        return True


def _environments(device: Device, environments: Environments | None) -> Environments:
    return environments or (lambda problem: Environment.of(device, problem.operation))


@functools.cache
def read_shipped_tables(folder: pathlib.Path) -> dict[str, list[Any]]:
    """Return the entries of the tables in a folder as JSON values, by the key of their problem."""
    entries: dict[str, list[Any]] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            for value in raw_table(path):
                key = json.dumps(value["problem"], sort_keys=True, separators=(",", ":"))
                entries.setdefault(key, []).append(value)
        except (exc.BadTuningFileError, KeyError, TypeError) as error:
            events.warn_once(f"tuning_table:{path}", f"{path} is damaged and ignored: {error}")
    return entries
