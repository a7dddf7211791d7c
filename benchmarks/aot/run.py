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

__all__ = ["make_rows", "measure_model"]

MIB = 2**20

VARIANTS = ("stock", "ours")

MODELS = ("mlp", "bert", "resnet", "llama")
"""The models that are compiled, loaded and called."""

WARM_UP_MODEL = "pointwise"
"""The model that was compiled before in a warm folder."""

PURPOSES = ("wrapper", "kernels", "fixed part", "linking", "probing and the rest")
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


class Workspace:
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
        self.environment = {
            **os.environ,
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "BENCHMARK_COMPILER_LOG": str(self.log),
            "KINETO_LOG_LEVEL": "99",
        }
        for name in ("TORCHINDUCTOR_VEC_ISA_OK", "AOTI_RUNTIME_CHECK_INPUTS"):
            self.environment.pop(name, None)

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
        environment = {**self.environment, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
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

    def compile(self, model: str, variant: str, cache: Path, **options: Any) -> dict[str, Any]:
        """Compile a model; return measurements, with CPU seconds of the C++ compiler by purpose."""
        for path in self.log.iterdir():
            path.unlink()
        package = self.package_path(model, variant)
        package.unlink(missing_ok=True)
        result: dict[str, Any] = self.run(
            "compile", cache, model=model, variant=variant, package=str(package), options=options
        )
        compiler = dict.fromkeys(PURPOSES, 0.0)
        for path in self.log.iterdir():
            user, system, *command = path.read_text().split()
            compiler[classify_command(command)] += float(user) + float(system)
        return {**result, "compiler": compiler}

    def package_path(self, model: str, variant: str) -> Path:
        """Return the path of a model's package."""
        return self.folder / f"{model.replace(' ', '_')}-{variant}.pt2"

    @contextlib.contextmanager
    def fresh_cache(self, like: Path | None = None) -> Iterator[Path]:
        """Create a temporary cache folder, empty or as a copy of another one."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            if like is not None:
                shutil.copytree(like, folder, dirs_exist_ok=True, symlinks=True)
            yield Path(folder)


def classify_command(command: Sequence[str]) -> str:
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

Samples = dict[str, dict[str, list[float]]]
"""Values of all rounds, by metric and variant."""


def measure_model(workspace: Workspace, name: str, rounds: int) -> list[results.Row]:
    """Compile, load and call one model with the extension and with Inductor.

    Args:
        name: name of an entry of `aot.models.MODELS`.
        rounds: number of measurements.
    """
    samples: Samples = defaultdict(lambda: defaultdict(list))
    weights = _measure_compiles(workspace, name, rounds, samples)
    with workspace.fresh_cache() as cache:
        for index in range(max(rounds, 3)):
            for variant in _order(index):
                _measure_runs(workspace, name, variant, cache, samples)
            eager = workspace.run("call", cache, model=name, variant="eager", package="")
            samples["call from Python"]["eager"].append(eager["seconds"])
    return list(make_rows(name, samples, weights))


def _order(index: int) -> Sequence[str]:
    return VARIANTS if index % 2 == 0 else VARIANTS[::-1]


def _measure_compiles(workspace: Workspace, name: str, rounds: int, samples: Samples) -> float:
    weights = 0.0
    with contextlib.ExitStack() as stack:
        warm_caches = {
            variant: stack.enter_context(workspace.fresh_cache()) for variant in VARIANTS
        }
        for variant, cache in warm_caches.items():
            workspace.compile(WARM_UP_MODEL, variant, cache)
        for index in range(rounds):
            for variant in _order(index):
                with workspace.fresh_cache() as cache:
                    first = workspace.compile(name, variant, cache)
                    _add_compile(samples, "cold", variant, first)
                    second = workspace.compile(name, variant, cache)
                    samples["compile, again"][variant].append(second["cpu"])
                    samples["compile, again, wall"][variant].append(second["wall"])
                with workspace.fresh_cache(warm_caches[variant]) as cache:
                    warm = workspace.compile(name, variant, cache)
                    _add_compile(samples, "warm", variant, warm)
                for metric in ("package", "shared object"):
                    samples[metric][variant].append(warm[metric])
                samples["compile, memory"][variant].append(warm["peak"])
                samples["compile, memory of the C++ compiler"][variant].append(warm["child peak"])
                weights = warm["weights"]
    return weights


def _add_compile(samples: Samples, state: str, variant: str, result: dict[str, Any]) -> None:
    samples[f"compile, {state}"][variant].append(result["cpu"])
    samples[f"compile, {state}, wall"][variant].append(result["wall"])
    samples[f"compile, {state}, Python"][variant].append(result["python"])
    for purpose, seconds in result["compiler"].items():
        samples[f"compile, {state}, C++ of {purpose}"][variant].append(seconds)


def _measure_runs(
    workspace: Workspace, name: str, variant: str, cache: Path, samples: Samples
) -> None:
    package = str(workspace.package_path(name, variant))
    load = workspace.run("load", cache, model=name, variant=variant, package=package)
    samples["load, CPU"][variant].append(load["cpu"])
    samples["load"][variant].append(load["wall"])
    samples["load, C++ loader"][variant].append(
        workspace.run("load_cpp", cache, package=package)["wall"]
    )
    for metric, key in (
        ("memory after loading", "loaded"),
        ("memory after a call", "called"),
        ("private memory after a call", "private"),
        ("memory at the highest", "peak"),
    ):
        samples[metric][variant].append(load[key])
    call = workspace.run("call", cache, model=name, variant=variant, package=package)
    samples["call from Python"][variant].append(call["seconds"])
    bare = workspace.run("bare", cache, model=name, package=package)
    samples["call of the C interface"][variant].append(bare["seconds"])


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
    "compile, memory": "peak resident memory above that before; floor: the weights",
    "compile, memory of the C++ compiler": "of the largest process",
    "shared object": "without the weights that Inductor's contains",
    "load": "wall time beyond import torch, in a fresh process",
    "load, C++ loader": "torch's loader, wall time",
    "memory after a call": "resident above that before loading; floor: the weights",
    "private memory after a call": "what other processes with the same package do not share",
    "call from Python": "one thread, positional inputs, minimum of 20 batches",
    "call of the C interface": "one thread, handles of the inputs included",
}

_BOUND_BY_WEIGHTS = ("compile, memory", "memory after a call")


def make_rows(name: str, samples: Samples, weights: float) -> Iterator[results.Row]:
    """Yield the rows of one model.

    Args:
        name: the name of the model.
        samples: its measurements.
        weights: bytes of its weights.
    """
    for metric, by_variant in samples.items():
        if not any(any(values) for values in by_variant.values()):
            continue
        unit, scale = _UNITS[re.split(r"[ ,]", metric)[0]]
        if metric.startswith("compile, memory"):
            unit, scale = "MiB", MIB
        medians = {
            variant: statistics.median(values) / scale for variant, values in by_variant.items()
        }
        repeated = [values for values in by_variant.values() if len(values) > 1 and all(values)]
        yield results.make_row(
            name,
            metric,
            unit,
            ours=medians.get("ours"),
            stock=medians.get("stock"),
            eager=medians.get("eager"),
            floor=weights / MIB if metric in _BOUND_BY_WEIGHTS and weights > MIB else None,
            spread=max((measure.summarize(v).spread for v in repeated if min(v) > 0), default=None),
            note=_NOTES.get(metric),
        )


def measure_small(workspace: Workspace, rounds: int) -> Iterator[results.Row]:
    """Measure the cost of a call and of an input, with models that compute almost nothing."""
    samples: Samples = defaultdict(lambda: defaultdict(list))
    with workspace.fresh_cache() as cache:
        for variant in VARIANTS:
            workspace.compile("pointwise", variant, cache)
            workspace.compile("eight inputs", variant, cache)
        # Two packages, without and with checks.
        workspace.compile("eight inputs", "ours", cache, artifact_cache=False)
        checked = workspace.package_path("eight inputs", "ours")
        checked = Path(shutil.copy(checked, checked.with_name("checked.pt2")))
        workspace.compile("eight inputs", "ours", cache, aot_check_inputs=False)
        packages = {
            "ours": (str(checked), str(workspace.package_path("eight inputs", "ours"))),
            "stock": (str(workspace.package_path("eight inputs", "stock")),) * 2,
        }
        for index in range(max(rounds, 5)):
            for variant in _order(index):
                for metric, task in (("Python", "call"), ("the C interface", "bare")):
                    arguments: Any = {
                        "model": "pointwise",
                        "package": str(workspace.package_path("pointwise", variant)),
                    }
                    if task == "call":
                        arguments["variant"] = variant
                    label = f"call {'from' if task == 'call' else 'of'} {metric}"
                    result = workspace.run(task, cache, **arguments)
                    samples[label][variant].append(result["seconds"])
                checked_call, unchecked_call = (
                    workspace.run("bare", cache, model="eight inputs", package=package, checks=on)
                    for package, on in zip(packages[variant], (True, False), strict=True)
                )
                cost = (checked_call["seconds"] - unchecked_call["seconds"]) / 8
                samples["call, check of an input"][variant].append(cost)
            eager = workspace.run("call", cache, model="pointwise", variant="eager", package="")
            samples["call from Python"]["eager"].append(eager["seconds"])
    for row in make_rows("pointwise", samples, 0):
        if row["metric"] == "call, check of an input":
            row["note"] = (
                "of eight; stock with AOTI_RUNTIME_CHECK_INPUTS=1, which is off by default"
            )
        yield row


def measure_safety(workspace: Workspace) -> Iterator[results.Row]:
    """Count the wrong inputs and damaged packages that raise an error; a crash does not count."""
    inputs = aoti_child.make_wrong_inputs()
    refused: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    accepted: dict[str, list[str]] = defaultdict(list)
    with workspace.fresh_cache() as cache:
        for variant in VARIANTS:
            workspace.compile("pointwise", variant, cache)
            package = workspace.package_path("pointwise", variant)

            def count(
                metric: str, case: str, task: str, variant: str = variant, **arguments: Any
            ) -> None:
                try:
                    is_refused = workspace.run(task, cache, variant=variant, **arguments)["refused"]
                except RuntimeError:
                    is_refused = False
                refused[metric][variant] += is_refused
                if not is_refused:
                    accepted[variant].append(case)

            for kind in inputs:
                count("wrong inputs refused", kind, "refuse", package=str(package), kind=kind)
            for kind in aoti_child.DAMAGES:
                damaged = Path(shutil.copy(package, workspace.folder / "damaged.pt2"))
                aoti_child.damage(str(damaged), kind)
                count("damaged packages refused", kind, "refuse_damaged", package=str(damaged))
            stack = workspace.run("executable_stack", cache, package=str(package))["executable"]
            refused["executable stack"][variant] = float(stack)
    for metric, kinds in (
        ("wrong inputs refused", list(inputs)),
        ("damaged packages refused", list(aoti_child.DAMAGES)),
    ):
        missed = {variant: [k for k in accepted[variant] if k in kinds] for variant in VARIANTS}
        note = "; ".join(f"{variant} accepts {', '.join(m)}" for variant, m in missed.items() if m)
        total = f"of {len(kinds)}"
        yield results.make_row(
            "safety",
            metric,
            "1",
            better="higher",
            ours=refused[metric]["ours"],
            stock=refused[metric]["stock"],
            note=f"{total}; {note}" if note else total,
        )
    stacks = refused["executable stack"]
    yield results.make_row(
        "safety",
        "executable stack",
        "1",
        ours=stacks["ours"],
        stock=stacks["stock"],
        note="1: the shared object requests an executable stack",
    )


# --- the command line ---------------------------------------------------------------------------


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--models", nargs="*", choices=MODELS, default=MODELS, metavar="NAME")
    parser.add_argument(
        "--rounds", type=int, default=1, metavar="N", help="compiles per model and state"
    )
    parser.add_argument("--json-out", metavar="DIR", help="folder of the result")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    options = _parse(arguments)
    header = results.collect_header("aoti", results.format_command(), results.name_hardware("cpu"))
    begin = time.perf_counter()
    rows: list[results.Row] = []
    with tempfile.TemporaryDirectory() as folder:
        workspace = Workspace(Path(folder))
        parts: list[tuple[str, Any]] = [
            ("safety", lambda: measure_safety(workspace)),
            ("calls", lambda: measure_small(workspace, options.rounds)),
            *(
                (name, lambda name=name: measure_model(workspace, name, options.rounds))
                for name in options.models
            ),
        ]
        for name, measure_part in parts:
            rows += measure_part()
            print(f"[{time.perf_counter() - begin:5.0f} s] {name}", flush=True)
            document: results.Document = {**header, "rows": rows}
            if options.json_out:
                # Write after every model, so that an interrupted run keeps its measurements.
                results.write(options.json_out, document)
    print(f"\n{results.render_table(document)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
