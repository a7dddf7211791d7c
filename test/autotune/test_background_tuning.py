"""Tuning in the background: the queue, its worker, and compiles that use both."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from inductor_ext import config
from inductor_ext.autotune import background_tuning, gpu_load, tuner, tuning_queue
from inductor_ext.autotune.background_tuning import LINGER, Worker, tune_later
from inductor_ext.autotune.decision import Decision, Timing
from inductor_ext.autotune.results_db import TuningDatabase
from inductor_ext.autotune.tuning_queue import MAX_ATTEMPTS, Request, Status, TuningQueue
from inductor_ext.cli import main
from inductor_ext.hooks import scope
from inductor_ext.lowerings.graph import post_grad_pass
from inductor_ext.options import list_mode_options, split_options
from inductor_ext.settings import Settings
from inductor_ext.templates.device import KNOWN
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.triton import ranking

pytest.importorskip("triton")

from test.support import fake_cuda

DEVICE = next(device for device in KNOWN if device.name == "NVIDIA H100 80GB HBM3")
PROBLEMS = [GemmProblem.contiguous("mm", m, 512, 512) for m in (1, 16, 64)]


def _request(problem: GemmProblem, device: str = DEVICE.name) -> Request:
    return Request(problem, device, dependent=True, budget=200)


def _decide(problems: Iterable[GemmProblem]) -> dict[GemmProblem, Decision]:
    decisions = {}
    for problem in problems:
        config = ranking.rank(problem, DEVICE, 1)[0][0]
        timings = (Timing(None, 10.0), Timing(config, 5.0))
        decisions[problem] = Decision(config, "measured", timings)
    return decisions


class Clock:
    """A GPU that is busy at the given looks, and no time."""

    def __init__(self, busy: Iterable[int] = ()) -> None:
        self._busy = set(busy)
        self._looks = 0
        self.slept = 0.0

    def is_idle(self) -> bool:
        self._looks += 1
        return self._looks not in self._busy

    def sleep(self, seconds: float) -> None:
        self.slept += seconds


class Bench:
    """Records what is measured; raises an error for some."""

    def __init__(self, fails: Iterable[GemmProblem] = ()) -> None:
        self._fails = set(fails)
        self.calls: list[GemmProblem] = []

    def __call__(self, requests: Sequence[Request]) -> Mapping[GemmProblem, Decision]:
        problems = [request.problem for request in requests]
        self.calls += problems
        if self._fails.intersection(problems):
            raise RuntimeError("the device is lost")
        return _decide(problems)


def _worker(folder: Path, bench: Bench) -> Worker:
    return Worker("gpu", TuningQueue(folder), TuningDatabase(folder), DEVICE, bench)


def test_queue(tmp_path: Path) -> None:
    queue = TuningQueue(tmp_path)
    assert queue.read() == []
    assert not (tmp_path / "queue").exists()
    requests = [_request(problem) for problem in PROBLEMS]
    assert queue.add(requests) == queue.add(requests) == len(requests)
    others = _request(PROBLEMS[0], "NVIDIA L4")
    queue.add([others])
    assert queue.read(DEVICE.name) == requests
    assert queue.read() == [*requests, others]
    begun = queue.begin(requests[0])
    assert begun == dataclasses.replace(requests[0], attempts=1)
    # It keeps its place.
    assert queue.read(DEVICE.name) == [begun, *requests[1:]]
    queue.postpone(begun)
    assert queue.read(DEVICE.name) == requests
    queue.remove(requests[1])
    queue.remove(requests[1])
    assert queue.read(DEVICE.name) == [requests[0], requests[2]]
    assert queue.clear() == 3
    assert queue.read() == []


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"problem": {"m": 1}}'])
def test_damaged_requests_are_removed(tmp_path: Path, text: str) -> None:
    queue = TuningQueue(tmp_path)
    queue.add([_request(PROBLEMS[0])])
    (path,) = (tmp_path / "queue" / "requests").iterdir()
    path.write_text(text)
    assert queue.read() == []
    assert not path.exists()


def test_a_worker_tunes_all_requests_and_ends(tmp_path: Path) -> None:
    queue, bench, clock = TuningQueue(tmp_path), Bench(), Clock()
    queue.add(_request(problem) for problem in PROBLEMS)
    queue.add([_request(PROBLEMS[0], "NVIDIA L4")])
    _worker(tmp_path, bench).run(clock)
    assert bench.calls == PROBLEMS
    database = TuningDatabase(tmp_path)
    for problem, decision in _decide(PROBLEMS).items():
        result = database.lookup(problem, DEVICE)
        assert result is not None
        assert result.exact
        assert result.decision.config == decision.config
    assert [request.device for request in queue.read()] == ["NVIDIA L4"]
    assert clock.slept == LINGER
    assert queue.statuses() == []
    assert not queue.has_worker("gpu")


def test_measurements_on_a_busy_gpu_are_not_stored(tmp_path: Path) -> None:
    """It is busy before the first measurement, and after it."""
    queue, bench, clock = TuningQueue(tmp_path), Bench(), Clock(busy=(1, 3))
    queue.add([_request(PROBLEMS[0])])
    _worker(tmp_path, bench).run(clock)
    assert bench.calls == [PROBLEMS[0]] * 2
    assert TuningDatabase(tmp_path).lookup(PROBLEMS[0], DEVICE) is not None
    assert clock.slept > LINGER


def test_problems_that_end_the_worker_are_given_up(tmp_path: Path) -> None:
    queue, bench = TuningQueue(tmp_path), Bench(fails=PROBLEMS[:1])
    queue.add(_request(problem) for problem in PROBLEMS)
    for attempts in range(1, MAX_ATTEMPTS + 1):
        with pytest.raises(RuntimeError, match="the device is lost"):
            _worker(tmp_path, bench).run(Clock())
        assert [request.attempts for request in queue.read()] == [attempts, attempts, 0]
    # The second one had the bad luck to be measured with it.
    _worker(tmp_path, bench).run(Clock())
    assert queue.read() == []
    assert TuningDatabase(tmp_path).lookup(PROBLEMS[2], DEVICE) is not None


def test_one_worker_at_a_time(tmp_path: Path) -> None:
    queue, bench = TuningQueue(tmp_path), Bench()
    queue.add([_request(PROBLEMS[0])])
    with queue.work("gpu") as is_worker:
        assert is_worker
        assert queue.has_worker("gpu")
        assert not queue.has_worker("other gpu")
        # A lock is held by a process; the other worker is another one.
        code = (
            "import sys; from inductor_ext.autotune.tuning_queue import TuningQueue\n"
            "with TuningQueue(sys.argv[1]).work('gpu') as is_worker: print(is_worker)"
        )
        command = [sys.executable, "-c", code, str(tmp_path)]
        assert subprocess.check_output(command, text=True).strip() == "False"
    _worker(tmp_path, bench).run(Clock())
    assert bench.calls == [PROBLEMS[0]]


def test_a_killed_worker_loses_nothing(tmp_path: Path) -> None:
    queue = TuningQueue(tmp_path)
    queue.add(_request(problem) for problem in PROBLEMS)
    code = f"""
import time
from pathlib import Path
from test.autotune.test_background_tuning import Clock, _worker

def measure(requests):
    print("begun", flush=True)
    time.sleep(1000)

_worker(Path({str(tmp_path)!r}), measure).run(Clock())
"""
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=root
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        (status,) = queue.statuses()
        assert (status.running, status.pid, status.tuned) == (True, process.pid, 0)
        process.send_signal(signal.SIGKILL)
    (status,) = queue.statuses()
    assert not status.running
    assert [request.attempts for request in queue.read()] == [1, 1, 0]
    bench = Bench()
    _worker(tmp_path, bench).run(Clock())
    assert bench.calls == PROBLEMS
    assert queue.read() == []


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The GPUs for which a worker was started."""
    indices: list[int] = []
    monkeypatch.setattr(background_tuning, "_start", lambda folder, index: indices.append(index))
    monkeypatch.setattr(background_tuning, "worker_name", lambda index: f"gpu {index}")
    return indices


def test_only_unknown_problems_are_queued(tmp_path: Path, started: list[int]) -> None:
    database, queue = TuningDatabase(tmp_path), TuningQueue(tmp_path)
    database.put(_decide(PROBLEMS[:1]), DEVICE)

    def tune(*problems: GemmProblem, index: int = 0) -> None:
        tune_later(problems, DEVICE, index, Settings(), database, dependent=True)

    tune(PROBLEMS[0])
    assert not started
    tune(*PROBLEMS, *PROBLEMS)
    assert [request.problem for request in queue.read()] == PROBLEMS[1:]
    assert started == [0]
    with queue.work("gpu 1"):
        tune(*PROBLEMS, index=1)
    assert started == [0]
    # No template supports it.
    tune(GemmProblem.contiguous("mm", 16, 512, 512, "float64"))
    assert len(queue.read()) == 2
    tune_later(PROBLEMS, DEVICE, 0, Settings(), TuningDatabase(None), dependent=True)
    assert started == [0]


@pytest.mark.parametrize("max_autotune", [False, True])
def test_a_compile_measures_nothing(
    tmp_path: Path, started: list[int], max_autotune: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(tuner, "tune", fail)
    settings = config.snapshot({"tuning": "background", "tuning_cache_dir": str(tmp_path)})
    half = torch.bfloat16
    with scope.compile_scope(settings):
        lowered = fake_cuda.lower(
            lambda x, w: x @ w.t(),
            ((128, 512), half),
            ((640, 512), half),
            seconds=fail,
            max_autotune=max_autotune,
        )
        key = post_grad_pass.cache_key(settings)
    assert "extern_kernels.mm" in lowered.code
    (request,) = TuningQueue(tmp_path).read()
    assert (request.problem.m, request.problem.n, request.problem.k) == (128, 640, 512)
    assert started == [0]
    # With results there is another key, so the next compile is no cache hit.
    database = TuningDatabase(tmp_path)
    database.put(_decide([request.problem]), DEVICE)
    with fake_cuda.device(), scope.compile_scope(settings):
        assert post_grad_pass.cache_key(settings) != key


def test_status_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INDUCTOR_EXT_TUNING_CACHE_DIR", str(tmp_path))
    assert main.main(["tune", "status"]) == 0
    assert "No process tunes in the background" in capsys.readouterr().out
    queue = TuningQueue(tmp_path)
    queue.add(_request(problem) for problem in PROBLEMS)
    with queue.work("gpu"):
        queue.report("gpu", Status(DEVICE.name, os.getpid(), "waits until the GPU is idle", 7, 1))
        assert main.main(["tune", "status"]) == 0
        text = capsys.readouterr().out
        assert f"process {os.getpid()}: waits until the GPU is idle; 7 tuned, 1 given up" in text
        assert "3 GEMMs to tune" in text
        assert main.main(["tune", "status", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert [worker["tuned"] for worker in report["workers"]] == [7]
        assert len(report["waiting"]) == 3
    assert main.main(["tune", "clear", "--source", "imported"]) == 0
    assert len(queue.read()) == 3
    assert main.main(["tune", "clear"]) == 0
    assert queue.read() == []


def test_the_mode() -> None:
    assert "max-autotune-background" in list_mode_options()
    settings, options = split_options("max-autotune-background", {"max_autotune": True})
    assert settings == {"tuning": "background"}
    assert options == {"triton.cudagraphs": True, "max_autotune": True}
    settings, _ = split_options("max-autotune-background", {"tuning": "compile"})
    assert settings == {"tuning": "compile"}
    compiled = torch.compile(
        lambda x: x @ x + 1, backend="inductor_ext", mode="max-autotune-background"
    )
    x = torch.randn(4, 4)
    torch.testing.assert_close(compiled(x), x @ x + 1)


@pytest.mark.parametrize(
    ("loads", "idle"), [([0, 3, 0, 10, 0], True), ([0, 0, 50], False), ([None], True)]
)
def test_an_idle_gpu(loads: list[int | None], idle: bool) -> None:
    values = iter(loads)
    assert gpu_load.is_idle("GPU-0", lambda _: next(values), lambda _: None) == idle
    assert list(values) == []


def test_without_the_driver_the_load_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_load, "_library", lambda: None)
    assert gpu_load.utilization("GPU-0") is None


def test_the_program_of_the_worker_exists() -> None:
    module = importlib.import_module(background_tuning._PROGRAM)
    assert callable(module.main)


def test_names_of_files_are_stable() -> None:
    """Processes of different versions share them."""
    assert tuning_queue.FOLDER == "queue"
    request = _request(PROBLEMS[0])
    assert Request.from_json(json.loads(json.dumps(request.to_json()))) == request
    assert request.name != _request(PROBLEMS[0], "NVIDIA L4").name
