"""Whole models with and without CUDA graphs: eager, Inductor's configurations, the extension.

The models are those of `gemm.models`, or with `--held-out` those of `gemm.held_out`. Every variant
compiles twice, the second time for CUDA graphs, like the modes max-autotune-no-cudagraphs and
max-autotune; eager mode is captured in a CUDA graph. Whole calls are timed back to back without
waiting, with variants in alternation. Errors are relative to the same model in float32; a wrong
result gets no time. Compile seconds are those of the first compile, from empty caches to the first
result. The peak is the memory that a call without CUDA graphs allocates at most. A model that
trains is called with its backward pass, up to the gradients of its parameters.

    python -m benchmarks.gemm.e2e --budget-seconds 520 --json-out DIR --resume FILE
    python -m benchmarks.gemm.e2e --held-out --without-tables --json-out DIR
    python -m benchmarks.gemm.e2e --held-out --suite held-out-tuned --json-out DIR
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._inductor import config as inductor_config

from benchmarks.gemm import models as gemm_models
from benchmarks.gemm.held_out import HELD_OUT
from benchmarks.gemm.measurement import Measurement, compute_error, is_accurate
from benchmarks.gemm.models import Model
from benchmarks.harness import gpu_lock, measure, results, resumable, variants
from benchmarks.harness.gpu_timing import time_batches
from benchmarks.harness.variants import Variant
from inductor_ext.autotune import results_db
from inductor_ext.templates.device import Device

__all__ = [
    "compute_lower_bound",
    "main",
    "make_finish",
    "make_rows",
    "measure_model",
    "use_tables",
    "use_tf32",
]

ROUNDS = 15

SETTINGS = ("no graphs", "graphs")
"""Without and with CUDA graphs."""


def compute_lower_bound(model: Model, device: str) -> float | None:
    """Return the milliseconds to read what a call must read; None if that is not the limit."""
    if device == "cpu" or not model.weight_bound:
        return None
    module, _ = model.make("meta", model.dtype)
    properties = Device.from_torch(torch.cuda.get_device_properties(0))
    return gemm_models.count_bytes_read(module) / properties.bandwidth * 1e3


def measure_model(
    model: Model, variant_list: Sequence[Variant], device: str, rounds: int = ROUNDS
) -> dict[str, Measurement]:
    """Compile, check and time one model.

    Args:
        model: an entry of `gemm.models.MODELS` or `gemm.held_out.HELD_OUT`.
        variant_list: the variants.
        device: "cuda" or "cpu"; without CUDA graphs on "cpu".
        rounds: number of measurements per variant.

    Returns:
        Measurements by variant.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(model.training))
        with gpu_lock.hold_gpu():
            exact = _compute_in_float32(model, device)
            module, inputs = model.make(device, model.dtype)
        stack.enter_context(use_tf32(model.dtype == torch.float32))
        return _measure(module, inputs, exact, variant_list, device, rounds, model)


@contextlib.contextmanager
def use_tf32(use: bool) -> Iterator[None]:
    """Allow TF32 in matmuls of float32 inside the block, if `use`."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if use else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def make_finish(model: Model, module: nn.Module) -> Callable[[Any], Any]:
    """Return what follows a call of the module: the backward pass, if the model trains."""
    if not model.training:
        return lambda result: result
    parameters = [p for p in module.parameters() if p.requires_grad]
    return lambda loss: (loss.detach(), *torch.autograd.grad(loss, parameters))


def _measure(
    module: nn.Module,
    inputs: Sequence[torch.Tensor],
    exact: Sequence[torch.Tensor],
    variant_list: Sequence[Variant],
    device: str,
    rounds: int,
    model: Model,
) -> dict[str, Measurement]:
    finish = make_finish(model, module)

    def function(*inputs: torch.Tensor) -> Any:
        return module(*inputs)

    settings = SETTINGS[: 2 if device == "cuda" else 1]
    measurements = {variant.name: Measurement() for variant in variant_list}
    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    for group in variants.group_by_backend(variant_list):
        with variants.use_fresh_caches():
            for variant in group:
                measurement = measurements[variant.name]
                for setting in settings:
                    try:
                        calls[variant.name, setting] = _prepare(
                            variant, setting, function, inputs, measurement, finish
                        )
                    except Exception as failure:
                        # A failing variant must not invalidate the measurements of the others.
                        line = str(failure).partition("\n")[0][:300]
                        text = f"{setting}: {type(failure).__name__}: {line}"
                        measurement.failure = text
                    print(f"  {model.name}: {variant.name}, {setting}: ready", flush=True)
    with gpu_lock.hold_gpu():
        by_row = model.selects_experts
        eager = compute_error(finish(function(*inputs)), exact, by_row=by_row)
        _check(calls, eager, exact, measurements, by_row=by_row)
        timers = {key: time_batches(call, variants.synchronize) for key, call in calls.items()}
        for (name, setting), values in measure.alternate(timers, rounds).items():
            measurements[name].times[setting] = values
    return measurements


def _check(
    calls: dict[tuple[str, str], Callable[[], Any]],
    eager: float,
    exact: Sequence[torch.Tensor],
    measurements: Mapping[str, Measurement],
    *,
    by_row: bool = False,
) -> None:
    """Remove the variants with wrong results from `calls`.

    Args:
        calls: by variant and setting.
        eager: the error of eager mode.
        exact: the reference.
        measurements: where errors are stored.
        by_row: see `compute_error`.
    """
    for (name, setting), call in list(calls.items()):
        value, peak = _call_and_measure_peak(call)
        if setting == SETTINGS[0]:
            measurements[name].peak = peak
        # The replay of a captured call returns nothing, but runs the same kernels.
        if value is None:
            continue
        error = compute_error(value, exact, by_row=by_row)
        if is_accurate(error, eager):
            measurements[name].record_error(error)
        else:
            failure = f"{setting}: wrong: error {error:.1e}, eager {eager:.1e}"
            measurements[name].failure = failure
            del calls[name, setting]


def _call_and_measure_peak(call: Callable[[], Any]) -> tuple[Any, int | None]:
    """Return the result of a call, and the bytes of GPU memory that it allocated at most."""
    if not torch.cuda.is_available():
        return call(), None
    # The first call may allocate workspaces that stay.
    call()
    values: list[Any] = []
    peak = measure.measure_gpu_peak(lambda: values.append(call()))
    return values[0], peak


def _compute_in_float32(model: Model, device: str) -> tuple[torch.Tensor, ...]:
    module, inputs = model.make(device, torch.float32)
    result = make_finish(model, module)(module(*inputs))
    return result if isinstance(result, tuple) else (result,)


def _prepare(
    variant: Variant,
    setting: str,
    function: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    measurement: Measurement,
    finish: Callable[[Any], Any],
) -> Callable[[], Any]:
    graphs = setting == "graphs"
    if variant.backend is None:
        call = variants.compile_and_call(variant, function, inputs, finish=finish).call
        return _capture(call) if graphs else call
    options: Mapping[str, Any] = {"triton.cudagraphs": True} if graphs else {}
    compiled = variants.compile_and_call(variant, function, inputs, options, finish)
    # Inductor with TMA reuses from the caches what Inductor without TMA has compiled.
    if measurement.compile is None and variant.name != "stock-max-tma":
        measurement.compile = compiled.seconds
    return compiled.call


def _capture(call: Callable[[], Any]) -> Callable[[], None]:
    """Capture the call in a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Load libraries outside of the capture.
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Capture on a stream that has no cuBLAS workspace yet, so that the graph gets its own: Inductor
    # frees the workspaces of streams when it records its graphs.
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
        call()
    return graph.replay


def make_rows(
    model: str, measurements: Mapping[str, Measurement], bound: float | None = None
) -> list[results.Row]:
    """Return the measurements of a model as result rows.

    Args:
        model: name of the model.
        measurements: see `measure_model`.
        bound: lower bound in milliseconds for any implementation.
    """
    rows: list[results.Row] = []
    for ours, variant, title in _list_comparisons(measurements):
        items = {
            name: measurements[name] for name in ("eager", variant.name) if name in measurements
        }
        if ours is not None:
            items["ours"] = measurements[ours]
        notes = "; ".join(f"{name}: {item.failure}" for name, item in items.items() if item.failure)
        for setting in SETTINGS:
            samples = {
                name: measure.summarize(item.times[setting])
                for name, item in items.items()
                if setting in item.times
            }
            if samples:
                rows.append(
                    variants.make_row(
                        model,
                        f"{setting}, {title}",
                        "ms",
                        {name: sample.median * 1e3 for name, sample in samples.items()},
                        variant.name,
                        floor=bound,
                        spread=max(sample.spread for sample in samples.values()),
                        note=notes or None,
                    )
                )
        for metric, unit, scale in (
            ("compile", "s", 1.0),
            ("error", "1", 1.0),
            ("peak", "MiB", _MIB),
        ):
            values = {
                name: None if (value := getattr(item, metric)) is None else value / scale
                for name, item in items.items()
            }
            if values.get(variant.name) is not None:
                rows.append(
                    variants.make_row(model, f"{metric}, {title}", unit, values, variant.name)
                )
    return rows


_MIB = 2.0**20


def _list_comparisons(
    measurements: Mapping[str, Measurement],
) -> Iterator[tuple[str | None, Variant, str]]:
    """Yield a variant of the extension, one of Inductor, and the title of their rows."""
    for variant in variants.VARIANTS.values():
        if variant.is_stock and variant.name in measurements:
            yield "ours" if "ours" in measurements else None, variant, variant.title
    if {"ours-default", "stock"} <= measurements.keys():
        yield "ours-default", variants.VARIANTS["stock"], "default in both"


def _format_lines(measurements: Mapping[str, Measurement]) -> str:
    lines = []
    for name, item in measurements.items():
        times = ", ".join(
            f"{setting} {measure.summarize(values).median * 1e3:.3f} ms"
            for setting, values in item.times.items()
        )
        seconds = f", {item.compile:.1f} s" if item.compile is not None else ""
        error = f", error {item.error:.1e}" if item.error is not None else ""
        failure = f", {item.failure}" if item.failure else ""
        lines.append(f"  {name}: {times}{seconds}{error}{failure}")
    return "\n".join(lines)


def make_suffix(freezing: bool, tables: bool) -> str:
    """Return what is added to the names of models in the results."""
    return ", frozen" * freezing + ", no tables" * (not tables)


class _ModelRunner:
    """Measures models one after the other.

    Args:
        names: names of the variants.
        rounds: see `measure_model`.
        seconds: whether compile times are part of the results.
        freezing: whether weights are constants; the model's name in the results then says so.
        tables: whether the shipped tuning tables are used; likewise.
    """

    def __init__(
        self,
        names: Sequence[str],
        rounds: int,
        seconds: bool = True,
        freezing: bool = False,
        tables: bool = True,
    ) -> None:
        self.variants = variants.select(names)
        self.rounds, self.seconds, self.freezing, self.tables = rounds, seconds, freezing, tables
        self.suffix = make_suffix(freezing, tables)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        variants.start_workers(self.variants, self.device)

    def __call__(self, name: str) -> resumable.CaseResult:
        """Measure a model."""
        model = _MODELS[name]
        # Dynamo also reads the option, before the options of the compile are applied.
        with inductor_config.patch(freezing=self.freezing), use_tables(self.tables):
            measurements = measure_model(model, self.variants, self.device, self.rounds)
        if not self.seconds:
            for item in measurements.values():
                item.compile = None
        torch._dynamo.reset()
        if self.device == "cuda":
            torch.cuda.empty_cache()
        bound = compute_lower_bound(model, self.device)
        return resumable.CaseResult(
            make_rows(name + self.suffix, measurements, bound),
            f"{name}:\n{_format_lines(measurements)}",
            failed=any(item.failure for item in measurements.values()),
        )


_MODELS: Mapping[str, Model] = {**gemm_models.MODELS, **HELD_OUT}


@contextlib.contextmanager
def use_tables(use: bool) -> Iterator[None]:
    """Let the extension find the tuning tables that it ships with, or none."""
    with tempfile.TemporaryDirectory() as empty:
        folder = results_db.TABLES if use else Path(empty)
        with mock.patch.object(results_db, "TABLES", folder):
            yield


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. The exit code is 1 if a variant failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--models", nargs="+", choices=list(_MODELS), metavar="NAME", help="by default all"
    )
    parser.add_argument("--held-out", action="store_true", help="the models of gemm.held_out")
    parser.add_argument(
        "--without-tables", action="store_true", help="without the shipped tuning tables"
    )
    variants.add_argument(parser)
    parser.add_argument("--suite", help="name of the results; by default e2e or held-out")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="measurements per variant")
    parser.add_argument(
        "--freezing", action="store_true", help="compile with the weights as constants"
    )
    resumable.add_arguments(parser)
    options = parser.parse_args(arguments)
    start = time.monotonic()
    suite = options.suite or ("held-out" if options.held_out else "e2e")
    header = results.collect_header(suite, results.format_command(), commit=options.commit)
    ledger = resumable.Ledger(header, options.json_out, options.resume)
    make = functools.partial(
        _ModelRunner,
        options.variants,
        options.rounds,
        freezing=options.freezing,
        tables=not options.without_tables,
    )
    names = options.models or (HELD_OUT if options.held_out else gemm_models.MODELS)
    suffix = make_suffix(options.freezing, not options.without_tables)
    todo = [name for name in names if name + suffix not in ledger.cases]
    case_results = gpu_lock.run(todo, make, options.processes, options.budget_seconds)
    _, failed = ledger.add_all(case_results)
    print(f"{len(ledger.cases)} models in {time.monotonic() - start:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
