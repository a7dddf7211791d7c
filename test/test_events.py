"""Records: their content, and that each way to read them returns them and nothing else."""

from __future__ import annotations

import dataclasses
import json
import logging
import multiprocessing
import os
import pathlib
import subprocess
import sys
import textwrap
from typing import ClassVar

import pytest

from inductor_ext import events
from inductor_ext.cpp_wrapper.records import PackageRecord

RECORD = PackageRecord(path="a.pt2", bytes=3, seconds=0.5)


@dataclasses.dataclass(frozen=True)
class Odd(events.Record):
    name: ClassVar[str] = "odd"

    value: object


def test_records_describe_themselves_and_are_json() -> None:
    assert RECORD.describe() == "package: path=a.pt2, bytes=3, seconds=0.5"
    expected = {"event": "package", "path": "a.pt2", "bytes": 3, "seconds": 0.5}
    assert json.loads(json.dumps(RECORD.as_json())) == expected


def test_capture_sees_records_only_inside() -> None:
    events.emit(RECORD)
    with events.capture() as outer:
        with events.capture() as inner:
            events.emit(RECORD)
        events.emit(Odd(1))
    events.emit(RECORD)
    assert inner == [RECORD]
    assert outer == [RECORD, Odd(1)]


def test_event_log_appends_json_lines(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "events.jsonl"
    events.emit(RECORD, event_log=str(path))
    events.emit(Odd(pathlib.PurePath("x")), event_log=str(path))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [RECORD.as_json(), {"event": "odd", "value": "x"}]


def _write_many(path: str, worker: int) -> None:
    for number in range(200):
        # Not through emit, which would import torch in every process.
        line = json.dumps({"value": f"{worker}-{number}-" + "x" * 2000})
        events._append(path, line + "\n")


def test_event_log_of_several_processes_does_not_mix_lines(tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "events.jsonl")
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_write_many, args=(path, n)) for n in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    with open(path) as file:
        names = [json.loads(line)["value"].rsplit("-", 1)[0] for line in file]
    assert sorted(names) == sorted(f"{w}-{n}" for w in range(3) for n in range(200))


def test_an_unwritable_event_log_warns_once(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "absent" / "events.jsonl")
    with events.capture() as records:
        for _ in range(3):
            events.emit(RECORD, event_log=path)
    assert records == [RECORD] * 3
    assert [record.levelno for record in caplog.records].count(logging.WARNING) == 1
    assert path in caplog.text


def test_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        events.warn_once("test_warn_once", "look here")
        events.warn_once("test_warn_once:other", "and here")
    assert caplog.messages == ["look here", "and here"]


COMPILE = """
    import torch
    torch.compile(lambda x: torch.sinh(x) + 1, backend="inductor_ext")(torch.ones(3))
"""


@pytest.fixture(scope="module")
def compile_process() -> object:
    """Run COMPILE, memoised, with the given environment variables."""
    done: dict[tuple[tuple[str, str], ...], subprocess.CompletedProcess[str]] = {}

    def run(**variables: str) -> subprocess.CompletedProcess[str]:
        key = tuple(sorted(variables.items()))
        if key not in done:
            done[key] = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", textwrap.dedent(COMPILE)],
                env={**os.environ, **variables},
                capture_output=True,
                text=True,
            )
            assert done[key].returncode == 0, done[key].stderr
        return done[key]

    return run


def our_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if "inductor_ext" in line]


def test_nothing_is_printed_by_default(compile_process) -> None:  # type: ignore[no-untyped-def]
    done = compile_process()
    assert done.stdout == ""
    assert our_lines(done.stderr) == []


@pytest.mark.parametrize("logs", ["inductor_ext", "+inductor_ext"])
def test_torch_logs_shows_decisions(compile_process, logs: str) -> None:  # type: ignore[no-untyped-def]
    done = compile_process(TORCH_LOGS=logs)
    (line,) = [line for line in our_lines(done.stderr) if "compile: " in line]
    assert "operators=2" in line
    assert done.stdout == ""


def test_structured_trace_and_event_log(compile_process, tmp_path: pathlib.Path) -> None:  # type: ignore[no-untyped-def]
    log = tmp_path / "events.jsonl"
    compile_process(TORCH_TRACE=str(tmp_path / "trace"), INDUCTOR_EXT_EVENT_LOG=str(log))
    (line,) = log.read_text().splitlines()
    assert json.loads(line)["event"] == "compile"
    (trace,) = (tmp_path / "trace").iterdir()
    assert "inductor_ext_compile" in trace.read_text()
