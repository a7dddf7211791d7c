"""Summarizes the results of `gemm` and `e2e`: geometric means, worst cases, targets.

If several files contain the same case, the newest one counts. Runs with CUTLASS (`gemm-cutlass`)
are compared only within themselves.

A speedup is Inductor's time divided by the extension's time, so more is better. Inductor's
max-autotune counts as the faster of its two configurations, with and without persistent TMA
kernels. `the best` is the fastest of these and cuBLAS in eager mode, selected per case.

    python -m benchmarks.gemm.summary benchmarks/results/gemm/*.json benchmarks/results/e2e/*.json
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gemm import cases as gemm_suite
from benchmarks.gemm import models as gemm_models
from benchmarks.gemm.cases import Case
from benchmarks.harness import results, variants

__all__ = ["TARGETS", "Line", "Numbers", "Target", "lines", "main", "numbers", "render"]

MAX = ("stock-max", "stock-max-tma")

LARGE = 2048
"""Minimum M of a large case."""

Values = Mapping[str, float]
"""Values by contender, or by the name of what else was measured."""


@dataclasses.dataclass(frozen=True)
class Numbers:
    """The measured values, by case or model."""

    times: Mapping[str, Values]
    """Microseconds of GEMMs under CUDA graphs; the roofline is under "floor"."""
    compile: Mapping[str, Values]
    """Compile seconds of GEMMs from empty caches."""
    again: Mapping[str, Values]
    """Compile seconds of GEMMs from warm caches."""
    cutlass: Mapping[str, Values]
    """Microseconds of GEMMs under CUDA graphs, in runs that include CUTLASS."""
    models: Mapping[tuple[str, str], Values]
    """Milliseconds, by model and setting (`e2e.SETTINGS`)."""
    models_compile: Mapping[str, Values]
    """Compile seconds of models."""
    ranked: Mapping[str, Values]
    """Microseconds of the best candidate that tuning would measure; "floor" is the best of all
    candidates."""
    tuning: Mapping[str, Values]
    """Seconds of tuning per tuned GEMM."""


def numbers(documents: Iterable[results.Document]) -> Numbers:
    """Read the results of suites whose names begin with `gemm` or `e2e`; skip others."""
    titles = {way.title: name for name, way in variants.CONTENDERS.items()}
    found: dict[str, dict[Any, dict[str, float]]] = {
        field.name: defaultdict(dict) for field in dataclasses.fields(Numbers)
    }
    for document in sorted(documents, key=lambda document: document["date"]):
        suite, _, rest = document["suite"].partition("-")
        if suite not in ("gemm", "e2e"):
            continue
        models, cutlass = suite == "e2e", rest.startswith("cutlass")
        begun: set[tuple[str, Any]] = set()
        for row in document["rows"]:
            metric, _, title = row["metric"].partition(", ")
            if title.startswith("warm, "):
                metric, title = "warm", title.removeprefix("warm, ")
            key: Any = row["case"]
            if metric == "best of the six ranked first":
                table = "ranked"
            elif metric == "graph" and not models:
                table = "cutlass" if cutlass else "times"
            elif cutlass:
                continue
            elif metric == "tuning":
                table = "tuning"
            elif metric in ("compile", "warm"):
                if models:
                    table = "models_compile"
                else:
                    table = "compile" if metric == "compile" else "again"
            elif metric in ("graphs", "no graphs") and models:
                table, key = "models", (key, metric)
            else:
                continue
            if (table, key) not in begun:
                begun.add((table, key))
                found[table][key] = {}
            stock = titles.get(title, title.removesuffix(" weights"))
            for name, value in (
                ("ours", row["ours"]),
                (stock, row["stock"]),
                ("eager", row["eager"]),
                ("floor", row["floor"]),
            ):
                if value is not None:
                    found[table][key][name] = value
    return Numbers(**found)


def _fastest(values: Values, names: Iterable[str]) -> float | None:
    return min((values[name] for name in names if name in values), default=None)


def speedup(values: Values, *over: str) -> float | None:
    """Return the fastest time of `over` divided by the extension's; None if one is missing."""
    rival = _fastest(values, over)
    return rival / values["ours"] if rival is not None and "ours" in values else None


def _speedups(of: Numbers, keep: Callable[[Case], bool], *over: str) -> dict[str, float]:
    found = {}
    for name, values in of.times.items():
        case = gemm_suite.CASES.get(name)
        ratio = speedup(values, *over)
        if case is not None and keep(case) and ratio is not None:
            found[name] = ratio
    return found


@dataclasses.dataclass(frozen=True)
class Target:
    """A performance target."""

    what: str
    value: float
    measure: Callable[[Numbers], Mapping[str, float]]
    """Returns the values to combine, by name."""
    combine: str = "geomean"
    """How to combine the values: `geomean`, `min` or `max`."""
    at_most: bool = False
    """Whether less is better."""


@dataclasses.dataclass(frozen=True)
class Line:
    """The result for one target."""

    target: Target
    found: float | None
    """None if nothing was measured for it."""
    count: int
    worst: str | None
    """Name of the value that is furthest from the target."""

    @property
    def met(self) -> bool | None:
        """Whether the target was met; None if nothing was measured."""
        if self.found is None:
            return None
        reached = self.target.value
        return self.found <= reached if self.target.at_most else self.found >= reached


def _cases(keep: Callable[[Case], bool], *over: str) -> Callable[[Numbers], Mapping[str, float]]:
    return lambda of: _speedups(of, keep, *(over or MAX))


def _models(*names: str) -> Callable[[Numbers], Mapping[str, float]]:
    """Return speedups of models over Inductor max-autotune, separately per setting."""

    def measure(of: Numbers) -> Mapping[str, float]:
        found = {}
        for (model, setting), values in of.models.items():
            ratio = speedup(values, *MAX)
            if ratio is not None and (not names or model in names):
                found[f"{model}, {setting}"] = ratio
        return found

    return measure


def _compile(of: Numbers) -> Mapping[str, float]:
    """Return compile time from empty caches relative to Inductor max-autotune without TMA."""
    both = [v for v in of.compile.values() if "ours" in v and "stock-max" in v]
    if not both:
        return {}
    ours, stock = (sum(values[name] for values in both) for name in ("ours", "stock-max"))
    return {"all cases": ours / stock}


def _seconds(of: Numbers) -> Mapping[str, float]:
    return {name: values["ours"] for name, values in of.compile.items() if "ours" in values}


def _tuning(of: Numbers) -> Mapping[str, float]:
    return {name: values["ours"] for name, values in of.tuning.items()}


def _with_cutlass(of: Numbers) -> dict[str, float]:
    """Return, for large cases, the fastest of all others divided by the extension with CUTLASS."""
    found = {}
    for name, values in of.cutlass.items():
        case = gemm_suite.CASES.get(name)
        best = _fastest(values, (*MAX, "eager", "ours"))
        if case is not None and case.m >= LARGE and best is not None and "ours-cutlass" in values:
            found[name] = best / values["ours-cutlass"]
    return found


def _gained(of: Numbers) -> Mapping[str, float]:
    found = _with_cutlass(of)
    gained = sum(ratio >= 1.05 for ratio in found.values())
    return {f"{gained} of {len(found)}": gained / len(found)} if found else {}


def _ranked(of: Numbers) -> Mapping[str, float]:
    return {name: values["floor"] / values["ours"] for name, values in of.ranked.items()}


def _kind(kind: str, *rows: int) -> Callable[[Case], bool]:
    return lambda case: case.kind == kind and case.m in rows


TARGETS: tuple[Target, ...] = (
    Target("every case, against the best", 0.98, _cases(lambda c: True, *MAX, "eager"), "min"),
    Target("plain bf16 layers of Llama", 1.05, _cases(lambda c: c.group == "llama")),
    Target("those of M <= 64", 1.10, _cases(lambda c: c.group == "llama" and c.m <= 64)),
    Target("fused", 1.25, _cases(lambda c: c.group == "fused")),
    Target("QKV, M <= 16", 1.6, _cases(_kind("qkv", 1, 16))),
    Target("SwiGLU, M <= 16", 1.15, _cases(_kind("swiglu", 1, 16))),
    Target("RMSNorm + linear, M <= 16", 1.15, _cases(_kind("rmsnorm", 1, 16))),
    Target(
        "fused, M = 2048, each", 1.02, _cases(lambda c: c.group == "fused" and c.m == 2048), "min"
    ),
    Target("int8 weights, M <= 16", 3.0, _cases(_kind("int8", 1, 16))),
    Target("the same, over bf16 weights", 1.7, _cases(_kind("int8", 1, 16), "bf16")),
    Target("int4 weights, M <= 16, over bf16 weights", 2.5, _cases(_kind("int4", 1, 16), "bf16")),
    Target(
        "int8 and int4 weights, M = 2048, each",
        1.0,
        _cases(lambda c: c.kind in ("int8", "int4") and c.m == 2048),
        "min",
    ),
    Target(
        "unaligned, skinny and bmm",
        1.15,
        _cases(lambda c: c.group in ("unaligned", "skinny", "bmm")),
    ),
    Target("with CUTLASS, large cases, over the best of the others", 0.98, _with_cutlass, "min"),
    Target("with CUTLASS, share of large cases that gain 5 %", 0.25, _gained, "min"),
    Target("models", 1.10, _models()),
    Target("Llama, decode of 16 sequences", 1.25, _models("llama decode 16x1"), "min"),
    Target("Llama, decode of one sequence", 1.1, _models("llama decode 1x1"), "min"),
    Target("compile seconds, over stock max-autotune", 0.25, _compile, "max", True),
    Target("compile seconds of a case", 2.0, _seconds, "max", True),
    Target("tuning seconds of a new GEMM", 2.0, _tuning, "max", True),
    Target("best of those ranked first, over the best measured", 0.97, _ranked, "min"),
)
"""Speedups are over Inductor max-autotune unless stated otherwise."""


def lines(of: Numbers) -> list[Line]:
    """Return the result for every target."""
    found = []
    for target in TARGETS:
        values = target.measure(of)
        if not values:
            found.append(Line(target, None, 0, None))
            continue
        combine: Any = {"geomean": statistics.geometric_mean, "min": min, "max": max}
        worst = (max if target.at_most else min)(values, key=values.__getitem__)
        combined = float(combine[target.combine](list(values.values())))
        found.append(Line(target, combined, len(values), worst))
    return found


def _table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    made = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in made)


def _number(value: float | None, digits: int = 2, unit: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def _groups(of: Numbers) -> Iterable[Sequence[str]]:
    for group in gemm_suite.GROUPS:

        def keep(case: Case, group: str = group) -> bool:
            return case.group == group

        over = [_speedups(of, keep, *way) for way in (MAX, ("stock",), ("eager",))]
        best = _speedups(of, keep, *MAX, "eager")
        if not best:
            continue
        reached = [
            values["floor"] / values["ours"]
            for name, values in of.times.items()
            if name in best and "floor" in values
        ]
        worst = min(best, key=best.__getitem__)
        yield (
            group,
            str(len(best)),
            *(_number(statistics.geometric_mean(o.values()) if o else None) for o in (*over, best)),
            f"{best[worst]:.2f} ({worst})",
            _number(100 * statistics.geometric_mean(reached), 0, " %") if reached else "-",
        )


def _model_rows(of: Numbers) -> Iterable[Sequence[str]]:
    order = list(gemm_models.MODELS)
    known = sorted(
        (key for key in of.models if key[0] in gemm_models.MODELS),
        key=lambda key: (order.index(key[0]), key[1]),
    )
    for model, setting in known:
        values = of.models[model, setting]
        seconds = of.models_compile.get(model, {})
        yield (
            model,
            setting,
            *(_number(values.get(name), 3) for name in ("eager", "stock")),
            _number(_fastest(values, MAX), 3),
            _number(values.get("ours"), 3),
            _number(speedup(values, *MAX)),
            _number(values.get("floor"), 3),
            " / ".join(_number(seconds.get(name), 1) for name in ("stock", "stock-max", "ours")),
        )


def render(of: Numbers) -> str:
    """Format targets, groups of the suite and models as Markdown."""
    parts = [
        _table(
            ("what", "cases", "target", "measured", "worst"),
            (
                (
                    line.target.what,
                    str(line.count),
                    f"{'<=' if line.target.at_most else '>='} {line.target.value:g}",
                    f"**{_number(line.found)}**" if line.met else _number(line.found),
                    line.worst or "-",
                )
                for line in lines(of)
            ),
        )
    ]
    groups = list(_groups(of))
    if groups:
        head = ("group", "cases", "over stock max-autotune", "over stock", "over eager")
        best = ("over the best", "least of these", "of the roofline")
        parts.append(_table((*head, *best), groups))
    models = list(_model_rows(of))
    if models:
        head = ("model", "CUDA graphs", "eager", "stock", "stock max-autotune")
        more = ("ours", "over max-autotune", "floor", "compile s: stock / max / ours")
        parts.append(_table((*head, *more), models))
    return "\n\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the summary of files. The exit code is 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    options = parser.parse_args(arguments)
    of = numbers(results.read(path) for path in options.files)
    print(render(of), end="")
    return 1 if any(line.met is False for line in lines(of)) else 0


if __name__ == "__main__":
    sys.exit(main())
