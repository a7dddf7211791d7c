"""The plots of docs/user/benchmarks.md and of the README, from the committed results.

`python -m benchmarks.doc_tables` writes them. Each plot has all cases of its result files, also
those in which the extension is slower or needs more memory.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence

from benchmarks.gemm import e2e, summary
from benchmarks.harness import results
from benchmarks.harness.bar_chart import BarChart, Group

__all__ = ["FOLDER", "PLOTS", "Gain", "draw_all", "summarize"]

FOLDER = results.CHECKOUT / "docs" / "user" / "images"

_INDUCTOR = ("Inductor (default)", 0)
_EXTENSION = ("extension", 2)


def _read(suite: str, hardware: str) -> results.Document:
    return results.read(results.RESULTS / suite / f"{hardware}.json")


def _divide(row: results.Row) -> float:
    """Return the value of the extension divided by that of Inductor (default)."""
    assert row["ours"] is not None
    assert row["stock"]
    return row["ours"] / row["stock"]


def _plot_tuned_models() -> BarChart:
    groups = []
    files = (("H200", "e2e", "nvidia-h200"), ("H100", "e2e-decode", "nvidia-h100-80gb-hbm3"))
    for gpu, suite, hardware in files:
        models = summary.collect([_read(suite, hardware)]).models
        for (model, setting), times in models.items():
            if setting == "graphs":
                tuned = min(times[name] for name in summary.MAX if name in times)
                default = times["stock"]
                ratios = (1.0, tuned / default, times["ours"] / default)
                groups.append(Group(f"{gpu}: {model}", ratios))
    return BarChart(
        "Time per call with CUDA graphs, relative to Inductor (default)",
        "Every model of the suites e2e and e2e-decode, decode and others. A shorter bar is faster.",
        (_INDUCTOR, ("Inductor, max-autotune", 1), ("extension, max-autotune", 2)),
        groups,
        reference=1.0,
    )


_HELD_OUT = tuple(f"{what}, default in both" for what in ("graphs", "no graphs"))
"""Metrics of the suite held-out, without tuning: with CUDA graphs, and without."""


def _read_untuned_models() -> dict[str, dict[str, float]]:
    """Return the ratios of each model by metric."""
    without = e2e.make_suffix(freezing=False, tables=False)
    cases: dict[str, dict[str, float]] = {}
    for row in _read("held-out", "nvidia-h200")["rows"]:
        if row["metric"] in _HELD_OUT and without not in row["case"]:
            cases.setdefault(row["case"], {})[row["metric"]] = _divide(row)
    return cases


def _plot_untuned_models() -> BarChart:
    metrics = _HELD_OUT
    ordered = sorted(_read_untuned_models().items(), key=lambda item: item[1][metrics[0]])
    return BarChart(
        "Time per call without tuning, relative to Inductor (default)",
        "Every model of the suite held-out on an H200. A bar below 1 means that the extension is "
        "faster, a bar above 1 that it is slower.",
        (("with CUDA graphs", 2), ("without CUDA graphs", 3)),
        [Group(name, [ratios[metric] for metric in metrics]) for name, ratios in ordered],
        reference=1.0,
    )


_KINDS = ("inference", "training")


def _read_peaks() -> dict[str, dict[str, float]]:
    """Return the ratios of each model by kind of step."""
    cases: dict[str, dict[str, float]] = {}
    for row in _read("memory-steps", "nvidia-h200")["rows"]:
        model, _, kind = row["case"].partition(", ")
        if row["metric"] == "peak" and kind in _KINDS:
            cases.setdefault(model, {})[kind] = _divide(row)
    return cases


def _plot_memory() -> BarChart:
    kinds, cases = _KINDS, _read_peaks()
    return BarChart(
        "Peak memory, relative to Inductor (default)",
        "Every model of the suite memory-steps on an H200: a call at inference and a whole "
        "training step. A shorter bar needs less memory.",
        (("inference", 2), ("training step", 3)),
        [Group(name, [cases[name].get(kind) for kind in kinds]) for name in sorted(cases)],
        reference=1.0,
    )


_MODELS = {"mlp": "MLP", "bert": "BERT-base", "resnet": "ResNet-50", "llama": "Llama, 24 layers"}


def _plot_package_load() -> BarChart:
    rows = {(row["case"], row["metric"]): row for row in _read("aoti", _CPU)["rows"]}
    loaders = {"load": "Python", "load, C++ loader": "C++ loader"}
    return BarChart(
        "Milliseconds to load a package in a new process",
        "Every model of the suite aoti, loaded from Python and with torch's C++ loader.",
        (_INDUCTOR, _EXTENSION),
        [
            Group(f"{title}, {label}", [rows[case, metric][key] for key in ("stock", "ours")])
            for case, title in _MODELS.items()
            for metric, label in loaders.items()
        ],
        digits=0,
    )


def _plot_package_costs() -> BarChart:
    rows = {(row["case"], row["metric"]): row for row in _read("aoti", _CPU)["rows"]}
    metrics: Sequence[tuple[str, str]] = (
        ("compile, cold", "first compile, empty cache"),
        ("compile, warm", "compile"),
        ("package", "size of the package"),
        ("memory after a call", "memory after a call"),
        ("call from Python", "call from Python"),
        ("call of the C interface", "call of the C interface"),
    )
    return BarChart(
        "Packages, relative to Inductor (default)",
        "Compile time, size, memory and time per call of the models of the suite aoti. A bar below "
        "1 means that the extension needs less, a bar above 1 that it needs more.",
        [(title, colour) for colour, title in enumerate(_MODELS.values())],
        [
            Group(label, [_divide(rows[case, metric]) for case in _MODELS])
            for metric, label in metrics
        ],
        reference=1.0,
    )


@dataclasses.dataclass(frozen=True)
class Gain:
    """What the extension needs of something, relative to Inductor (default)."""

    what: str
    suite: str
    device: str
    ratios: Sequence[float]
    """Of all cases of the suite."""

    @property
    def mean(self) -> float:
        """The geometric mean."""
        return statistics.geometric_mean(self.ratios)


def summarize() -> Sequence[Gain]:
    """Return the gains that the README begins with. Nothing was tuned for these models."""
    models, peaks = _read_untuned_models(), _read_peaks()
    rows = [row for row in _read("aoti", _CPU)["rows"] if row["metric"] == "load"]

    def time(decodes: bool) -> Sequence[float]:
        return [
            ratios[_HELD_OUT[0]] for name, ratios in models.items() if ("decode" in name) is decodes
        ]

    def peak(kind: str) -> Sequence[float]:
        return [ratios[kind] for ratios in peaks.values() if kind in ratios]

    gpu, steps = "H200", "memory-steps"
    return (
        Gain("time of a decode step", "held-out", gpu, time(True)),
        Gain("time of other calls and steps", "held-out", gpu, time(False)),
        Gain("peak memory of a call", steps, gpu, peak("inference")),
        Gain("peak memory of a training step", steps, gpu, peak("training")),
        Gain("time to load a package", "aoti", "CPU", [_divide(row) for row in rows]),
    )


def _plot_summary() -> BarChart:
    gains = summarize()
    return BarChart(
        "What the extension needs, relative to Inductor (default)",
        "Geometric means of all models of the suites held-out, memory-steps and aoti. A shorter "
        "bar is better.",
        (_EXTENSION,),
        [Group(gain.what, [gain.mean]) for gain in gains],
        reference=1.0,
    )


_CPU = "amd-epyc-2-cores-avx512"

PLOTS: Mapping[str, Callable[[], BarChart]] = {
    "summary.svg": _plot_summary,
    "tuned_models.svg": _plot_tuned_models,
    "untuned_models.svg": _plot_untuned_models,
    "peak_memory.svg": _plot_memory,
    "package_load.svg": _plot_package_load,
    "package_costs.svg": _plot_package_costs,
}
"""Functions that make the plots, by the name of the file."""


def draw_all() -> Mapping[str, str]:
    """Return the SVG files by name."""
    return {name: make().draw() for name, make in PLOTS.items()}
