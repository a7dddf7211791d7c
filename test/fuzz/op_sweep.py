"""The operator sweep: PyTorch's operator samples in eager mode, Inductor and inductor_ext.

    python -m test.fuzz.op_sweep                     the fixed sample of test/fuzz/op_sweep_data.py
    python -m test.fuzz.op_sweep --all --jobs 2      every operator; writes benchmarks/results/
    python -m test.fuzz.op_sweep addmm cat --dtypes float32

`op_sweep_judge` describes cases and verdicts. Here are the worker processes, the journal of an
interrupted sweep, and the results file.
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
from typing import Any

import torch

from benchmarks.harness import results as results_format
from test.fuzz import op_sweep_data as data
from test.fuzz import workers
from test.fuzz.op_sweep_judge import (
    DEFAULT_DTYPES,
    OTHER_DTYPES,
    SAMPLES,
    Case,
    Result,
    Status,
    Verdict,
    batches,
    judge,
    operators,
    sample_cases,
    supported,
)
from test.fuzz.workers import BATCHES_PER_WORKER, Announce, Worker

_CRASHED = {
    "eager": (Verdict.EAGER_FAILS, None, None),
    "stock": (Verdict.STOCK_FAILS, Status.FAILS, None),
    "ours": (Verdict.OURS_FAILS, Status.AGREES, Status.FAILS),
}
"""By the stage that did not end: the verdict, and the outcomes of both backends."""


def _judge(samples: int, batch: Sequence[Case], announce: Announce) -> list[Result]:
    return judge(batch, samples=samples, announce=announce)


@dataclasses.dataclass(frozen=True)
class Limits:
    """Resources of a sweep."""

    jobs: int
    samples: int
    memory_bytes: int
    """Of data, in each worker process."""
    timeout_s: float
    """For one stage of one batch."""


def sweep(
    cases: Sequence[Case], limits: Limits, log: str, on_results: Callable[[list[Result]], None]
) -> None:
    """Judge cases in worker processes.

    A batch that kills its worker, or is stuck, is repeated case by case, so that one operator's
    crash is one case's verdict.

    Args:
        cases: of this torch, see `supported`.
        limits: processes, samples, memory and time.
        log: path of the file to which the workers' output is appended.
        on_results: called with each batch's results, one call at a time.
    """
    pending = collections.deque(batches(cases))
    lock = threading.Lock()

    def attend() -> None:
        while pending:
            worker: Worker[Sequence[Case], list[Result]] = Worker(
                functools.partial(_judge, limits.samples), limits.memory_bytes, log
            )
            try:
                for _ in range(BATCHES_PER_WORKER):
                    try:
                        batch = pending.popleft()
                    except IndexError:
                        return
                    answer, why = worker.judge(batch, limits.timeout_s)
                    if not isinstance(answer, str):
                        results = answer
                    elif len(batch) > 1:
                        pending.extendleft([case] for case in batch)
                        break
                    else:
                        verdict, stock, ours = _CRASHED[answer]
                        results = [Result(batch[0], verdict, str(why), stock, ours)]
                    with lock:
                        on_results(results)
                    if results is not answer:
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


class Journal:
    """The results so far, so that an interrupted sweep can go on.

    A journal holds for one torch, one source state of inductor_ext and one number of samples; any
    other journal at its path is overwritten.
    """

    def __init__(self, path: Path, samples: int, *, restart: bool) -> None:
        from inductor_ext.storage import digest

        header = (torch.__version__, digest.source_key(), samples)
        self._journal = workers.Journal(path, header, restart=restart)
        earlier = map(Result.from_json, self._journal.earlier)
        self.results: dict[Case, Result] = {result.case: result for result in earlier}

    def add(self, results: Sequence[Result]) -> None:
        """Keep results, in memory and on disk."""
        self.results.update((result.case, result) for result in results)
        self._journal.write(result.to_json() for result in results)


def unlisted_stock_failures(results: Sequence[Result]) -> list[Result]:
    """Failures of Inductor that the data does not list for the installed torch."""
    minor = ".".join(torch.__version__.split(".")[:2])
    listed = {(f.operator, f.dtype) for f in data.STOCK_FAILURES if minor in f.torch.split()}
    return [
        result
        for result in results
        if result.verdict in (Verdict.STOCK_DISAGREES, Verdict.STOCK_FAILS)
        and (result.case.operator, result.case.dtype) not in listed
    ]


def _row(case: str, metric: str, unit: str, **values: Any) -> results_format.Row:
    return {
        **dict.fromkeys(results_format.Row.__annotations__),
        "case": case,
        "metric": metric,
        "unit": unit,
        "better": "higher",
        **values,
    }


def rows(results: Sequence[Result]) -> list[results_format.Row]:
    """The results in the benchmarks' schema.

    First the number of cases with each verdict, then for each dtype how many cases agree with
    eager mode under each backend, then every case whose verdict is not "agree": 1 where a backend
    agrees with eager mode, 0 where it does not, null where it did not run. Eager mode agrees
    with itself unless it fails.
    """
    counts = collections.Counter(result.verdict for result in results)
    failures = []
    for verdict in Verdict:
        better = "higher" if verdict is Verdict.AGREE else "lower"
        failures.append(_row("all", verdict.value, "cases", better=better, ours=counts[verdict]))
    for dtype in dict.fromkeys(result.case.dtype for result in results):
        ran = [result for result in results if result.case.dtype == dtype and result.stock]
        agreeing = {
            backend: sum(getattr(result, backend) is Status.AGREES for result in ran)
            for backend in ("ours", "stock")
        }
        failures.append(_row(dtype, _AGREES, "cases", eager=len(ran), **agreeing))
    for result in results:
        if result.verdict is not Verdict.AGREE:
            agrees = {
                backend: None if status is None else int(status is Status.AGREES)
                for backend, status in (("ours", result.ours), ("stock", result.stock))
            }
            eager = int(result.verdict is not Verdict.EAGER_FAILS)
            note = f"{result.verdict.value}: {result.why}"
            failures.append(
                _row(str(result.case), _AGREES, "bool", eager=eager, note=note, **agrees)
            )
    return failures


_AGREES = "agrees with eager"


def _dtypes(text: str) -> list[str]:
    names = text.split(",")
    if not all(isinstance(getattr(torch, name, None), torch.dtype) for name in names):
        raise argparse.ArgumentTypeError(f"{text!r}: names of torch dtypes, separated by commas")
    return names


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m test.fuzz.op_sweep",
        description="Operator samples through eager mode, stock Inductor and inductor_ext.",
    )
    parser.add_argument("operators", nargs="*", help="only these, as name or name.variant")
    parser.add_argument("--all", action="store_true", help="every operator of this torch")
    parser.add_argument(
        "--dtypes",
        type=_dtypes,
        help=f"with --all or operators; default {','.join(DEFAULT_DTYPES)}; "
        f"useful as well: {','.join(OTHER_DTYPES)}",
    )
    parser.add_argument("--samples", type=int, default=SAMPLES, help="inputs for each operator")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes")
    parser.add_argument("--memory-gib", type=float, default=8.0, help="for each worker")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one compile")
    parser.add_argument(
        "--journal", type=Path, help="with --all: where an interrupted sweep goes on"
    )
    parser.add_argument("--restart", action="store_true", help="with --all: forget the journal")
    parser.add_argument(
        "--results",
        type=Path,
        default=results_format.RESULTS,
        help="with --all: the folder in which the result is written",
    )
    return parser.parse_args(arguments)


def _chosen_cases(options: argparse.Namespace) -> list[Case]:
    dtypes = options.dtypes or DEFAULT_DTYPES
    if options.all:
        names = list(operators())
    elif options.operators:
        names = options.operators
    else:
        cases = sample_cases()
        return [case for case in cases if not options.dtypes or case.dtype in dtypes]
    return [Case(name, dtype) for dtype in dtypes for name in names]


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds:02d} s"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; return 1 if inductor_ext fails where Inductor does not, otherwise 0."""
    options = _arguments(arguments)
    header = results_format.collect_header("op-sweep", results_format.format_command())
    chosen = _chosen_cases(options)
    cases = supported(chosen)
    extent = "all" if options.all else "some"
    journal_path = options.journal or (
        Path(tempfile.gettempdir()) / f"inductor_ext-op-sweep-{extent}-{torch.__version__}.jsonl"
    )
    journal = Journal(journal_path, options.samples, restart=options.restart or not options.all)
    todo = [case for case in cases if case not in journal.results]
    if not options.all:
        absent = [str(case) for case in chosen if case not in set(cases)]
        print(f"{len(absent)} cases absent from torch {torch.__version__}: {', '.join(absent)}")
    print(f"{len(cases)} cases, {len(cases) - len(todo)} of them known from {journal_path}")
    begin = time.monotonic()
    judged = 0

    def on_results(results: list[Result]) -> None:
        nonlocal judged
        journal.add(results)
        judged += len(results)
        elapsed = time.monotonic() - begin
        left = elapsed / judged * (len(todo) - judged)
        for result in results:
            if result.verdict is not Verdict.AGREE:
                print(f"  {result.case}: {result.verdict.value}: {result.why}")
        print(
            f"{judged}/{len(todo)} cases, {_duration(elapsed)}, about {_duration(left)} left",
            flush=True,
        )

    limits = Limits(options.jobs, options.samples, int(options.memory_gib * 2**30), options.timeout)
    sweep(todo, limits, f"{journal_path}.log", on_results)
    results = [journal.results[case] for case in cases]
    for verdict, count in collections.Counter(r.verdict for r in results).most_common():
        print(f"{verdict.value}: {count}")
    for result in unlisted_stock_failures(results):
        print(f"not in STOCK_FAILURES: {result.case}: {result.verdict.value}: {result.why}")
    if options.all:
        path = results_format.write(options.results, {**header, "rows": rows(results)})
        print(f"written: {path}")
    broken = {Verdict.OURS_DISAGREES, Verdict.OURS_FAILS}
    return int(any(result.verdict in broken for result in results))


if __name__ == "__main__":
    sys.exit(main())
