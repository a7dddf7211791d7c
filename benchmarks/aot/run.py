"""AOT packages of the extension and of Inductor: compile, load, call, memory, and error handling.

Every measurement runs in its own process; those of the extension and of Inductor alternate. A
compile is measured in CPU seconds of all participating processes, after the model has been
exported:

- cold: with an empty cache folder;
- again: the same model again with the same folder, in another process;
- warm: with a folder that was used to compile another model before.

Loading is measured without `import torch`. Calls use one thread; the fastest of 20 batches counts.

    python -m benchmarks.aot.run [--models NAME ...] [--rounds N] [--json-out DIR]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import stat
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.aot import child as aoti_child
from benchmarks.harness import measure, results

__all__ = ["measure_model"]

MIB = 2**20

WAYS = ("stock", "ours")

MODELS = ("mlp", "bert", "resnet", "llama")
"""The models that are compiled, loaded and called."""

WARMING = "pointwise"
"""The model that was compiled before in a warm folder."""

PARTS = ("wrapper", "kernels", "fixed part", "linking", "probing and the rest")
"""What C++ compilers are called for."""


# --- processes ----------------------------------------------------------------------------------

_TIMED = """#!/bin/bash
# Calls the compiler, and writes down its CPU seconds and its arguments.
TIMEFORMAT="%U %S"
exec 3>&1 4>&2
seconds=$( {{ time {real} "$@" 1>&3 2>&4; }} 2>&1 )
code=$?
echo "$seconds $*" > "$BENCHMARK_COMPILER_LOG/$$-$RANDOM"
exit $code
"""


class Bench:
    """Starts the measuring processes, with their files in a temporary folder of the caller."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tools = folder / "tools"
        tools.mkdir()
        compiler = tools / "g++"
        compiler.write_text(_TIMED.format(real=shutil.which("g++")))
        compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
        self.log = folder / "compiler"
        self.log.mkdir()
        self._environment = {
            **os.environ,
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "BENCHMARK_COMPILER_LOG": str(self.log),
            "KINETO_LOG_LEVEL": "99",
        }
        for name in ("TORCHINDUCTOR_VEC_ISA_OK", "AOTI_RUNTIME_CHECK_INPUTS"):
            self._environment.pop(name, None)

    def run(self, task: str, cache: Path, /, *, checks: bool = False, **arguments: Any) -> Any:
        """Run one task of `aot.child` in its own process; return the task's result.

        Args:
            task: name of the task.
            cache: Inductor's cache folder.
            checks: whether Inductor's input checks are enabled.
            arguments: arguments of the task.

        Raises:
            RuntimeError: the task failed or crashed; with the end of its stderr.
        """
        environment = {**self._environment, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
        if checks:
            environment["AOTI_RUNTIME_CHECK_INPUTS"] = "1"
        run = subprocess.run(
            [sys.executable, "-m", "benchmarks.aot.child", task, json.dumps(arguments)],
            env=environment,
            cwd=results.CHECKOUT,
            capture_output=True,
            text=True,
        )
        if run.returncode != 0:
            raise RuntimeError(
                f"{task} {arguments}: exit code {run.returncode}\n{run.stderr[-3000:]}"
            )
        return json.loads(run.stdout.splitlines()[-1])

    def compile(self, model: str, way: str, cache: Path, **options: Any) -> dict[str, Any]:
        """Compile a model; return measurements, with CPU seconds of the C++ compiler by purpose."""
        for path in self.log.iterdir():
            path.unlink()
        package = self.package(model, way)
        package.unlink(missing_ok=True)
        found: dict[str, Any] = self.run(
            "compile", cache, model=model, way=way, package=str(package), options=options
        )
        compiler = dict.fromkeys(PARTS, 0.0)
        for path in self.log.iterdir():
            user, system, *command = path.read_text().split()
            compiler[_part(command)] += float(user) + float(system)
        return {**found, "compiler": compiler}

    def package(self, model: str, way: str) -> Path:
        """Return the path of a model's package."""
        return self.folder / f"{model.replace(' ', '_')}-{way}.pt2"

    @contextlib.contextmanager
    def fresh_cache(self, like: Path | None = None) -> Iterator[Path]:
        """Create a temporary cache folder, empty or as a copy of another one."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            if like is not None:
                shutil.copytree(like, folder, dirs_exist_ok=True, symlinks=True)
            yield Path(folder)


def _part(command: Sequence[str]) -> str:
    """Return the purpose of a compiler call, by the names of the files that it compiles."""
    pairs = zip(["", *command], command, strict=False)
    words = [word for before, word in pairs if before not in ("-include", "-o")]
    sources = [word for word in words if re.search(r"\.(cpp|cc|c|h|hpp|S|s)$", word)]
    names = " ".join(os.path.basename(word) for word in sources)
    if "c++-header" in command or re.search(r"\.(h|hpp)\b", names):
        return "fixed part"
    if any("cpp_wrapper/runtime" in word for word in sources):
        return "fixed part"
    if "wrapper" in names:
        return "wrapper"
    if "kernel" in names:
        return "kernels"
    if any(word.endswith(".o") for word in command) and not sources:
        return "linking"
    return "probing and the rest"


# --- measuring ----------------------------------------------------------------------------------

Taken = dict[str, dict[str, list[float]]]
"""Values of all rounds, by metric and way."""


def measure_model(bench: Bench, name: str, rounds: int) -> list[results.Row]:
    """Compile, load and call one model with the extension and with Inductor.

    Args:
        name: name of an entry of `aot.models.MODELS`.
        rounds: number of measurements.
    """
    taken: Taken = defaultdict(lambda: defaultdict(list))
    weights = _compiles(bench, name, rounds, taken)
    with bench.fresh_cache() as cache:
        for index in range(max(rounds, 3)):
            for way in _turn(index):
                _runs(bench, name, way, cache, taken)
            eager = bench.run("call", cache, model=name, way="eager", package="")
            taken["call from Python"]["eager"].append(eager["seconds"])
    return list(_rows(name, taken, weights))


def _turn(index: int) -> Sequence[str]:
    return WAYS if index % 2 == 0 else WAYS[::-1]


def _compiles(bench: Bench, name: str, rounds: int, taken: Taken) -> float:
    weights = 0.0
    with contextlib.ExitStack() as stack:
        warmed = {way: stack.enter_context(bench.fresh_cache()) for way in WAYS}
        for way, cache in warmed.items():
            bench.compile(WARMING, way, cache)
        for index in range(rounds):
            for way in _turn(index):
                with bench.fresh_cache() as cache:
                    _keep(taken, "cold", way, bench.compile(name, way, cache))
                    again = bench.compile(name, way, cache)
                    taken["compile, again"][way].append(again["cpu"])
                    taken["compile, again, wall"][way].append(again["wall"])
                with bench.fresh_cache(warmed[way]) as cache:
                    found = bench.compile(name, way, cache)
                    _keep(taken, "warm", way, found)
                for metric in ("package", "shared object"):
                    taken[metric][way].append(found[metric])
                taken["compile, memory"][way].append(found["peak"])
                taken["compile, memory of the C++ compiler"][way].append(found["child peak"])
                weights = found["weights"]
    return weights


def _keep(taken: Taken, state: str, way: str, found: dict[str, Any]) -> None:
    taken[f"compile, {state}"][way].append(found["cpu"])
    taken[f"compile, {state}, wall"][way].append(found["wall"])
    taken[f"compile, {state}, Python"][way].append(found["python"])
    for part, seconds in found["compiler"].items():
        taken[f"compile, {state}, C++ of {part}"][way].append(seconds)


def _runs(bench: Bench, name: str, way: str, cache: Path, taken: Taken) -> None:
    package = str(bench.package(name, way))
    loaded = bench.run("load", cache, model=name, way=way, package=package)
    taken["load, CPU"][way].append(loaded["cpu"])
    taken["load"][way].append(loaded["wall"])
    taken["load, C++ loader"][way].append(bench.run("load_cpp", cache, package=package)["wall"])
    for metric, key in (
        ("memory after loading", "loaded"),
        ("memory after a call", "called"),
        ("private memory after a call", "private"),
        ("memory at the highest", "peak"),
    ):
        taken[metric][way].append(loaded[key])
    called = bench.run("call", cache, model=name, way=way, package=package)
    taken["call from Python"][way].append(called["seconds"])
    bare = bench.run("bare", cache, model=name, package=package)
    taken["call of the C interface"][way].append(bare["seconds"])


_UNITS = {
    "compile": ("s", 1.0),
    "load": ("ms", 1e-3),
    "call": ("us", 1e-6),
    "memory": ("MiB", MIB),
    "private": ("MiB", MIB),
    "package": ("MiB", MIB),
    "shared": ("MiB", MIB),
}
"""By a metric's first word: the unit, and the divisor of a value."""

_NOTES = {
    "compile, cold": "CPU seconds, in an empty cache folder",
    "compile, warm": "CPU seconds, another model was compiled in the cache folder before",
    "compile, again": "CPU seconds, by another process in the same cache folder",
    "compile, memory": "highest resident memory above that before; floor: the weights",
    "compile, memory of the C++ compiler": "of the largest process",
    "shared object": "without the weights that stock's holds",
    "load": "wall time beyond import torch, in a fresh process",
    "load, C++ loader": "torch's loader, wall time",
    "memory after a call": "resident above that before loading; floor: the weights",
    "private memory after a call": "what other processes with the same package do not share",
    "call from Python": "one thread, positional inputs, least of 20 batches",
    "call of the C interface": "one thread, handles of the inputs included",
}

_OF_WEIGHTS = ("compile, memory", "memory after a call")


def _rows(name: str, taken: Taken, weights: float) -> Iterator[results.Row]:
    for metric, ways in taken.items():
        if not any(any(values) for values in ways.values()):
            continue
        unit, scale = _UNITS[re.split(r"[ ,]", metric)[0]]
        if metric.startswith("compile, memory"):
            unit, scale = "MiB", MIB
        medians = {way: statistics.median(values) / scale for way, values in ways.items()}
        measured = [values for values in ways.values() if len(values) > 1 and all(values)]
        yield _row(
            name,
            metric,
            unit,
            medians,
            floor=weights / MIB if metric in _OF_WEIGHTS and weights > MIB else None,
            spread=max((measure.summarize(v).spread for v in measured if min(v) > 0), default=None),
            note=_NOTES.get(metric),
        )


def _row(
    case: str,
    metric: str,
    unit: str,
    values: dict[str, float],
    *,
    higher: bool = False,
    floor: float | None = None,
    spread: float | None = None,
    note: str | None = None,
) -> results.Row:
    return {
        "case": case,
        "metric": metric,
        "unit": unit,
        "better": "higher" if higher else "lower",
        "ours": values.get("ours"),
        "stock": values.get("stock"),
        "eager": values.get("eager"),
        "floor": floor,
        "spread": spread,
        "note": note,
    }


def measure_small(bench: Bench, rounds: int) -> Iterator[results.Row]:
    """Measure the cost of a call and of an input, with models that compute almost nothing."""
    taken: Taken = defaultdict(lambda: defaultdict(list))
    with bench.fresh_cache() as cache:
        for way in WAYS:
            bench.compile("pointwise", way, cache)
            bench.compile("eight inputs", way, cache)
        # Two packages, without and with checks.
        bench.compile("eight inputs", "ours", cache, artifact_cache=False)
        checked = bench.package("eight inputs", "ours")
        checked = Path(shutil.copy(checked, checked.with_name("checked.pt2")))
        bench.compile("eight inputs", "ours", cache, aot_check_inputs=False)
        packages = {
            "ours": (str(checked), str(bench.package("eight inputs", "ours"))),
            "stock": (str(bench.package("eight inputs", "stock")),) * 2,
        }
        for index in range(max(rounds, 5)):
            for way in _turn(index):
                for metric, task in (("Python", "call"), ("the C interface", "bare")):
                    arguments: Any = {
                        "model": "pointwise",
                        "package": str(bench.package("pointwise", way)),
                    }
                    if task == "call":
                        arguments["way"] = way
                    label = f"call {'from' if task == 'call' else 'of'} {metric}"
                    found = bench.run(task, cache, **arguments)
                    taken[label][way].append(found["seconds"])
                with_, without = (
                    bench.run("bare", cache, model="eight inputs", package=package, checks=on)
                    for package, on in zip(packages[way], (True, False), strict=True)
                )
                cost = (with_["seconds"] - without["seconds"]) / 8
                taken["call, check of an input"][way].append(cost)
            eager = bench.run("call", cache, model="pointwise", way="eager", package="")
            taken["call from Python"]["eager"].append(eager["seconds"])
    for row in _rows("pointwise", taken, 0):
        if row["metric"] == "call, check of an input":
            row["note"] = (
                "of eight; stock's with AOTI_RUNTIME_CHECK_INPUTS=1, which is off as a rule"
            )
        yield row


def measure_safety(bench: Bench) -> Iterator[results.Row]:
    """Count the wrong inputs and damaged packages that raise an error; a crash does not count."""
    inputs = aoti_child.wrong_inputs()
    refused: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    accepted: dict[str, list[str]] = defaultdict(list)
    with bench.fresh_cache() as cache:
        for way in WAYS:
            bench.compile("pointwise", way, cache)
            package = bench.package("pointwise", way)

            def count(metric: str, what: str, task: str, way: str = way, **arguments: Any) -> None:
                try:
                    found = bench.run(task, cache, way=way, **arguments)["refused"]
                except RuntimeError:
                    found = False
                refused[metric][way] += found
                if not found:
                    accepted[way].append(what)

            for kind in inputs:
                count("wrong inputs refused", kind, "refuse", package=str(package), kind=kind)
            for kind in aoti_child.DAMAGES:
                damaged = Path(shutil.copy(package, bench.folder / "damaged.pt2"))
                aoti_child.damage(str(damaged), kind)
                count("damaged packages refused", kind, "refuse_damaged", package=str(damaged))
            stack = bench.run("executable_stack", cache, package=str(package))["executable"]
            refused["executable stack"][way] = float(stack)
    for metric, kinds in (
        ("wrong inputs refused", list(inputs)),
        ("damaged packages refused", list(aoti_child.DAMAGES)),
    ):
        missed = {way: [k for k in accepted[way] if k in kinds] for way in WAYS}
        note = "; ".join(f"{way} accepts {', '.join(m)}" for way, m in missed.items() if m)
        total = f"of {len(kinds)}"
        yield _row(
            "safety",
            metric,
            "1",
            refused[metric],
            higher=True,
            floor=None,
            note=f"{total}; {note}" if note else total,
        )
    yield _row("safety", "executable stack", "1", refused["executable stack"], note="1: asked for")


# --- the command line ---------------------------------------------------------------------------


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--models", nargs="*", choices=MODELS, default=MODELS, metavar="NAME")
    parser.add_argument(
        "--rounds", type=int, default=1, metavar="N", help="compiles of each model in each state"
    )
    parser.add_argument("--json-out", metavar="DIR", help="keep the table as a result")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    options = _parse(arguments)
    header = results.collect_header("aoti", results.command_line(), results.hardware_slug("cpu"))
    begin = time.perf_counter()
    rows: list[results.Row] = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        parts: list[tuple[str, Any]] = [
            ("safety", lambda: measure_safety(bench)),
            ("calls", lambda: measure_small(bench, options.rounds)),
            *(
                (name, lambda name=name: measure_model(bench, name, options.rounds))
                for name in options.models
            ),
        ]
        for name, part in parts:
            rows += part()
            print(f"[{time.perf_counter() - begin:5.0f} s] {name}", flush=True)
            document: results.Document = {**header, "rows": rows}
            if options.json_out:
                # Write after every model, so that an interrupted run keeps its measurements.
                results.write(options.json_out, document)
    print(f"\n{results.render_table(document)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
