"""The queue of problems that a background process tunes: one file per problem and kind of GPU.

A request is written and removed as a whole, so every process may be killed at any time. A request
counts how often it was begun; one that ends its worker several times is given up. The folder also
contains the status of each worker. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

from inductor_ext import events, exc
from inductor_ext.autotune.results_folder import hash_texts
from inductor_ext.storage.atomic import SharedFolder, atomic_write
from inductor_ext.templates.problem import GemmProblem

FOLDER = "queue"
"""Name of the folder, in the folder of tuning results."""

MAX_ATTEMPTS = 3
"""How often a problem is begun before it is given up."""

_REQUEST = re.compile(r"[0-9a-f]{40}\.json")
_WORKER = re.compile(r"worker-([0-9a-f]{40})\.json")


@dataclasses.dataclass(frozen=True)
class Request:
    """A problem to tune."""

    problem: GemmProblem
    device: str
    """Name of the GPU. Any GPU of this name may measure it."""
    dependent: bool
    """See `tuner.tune`."""
    budget: int
    """The setting `tuning_budget`."""
    attempts: int = 0

    @property
    def name(self) -> str:
        """The name of the request's file, the same for the same problem and GPU."""
        return hash_texts(self.device, self.problem.key) + ".json"

    def to_json(self) -> dict[str, Any]:
        """Return the request as a JSON object."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**fields, "problem": self.problem.to_json(whole=True)}

    @classmethod
    def from_json(cls, value: Any) -> Request:
        """Return the request of a JSON object.

        Raises:
            exc.BadGemmError: the problem is invalid.
            KeyError, TypeError, ValueError: another field is missing or has a wrong type.
        """
        return cls(
            GemmProblem.from_json(value["problem"]),
            str(value["device"]),
            bool(value["dependent"]),
            int(value["budget"]),
            int(value["attempts"]),
        )


@dataclasses.dataclass(frozen=True)
class Status:
    """What a worker does."""

    device: str
    pid: int
    state: str
    """In words, such as "waits until the GPU is idle"."""
    tuned: int = 0
    failed: int = 0
    running: bool = True
    """Whether the process still exists."""


class TuningQueue(SharedFolder):
    """Requests and workers' statuses, in files that processes share."""

    def __init__(self, results: str | os.PathLike[str]) -> None:
        """Describe a queue without touching the file system.

        Args:
            results: the folder of tuning results.
        """
        super().__init__(pathlib.Path(results) / FOLDER, self._warn_of_error)

    def _warn_of_error(self, action: str, error: Exception) -> None:
        events.warn_once(
            f"tuning_queue:{self.path}",
            f"the folder of GEMMs to tune in the background, {self.path}, cannot be {action}: "
            f"{error}",
        )

    def add(self, requests: Iterable[Request]) -> int:
        """Add requests that the queue lacks; return how many of them it contains then."""
        count = 0
        with self.warn_on_error("written"):
            for request in requests:
                if not (self.make("requests") / request.name).exists():
                    self._write(request)
                count += 1
        return count

    def read(self, device: str | None = None) -> list[Request]:
        """Return the requests for GPUs of a name, or all, oldest first."""
        found: list[tuple[int, str, Request]] = []
        with self.warn_on_error("read"):
            for path in self._paths(self.path / "requests", _REQUEST):
                with contextlib.suppress(FileNotFoundError):
                    request = self._load(path)
                    if request is not None and device in (None, request.device):
                        found.append((path.stat().st_mtime_ns, path.name, request))
        return [request for *_, request in sorted(found, key=lambda item: item[:2])]

    def _load(self, path: pathlib.Path) -> Request | None:
        """Return the request of a file. A file that cannot be understood is removed."""
        try:
            return Request.from_json(json.loads(path.read_text("utf-8")))
        except (exc.BadGemmError, KeyError, TypeError, ValueError):
            path.unlink(missing_ok=True)
            return None

    def begin(self, request: Request) -> Request | None:
        """Count an attempt; return the request to work on, or None if it is given up."""
        if request.attempts >= MAX_ATTEMPTS:
            self.remove(request)
            return None
        begun = dataclasses.replace(request, attempts=request.attempts + 1)
        with self.warn_on_error("written"):
            self._write(begun)
        return begun

    def postpone(self, request: Request) -> None:
        """Take back an attempt that says nothing about the problem."""
        with self.warn_on_error("written"):
            self._write(dataclasses.replace(request, attempts=max(0, request.attempts - 1)))

    def remove(self, request: Request) -> None:
        """Remove a request, if the queue contains it."""
        with self.warn_on_error("written"):
            (self.path / "requests" / request.name).unlink(missing_ok=True)

    def clear(self) -> int:
        """Remove all requests; return how many."""
        requests = self.read()
        for request in requests:
            self.remove(request)
        return len(requests)

    @contextlib.contextmanager
    def work(self, worker: str) -> Iterator[bool]:
        """Be the worker of this name; yields False if another process is. Its status is removed at
        the end.
        """
        name = hash_texts(worker)
        with self.lock(name, timeout=0) as held:
            try:
                yield held
            finally:
                if held:
                    with self.warn_on_error("written"):
                        (self.path / f"worker-{name}.json").unlink(missing_ok=True)

    def has_worker(self, worker: str) -> bool:
        """Whether a process is the worker of this name, or none can be."""
        with contextlib.suppress(OSError):
            return self._is_locked(hash_texts(worker))
        return True

    def _is_locked(self, name: str) -> bool:
        with self.lock(name, timeout=0) as held:
            return not held

    def report(self, worker: str, status: Status) -> None:
        """Replace the status of a worker."""
        path = self.make(".") / f"worker-{hash_texts(worker)}.json"
        with self.warn_on_error("written"), atomic_write(path) as temporary:
            pathlib.Path(temporary).write_text(json.dumps(dataclasses.asdict(status)))

    def statuses(self) -> list[Status]:
        """Return the last statuses of workers, also of those that were killed."""
        statuses = []
        with self.warn_on_error("read"):
            for path in self._paths(self.path, _WORKER):
                with contextlib.suppress(FileNotFoundError, TypeError, ValueError):
                    status = Status(**json.loads(path.read_text("utf-8")))
                    name = path.stem.removeprefix("worker-")
                    statuses.append(dataclasses.replace(status, running=self._is_locked(name)))
        return statuses

    def _paths(self, folder: pathlib.Path, names: re.Pattern[str]) -> list[pathlib.Path]:
        if not folder.is_dir():
            return []
        return sorted(path for path in folder.iterdir() if names.fullmatch(path.name))

    def _write(self, request: Request) -> None:
        path = self.make("requests") / request.name
        times = path.stat() if path.exists() else None
        with atomic_write(path) as temporary:
            pathlib.Path(temporary).write_text(json.dumps(request.to_json()))
            if times is not None:
                # Its place in the queue.
                os.utime(temporary, ns=(times.st_atime_ns, times.st_mtime_ns))
