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

__all__ = [
    "TARGETS",
    "Numbers",
    "Target",
    "TargetResult",
    "check_targets",
    "collect",
    "main",
    "render",
]

MAX = ("stock-max", "stock-max-tma")

LARGE = 2048
"""Minimum M of a large case."""

Values = Mapping[str, float]
"""Values by variant, or by the name of another measurement."""


@dataclasses.dataclass(frozen=True)
class Numbers:
    """The measured values, by case or model."""

    times: Mapping[str, Values]
    """Microseconds of GEMMs under CUDA graphs; the roofline is under "floor"."""
    compile: Mapping[str, Values]
    """Compile seconds of GEMMs from empty caches."""
    compile_warm: Mapping[str, Values]
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


def collect(documents: Iterable[results.Document]) -> Numbers:
    """Read the results of suites whose names begin with `gemm` or `e2e`; skip others."""
    titles = {variant.title: name for name, variant in variants.VARIANTS.items()}
    tables: dict[str, dict[Any, dict[str, float]]] = {
        field.name: defaultdict(dict) for field in dataclasses.fields(Numbers)
    }
    for document in sorted(documents, key=lambda document: document["date"]):
        suite, _, rest = document["suite"].partition("-")
        if suite not in ("gemm", "e2e"):
            continue
        models, cutlass = suite == "e2e", rest.startswith("cutlass")
        replaced: set[tuple[str, Any]] = set()
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
                    table = "compile" if metric == "compile" else "compile_warm"
            elif metric in ("graphs", "no graphs") and models:
                table, key = "models", (key, metric)
            else:
                continue
            if (table, key) not in replaced:
                replaced.add((table, key))
                tables[table][key] = {}
            inductor = titles.get(title, title.removesuffix(" weights"))
            for name, value in (
                ("ours", row["ours"]),
                (inductor, row["stock"]),
                ("eager", row["eager"]),
                ("floor", row["floor"]),
            ):
                if value is not None:
                    tables[table][key][name] = value
    return Numbers(**tables)


def _find_fastest(values: Values, names: Iterable[str]) -> float | None:
    return min((values[name] for name in names if name in values), default=None)


def compute_speedup(values: Values, *over: str) -> float | None:
    """Return the fastest time of `over` divided by the extension's; None if one is missing."""
    fastest = _find_fastest(values, over)
    return fastest / values["ours"] if fastest is not None and "ours" in values else None


def _compute_speedups(
    numbers: Numbers, keep: Callable[[Case], bool], *over: str
) -> dict[str, float]:
    speedups = {}
    for name, values in numbers.times.items():
        case = gemm_suite.CASES.get(name)
        ratio = compute_speedup(values, *over)
        if case is not None and keep(case) and ratio is not None:
            speedups[name] = ratio
    return speedups


@dataclasses.dataclass(frozen=True)
class Target:
    """A performance target."""

    name: str
    value: float
    measure: Callable[[Numbers], Mapping[str, float]]
    """Returns the values to combine, by name."""
    combine: str = "geomean"
    """How to combine the values: `geomean`, `min` or `max`."""
    at_most: bool = False
    """Whether less is better."""


@dataclasses.dataclass(frozen=True)
class TargetResult:
    """The result for one target."""

    target: Target
    value: float | None
    """None if nothing was measured for it."""
    count: int
    worst: str | None
    """Name of the value that is furthest from the target."""

    @property
    def is_met(self) -> bool | None:
        """Whether the target was met; None if nothing was measured."""
        if self.value is None:
            return None
        limit = self.target.value
        return self.value <= limit if self.target.at_most else self.value >= limit


def _select_cases(
    keep: Callable[[Case], bool], *over: str
) -> Callable[[Numbers], Mapping[str, float]]:
    return lambda numbers: _compute_speedups(numbers, keep, *(over or MAX))


def _select_models(*names: str) -> Callable[[Numbers], Mapping[str, float]]:
    """Return speedups of models over Inductor max-autotune, separately per setting."""

    def measure(numbers: Numbers) -> Mapping[str, float]:
        speedups = {}
        for (model, setting), values in numbers.models.items():
            ratio = compute_speedup(values, *MAX)
            if ratio is not None and (not names or model in names):
                speedups[f"{model}, {setting}"] = ratio
        return speedups

    return measure


def _compute_compile_ratio(numbers: Numbers) -> Mapping[str, float]:
    """Return compile time from empty caches relative to Inductor max-autotune without TMA."""
    cases = [v for v in numbers.compile.values() if "ours" in v and "stock-max" in v]
    if not cases:
        return {}
    extension, inductor = (sum(values[name] for values in cases) for name in ("ours", "stock-max"))
    return {"all cases": extension / inductor}


def _get_compile_seconds(numbers: Numbers) -> Mapping[str, float]:
    return {name: values["ours"] for name, values in numbers.compile.items() if "ours" in values}


def _get_tuning_seconds(numbers: Numbers) -> Mapping[str, float]:
    return {name: values["ours"] for name, values in numbers.tuning.items()}


def _compute_cutlass_speedups(numbers: Numbers) -> dict[str, float]:
    """Return, for large cases, the fastest of all others divided by the extension with CUTLASS."""
    speedups = {}
    for name, values in numbers.cutlass.items():
        case = gemm_suite.CASES.get(name)
        best = _find_fastest(values, (*MAX, "eager", "ours"))
        if case is not None and case.m >= LARGE and best is not None and "ours-cutlass" in values:
            speedups[name] = best / values["ours-cutlass"]
    return speedups


def _compute_cutlass_share(numbers: Numbers) -> Mapping[str, float]:
    """Return the share of large cases in which CUTLASS is at least 5 % faster."""
    speedups = _compute_cutlass_speedups(numbers)
    count = sum(ratio >= 1.05 for ratio in speedups.values())
    return {f"{count} of {len(speedups)}": count / len(speedups)} if speedups else {}


def _compute_ranking_speed(numbers: Numbers) -> Mapping[str, float]:
    """Return the speed of the best candidate that ranks first, over the best of all."""
    return {name: values["floor"] / values["ours"] for name, values in numbers.ranked.items()}


def _is_kind(kind: str, *m_values: int) -> Callable[[Case], bool]:
    return lambda case: case.kind == kind and case.m in m_values


TARGETS: tuple[Target, ...] = (
    Target(
        "every case, against the best", 0.98, _select_cases(lambda c: True, *MAX, "eager"), "min"
    ),
    Target("plain bf16 layers of Llama", 1.05, _select_cases(lambda c: c.group == "llama")),
    Target("those of M <= 64", 1.10, _select_cases(lambda c: c.group == "llama" and c.m <= 64)),
    Target("fused", 1.25, _select_cases(lambda c: c.group == "fused")),
    Target("QKV, M <= 16", 1.6, _select_cases(_is_kind("qkv", 1, 16))),
    Target("SwiGLU, M <= 16", 1.15, _select_cases(_is_kind("swiglu", 1, 16))),
    Target("RMSNorm + linear, M <= 16", 1.15, _select_cases(_is_kind("rmsnorm", 1, 16))),
    Target(
        "fused, M = 2048, each",
        1.02,
        _select_cases(lambda c: c.group == "fused" and c.m == 2048),
        "min",
    ),
    Target("int8 weights, M <= 16", 3.0, _select_cases(_is_kind("int8", 1, 16))),
    Target("the same, over bf16 weights", 1.7, _select_cases(_is_kind("int8", 1, 16), "bf16")),
    Target(
        "int4 weights, M <= 16, over bf16 weights",
        2.5,
        _select_cases(_is_kind("int4", 1, 16), "bf16"),
    ),
    Target(
        "int8 and int4 weights, M = 2048, each",
        1.0,
        _select_cases(lambda c: c.kind in ("int8", "int4") and c.m == 2048),
        "min",
    ),
    Target(
        "unaligned, skinny and bmm",
        1.15,
        _select_cases(lambda c: c.group in ("unaligned", "skinny", "bmm")),
    ),
    Target(
        "with CUTLASS, large cases, over the best of the others",
        0.98,
        _compute_cutlass_speedups,
        "min",
    ),
    Target("with CUTLASS, share of large cases that gain 5 %", 0.25, _compute_cutlass_share, "min"),
    Target("models", 1.10, _select_models()),
    Target("Llama, decode of 16 sequences", 1.25, _select_models("llama decode 16x1"), "min"),
    Target("Llama, decode of one sequence", 1.1, _select_models("llama decode 1x1"), "min"),
    Target(
        "compile seconds, over Inductor max-autotune", 0.25, _compute_compile_ratio, "max", True
    ),
    Target("compile seconds of a case", 2.0, _get_compile_seconds, "max", True),
    Target("tuning seconds of a new GEMM", 2.0, _get_tuning_seconds, "max", True),
    Target(
        "best of those ranked first, over the best measured", 0.97, _compute_ranking_speed, "min"
    ),
)
"""Speedups are over Inductor max-autotune unless stated otherwise."""


def check_targets(numbers: Numbers) -> list[TargetResult]:
    """Return the result for every target."""
    target_results = []
    for target in TARGETS:
        values = target.measure(numbers)
        if not values:
            target_results.append(TargetResult(target, None, 0, None))
            continue
        combine: Any = {"geomean": statistics.geometric_mean, "min": min, "max": max}
        worst = (max if target.at_most else min)(values, key=values.__getitem__)
        value = float(combine[target.combine](list(values.values())))
        target_results.append(TargetResult(target, value, len(values), worst))
    return target_results


def _format_table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _format_number(value: float | None, digits: int = 2, unit: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def _make_group_rows(numbers: Numbers) -> Iterable[Sequence[str]]:
    for group in gemm_suite.GROUPS:

        def keep(case: Case, group: str = group) -> bool:
            return case.group == group

        over = [_compute_speedups(numbers, keep, *names) for names in (MAX, ("stock",), ("eager",))]
        best = _compute_speedups(numbers, keep, *MAX, "eager")
        if not best:
            continue
        roofline_shares = [
            values["floor"] / values["ours"]
            for name, values in numbers.times.items()
            if name in best and "floor" in values
        ]
        worst = min(best, key=best.__getitem__)
        yield (
            group,
            str(len(best)),
            *(
                _format_number(statistics.geometric_mean(o.values()) if o else None)
                for o in (*over, best)
            ),
            f"{best[worst]:.2f} ({worst})",
            _format_number(100 * statistics.geometric_mean(roofline_shares), 0, " %")
            if roofline_shares
            else "-",
        )


def _make_model_rows(numbers: Numbers) -> Iterable[Sequence[str]]:
    order = list(gemm_models.MODELS)
    keys = sorted(
        (key for key in numbers.models if key[0] in gemm_models.MODELS),
        key=lambda key: (order.index(key[0]), key[1]),
    )
    for model, setting in keys:
        values = numbers.models[model, setting]
        seconds = numbers.models_compile.get(model, {})
        yield (
            model,
            setting,
            *(_format_number(values.get(name), 3) for name in ("eager", "stock")),
            _format_number(_find_fastest(values, MAX), 3),
            _format_number(values.get("ours"), 3),
            _format_number(compute_speedup(values, *MAX)),
            _format_number(values.get("floor"), 3),
            " / ".join(
                _format_number(seconds.get(name), 1) for name in ("stock", "stock-max", "ours")
            ),
        )


def render(numbers: Numbers) -> str:
    """Format targets, groups of the suite and models as Markdown."""
    parts = [
        _format_table(
            ("what", "cases", "target", "measured", "worst"),
            (
                (
                    result.target.name,
                    str(result.count),
                    f"{'<=' if result.target.at_most else '>='} {result.target.value:g}",
                    f"**{_format_number(result.value)}**"
                    if result.is_met
                    else _format_number(result.value),
                    result.worst or "-",
                )
                for result in check_targets(numbers)
            ),
        )
    ]
    groups = list(_make_group_rows(numbers))
    if groups:
        head = (
            "group",
            "cases",
            "over Inductor max-autotune",
            "over Inductor (default)",
            "over eager",
        )
        best = ("over the best", "lowest of these", "of the roofline")
        parts.append(_format_table((*head, *best), groups))
    models = list(_make_model_rows(numbers))
    if models:
        head = ("model", "CUDA graphs", "eager", "Inductor (default)", "Inductor max-autotune")
        more = (
            "extension",
            "over max-autotune",
            "lower bound",
            "compile s: default / max-autotune / extension",
        )
        parts.append(_format_table((*head, *more), models))
    return "\n\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the summary of files. The exit code is 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    options = parser.parse_args(arguments)
    numbers = collect(results.read(path) for path in options.files)
    print(render(numbers), end="")
    return 1 if any(result.is_met is False for result in check_targets(numbers)) else 0


if __name__ == "__main__":
    sys.exit(main())
