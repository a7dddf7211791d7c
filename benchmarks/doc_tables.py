"""Writes the tables and plots of the README and of two pages in docs/user from `results`.

    python -m benchmarks.doc_tables

The pages are benchmarks.md and compatibility.md. The text between the marks `<!-- table: NAME -->`
and `<!-- end -->` is replaced; `doc_plots` draws the plots. A test compares both with the committed
results.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from benchmarks import compatibility, doc_plots
from benchmarks.gemm import cases, e2e, models, summary
from benchmarks.harness import results
from benchmarks.harness.markdown import format_table, link_result

__all__ = ["PAGES", "main", "render"]

_DOCS = results.CHECKOUT / "docs" / "user"

PAGES = (results.CHECKOUT / "README.md", _DOCS / "benchmarks.md", _DOCS / "compatibility.md")

_GPUS = {"H200": "nvidia-h200", "H100": "nvidia-h100-80gb-hbm3"}

_COMMANDS = {
    "aoti": "benchmarks.aot.run",
    "e2e": "benchmarks.gemm.e2e",
    "e2e-decode": "benchmarks.gemm.e2e",
    "gemm": "benchmarks.gemm.run",
    "held-out": "benchmarks.gemm.e2e --held-out --variants eager stock ours-default",
    "held-out-tuned": "benchmarks.gemm.e2e --held-out --suite held-out-tuned --without-tables "
    "--variants eager stock stock-max ours ours-default",
    "memory-budget": "benchmarks.memory.budget",
    "memory-gpu": "benchmarks.memory.gpu",
    "memory-peak": "benchmarks.memory.peak",
    "memory-steps": "benchmarks.memory.steps --rounds 0",
    "planner": "benchmarks.memory.planner",
}
"""Modules that make the results today; the files name those of the commit that was measured."""

_GROUPS = {
    "llama": "plain layers of Llama 8B and 70B",
    "square": "squares and other large shapes",
    "unaligned": "unaligned rows",
    "skinny": "large K, small M and N",
    "bmm": "batched",
    "grouped": "grouped (experts)",
    "int8": "int8 weights, int8 x int8",
    "int4": "int4 weights",
    "fp8": "fp8, row-wise scales",
    "fused": "fused: gates, norms, QKV, epilogues",
    "quantized": "quantized gates and QKV",
    "frozen": "frozen QKV",
}

_MODELS = {
    "llama decode 16x1": "Llama-8B, 4 layers, decode 16 x 1",
    "llama decode 1x1": "Llama-8B, 4 layers, decode 1 x 1",
    "llama prefill 1x2048": "Llama-8B, 4 layers, prefill 1 x 2048",
    "llama int8 decode 16x1": "the same with int8 weights (torchao), decode 16 x 1",
    "llama int8 decode 1x1": "the same with int8 weights (torchao), decode 1 x 1",
    "bert 32x128": "BERT-base 32 x 128",
    "vit 64x224": "ViT-B 64 x 224",
    "unet 4x256": "U-Net 4 x 256",
}

_INSTANCES = {
    **{f"minimalloc-{letter}": f"MiniMalloc {letter}" for letter in "ABCDEF"},
    "somas-resnet50": "SOMAS, ResNet-50",
    "iopddl-G_1": "iopddl G_1",
    **{f"training {n}, any sizes": f"synthetic training graph, {n}" for n in (200, 2000, 20000)},
}
"""Problems of the planner, with their titles."""

_PACKAGES: Sequence[tuple[str, str, str]] = (
    ("compile", "compile, warm", "CPU s"),
    ("compile, C++ of the wrapper only", "compile, warm, C++ of wrapper", "CPU s"),
    ("first compile with an empty cache", "compile, cold", "CPU s"),
    ("the same model again", "compile, again", "CPU s"),
    ("memory that a compile adds", "compile, memory", "MiB"),
    ("package file", "package", "MiB"),
    ("shared library without weights", "shared object", "MiB"),
    ("load in a new process", "load", "ms"),
    ("load with torch's C++ loader", "load, C++ loader", "ms"),
    ("memory after a call", "memory after a call", "MiB"),
    ("part of it not shared by processes", "private memory after a call", "MiB"),
    ("call from Python", "call from Python", "us"),
    ("call of the C interface", "call of the C interface", "us"),
)
"""Label, metric and unit of the rows of the table of packages."""


def _read(suite: str, hardware: str) -> results.Document:
    return results.read(results.RESULTS / suite / f"{hardware}.json")


def _index(document: results.Document) -> Mapping[tuple[str, str], results.Row]:
    """Return the rows by case and metric."""
    return {(row["case"], row["metric"]): row for row in document["rows"]}


def _read_value(row: results.Row, column: Literal["stock", "ours"]) -> float:
    value = row[column]
    assert value is not None
    return value


def _format(value: float) -> str:
    """Format a positive number with three significant digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def _format_ratio(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _make_sources(*files: tuple[str, str]) -> str:
    """Describe where the numbers of a section come from."""
    rows = []
    for suite, hardware in files:
        document = _read(suite, hardware)
        versions = document["versions"]
        tools = [f"{name} {versions[name]}" for name in ("torch", "triton") if name in versions]
        rows.append(
            (
                link_result(document),
                ", ".join(tools),
                (document["commit"] or "")[:12],
                document["date"][:10],
                f"`python -m {_COMMANDS[suite]}`",
            )
        )
    return format_table(("result file", "versions", "commit", "date", "command"), rows)


def _make_model_row(gpu: str, name: str, numbers: summary.Numbers) -> Sequence[str]:
    def values(setting: str) -> tuple[summary.Values, float, float]:
        times = numbers.models[name, setting]
        tuned = min(times[variant] for variant in summary.MAX if variant in times)
        return times, tuned, min(tuned, times["stock"]) / times["ours"]

    graphs, tuned, best = values("graphs")
    plain, plain_tuned, plain_best = values("no graphs")
    extension = graphs["ours"]
    columns = (graphs["eager"], graphs["stock"], tuned, extension)
    plain_columns = (plain["stock"], plain_tuned, plain["ours"])
    return (
        gpu,
        _MODELS[name],
        *map(_format, columns),
        _format_ratio(tuned / extension),
        _format_ratio(best),
        " / ".join(map(_format, plain_columns)),
        _format_ratio(plain_best),
    )


def _make_models() -> str:
    rows = []
    for gpu, suite in (("H200", "e2e"), ("H100", "e2e-decode")):
        numbers = summary.collect([_read(suite, _GPUS[gpu])])
        names = {model for model, _ in numbers.models}
        rows += [_make_model_row(gpu, name, numbers) for name in models.MODELS if name in names]
    head = (
        "GPU",
        "model",
        "eager",
        "Inductor (default)",
        "max-autotune",
        "extension",
        "speedup over max-autotune",
        "over the better of both",
        "without CUDA graphs: default / max-autotune / extension",
        "speedup over the better",
    )
    return format_table(head, rows)


def _make_held_out() -> str:
    """Compare the default modes on the models that nothing was tuned for."""
    table = _index(_read("held-out", _GPUS["H200"]))
    graphs, plain, peak = (f"{what}, default in both" for what in ("graphs", "no graphs", "peak"))
    no_tables = e2e.make_suffix(freezing=False, tables=False)
    names = [name for name, metric in table if metric == graphs and no_tables not in name]

    def speedup(name: str, metric: str) -> float:
        row = table[name, metric]
        return _read_value(row, "stock") / _read_value(row, "ours")

    columns = [(metric, suffix) for metric in (graphs, plain) for suffix in ("", no_tables)]
    rows = []
    for name in sorted(names):
        times, memory = table[name, graphs], table[name, peak]
        rows.append(
            (
                name,
                _format_cell(times["stock"]),
                _format_cell(times["ours"]),
                *(_format_ratio(speedup(name + suffix, metric)) for metric, suffix in columns),
                " / ".join(_format_cell(memory[key]) for key in ("eager", "stock", "ours")),
            )
        )
    means = [
        _format_ratio(statistics.geometric_mean(speedup(name + suffix, metric) for name in names))
        for metric, suffix in columns
    ]
    rows.append(("geometric mean", "", "", *means, ""))
    head = (
        "model",
        "Inductor",
        "extension",
        "speedup",
        "without tuning tables",
        "without CUDA graphs",
        "without both",
        "peak MiB: eager / Inductor / extension",
    )
    return format_table(head, rows)


def _make_held_out_tuned() -> str:
    """Compare max-autotune on the models that nothing was tuned for."""
    table = _index(_read("held-out-tuned", _GPUS["H200"]))
    suffix = e2e.make_suffix(freezing=False, tables=False)
    tuned = "stock max-autotune"

    rows, gains, shares = [], [], []
    for name in sorted({name for name, _ in table}):
        graphs, compiles = (table[name, f"{what}, {tuned}"] for what in ("graphs", "compile"))
        times = [
            _read_value(table[name, "graphs, stock default"], "stock"),
            _read_value(graphs, "stock"),
            _read_value(graphs, "ours"),
        ]
        seconds = [_read_value(compiles, "stock"), _read_value(compiles, "ours")]
        gains.append(min(times[:2]) / times[2])
        shares.append(seconds[1] / seconds[0])
        rows.append(
            (
                name.removesuffix(suffix),
                *map(_format, times),
                _format_ratio(gains[-1]),
                " / ".join(map(_format, seconds)),
                _format_ratio(shares[-1]),
            )
        )
    means = [_format_ratio(statistics.geometric_mean(values)) for values in (gains, shares)]
    rows.append(("geometric mean", "", "", "", means[0], "", means[1]))
    head = (
        "model",
        "Inductor (default)",
        "Inductor (max-autotune)",
        "extension (max-autotune)",
        "speedup over the better",
        "compile s: Inductor / extension",
        "ratio",
    )
    return format_table(head, rows)


def _compute_speedups(gpu: str) -> Mapping[str, Mapping[str, float]]:
    """Return the speedups of every matmul over max-autotune, eager mode and the best of all."""
    times = summary.collect([_read("gemm", _GPUS[gpu])]).times
    over = {
        "max-autotune": summary.MAX,
        "eager": ("eager",),
        "best": (*summary.MAX, "stock", "eager"),
    }
    return {
        name: {
            label: ratio
            for label, variants in over.items()
            if (ratio := summary.compute_speedup(values, *variants)) is not None
        }
        for name, values in times.items()
    }


def _make_matmuls() -> str:
    ratios = {gpu: _compute_speedups(gpu) for gpu in _GPUS}

    def mean(gpu: str, group: str, over: str) -> str:
        values = [
            ratio[over]
            for name, ratio in ratios[gpu].items()
            if cases.CASES[name].group == group and over in ratio
        ]
        return _format_ratio(statistics.geometric_mean(values)) if values else "-"

    def lowest(gpu: str, group: str) -> str:
        speedups = {n: r["best"] for n, r in ratios[gpu].items() if cases.CASES[n].group == group}
        name = min(speedups, key=speedups.__getitem__)
        return f"{speedups[name]:.2f}: {name}"

    rows = []
    for group, label in _GROUPS.items():
        counts = [sum(cases.CASES[name].group == group for name in ratios[gpu]) for gpu in _GPUS]
        means = [
            " / ".join(mean(gpu, group, over) for gpu in _GPUS)
            for over in ("max-autotune", "eager", "best")
        ]
        lows = [
            lowest(gpu, group) if count else "-" for gpu, count in zip(_GPUS, counts, strict=True)
        ]
        rows.append((label, " / ".join(map(str, counts)), *means, *lows))
    head = (
        "matmuls",
        "cases",
        "speedup over max-autotune",
        "over eager",
        "over the best",
        "lowest on the H200",
        "lowest on the H100",
    )
    return format_table(head, rows)


def _make_slower() -> str:
    rows = []
    for gpu in _GPUS:
        slow = {name: r["best"] for name, r in _compute_speedups(gpu).items() if r["best"] < 0.985}
        rows += [(gpu, name, f"{slow[name]:.2f}") for name in sorted(slow, key=slow.__getitem__)]
    return format_table(("GPU", "matmul", "speedup over the best"), rows)


def _make_peaks() -> str:
    rows = []
    for hardware in ("intel-xeon-processor-16-cores-avx512", "amd-epyc-2-cores-avx512"):
        document = _read("memory-peak", hardware)
        table = _index(document)
        metric = "runtime peak over no reuse"
        mean, worst = table["all, geometric mean", metric], table["all, worst", metric]
        pools = table["all, geometric mean", metric + ", pools"]
        pools_worst = table["all, worst", metric + ", pools"]
        calls = table["all, sum", "allocator calls"]
        number = str(mean["note"]).split()[0]
        label = f"torch {document['versions']['torch'].partition('+')[0]}, {number} graphs"
        for variant, middle, most, count in (
            ("Inductor (default): buffer reuse", mean["stock"], worst["stock"], calls["stock"]),
            ("Inductor, `memory_planning=True`", pools["stock"], pools_worst["stock"], None),
            ("extension", mean["ours"], worst["ours"], calls["ours"]),
        ):
            total = f"{count:,.0f}" if count is not None else "-"
            rows.append((label, variant, f"{middle:.3f}", f"{most:.3f}", total))
    head = ("CPU", "strategy", "peak, geometric mean", "worst", "allocator calls")
    return format_table(head, rows)


def _make_steps(hardware: str) -> str:
    """Compare the peaks of calls and training steps with eager mode."""
    table = _index(_read("memory-steps", hardware))
    kinds = ("inference", "training")
    names = sorted({case.split(",")[0] for case, _ in table})
    models = [name for name in names if all((f"{name}, {k}", "peak") in table for k in kinds)]

    def read(model: str, kind: str) -> tuple[float, float, float]:
        row = table[f"{model}, {kind}", "peak"]
        return row["eager"] or 0.0, row["stock"] or 0.0, row["ours"] or 0.0

    def average(kind: str) -> str:
        ratios = [[peak / peaks[0] for peak in peaks] for peaks in (read(m, kind) for m in models)]
        means = map(statistics.geometric_mean, zip(*ratios, strict=True))
        return " / ".join(f"{mean:.2f}" for mean in means)

    rows = [
        (model, *(" / ".join(map(_format_cell, read(model, kind))) for kind in kinds))
        for model in models
    ]
    rows.append(("geometric mean over eager", *map(average, kinds)))
    head = (
        "model",
        "inference, MiB: eager / Inductor / extension",
        "training step, MiB: eager / Inductor / extension",
    )
    return format_table(head, rows)


def _make_budgets() -> str:
    """Compare training steps within a budget with those without one."""
    table = _index(_read("memory-budget", "amd-epyc-2-cores-avx512"))
    rows = []
    for model in dict.fromkeys(case for case, _ in table):
        limited = table[model, "peak"]
        cells = [table[model, "peak, no budget"]["ours"], limited["floor"], limited["ours"]]
        share = re.search(r"([\d.]+ %) of the FLOPs", limited["note"] or "")
        ratio = "-"
        if (model, "time") in table:
            time, by_default = (table[model, m]["ours"] or 0 for m in ("time", "time, no budget"))
            ratio = f"{time / by_default:.2f}"
        fits = [_format_cell(cell) if cell else "does not fit" for cell in cells]
        rows.append((model, *fits, share[1] if share else "-", ratio))
    head = ("model", "by default, MiB", "budget", "peak", "FLOPs recomputed", "time / by default")
    return format_table(head, rows)


def _make_gpu_peaks() -> str:
    titles = {"bert": "BERT", "t5": "T5", "unet": "U-Net", "vit": "ViT"}
    table = _index(_read("memory-gpu", "nvidia-h200"))
    rows = []
    for model, title in titles.items():
        peak, pools, call = (
            table[f"{model}, inference", metric] for metric in ("peak", "peak, pools", "call")
        )
        numbers = (peak["stock"], pools["stock"], peak["floor"], peak["ours"])
        rows.append(
            (
                title,
                *map(_format_cell, numbers),
                f"{_format_cell(call['stock'])} / {_format_cell(call['ours'])}",
            )
        )
    head = (
        "model",
        "Inductor (default)",
        "Inductor, `memory_planning=True`",
        "Inductor, `allow_buffer_reuse=False`",
        "extension",
        "ms per call: Inductor / extension",
    )
    return format_table(head, rows)


def _make_planner() -> str:
    document = _read("planner", "amd-epyc-2-cores-avx512")
    table = _index(document)

    def run(case: str) -> Sequence[str]:
        if (case, "peak / lower bound") not in table:
            return ("-", "-")
        ratio, seconds = (table[case, metric] for metric in ("peak / lower bound", "cpu time"))
        return (f"{ratio['ours']:.3f}", f"{_format_cell(seconds['ours'])} s")

    rows = []
    for case, title in _INSTANCES.items():
        buffers = str(table[case, "peak"]["note"]).split()[0]
        rows.append((title, buffers, *run(case), *run(f"{case}, long")))
    head = ("problem", "buffers", "default budget", "CPU time", "long search", "CPU time")
    return format_table(head, rows)


def _format_cell(value: float | None) -> str:
    return "-" if value is None else _format(value)


def _make_packages() -> str:
    titles = {
        "mlp": "MLP",
        "bert": "BERT-base",
        "resnet": "ResNet-50",
        "llama": "Llama, 24 layers",
    }
    document = _read("aoti", "amd-epyc-2-cores-avx512")
    table = _index(document)
    rows = []
    for label, metric, unit in _PACKAGES:
        cells = [table[model, metric] for model in titles]
        rows.append(
            (
                f"{label}, {unit}",
                *(f"{_format_cell(row['stock'])} → {_format_cell(row['ours'])}" for row in cells),
            )
        )
    return format_table(("Inductor (default) → extension", *titles.values()), rows)


def _make_summary() -> str:
    rows = []
    for gain in doc_plots.summarize():
        extent = f"{min(gain.ratios):.2f} to {max(gain.ratios):.2f}"
        rows.append((gain.what, str(len(gain.ratios)), f"**{gain.mean:.2f}**", extent, gain.device))
    head = ("relative to Inductor (default)", "models", "geometric mean", "range", "measured on")
    return format_table(head, rows)


_TABLES: Mapping[str, Callable[[], str]] = {
    "summary": _make_summary,
    "default sources": lambda: _make_sources(("held-out", _GPUS["H200"])),
    "default": _make_held_out,
    "tuned sources": lambda: _make_sources(("held-out-tuned", _GPUS["H200"])),
    "tuned": _make_held_out_tuned,
    "matmul sources": lambda: _make_sources(
        *(("gemm", hardware) for hardware in _GPUS.values()),
        ("e2e", _GPUS["H200"]),
        ("e2e-decode", _GPUS["H100"]),
    ),
    "models": _make_models,
    "matmuls": _make_matmuls,
    "slower matmuls": _make_slower,
    "memory sources": lambda: _make_sources(
        ("memory-steps", "amd-epyc-2-cores-avx512"),
        ("memory-steps", "nvidia-h200"),
        ("memory-budget", "amd-epyc-2-cores-avx512"),
        ("memory-peak", "intel-xeon-processor-16-cores-avx512"),
        ("memory-peak", "amd-epyc-2-cores-avx512"),
        ("memory-gpu", "nvidia-h200"),
        ("planner", "amd-epyc-2-cores-avx512"),
    ),
    "steps": lambda: _make_steps("amd-epyc-2-cores-avx512"),
    "GPU steps": lambda: _make_steps("nvidia-h200"),
    "budgets": _make_budgets,
    "peaks": _make_peaks,
    "GPU peaks": _make_gpu_peaks,
    "planner": _make_planner,
    "package sources": lambda: _make_sources(("aoti", "amd-epyc-2-cores-avx512")),
    "packages": _make_packages,
    **compatibility.TABLES,
}


def render(page: str) -> str:
    """Return the page with the tables of the committed results."""

    def replace(match: re.Match[str]) -> str:
        return f"<!-- table: {match[1]} -->\n\n{_TABLES[match[1]]()}\n\n<!-- end -->"

    return re.sub(r"<!-- table: ([\w ]+) -->.*?<!-- end -->", replace, page, flags=re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> int:
    """Update the pages and the plots; return the exit code."""
    argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0]).parse_args(arguments)
    for page in PAGES:
        page.write_text(render(page.read_text(encoding="utf-8")), encoding="utf-8")
    for name, drawing in doc_plots.draw_all().items():
        (doc_plots.FOLDER / name).write_text(drawing, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
