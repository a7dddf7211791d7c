"""Host time that the extension adds around compiled code: imports, activations, calls, compiles.

All figures are measured in child processes of this checkout and of another one (`--baseline`, a
folder with an earlier version), in alternation. Every pair gives a ratio, and the median of the
ratios is reported, because the speed of a shared machine drifts by more than the difference between
two versions.

- importing `inductor_ext`, and the modules that a first compile needs (torch is imported before);
- entering and leaving `inductor_ext.activate()` after the hooks into torch are installed;
- a call of a small compiled function, with `backend="inductor_ext"` and with `backend="inductor"`;
- compiling that function with Inductor's caches disabled.

For activations and calls, the number of functions entered is counted as well, which does not depend
on the machine's load.

    python -m benchmarks.overhead --baseline FOLDER [--rounds N] [--json-out DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.harness import results

__all__ = ["main", "measure"]

METRICS = {
    "import of the package": "ms",
    "import for a first compile": "ms",
    "activation": "us",
    "call, Inductor (default)": "us",
    "call, inductor_ext": "us",
    "compile, inductor_ext": "s",
    "functions entered, activation": "calls",
    "functions entered, call, inductor_ext": "calls",
}
"""Metrics with their units."""


def _time_calls(call: Callable[[], object], number: int) -> float:
    """Return the median time of a call over 9 batches of `number` calls."""
    batches = []
    for _ in range(9):
        start = time.perf_counter()
        for _ in range(number):
            call()
        batches.append((time.perf_counter() - start) / number * 1e6)
    return statistics.median(batches)


def _count_functions(call: Callable[[], object]) -> float:
    """Return how many Python and C functions one call enters."""
    count = 0

    def profile(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    for _ in range(10):
        call()
    sys.setprofile(None)
    return count / 10


def measure() -> dict[str, float]:
    """Return the figures of the `inductor_ext` that is first on this process's import path."""
    import torch

    start = time.perf_counter()
    import inductor_ext

    figures = {"import of the package": (time.perf_counter() - start) * 1e3}
    import torch._inductor.compile_fx

    start = time.perf_counter()
    import inductor_ext.backend
    import inductor_ext.memory_planning

    figures["import for a first compile"] = (time.perf_counter() - start) * 1e3

    def activate() -> None:
        with inductor_ext.activate():
            pass

    activate()
    figures["activation"] = _time_calls(activate, 200)
    figures["functions entered, activation"] = _count_functions(activate)

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x, -1) + 1

    x = torch.randn(8, 8)
    torch.set_num_threads(1)
    with torch.no_grad():
        for backend, name in (
            ("inductor", "call, Inductor (default)"),
            ("inductor_ext", "call, inductor_ext"),
        ):
            torch.compiler.reset()
            compiled = torch.compile(function, backend=backend)
            start = time.perf_counter()
            compiled(x)
            seconds = time.perf_counter() - start
            figures[name] = _time_calls(lambda: compiled(x), 2000)  # noqa: B023 - called here
        figures["functions entered, call, inductor_ext"] = _count_functions(lambda: compiled(x))
    figures["compile, inductor_ext"] = seconds
    return figures


def _measure_folder(folder: Path) -> dict[str, float]:
    """Return the figures of the package in a folder."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), "--child"],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(folder),
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and store the results; the exit code is 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--baseline", type=Path, metavar="FOLDER", help="an earlier checkout")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json-out", type=Path, metavar="DIR")
    args = parser.parse_args(argv)
    if args.child:
        print(json.dumps(measure()))
        return 0
    if args.baseline is None or not (args.baseline / "inductor_ext").is_dir():
        parser.error("--baseline must name a checkout, a folder that contains inductor_ext/")
    # Imported here, because imports are timed in child processes.
    from benchmarks.harness import results

    folders = {"now": Path.cwd(), "before": args.baseline.resolve()}
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in folders}
    for number in range(args.rounds):
        order = list(folders) if number % 2 else list(reversed(folders))
        for name in order:
            samples[name].append(_measure_folder(folders[name]))
    rows: list[results.Row] = []
    for metric, unit in METRICS.items():
        now, before = (
            statistics.median(figures[metric] for figures in samples[name])
            for name in ("now", "before")
        )
        pairs = zip(samples["now"], samples["before"], strict=True)
        low, ratio, high = statistics.quantiles([a[metric] / b[metric] for a, b in pairs], n=4)
        print(f"{metric:38} {now:10.3f} {unit:5} before {before:10.3f}  ratio {ratio:.3f}")
        rows.append(
            results.make_row(
                "softmax(x @ x) + 1 of 8 x 8",
                metric,
                unit,
                ours=now,
                spread=(high - low) / ratio,
                note=f"before: {before:.3f} {unit}; median of the ratios {ratio:.3f}",
            )
        )
    if args.json_out is not None:
        command = "python -m benchmarks.overhead --baseline FOLDER"
        header = results.collect_header("overhead", command, results.name_hardware("cpu"))
        print(results.write(args.json_out, {**header, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
