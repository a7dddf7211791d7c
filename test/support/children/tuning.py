"""Processes that share a folder of tuning results, started and killed by one without torch.

    python child_tuning.py write FOLDER             eight processes put overlapping results
    python child_tuning.py kill FOLDER KILLS SEED   writers die at random moments
    python child_tuning.py tune_missing FOLDER            eight processes meet the same problems
    python child_tuning.py agree FILE               two ranks disagree; these load torch

Each exits with 0 if all its assertions hold, and prints what the test compares.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from inductor_ext.autotune.decision import Decision, Timing
from inductor_ext.autotune.results import Environment, TuningResult
from inductor_ext.autotune.results_db import TuningDatabase
from inductor_ext.templates.device import KNOWN, Device
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.triton.config import GemmConfig

__all__ = ["CONFIG", "H200", "HERE", "decision", "entry", "here", "problem"]

(H200,) = (item for item in KNOWN if item.name == "NVIDIA H200")

HERE = Environment(H200.name, H200.capability, H200.sms, "3.7.1", "13.0", "0123456789abcdef")

CONFIG = GemmConfig("persistent_tma", 128, 256, 64, 3, 8, tma=True, flatten=True)

PROCESSES = 8


def problem(index: int = 0) -> GemmProblem:
    return GemmProblem.contiguous("mm", 2048 + index, 4096, 4096)


def here(problem: GemmProblem) -> Environment:
    return HERE


def decision(microseconds: float = 90.0, config: GemmConfig | None = CONFIG) -> Decision:
    """A decision with the time of its configuration; Inductor (default) takes 100 us."""
    other = Timing(CONFIG, microseconds) if config else Timing(CONFIG, None, "it was wrong")
    return Decision(config, "measured", (Timing(None, 100.0), other))


def entry(
    index: int = 0,
    microseconds: float = 90.0,
    environment: Environment = HERE,
    config: GemmConfig | None = CONFIG,
    device: Device = H200,
    measured: int = 1_700_000_000,
) -> TuningResult:
    chosen = decision(microseconds, config)
    return TuningResult(problem(index), environment, config, chosen.timings, measured, "2.13.0")


def forked(count: int, work: Callable[[int], None]) -> None:
    """Run `work(index)` in this many processes; raise unless all succeed."""
    children = []
    for index in range(count):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                work(index)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert ended == [0] * count, ended


def write(folder: str) -> None:
    def work(index: int) -> None:
        store = TuningDatabase(folder)
        for step in range(12):
            # Each problem comes from several processes, each environment from one.
            own = dataclasses.replace(HERE, triton=f"3.{index}")
            store.put({problem(step): decision(50.0 + index)}, H200, lambda _, own=own: own)
            result = store.lookup(problem(step), H200, lambda _, own=own: own)
            assert result is not None
            assert result.exact
            assert result.decision.microseconds(CONFIG) == 50.0 + index

    forked(PROCESSES, work)


def kill(folder: str, kills: int, seed: int) -> None:
    choose = random.Random(seed)
    store = TuningDatabase(folder)
    store.put({problem(index): decision() for index in range(5)}, H200, here)
    # Up to several times as long as a writer takes on this disk, so that some have written.
    begun = time.perf_counter()
    store.put({problem(): decision()}, H200, here)
    once = time.perf_counter() - begun
    died = 0
    for index in range(kills):
        written, report = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                for step in range(1_000_000):
                    # Another environment each time, so that each writes a file.
                    other = dataclasses.replace(HERE, templates=f"{index} {step}")
                    store.put(
                        {problem((index + step) % 5): decision()}, H200, lambda _, it=other: it
                    )
                    os.write(report, b".")
            finally:
                os._exit(1)
        if index % 2 == 0:
            # Half of the writers have written at least once, however slow the machine is.
            os.read(written, 1)
        time.sleep(choose.uniform(0.1, 4) * once)
        os.kill(child, signal.SIGKILL)
        died += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        os.close(written)
        os.close(report)
    print(died)


def tune_missing(folder: str) -> None:
    problems = [problem(index) for index in range(6)]
    log = Path(folder).with_suffix(".log")
    results = Path(folder).with_suffix(".results")

    def work(index: int) -> None:
        def tune(batch: Sequence[GemmProblem]) -> dict[GemmProblem, Decision]:
            with open(log, "a") as file:
                file.writelines(f"{item.m}\n" for item in batch)
            time.sleep(0.05)
            return {item: decision(10.0 + index) for item in batch}

        mine = problems[index % 3 :]
        random.Random(index).shuffle(mine)
        decisions = TuningDatabase(folder).tune_missing(mine, H200, tune, here)
        times = {item.m: decisions[item].microseconds(CONFIG) for item in mine}
        with open(results, "a") as file:
            file.write(json.dumps(times) + "\n")

    forked(PROCESSES, work)


def agree(file: str) -> None:
    import torch.distributed as dist

    from inductor_ext.autotune import distributed

    def work(rank: int) -> None:
        store = dist.FileStore(file, 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)

        def decide(batch: Sequence[GemmProblem]) -> dict[GemmProblem, Decision]:
            # Both have read, and seen no decision, before either decides.
            store.add("deciding", 1)
            while store.add("deciding", 0) < 2:
                time.sleep(0.001)
            return {item: decision(10.0 + rank) for item in batch}

        problems = [problem(index) for index in range(3)]
        decisions = distributed.share_decisions(
            problems if rank else problems[::-1], decide, here, ""
        )
        times = [decisions[item].microseconds(CONFIG) for item in problems]
        os.write(1, (json.dumps(times) + "\n").encode())

    forked(2, work)


if __name__ == "__main__":
    mode, path, *numbers = sys.argv[1:]
    {"write": write, "kill": kill, "tune_missing": tune_missing, "agree": agree}[mode](
        path, *map(int, numbers)
    )
