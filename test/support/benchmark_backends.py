"""Benchmark backends without a device: kernels are torch on the CPU, with synthetic timings.

A candidate's outcome is its configuration's `group_m`, see the constants; it takes `block_m`
microseconds, and Inductor (default) takes `STOCK`. For a CUTLASS kernel these are its swizzle and
its stages. A tuning worker imports `cpu_bench` by name.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from inductor_ext import numerics
from inductor_ext.autotune import candidate_run
from inductor_ext.autotune.candidate_run import Candidate, Compiled
from inductor_ext.autotune.timing import Stopwatch
from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.kernels import Config
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.triton.config import GemmConfig

__all__ = [
    "STOCK",
    "SimulatedStopwatch",
    "candidate",
    "cpu_bench",
    "cutlass_candidate",
    "warm_cpu_bench",
]

STOCK = 100.0
"""Microseconds."""

RIGHT, WRONG, NOT_A_NUMBER, RAISES, NO_COMPILE, UNUSED, CRASHES, HANGS, SEGFAULTS = range(1, 10)


def candidate(microseconds: int, behaviour: int = RIGHT) -> GemmConfig:
    """A configuration with this time and outcome."""
    return GemmConfig("splitk", microseconds, 32, 32, 2, 4, group_m=behaviour)


def cutlass_candidate(microseconds: int, behaviour: int = RIGHT) -> CutlassConfig:
    """The same for a CUTLASS kernel."""
    return CutlassConfig(
        90,
        "warpspecialized_pingpong",
        (64, 64, 32),
        *("float32",) * 3,
        stages=microseconds,
        swizzle=behaviour,
    )


def _told(config: Config | None) -> tuple[int, float]:
    """The outcome of a candidate, and its microseconds."""
    if config is None:
        return RIGHT, STOCK
    if isinstance(config, CutlassConfig):
        return config.swizzle, config.stages
    return config.group_m, config.block_m


class SimulatedStopwatch:
    """A clock that advances only by calls, with noise.

    Args:
        microseconds: the time of each candidate.
        noise: standard deviation, as a share.
        drift: relative increase of a call's time after one second.
        cold: relative time of the first calls, which falls to 1 within a millisecond.
    """

    def __init__(
        self,
        microseconds: Sequence[float],
        noise: float = 0.0,
        drift: float = 0.0,
        cold: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.microseconds = microseconds
        self.orders: list[list[int]] = []
        self._seconds = 0.0
        self._noise, self._drift, self._cold = noise, drift, cold
        self._random = random.Random(seed)

    def round(self, order: Sequence[int]) -> list[float]:
        self.orders.append(list(order))
        return [self._call(self.microseconds[index]) for index in order]

    def _call(self, microseconds: float) -> float:
        warm = min(1.0, self._seconds / 1e-3)
        factor = self._cold + (1 - self._cold) * warm + self._drift * self._seconds
        time = microseconds * factor * (1 + self._random.gauss(0, self._noise))
        self._seconds += time * 1e-6
        return time

    def now(self) -> float:
        return self._seconds


class CpuBench:
    device = "cpu"
    warmed_up = 0
    """The number of compiles in this process."""

    def __init__(self) -> None:
        self.broken = False
        self.free: int | None = None
        self.ran = 0.0
        """Microseconds of the last called candidate."""

    def warm_up(self) -> None:
        CpuBench.warmed_up += 1

    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        yield

    def compile(
        self, variants: Sequence[Candidate], starting: Callable[[int], None]
    ) -> Iterator[Compiled | Exception]:
        for index, (problem, config) in enumerate(variants):
            starting(index)
            yield self._compiled(problem, config)

    def _compiled(self, problem: Any, config: Config | None) -> Compiled | Exception:
        behaviour, microseconds = _told(config)
        if behaviour == NO_COMPILE:
            return ValueError("no such instruction\nand more")
        if behaviour == CRASHES:
            os._exit(3)
        if behaviour == SEGFAULTS:
            os.kill(os.getpid(), signal.SIGSEGV)
        if behaviour == HANGS:
            time.sleep(60)
        # A crash needs no torch; the rest of this module does.
        from inductor_ext.autotune import reference

        program = reference.program(problem)

        def call(*tensors: Any) -> Any:
            self.ran = float(microseconds)
            if behaviour == RAISES:
                raise RuntimeError("an illegal memory access")
            outputs = program.function(*tensors)
            if behaviour == WRONG:
                outputs[0][-1, -1] += 1
            if behaviour == NOT_A_NUMBER:
                outputs[0][0, 0] = float("nan")
            return outputs

        return Compiled(call, "stock" if behaviour == UNUSED or config is None else repr(config))

    @contextlib.contextmanager
    def stopwatch(self, calls: Sequence[Callable[[], object]]) -> Iterator[Stopwatch]:
        times = []
        for call in calls:
            call()
            times.append(self.ran)
        yield SimulatedStopwatch(times)

    def free_memory(self) -> int | None:
        return self.free

    def synchronize(self) -> None:
        if self.broken:
            raise RuntimeError("the device is gone")


def cpu_bench(index: int) -> CpuBench:
    """A bench of the only CPU."""
    return CpuBench()


class _Eager(CpuBench):
    def compile(
        self, variants: Sequence[Candidate], starting: Callable[[int], None]
    ) -> Iterator[Compiled | Exception]:
        if variants and CpuBench.warmed_up != 1:
            return iter([ValueError(f"warmed up {CpuBench.warmed_up} times")] * len(variants))
        return super().compile(variants, starting)


def eager_bench(index: int) -> CpuBench:
    """A bench that compiles only in a process where it has been warmed up once."""
    return _Eager()


class _Dying(CpuBench):
    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        yield
        os._exit(3)


def dying_bench(index: int) -> CpuBench:
    """A bench whose process dies after its last candidate."""
    return _Dying()


class _Telling(CpuBench):
    def compile(
        self, variants: Sequence[Candidate], starting: Callable[[int], None]
    ) -> Iterator[Compiled | Exception]:
        from torch._inductor import config

        state = (numerics.determinism(), numerics.matmul_flags(), config.deterministic)
        workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
        return iter([ValueError(f"{state} {workspace}")] * len(variants))


def telling_bench(index: int) -> CpuBench:
    """A bench that compiles nothing and reports torch's flags."""
    return _Telling()


def warm_cpu_bench(index: int) -> CpuBench:
    """The same, with the imports that a problem needs and Inductor's configuration."""
    import torch._inductor.config  # noqa: F401

    bench = CpuBench()
    problem = GemmProblem.contiguous("mm", 16, 16, 16, "float32")
    list(candidate_run.run([candidate_run.Job(problem, ())], bench, 1, lambda *at: None))
    return bench
