"""Tune in a background process, so that a compile does not wait (`tuning="background"`).

`tune_later` puts problems without an exact result into the queue (`tuning_queue`) and starts a
process of low priority for the GPU, if none runs. That process outlives this one. It measures while
the GPU is idle, stores the results like every tuning run, and ends when the queue is empty. The
next compile of the same graph, in this or another process, uses them.

A measurement during which another process has used the GPU is not stored. The process may be killed
at any time: results and requests are complete files, and the next compile starts it again.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from inductor_ext.autotune.decision import Decision
from inductor_ext.autotune.results_db import TuningDatabase
from inductor_ext.autotune.tuning_queue import Request, Status, TuningQueue
from inductor_ext.settings import Settings
from inductor_ext.templates.device import Device
from inductor_ext.templates.format import problem_words
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.triton import ranking
from inductor_ext.toolchain import background_process

AT_ONCE = 2
"""Problems that are measured before the GPU's load is read again."""

LINGER = 20.0
"""Seconds that a worker waits for requests before it ends."""

_BUSY = 5.0
"""Seconds until the load of a busy GPU is read again."""

_PROGRAM = "inductor_ext.cli.tuning_worker"
"""The module that runs a `Worker` in a process of its own."""

started_processes: list[subprocess.Popen[bytes]] = []
"""Workers that this process has started. Polling reaps those that have ended."""


def tune_later(
    problems: Iterable[GemmProblem],
    device: Device,
    index: int,
    settings: Settings,
    database: TuningDatabase,
    *,
    dependent: bool,
) -> None:
    """Have problems without an exact result tuned, without waiting for it.

    Args:
        problems: those of a compile.
        device: the description of the GPU.
        index: of the GPU in this process.
        settings: of the compile.
        database: of tuning results. Without a folder nothing is tuned.
        dependent: see `tuner.tune`.
    """
    if database.folder is None:
        return
    requests = []
    for problem in dict.fromkeys(problems):
        if not database.lookup_exact(problem, device) and _has_candidates(problem, device):
            requests.append(Request(problem, device.name, dependent, settings.tuning_budget))
    queue = TuningQueue(database.folder)
    if queue.add(requests) and not queue.has_worker(worker_name(index)):
        _start(database.folder, index)


def _has_candidates(problem: GemmProblem, device: Device) -> bool:
    """Whether tuning would measure anything."""
    return bool(ranking.rank(problem, device, 1)) and ranking.prologue_pays(problem, device)


def worker_name(index: int) -> str:
    """Return the name of the worker of a GPU, the same in all processes."""
    import torch

    properties = torch.cuda.get_device_properties(index)
    return str(getattr(properties, "uuid", f"{properties.name}:{index}"))


def _start(folder: os.PathLike[str], index: int) -> None:
    background_process.start(started_processes, _PROGRAM, os.fspath(folder), str(index))


Tune = Callable[[Sequence[Request]], Mapping[GemmProblem, Decision]]


class Clock(Protocol):
    """What the worker asks of the machine; tests replace it."""

    def is_idle(self) -> bool:
        """Whether no other process uses the GPU."""

    def sleep(self, seconds: float) -> None:
        """Wait."""


class Worker:
    """Tunes what the queue contains for one GPU."""

    def __init__(
        self, name: str, queue: TuningQueue, database: TuningDatabase, device: Device, tune: Tune
    ) -> None:
        self._name = name
        self._queue = queue
        self._database = database
        self._device = device
        self._tune = tune
        self._status = Status(device.name, os.getpid(), "starts")

    def run(self, clock: Clock) -> None:
        """Work until there are no requests for `LINGER` seconds; not if there is a worker."""
        # A request may come after the last look, from a process that still sees this worker.
        while self._serve(clock) and self._queue.read(self._device.name):
            pass

    def _serve(self, clock: Clock) -> bool:
        with self._queue.work(self._name) as is_worker:
            waited = 0.0
            while is_worker and waited < LINGER:
                requests = self._queue.read(self._device.name)
                if not requests:
                    self._report("has nothing to do")
                    clock.sleep(1.0)
                    waited += 1.0
                elif not clock.is_idle():
                    waited = 0.0
                    self._report("waits until the GPU is idle")
                    clock.sleep(_BUSY)
                else:
                    waited = 0.0
                    self._work_on(requests[:AT_ONCE], clock)
        return is_worker

    def _work_on(self, requests: Sequence[Request], clock: Clock) -> None:
        begun = [self._queue.begin(request) for request in requests]
        active = {request.problem: request for request in begun if request is not None}
        given_up = begun.count(None)
        self._status = dataclasses.replace(self._status, failed=self._status.failed + given_up)
        if not active:
            return
        self._report("tunes " + ", ".join(problem_words(problem) for problem in active))
        with self._database.claim([*active], self._device) as claimed:
            decisions = self._tune([active[problem] for problem in claimed]) if claimed else {}
            if decisions and not clock.is_idle():
                # Another process may have disturbed the measurement.
                for problem in claimed:
                    self._queue.postpone(active.pop(problem))
                return
            self._database.put(decisions, self._device)
        # Those that were not claimed have results by now.
        for problem, request in active.items():
            if problem in claimed or self._database.lookup_exact(problem, self._device):
                self._queue.remove(request)
        tuned = self._status.tuned + len(decisions)
        self._status = dataclasses.replace(self._status, tuned=tuned)

    def _report(self, state: str) -> None:
        if state != self._status.state:
            self._status = dataclasses.replace(self._status, state=state)
            self._queue.report(self._name, self._status)
