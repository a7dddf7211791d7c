"""What the seconds of a compile go to: one process per compile, from empty caches, by phase.

Every model, variant and number of cores gets a new process, which may use only that many cores.
Its stack is sampled from the call of `torch.compile` to the first result
(`reports.compile_phases`): starting compile workers, imports, tuning and code generation all count.
The tuning folder is empty, and the shipped tuning tables are off. Inductor with `max_autotune` is
compared with the extension with `max_autotune`, and Inductor (default) with the extension (default)
and with tuning in the background.

    python -m benchmarks.gemm.tuning_cost --cores 8 16 --budget-seconds 540 --json-out DIR
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.harness import results, resumable, variants

__all__ = ["COMPARISONS", "MODELS", "main", "make_rows"]

MODELS = (
    "phi3-mini decode 1x1",
    "qwen3-4b decode 8x1",
    "qwen3-4b prefill 1x1024",
    "modernbert 16x512",
)
"""Held-out models that are measured by default: decode with one and several rows, and with many."""

COMPARISONS: Mapping[str, tuple[str, str]] = {
    "max-autotune": ("ours", "stock-max"),
    "default": ("ours-default", "stock"),
    "in the background": ("ours-background", "stock"),
}
"""The variant of the extension and of Inductor by title."""

_BACKGROUND = variants.Variant(
    "ours-background", "ours, tuning in the background", "inductor_ext", {"tuning": "background"}
)

_VARIANTS = {**variants.VARIANTS, _BACKGROUND.name: _BACKGROUND}

TOTAL = "compile"


def _measure_here(model_name: str, variant: variants.Variant) -> dict[str, float]:
    """Return the seconds of each phase of a compile in this process."""
    import torch

    from benchmarks.gemm.e2e import make_finish, use_tables, use_tf32
    from benchmarks.gemm.held_out import HELD_OUT
    from inductor_ext.reports.compile_phases import sample_phases

    model = HELD_OUT[model_name]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with (
        torch.set_grad_enabled(model.training),
        use_tf32(model.dtype == torch.float32),
        variants.use_fresh_caches(),
        use_tables(False),
    ):
        module, inputs = model.make(device, model.dtype)
        finish = make_finish(model, module)
        # Libraries of eager mode are loaded, and the model's constants exist.
        finish(module(*inputs))

        def function(*inputs: torch.Tensor) -> Any:
            return module(*inputs)

        with sample_phases() as seconds:
            compiled = variants.compile_and_call(variant, function, inputs, finish=finish)
        _end_workers()
    longest_first = sorted(seconds.items(), key=lambda item: -item[1])
    return {TOTAL: compiled.seconds, **dict(longest_first)}


def _end_workers() -> None:
    """End the processes that tune in the background, which would disturb the next compile."""
    from inductor_ext.autotune import background_tuning

    for process in background_tuning.started_processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def _use_cores(count: int) -> Iterator[None]:
    """Let processes that start inside the block use only so many cores."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def measure(model: str, variant: str, cores: int) -> dict[str, float]:
    """Return the seconds of a compile by phase, measured in a new process.

    Args:
        model: a held-out model.
        variant: a name in `COMPARISONS`.
        cores: number of cores that the process and its workers use.

    Raises:
        RuntimeError: the process failed; the message is the end of its output.
    """
    command = [sys.executable, "-m", __spec__.name, "--child", model, variant]
    with _use_cores(cores):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{model}, {variant}: {done.stderr.strip()[-400:]}")
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def make_rows(case: str, measurements: Mapping[str, Mapping[str, float]]) -> list[results.Row]:
    """Return result rows: for each comparison the total and every phase of 0.05 s or more.

    Args:
        case: name of the case.
        measurements: seconds by phase, by variant.
    """
    rows = []
    for title, (ours, stock) in COMPARISONS.items():
        if not {ours, stock} <= measurements.keys():
            continue
        phases = dict.fromkeys((*measurements[ours], *measurements[stock]))
        for phase in phases:
            values: dict[str, float | None] = {
                "ours": measurements[ours].get(phase, 0.0),
                stock: measurements[stock].get(phase, 0.0),
            }
            if max(value or 0.0 for value in values.values()) >= 0.05:
                rows.append(variants.make_row(case, f"{title}: {phase}", "s", values, stock))
    return rows


def _run_case(model: str, names: Iterable[str], cores: int) -> resumable.CaseResult:
    case = f"{model}, {cores} cores"
    measurements, failures = {}, []
    for name in names:
        try:
            measurements[name] = measure(model, name, cores)
        except RuntimeError as error:
            failures.append(str(error))
    rows = make_rows(case, measurements)
    lines = [
        f"  {name}: " + ", ".join(f"{phase} {value:.1f}" for phase, value in seconds.items())
        for name, seconds in measurements.items()
    ]
    return resumable.CaseResult(rows, "\n".join([case, *lines, *failures]), bool(failures))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. The exit code is 1 if a compile failed."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["--child"]:
        model, variant = arguments[1:]
        print(json.dumps(_measure_here(model, _VARIANTS[variant])))
        return 0
    used = list(dict.fromkeys(name for pair in COMPARISONS.values() for name in pair))
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="NAME")
    parser.add_argument("--variants", nargs="+", choices=used, default=used, metavar="NAME")
    parser.add_argument("--cores", nargs="+", type=int, default=[16], metavar="N")
    resumable.add_arguments(parser)
    options = parser.parse_args(arguments)
    header = results.collect_header("tuning-cost", results.format_command(), commit=options.commit)
    ledger = resumable.Ledger(header, options.json_out, options.resume)
    cases = [(model, cores) for cores in options.cores for model in options.models]
    todo = [item for item in cases if f"{item[0]}, {item[1]} cores" not in ledger.cases]
    _, failed = ledger.add_all(
        _run_case(model, options.variants, cores)
        for model, cores in resumable.take_within(todo, options.budget_seconds)
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
