"""Worker processes that may die of their work, and the journal of an interrupted run.

A worker calls one function on each batch that it receives. Before a stage that may crash or take
forever, the function announces the stage's name, so that a crash can be attributed to it.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import resource
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, TypeVar

Batch = TypeVar("Batch")
Answer = TypeVar("Answer")

BATCHES_PER_WORKER = 25
"""Compiled libraries stay loaded in the process that compiled them, so workers are replaced."""

FIRST_STAGE = "eager"
"""The stage until a worker announces another one."""

Announce = Callable[[str], None]


def _serve(
    connection: Connection,
    judge: Callable[[Any, Announce], Any],
    memory_bytes: int | None,
    log: str,
) -> None:
    """Judge batches until None arrives; the body of a worker process."""
    if memory_bytes is not None:
        # RLIMIT_DATA, not RLIMIT_AS: libraries reserve address space far beyond what they use.
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    while (batch := connection.recv()) is not None:
        print(f"batch: {batch}", flush=True)
        connection.send(("answer", judge(batch, lambda stage: connection.send(("stage", stage)))))


class Worker(Generic[Batch, Answer]):
    """A process that judges batches and may die of one.

    Args:
        judge: called in the process with a batch and a function that announces stages; picklable.
        memory_bytes: limit of the process's data, None for no limit.
        log: path of the file to which the process's output is appended.
    """

    def __init__(
        self, judge: Callable[[Batch, Announce], Answer], memory_bytes: int | None, log: str
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        arguments = (theirs, judge, memory_bytes, log)
        self.process = context.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def judge(self, batch: Batch, timeout_s: float) -> tuple[Answer, None] | tuple[str, str]:
        """The batch's answer or, if the process dies or is stuck, the stage and what happened.

        After the latter the worker is spent.

        Args:
            batch: what is sent to the process; picklable.
            timeout_s: for one stage.
        """
        stage = FIRST_STAGE
        try:
            self.connection.send(batch)
            while self.connection.poll(timeout_s):
                kind, content = self.connection.recv()
                if kind == "answer":
                    return content, None
                stage = content
            why = f"no answer within {timeout_s:.0f} s"
        except (EOFError, OSError):
            self.process.join()
            why = f"the process ended with exit code {self.process.exitcode}"
        self.process.kill()
        return stage, why

    def close(self) -> None:
        """End the process, which is idle or dead."""
        with contextlib.suppress(OSError):
            self.connection.send(None)
        self.process.join(timeout=30)
        self.process.kill()
        self.process.join()
        self.connection.close()


class Journal:
    """JSON objects, one a line, so that an interrupted run can go on.

    A journal holds for one header; a journal with another header is overwritten.

    Args:
        path: of the file.
        header: what the run depends on, such as the torch release and the source state.
        restart: whether to overwrite the journal in any case.
    """

    def __init__(self, path: Path, header: Iterable[Any], *, restart: bool) -> None:
        self._path = path
        first = json.dumps([*header])
        lines = path.read_text().splitlines() if path.exists() and not restart else []
        earlier = list(_parse(lines[1:])) if lines[:1] == [first] else []
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(first + "\n")
        self.earlier: list[dict[str, Any]] = earlier
        """The objects of the run that is continued."""
        self.write(earlier)

    def write(self, objects: Iterable[dict[str, Any]]) -> None:
        """Append objects."""
        with self._path.open("a") as file:
            file.writelines(json.dumps(item) + "\n" for item in objects)


def _parse(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        # A line cut short by an interruption is judged again.
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(line)
