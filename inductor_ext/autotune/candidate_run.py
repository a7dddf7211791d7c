"""Run the candidates of problems on a device: compile, verify, time, decide.

`run` does this for a batch in this process. It accesses the device through a `BenchmarkBackend`, so
that the same steps work in another process and without a GPU. A candidate that does not compile,
gives wrong results or raises is dropped with the reason and never chosen. `notify` is called before
each step that could crash the process, so that a parent process can identify the candidate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from inductor_ext import exc
from inductor_ext.autotune import timing
from inductor_ext.autotune.decision import Timing
from inductor_ext.templates.format import config_words, problem_words
from inductor_ext.templates.kernels import Config
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.toolchain import compiler_errors

Candidate = tuple[GemmProblem, "Config | None"]
"""A problem and the configuration that computes it; None for Inductor's path."""

Notify = Callable[[int, "Config | None"], None]
"""Called with the index of a job and a configuration before the configuration is compiled or
run."""


@dataclass(frozen=True)
class Compiled:
    """A compiled candidate."""

    call: Callable[..., Sequence[Any]]
    """Takes the inputs of the program and returns its outputs."""
    key: str
    """Equal for candidates with the same generated code."""


class BenchmarkBackend(Protocol):
    """The interface to a device that tuning needs."""

    device: str
    """Where inputs are created, as a torch device string."""

    def warm_up(self) -> None:
        """Start slow one-time initialization; it may still be running when this returns."""

    def prepared(self) -> AbstractContextManager[None]:
        """Return the context in which all other methods are called."""

    def compile(
        self, candidates: Sequence[Candidate], starting: Callable[[int], None]
    ) -> Iterator[Compiled | Exception]:
        """Compile candidates; yield each as soon as it and those before it are ready.

        Args:
            candidates: of any problems; those of a problem follow each other.
            starting: called with the index of a candidate before work on it begins.

        Yields:
            A compiled candidate, or the exception if it does not compile.
        """

    def stopwatch(
        self, calls: Sequence[Callable[[], object]]
    ) -> AbstractContextManager[timing.Stopwatch]:
        """Return a stopwatch for these calls."""

    def free_memory(self) -> int | None:
        """Return the bytes that can be allocated; None if unknown."""

    def synchronize(self) -> None:
        """Wait for the device.

        Raises:
            Exception: a kernel has broken the device for this process.
        """


@dataclass(frozen=True)
class Job:
    """The candidates to try for a problem."""

    problem: GemmProblem
    configs: tuple[Config, ...]
    dropped: tuple[Timing, ...] = ()
    """Candidates that have already failed."""


@dataclass(frozen=True)
class Report:
    """The result of a job."""

    problem: GemmProblem
    chosen: Config | None
    timings: tuple[Timing, ...]
    """Inductor's path first, then all candidates."""
    reason: str
    """Why this candidate was chosen, as text."""
    seconds: float
    """Wall time of verification and timing."""


def run(
    jobs: Sequence[Job], bench: BenchmarkBackend, budget: float, notify: Notify
) -> Generator[Report, None, None]:
    """Run jobs one after the other, while the candidates of later jobs compile.

    Args:
        jobs: of different problems.
        bench: the device.
        budget: milliseconds of timing per job.
        notify: see `Notify`.

    Yields:
        A report for each job, in order.

    Raises:
        exc.TuningFaultError: a candidate has broken the device for this process.
    """
    candidates = [(job.problem, config) for job in jobs for config in (None, *job.configs)]
    owner = [index for index, job in enumerate(jobs) for _ in (None, *job.configs)]
    with bench.prepared():
        compiled = bench.compile(
            candidates, lambda index: notify(owner[index], candidates[index][1])
        )
        for index, job in enumerate(jobs):
            stock = next(compiled)
            by_config = {config: next(compiled) for config in job.configs}
            start = time.perf_counter()
            trial = _Trial(job, bench, lambda config, index=index: notify(index, config))  # type: ignore[misc]
            selected, reason = trial.run(stock, by_config, budget)
            seconds = time.perf_counter() - start
            yield Report(job.problem, selected, trial.timings(), reason, seconds)


class _Trial:
    def __init__(self, job: Job, bench: BenchmarkBackend, notify: Callable[[Any], None]) -> None:
        self.job = job
        self.problem = job.problem
        self.bench = bench
        self.notify = notify
        self.failures: dict[Config | None, str] = {}
        self.microseconds_by_config: dict[Config | None, float] = {}

    def timings(self) -> tuple[Timing, ...]:
        timings = [
            Timing(config, self.microseconds_by_config.get(config), self.failures.get(config))
            for config in (None, *self.job.configs)
        ]
        return (*timings, *self.job.dropped)

    def run(
        self,
        stock: Compiled | Exception,
        by_config: dict[Config, Compiled | Exception],
        budget: float,
    ) -> tuple[Config | None, str]:
        """Return the chosen configuration and the reason."""
        from inductor_ext.autotune import reference

        candidates = self._drop_duplicates(stock, by_config)
        try:
            if isinstance(stock, Exception):
                raise stock
            program = reference.program(self.problem)
            shortage = self._find_memory_shortage(program)
            if shortage is not None:
                return self._give_up(shortage)
            with reference.precision(self.problem):
                self.notify(None)
                inputs = program.make_inputs(self.bench.device)
                calls = self._verify_candidates(program, inputs, stock, candidates)
                configs = list(calls)
                # Candidates are timed together, so an error here cannot be attributed to one of
                # them.
                self.notify(None)
                with self.bench.stopwatch(list(calls.values())) as stopwatch:
                    share = budget if len(calls) > 1 else budget / 4
                    samples = timing.measure(stopwatch, len(calls), share)
        except exc.TuningFaultError:
            raise
        except Exception as error:
            self._check_device(None, error)
            why = compiler_errors.describe(error)
            return self._give_up(f"Inductor (default) cannot be measured: {why}")
        for config, sample in zip(configs, samples, strict=True):
            self.microseconds_by_config[config] = sample.microseconds
        verdict = timing.decide(samples)
        return configs[verdict.index], self._describe_verdict(verdict)

    def _give_up(self, reason: str) -> tuple[None, str]:
        self.failures = dict.fromkeys((None, *self.job.configs), reason) | self.failures
        return None, reason

    def _drop_duplicates(
        self, stock: Compiled | Exception, by_config: dict[Config, Compiled | Exception]
    ) -> dict[Config, Compiled]:
        """Return the candidates that compiled, without duplicates of the same code."""
        labels: dict[str, str] = {}
        if isinstance(stock, Compiled):
            labels[stock.key] = "Inductor (default): the template was not used"
        candidates = {}
        for config, compiled in by_config.items():
            if isinstance(compiled, Exception):
                self.failures[config] = f"does not compile: {compiler_errors.describe(compiled)}"
            elif compiled.key in labels:
                self.failures[config] = f"generates the same code as {labels[compiled.key]}"
            else:
                labels[compiled.key] = config_words(config)
                candidates[config] = compiled
        return candidates

    def _find_memory_shortage(self, program: Any) -> str | None:
        """Return why memory does not suffice; None if it does."""
        from inductor_ext.autotune import accuracy

        free = self.bench.free_memory()
        problem = self.problem
        rows = problem.outputs * len(accuracy.sampled_rows(problem))
        exact = 8 * (problem.batch * problem.k * problem.n + rows * (problem.k + 4 * problem.n))
        required_bytes = program.bytes + 3 * problem.bytes_written + exact
        if free is None or required_bytes <= 0.9 * free:
            return None
        gib = 1 << 30
        return f"tuning needs {required_bytes / gib:.1f} GiB, and {free / gib:.1f} GiB are free"

    def _verify_candidates(
        self, program: Any, inputs: Any, stock: Compiled, candidates: dict[Config, Compiled]
    ) -> dict[Config | None, Callable[[], Any]]:
        """Return calls, without arguments, of Inductor's path and the verified candidates."""
        from inductor_ext.autotune.accuracy import Verifier

        def bind(compiled: Compiled) -> Callable[[], Any]:
            return lambda: compiled.call(*inputs)

        verifier = Verifier(program, inputs)
        calls: dict[Config | None, Callable[[], Any]] = {None: bind(stock)}
        verifier.set_stock(calls[None]())
        for config, candidate in candidates.items():
            self.notify(config)
            try:
                reason = verifier.check(bind(candidate))
                self.bench.synchronize()
            except Exception as error:
                self._check_device(config, error)
                reason = f"failed: {compiler_errors.describe(error)}"
            if reason is None:
                calls[config] = bind(candidate)
            else:
                self.failures[config] = reason
        return calls

    def _check_device(self, config: Config | None, error: Exception) -> None:
        """Check that the device still works after an error."""
        try:
            self.bench.synchronize()
        except Exception:
            raise exc.TuningFaultError(
                candidate=config_words(config),
                problem=problem_words(self.problem),
                why=compiler_errors.describe(error),
            ) from error

    def _describe_verdict(self, verdict: timing.Verdict) -> str:
        if len(self.microseconds_by_config) == 1:
            candidates = self.job.configs or self.job.dropped
            return "no candidates are left" if candidates else "no template supports it"
        stock = self.microseconds_by_config[None]
        gain, needed = verdict.gain / stock, verdict.needed / stock
        if verdict.index:
            return f"{gain:.1%} less time than Inductor (default)"
        difference = f"{gain:.1%} ahead" if gain > 0 else f"{-gain:.1%} behind"
        return f"the best candidate is {difference}; {needed:.1%} ahead is required"
