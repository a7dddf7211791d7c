"""The operator sweep: PyTorch's operator samples in eager mode, inductor_ext and Inductor.

    python -m test.fuzz.op_sweep                     the fixed sample of test/fuzz/op_sweep_data.py
    python -m test.fuzz.op_sweep --all --jobs 2      every operator; writes benchmarks/results/
    python -m test.fuzz.op_sweep --all --ways package --dtypes float32,complex64
    python -m test.fuzz.op_sweep --all --backward --dtypes float32 --always-stock
    python -m test.fuzz.op_sweep addmm cat --dtypes float32

`op_sweep_cases` describes the cases, `op_sweep_judge` the verdicts, and `op_sweep_results` the
results file and the journal of an interrupted sweep. Here are the worker processes.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.harness import results as results_format
from test.fuzz import op_sweep_cases, op_sweep_results
from test.fuzz import op_sweep_data as data
from test.fuzz.op_sweep_cases import DEFAULT_DTYPES, OTHER_DTYPES, SAMPLES, SOURCES, WAYS, Case
from test.fuzz.op_sweep_judge import OURS, STOCK, Judge, Result, Verdict, verdict_of
from test.fuzz.op_sweep_ways import Outcome, Status
from test.fuzz.workers import BATCHES_PER_WORKER, Announce, Worker


@dataclasses.dataclass(frozen=True)
class Limits:
    """Resources of a sweep."""

    jobs: int
    memory_bytes: int
    """Of data, in each worker process."""
    timeout_s: float
    """For one stage of one batch."""
    budget_s: float = float("inf")
    """No batch begins after this time."""


@dataclasses.dataclass(frozen=True)
class Task:
    """What a worker judges at once."""

    cases: tuple[Case, ...]
    known: tuple[tuple[str, Outcome], ...] = ()
    """Of the only case: the backends that ended their process, with the outcome."""


def _judge(samples: int, always_stock: bool, task: Task, announce: Announce) -> list[Result]:
    return Judge(samples, always_stock, dict(task.known), announce).judge(task.cases)


def _divide(task: Task, stage: str, why: str) -> list[Task] | Result:
    """What remains of a task that ended its process in a stage: smaller tasks, or the verdict."""
    if len(task.cases) > 1:
        return [Task((case,)) for case in task.cases]
    if stage not in (OURS, STOCK):
        return Result(task.cases[0], Verdict.EAGER_FAILS, why)
    known = {**dict(task.known), stage: Outcome(Status.FAILS, why)}
    if len(known) == 1:
        return [Task(task.cases, tuple(known.items()))]
    verdict, why = verdict_of(known[STOCK], known[OURS])
    return Result(task.cases[0], verdict, why, known[STOCK].status, known[OURS].status)


def sweep(
    cases: Sequence[Case],
    judge: Callable[[Task, Announce], list[Result]],
    limits: Limits,
    log: str,
    on_results: Callable[[list[Result]], None],
) -> None:
    """Judge cases in worker processes.

    A batch that ends its worker, or is stuck, is repeated case by case, so that one operator's
    crash is one case's verdict.

    Args:
        cases: of this torch, see `op_sweep_cases.supported`.
        judge: called in a worker; picklable.
        limits: processes, memory and time.
        log: path of the file to which the workers' output is appended.
        on_results: called with each batch's results, one call at a time.
    """
    pending = collections.deque(Task(tuple(batch)) for batch in op_sweep_cases.batches(cases))
    lock = threading.Lock()
    end = time.monotonic() + limits.budget_s

    def attend() -> None:
        while pending and time.monotonic() < end:
            worker: Worker[Task, list[Result]] = Worker(judge, limits.memory_bytes, log)
            try:
                for _ in range(BATCHES_PER_WORKER):
                    if time.monotonic() >= end:
                        return
                    try:
                        task = pending.popleft()
                    except IndexError:
                        return
                    answer, why = worker.judge(task, limits.timeout_s)
                    if not isinstance(answer, str):
                        with lock:
                            on_results(answer)
                        continue
                    remainder = _divide(task, answer, str(why))
                    if isinstance(remainder, list):
                        pending.extendleft(remainder)
                    else:
                        with lock:
                            on_results([remainder])
                    break
            finally:
                worker.close()

    with concurrent.futures.ThreadPoolExecutor(limits.jobs) as executor:
        futures = [executor.submit(attend) for _ in range(limits.jobs)]
        try:
            for future in futures:
                future.result()
        finally:
            pending.clear()


def unlisted_failures(results: Sequence[Result]) -> list[Result]:
    """Cases on which neither backend agrees and that the data does not list for this torch."""
    minor = ".".join(torch.__version__.split(".")[:2])
    listed = {(f.operator, f.dtype) for f in data.FAILURES if minor in f.torch.split()}
    return [
        result
        for result in results
        if result.verdict is Verdict.BOTH_FAIL
        and (result.case.operator, result.case.dtype) not in listed
    ]


def _names(text: str, allowed: Sequence[str]) -> list[str]:
    names = text.split(",")
    if not set(names) <= set(allowed):
        raise argparse.ArgumentTypeError(f"{text!r}: {', '.join(allowed)}, separated by commas")
    return names


def _dtypes(text: str) -> list[str]:
    return _names(text, [n for n, v in vars(torch).items() if isinstance(v, torch.dtype)])


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m test.fuzz.op_sweep",
        description="Operator samples through eager mode, inductor_ext and stock Inductor.",
    )
    parser.add_argument("operators", nargs="*", help="only these, as name or name.variant")
    parser.add_argument("--all", action="store_true", help="every operator of this torch")
    parser.add_argument(
        "--sources",
        type=functools.partial(_names, allowed=SOURCES),
        default=SOURCES,
        help=f"with --all or operators: lists of operators, default {','.join(SOURCES)}",
    )
    parser.add_argument(
        "--dtypes",
        type=_dtypes,
        help=f"with --all or operators; default {','.join(DEFAULT_DTYPES)}; "
        f"useful as well: {','.join(OTHER_DTYPES)}",
    )
    parser.add_argument(
        "--ways",
        type=functools.partial(_names, allowed=WAYS),
        default=WAYS[:1],
        help=f"of compiling: {','.join(WAYS)}; default {WAYS[0]}",
    )
    parser.add_argument("--backward", action="store_true", help="compute gradients as well")
    parser.add_argument(
        "--always-stock",
        action="store_true",
        help="run Inductor (default) even where the extension agrees with eager mode",
    )
    parser.add_argument("--samples", type=int, default=SAMPLES, help="inputs for each operator")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes")
    parser.add_argument("--memory-gib", type=float, default=8.0, help="for each worker")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one compile")
    parser.add_argument(
        "--budget-seconds", type=float, default=float("inf"), help="end early; see --journal"
    )
    parser.add_argument("--journal", type=Path, help="where an interrupted sweep goes on")
    parser.add_argument("--restart", action="store_true", help="forget the journal")
    parser.add_argument(
        "--results",
        type=Path,
        default=results_format.RESULTS,
        help="with --all: the folder in which the result is written",
    )
    return parser.parse_args(arguments)


def _chosen_cases(options: argparse.Namespace) -> list[Case]:
    dtypes = options.dtypes or DEFAULT_DTYPES
    sources = options.sources
    if options.all:
        names = {source: list(op_sweep_cases.operators(source)) for source in sources}
    elif options.operators:
        names = {
            source: [n for n in options.operators if n in op_sweep_cases.operators(source)]
            for source in sources
        }
    else:
        names = {SOURCES[0]: list(data.SAMPLE)}
    cases = [
        Case(name, dtype, way, options.backward, source)
        for source, operators in names.items()
        for way in options.ways
        for dtype in dtypes
        for name in operators
    ]
    if options.all or options.operators:
        return cases
    return [c for c in cases if options.dtypes or c.dtype in data.SAMPLE[c.operator].split()]


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds:02d} s"


def _print_progress(results: Sequence[Result], judged: int, count: int, elapsed: float) -> None:
    for result in results:
        if result.verdict is not Verdict.AGREE:
            print(f"  {result.case}: {result.verdict.value}: {result.why}")
    left = elapsed / judged * (count - judged)
    print(f"{judged}/{count} cases, {_duration(elapsed)}, about {_duration(left)} left", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; return 1 if inductor_ext fails where Inductor does not, otherwise 0."""
    options = _arguments(arguments)
    header = results_format.collect_header("op-sweep", results_format.format_command())
    chosen = _chosen_cases(options)
    cases = op_sweep_cases.supported(chosen)
    extent = "all" if options.all else "some"
    journal_path = options.journal or (
        Path(tempfile.gettempdir()) / f"inductor_ext-op-sweep-{extent}-{torch.__version__}.jsonl"
    )
    journal = op_sweep_results.Journal(
        journal_path,
        options.samples,
        always_stock=options.always_stock,
        restart=options.restart or not (options.all or options.journal),
    )
    todo = [case for case in cases if case not in journal.results]
    if not options.all:
        absent = [str(case) for case in chosen if case not in set(cases)]
        print(f"{len(absent)} cases not supported by this torch: {', '.join(absent)}")
    print(f"{len(cases)} cases, {len(cases) - len(todo)} of them known from {journal_path}")
    begin = time.monotonic()
    judged = 0

    def on_results(results: list[Result]) -> None:
        nonlocal judged
        journal.add(results)
        judged += len(results)
        _print_progress(results, judged, len(todo), time.monotonic() - begin)

    memory = int(options.memory_gib * 2**30)
    limits = Limits(options.jobs, memory, options.timeout, options.budget_seconds)
    judge = functools.partial(_judge, options.samples, options.always_stock)
    sweep(todo, judge, limits, f"{journal_path}.log", on_results)
    results = [journal.results[case] for case in cases if case in journal.results]
    if len(results) < len(cases):
        print(f"{len(cases) - len(results)} cases are left")
    for verdict, count in collections.Counter(r.verdict for r in results).most_common():
        print(f"{verdict.value}: {count}")
    if options.all:
        rows = op_sweep_results.make_rows(results, cases, header["commit"])
        print(f"written: {op_sweep_results.write(options.results, header, rows)}")
    else:
        for result in unlisted_failures(results):
            print(f"not in FAILURES: {result.case}: {result.verdict.value}: {result.why}")
    return int(any(result.verdict is Verdict.BELOW_STOCK for result in results))


if __name__ == "__main__":
    sys.exit(main())
