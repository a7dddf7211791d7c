"""The graph fuzzer: random programs in eager mode, Inductor (default) and inductor_ext.

    python -m test.fuzz.graphs --count 5000 --seed 0 --jobs 16     writes benchmarks/results/
    python -m test.fuzz.graphs --count 80 --ways compile           a few, without a result file
    python -m test.fuzz.graphs --shrink 1234 --ways package        a small standalone reproducer

`graph_generator` draws programs, `graph_judge` compiles and compares them. Here are the batches,
the worker processes, the journal of an interrupted run, and the results file. A batch is compiled
at once; of several ways, each takes its own share of the batches (`SHARES`).
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from benchmarks.harness import results as results_format
from benchmarks.harness.results import make_row
from test.fuzz import workers
from test.fuzz.graph_generator import BATCH
from test.fuzz.graph_judge import (
    COMPILE_MODES,
    DISAGREEMENTS,
    FAILURES,
    WAYS,
    Build,
    Outcome,
    Result,
    Task,
    Verdict,
    judge_task,
    parse_stage,
    verdict_of,
)
from test.fuzz.workers import BATCHES_PER_WORKER, FIRST_STAGE, Worker

SHARES = {"stock": (8, 0), "compile": (2, 0), "cpp_wrapper": (2, 1), "package": (4, 1)}
"""Of several ways, each takes the batches with a remainder of a division: every program is compiled
at least once, and each way sees every mode of programs. A batch by all ways would cost 10 s of CPU
time for each program, this costs 4 s."""

_MIN_COMMITTED = 500

MAX_SECONDS = 600.0
"""Time limit of a stage: the compile and run of one batch, or of one program."""


def _takes(way: str, batch: int) -> bool:
    divisor, remainder = SHARES[way]
    # The modes of programs recur every 10 batches; the other term shifts them.
    return (batch + batch // 10) % divisor == remainder


def make_tasks(
    seeds: range, ways: Sequence[str], modes: Sequence[str], device: str, *, share: bool = True
) -> list[Task]:
    """The batches of consecutive seeds, with the builds that each of them gets.

    Args:
        seeds: of the programs.
        ways: of `WAYS`.
        modes: of `COMPILE_MODES`.
        device: "cpu" or "cuda".
        share: whether a way takes only its share of the batches.
    """
    batches: dict[int, list[int]] = collections.defaultdict(list)
    for seed in seeds:
        batches[seed // BATCH].append(seed)
    tasks = []
    for batch, batch_seeds in batches.items():
        builds = [(way, mode) for way in ways for mode in modes if not share or _takes(way, batch)]
        if builds:
            tasks.append(Task(tuple(batch_seeds), tuple(builds), device))
    return tasks


def remaining_tasks(tasks: Iterable[Task], known: set[tuple[int, Build]]) -> list[Task]:
    """The tasks without programs whose results are known for all builds."""
    remaining = []
    for task in tasks:
        seeds = [s for s in task.seeds if any((s, build) not in known for build in task.builds)]
        if seeds:
            remaining.append(Task(tuple(seeds), task.builds, task.device))
    return remaining


def run(
    tasks: Sequence[Task],
    jobs: int,
    log: str,
    on_results: Callable[[list[Result]], None],
    *,
    deadline: float | None = None,
    timeout_s: float = MAX_SECONDS,
) -> None:
    """Judge tasks in worker processes, which may crash.

    A batch that crashes its worker, or is stuck, is repeated program by program, in a worker each.

    Args:
        tasks: see `make_tasks`.
        jobs: number of processes.
        log: path of the file to which the workers' output is appended.
        on_results: called with the results of a task, one call at a time.
        deadline: no task starts after this `time.monotonic()`.
        timeout_s: for one stage.
    """
    pending = collections.deque(tasks)
    lock = threading.Lock()

    def attend() -> None:
        while pending:
            worker: Worker[Task, list[Result]] = Worker(judge_task, None, log)
            try:
                for _ in range(BATCHES_PER_WORKER):
                    if deadline is not None and time.monotonic() > deadline:
                        return
                    try:
                        task = pending.popleft()
                    except IndexError:
                        return
                    answer, why = worker.judge(task, timeout_s)
                    if not isinstance(answer, str):
                        with lock:
                            on_results(answer)
                        continue
                    results, repeated = attribute_crash(task, answer, str(why))
                    pending.extendleft(reversed(repeated))
                    with lock:
                        on_results(results)
                    break
            finally:
                worker.close()

    with concurrent.futures.ThreadPoolExecutor(jobs) as executor:
        futures = [executor.submit(attend) for _ in range(jobs)]
        try:
            for future in futures:
                future.result()
        finally:
            pending.clear()


def attribute_crash(task: Task, stage: str, why: str) -> tuple[list[Result], list[Task]]:
    """What a crash of a worker means: results, and tasks to repeat in other workers.

    Args:
        task: that was being judged.
        stage: the last stage that was announced.
        why: how the process ended.
    """
    if len(task.seeds) > 1:
        return [], [Task((seed,), task.builds, task.device) for seed in task.seeds]
    (seed,) = task.seeds
    if stage == FIRST_STAGE:
        # Eager mode crashes, or the generator does not end: the program is not a case.
        verdict = Verdict.SKIPPED
        return [Result(seed, *build, verdict, f"eager mode: {why}") for build in task.builds], []
    build, backend, ours = parse_stage(stage)
    rest = tuple(b for b in task.builds if b != build)
    repeated = [Task((seed,), rest, task.device)] if rest else []
    crash = Outcome(Verdict.CRASH, why)
    if ours is not None:
        verdict, text = verdict_of(ours, crash)
        return [Result(seed, *build, verdict, text)], repeated
    if backend == "inductor":
        return [Result(seed, *build, Verdict.CRASH, why)], repeated
    return [], [Task((seed,), (build,), task.device, crash), *repeated]


def rows(results: Sequence[Result]) -> list[results_format.Row]:
    """The results in the benchmarks' schema: counts by way and verdict, then all disagreements."""
    counts = collections.Counter((r.way, r.mode, r.verdict) for r in results)
    table = []
    for way, mode in dict.fromkeys((r.way, r.mode) for r in results):
        column = "stock" if way == "stock" else "ours"
        for verdict in Verdict:
            if way == "stock" and verdict.name.endswith("_TOO"):
                continue
            value = {column: counts[way, mode, verdict]}
            better = "higher" if verdict is Verdict.RIGHT else "lower"
            case, metric = f"{way}, {mode}", verdict.value
            table.append(make_row(case, metric, "programs", better=better, **value))  # type: ignore[arg-type]
    for result in sorted(results, key=lambda r: (r.seed, r.way, r.mode)):
        if result.verdict in DISAGREEMENTS and result.way != "stock":
            case, metric = f"seed {result.seed}", f"{result.way}, {result.mode}"
            note = f"{result.verdict.value}: {result.why}"
            table.append(make_row(case, metric, "bool", better="higher", ours=0, note=note))
    return table


def _names(allowed: Iterable[str]) -> Callable[[str], list[str]]:
    known = list(allowed)

    def parse(text: str) -> list[str]:
        names = text.split(",")
        if not set(names) <= set(known):
            raise argparse.ArgumentTypeError(f"{text!r}: expected some of {','.join(known)}")
        return names

    return parse


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m test.fuzz.graphs",
        description="Random programs through eager mode, Inductor (default) and inductor_ext.",
    )
    parser.add_argument("--count", type=int, default=80, help="number of programs")
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes")
    parser.add_argument("--ways", type=_names(WAYS), default=list(WAYS), help=",".join(WAYS))
    parser.add_argument("--modes", type=_names(COMPILE_MODES), default=["default"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--all", action="store_true", help="every way for every program")
    parser.add_argument("--budget-seconds", type=float, help="start no batch after this time")
    parser.add_argument("--timeout", type=float, default=MAX_SECONDS, help="seconds for one batch")
    parser.add_argument("--journal", type=Path, help="where an interrupted run goes on")
    parser.add_argument("--restart", action="store_true", help="forget the journal")
    parser.add_argument("--shrink", type=int, metavar="SEED", help="reduce one program, print it")
    parser.add_argument("--show", type=int, metavar="SEED", help="print one program")
    parser.add_argument(
        "--json-out",
        type=Path,
        help="folder in which the result is written; by default benchmarks/results if at least "
        f"{_MIN_COMMITTED} programs are drawn, else none",
    )
    parser.add_argument("--commit", help="commit of the source tree if it is not a git checkout")
    return parser.parse_args(arguments)


def _open_journal(options: argparse.Namespace) -> tuple[workers.Journal, Path]:
    from inductor_ext.storage import digest

    name = f"inductor_ext-graphs-{options.device}-{torch.__version__}.jsonl"
    path = options.journal or Path(tempfile.gettempdir()) / name
    header = (torch.__version__, digest.source_key(), options.device)
    return workers.Journal(path, header, restart=options.restart), path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; return 1 if a program disagrees with eager mode, otherwise 0."""
    options = _arguments(arguments)
    if options.show is not None or options.shrink is not None:
        from test.fuzz import graph_shrink

        return graph_shrink.main(options)
    hardware = results_format.name_hardware(options.device)
    header = results_format.collect_header(
        "graphs", results_format.format_command(), hardware, commit=options.commit
    )
    journal, path = _open_journal(options)
    results = {(r.seed, (r.way, r.mode)): r for r in map(Result.from_json, journal.earlier)}
    seeds = range(options.seed, options.seed + options.count)
    tasks = make_tasks(seeds, options.ways, options.modes, options.device, share=not options.all)
    todo = remaining_tasks(tasks, set(results))
    count = sum(len(task.seeds) for task in todo)
    print(f"{options.count} programs, {options.count - count} of them known from {path}")
    begin = time.monotonic()
    done: set[int] = set()

    def on_results(judged: list[Result]) -> None:
        journal.write(result.to_json() for result in judged)
        results.update(((r.seed, (r.way, r.mode)), r) for r in judged)
        for r in judged:
            if r.verdict in DISAGREEMENTS:
                print(f"  seed {r.seed}, {r.way}, {r.mode}: {r.verdict.value}: {r.why}")
        done.update(r.seed for r in judged)
        print(f"{len(done)}/{count} programs, {time.monotonic() - begin:.0f} s", flush=True)

    budget = options.budget_seconds
    run(
        todo,
        options.jobs,
        f"{path}.log",
        on_results,
        deadline=None if budget is None else begin + budget,
        timeout_s=options.timeout,
    )
    wanted = {(seed, build) for task in tasks for seed in task.seeds for build in task.builds}
    complete = [result for key, result in results.items() if key in wanted]
    print_summary(complete)
    folder = options.json_out
    if folder is None and options.count >= _MIN_COMMITTED:
        folder = results_format.RESULTS
    if folder is not None and complete:
        document: results_format.Document = {**header, "rows": rows(complete)}
        print(f"written: {results_format.write(folder, document)}")
    ours = [r for r in complete if r.way != "stock"]
    return int(any(r.verdict in (*FAILURES, Verdict.STOCK_WRONG_TOO) for r in ours))


def print_summary(results: Sequence[Result]) -> None:
    """Print the number of programs by way, mode and verdict."""
    counts = collections.Counter((r.way, r.mode, r.verdict.value) for r in results)
    for (way, mode, verdict), number in sorted(counts.items()):
        print(f"{way}, {mode}: {verdict}: {number}")


if __name__ == "__main__":
    sys.exit(main())
