"""Run candidates in a worker process, so that a crash or a hang does not affect this process.

`run` does the same as `candidate_run.run`. The worker receives jobs as one line of JSON and answers
in lines: before each step, which candidate is next; after each job, a report. If it dies, or says
nothing for longer than the deadline, the current candidate is dropped with the reason and a new
worker continues with the rest. There is one worker per device; it is kept for the next batch and
ends with this process.

The worker imports the function that creates its bench by name, so this must be a top-level function
of an importable module. The worker compiles and runs with the state of this compile: Inductor's
options, the choices handler with the extension's settings, torch's deterministic mode with
`CUBLAS_WORKSPACE_CONFIG`, and the flags of `torch.backends.cuda.matmul`.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import importlib
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

from inductor_ext import _compat, exc, numerics
from inductor_ext.autotune import candidate_run
from inductor_ext.autotune.candidate_run import BenchmarkBackend, Job, Report
from inductor_ext.autotune.decision import Timing
from inductor_ext.storage import json_codec
from inductor_ext.templates.kernels import Config, config_from_json
from inductor_ext.templates.problem import read

_START = 300.0
"""Timeout in seconds for a process to start and to create its bench, including all imports."""


def run(
    jobs: Sequence[Job],
    make_bench: Callable[[int], BenchmarkBackend],
    device: int,
    budget: float,
    deadline: float,
) -> Generator[Report, None, None]:
    """Run jobs in the worker of a device.

    Args:
        jobs: of different problems.
        make_bench: a top-level function of a module; called in the worker with `device`.
        device: index.
        budget: milliseconds of timing per job.
        deadline: seconds for one step of one candidate.

    Yields:
        A report for each job, in any order.
    """
    remaining = list(jobs)
    while remaining:
        request = build_request(remaining, make_bench, device, budget)
        position: tuple[int, Config | None] | None = None
        done = set()
        try:
            for message in _get_worker(device).answers(request, deadline):
                if "at" in message:
                    index, config = message["at"]
                    position = index, config and config_from_json(config)
                else:
                    report = read(Report, message["report"], "report")
                    done.add(report.problem)
                    yield report
            return
        except _WorkerError as error:
            why = str(error)
        if position is None:
            for job in remaining:
                yield _make_failed_report(job, why)
            return
        index, config = position
        culprit = remaining[index]
        if culprit.problem in done:
            # The worker failed between two jobs.
            pass
        elif config is None:
            yield _make_failed_report(culprit, f"Inductor (default): {why}")
            done.add(culprit.problem)
        else:
            remaining[index] = Job(
                culprit.problem,
                tuple(other for other in culprit.configs if other != config),
                (*culprit.dropped, Timing(config, None, why)),
            )
        remaining = [job for job in remaining if job.problem not in done]


def warm_up(make_bench: Callable[[int], BenchmarkBackend], device: int) -> threading.Thread | None:
    """Start the worker of a device, and create and warm up its bench, in the background.

    Args:
        make_bench: as for `run`.
        device: index.

    Returns:
        The thread that waits for the worker; None if the worker already runs. `run` need not wait
        for it.
    """
    if _is_running(device):
        return None
    request = build_request([], make_bench, device, 0.0)

    def start() -> None:
        # The next user of the worker gets the error.
        with contextlib.suppress(_WorkerError):
            for _ in _get_worker(device).answers(request, _START):
                pass

    thread = threading.Thread(target=start, name="inductor_ext-tuning-worker", daemon=True)
    thread.start()
    return thread


def build_request(
    jobs: Sequence[Job], make_bench: Callable[[int], BenchmarkBackend], device: int, budget: float
) -> dict[str, Any]:
    return {
        "jobs": [json_codec.encode(job, whole=True) for job in jobs],
        "bench": [make_bench.__module__, make_bench.__qualname__],
        "device": device,
        "budget": budget,
        "context": _capture_context(),
    }


def _make_failed_report(job: Job, why: str) -> Report:
    timings = tuple(Timing(config, None, why) for config in (None, *job.configs))
    return Report(job.problem, None, (*timings, *job.dropped), why, 0.0)


# --- parent process -----------------------------------------------------------------------------


class _WorkerError(Exception):
    """The worker failed; the message is the reason."""


class _Worker:
    def __init__(self) -> None:
        """Start the process and wait until it is ready.

        Raises:
            _WorkerError: the process cannot be started.
        """
        request_read, self._request = os.pipe()
        self._answer, answer_write = os.pipe()
        command = [sys.executable, "-m", __name__, str(request_read), str(answer_write)]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path),
        }
        try:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(request_read, answer_write),
            )
        except OSError as error:
            os.close(self._request)
            os.close(self._answer)
            raise _WorkerError(f"the process cannot be started: {error}") from error
        finally:
            os.close(request_read)
            os.close(answer_write)
        self._buffer = b""
        self._asking = threading.Lock()
        self._read_message(_START)

    def answers(self, request: Mapping[str, Any], deadline: float) -> Iterator[dict[str, Any]]:
        """Yield all answers of the worker to a request; requests of several threads are serialized.

        Raises:
            _WorkerError: the worker has ended, or was killed because it sent nothing for `deadline`
                seconds.
        """
        with self._asking:
            try:
                yield from self._answers(request, deadline)
            except BaseException:
                # Unread answers in the pipe would be taken for answers to the next request.
                self.close()
                raise

    def _answers(self, request: Mapping[str, Any], deadline: float) -> Iterator[dict[str, Any]]:
        try:
            data = json.dumps(request).encode() + b"\n"
            while data:
                data = data[os.write(self._request, data) :]
        except OSError as error:
            raise self._make_exit_error() from error
        message = self._read_message(_START)
        while True:
            if "done" in message:
                return
            if "error" in message:
                self.close()
                raise _WorkerError(message["error"])
            if "begun" not in message:
                yield message
            message = self._read_message(deadline)

    def _read_message(self, deadline: float) -> dict[str, Any]:
        end = time.monotonic() + deadline
        # Not select, which does not support descriptors above 1023.
        poller = select.poll()
        poller.register(self._answer, select.POLLIN)
        while b"\n" not in self._buffer:
            if not poller.poll(1e3 * max(0.0, end - time.monotonic())):
                self.close()
                raise _WorkerError(f"no result within {deadline:g} s")
            chunk = os.read(self._answer, 1 << 16)
            if not chunk:
                raise self._make_exit_error()
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def _make_exit_error(self) -> _WorkerError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        status = self.close()
        if status < 0:
            with contextlib.suppress(ValueError):
                return _WorkerError(f"the process died of {signal.Signals(-status).name}")
        return _WorkerError(f"the process ended with status {status}")

    def close(self) -> int:
        """Kill the process and return its exit status."""
        if self._request >= 0:
            os.close(self._request)
            os.close(self._answer)
            self._request = self._answer = -1
        self.process.kill()
        return self.process.wait()

    @property
    def alive(self) -> bool:
        return self._request >= 0 and self.process.poll() is None


workers: dict[int, _Worker] = {}
_starting = threading.Lock()


def _get_worker(device: int) -> _Worker:
    with _starting:
        if not _is_running(device):
            workers[device] = _Worker()
        return workers[device]


def _is_running(device: int) -> bool:
    return device in workers and workers[device].alive


@atexit.register
def close_workers() -> None:
    for worker in workers.values():
        worker.close()
    workers.clear()


# A forked child shares the pipes, but must not use the workers.
os.register_at_fork(after_in_child=workers.clear)


_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""Without it, calls of cuBLAS raise in torch's deterministic mode."""


def _capture_context() -> dict[str, Any] | None:
    """Return the state of this thread that compiles depend on; None if Inductor is not imported."""
    if "torch._inductor.config" not in sys.modules:
        return None
    from torch._inductor import config as inductor_config

    options = {
        name: value
        for name, value in inductor_config.save_config_portable().items()
        if isinstance(value, (bool, int, float, str, type(None)))
    }
    handler = _compat.peek_choices()
    choices = base64.b64encode(pickle.dumps(handler)).decode() if handler is not None else None
    return {
        "options": options,
        "choices": choices,
        "determinism": numerics.determinism(),
        "matmul_flags": numerics.matmul_flags(),
        "workspace": os.environ.get(_WORKSPACE),
    }


# --- worker process -----------------------------------------------------------------------------


def main() -> None:
    """Answer requests until the parent closes the pipe."""
    requests, answers = os.fdopen(int(sys.argv[1]), "r"), int(sys.argv[2])
    # The parent handles Ctrl-C; this process ends with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()

    def say(**message: Any) -> None:
        os.write(answers, json.dumps(message).encode() + b"\n")

    say(ready=True)
    for line in requests:
        try:
            _answer(json.loads(line), say)
        except exc.TuningFaultError as error:
            say(error=f"the candidate left the device in an error state: {error.fields['why']}")
            return
        except Exception as error:
            # After an unexpected error the process may be in a bad state, so it ends.
            say(error=f"{type(error).__name__}: {error}")
            return
        say(done=True)


def _answer(request: Mapping[str, Any], send: Callable[..., None]) -> None:
    module, name = request["bench"]
    bench = getattr(importlib.import_module(module), name)(request["device"])
    jobs = [read(Job, job, "job") for job in request["jobs"]]
    send(begun=True)

    def notify(index: int, config: Config | None) -> None:
        send(at=[index, config and config.to_json()])

    with _restore_context(request["context"]):
        if not jobs:
            bench.warm_up()
        for report in candidate_run.run(jobs, bench, request["budget"], notify):
            send(report=json_codec.encode(report))


@contextlib.contextmanager
def _restore_context(context: Mapping[str, Any] | None) -> Iterator[None]:
    if context is None:
        yield
        return
    from torch._inductor import config as inductor_config

    with contextlib.ExitStack() as stack:
        stack.enter_context(inductor_config.patch(context["options"]))
        if context["workspace"] is not None:
            os.environ[_WORKSPACE] = context["workspace"]
        stack.enter_context(numerics.with_determinism(tuple(context["determinism"])))
        stack.enter_context(numerics.with_matmul_flags(context["matmul_flags"]))
        if context["choices"] is not None:
            handler = pickle.loads(base64.b64decode(context["choices"]))
            stack.enter_context(_compat.choices_handler(handler))
        yield


def _exit_with_parent(parent: int) -> None:
    """Exit when the parent process has ended, even during a request."""
    while os.getppid() == parent:
        time.sleep(2)
    os._exit(1)


if __name__ == "__main__":
    main()
