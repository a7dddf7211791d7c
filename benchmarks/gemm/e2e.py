"""Whole models with and without CUDA graphs: eager, Inductor's configurations, the extension.

The models are those of `gemm.models` in bfloat16. Every variant compiles twice, the second time
for CUDA graphs, like the modes max-autotune-no-cudagraphs and max-autotune; eager mode is captured
in a CUDA graph. Whole calls are timed back to back without waiting, with variants in alternation.
Errors are relative to the same model in float32; a wrong result gets no time. Compile seconds are
those of the first compile, from empty caches to the first result.

    python -m benchmarks.gemm.e2e --budget-seconds 520 --json-out DIR --resume FILE
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._inductor import config as inductor_config

from benchmarks.gemm import models as gemm_models
from benchmarks.gemm.measurement import Measurement, compute_error, is_accurate
from benchmarks.gemm.models import Model
from benchmarks.harness import gpu_lock, measure, results, resumable, variants
from benchmarks.harness.gpu_timing import time_batches
from benchmarks.harness.variants import Variant
from inductor_ext.templates.device import Device

__all__ = ["compute_lower_bound", "main", "make_rows", "measure_model"]

ROUNDS = 15

SETTINGS = ("no graphs", "graphs")
"""Without and with CUDA graphs."""


def compute_lower_bound(model: Model, device: str) -> float | None:
    """Return the milliseconds to read what a call must read; None if that is not the limit."""
    if device == "cpu" or not model.bytes_read:
        return None
    properties = Device.from_torch(torch.cuda.get_device_properties(0))
    return model.bytes_read / properties.bandwidth * 1e3


def measure_model(
    model: Model, variant_list: Sequence[Variant], device: str, rounds: int = ROUNDS
) -> dict[str, Measurement]:
    """Compile, check and time one model.

    Args:
        model: an entry of `gemm.models.MODELS`.
        variant_list: the variants.
        device: "cuda" or "cpu"; without CUDA graphs on "cpu".
        rounds: number of measurements per variant.

    Returns:
        Measurements by variant.
    """
    with gpu_lock.hold_gpu():
        exact = _compute_in_float32(model, device)
        module, inputs = model.make(device, torch.bfloat16)

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
                            variant, setting, function, inputs, measurement
                        )
                    except Exception as failure:
                        # A failing variant must not invalidate the measurements of the others.
                        text = f"{setting}: {type(failure).__name__}: {str(failure)[:300]}"
                        measurement.failure = text
                    print(f"  {model.name}: {variant.name}, {setting}: ready", flush=True)
    with gpu_lock.hold_gpu():
        _check(calls, compute_error(function(*inputs), exact), exact, measurements)
        timers = {key: time_batches(call, variants.synchronize) for key, call in calls.items()}
        for (name, setting), values in measure.alternate(timers, rounds).items():
            measurements[name].times[setting] = values
    return measurements


def _check(
    calls: dict[tuple[str, str], Callable[[], Any]],
    eager: float,
    exact: Sequence[torch.Tensor],
    measurements: Mapping[str, Measurement],
) -> None:
    """Remove the variants with wrong results from `calls`.

    Args:
        calls: by variant and setting.
        eager: the error of eager mode.
        exact: the reference.
        measurements: where errors are stored.
    """
    for (name, setting), call in list(calls.items()):
        value = call()
        # The replay of a captured call returns nothing, but runs the same kernels.
        if value is None:
            continue
        error = compute_error(value, exact)
        if is_accurate(error, eager):
            measurements[name].record_error(error)
        else:
            failure = f"{setting}: wrong: error {error:.1e}, eager {eager:.1e}"
            measurements[name].failure = failure
            del calls[name, setting]


def _compute_in_float32(model: Model, device: str) -> tuple[torch.Tensor, ...]:
    module, inputs = model.make(device, torch.float32)
    result = module(*inputs)
    return result if isinstance(result, tuple) else (result,)


def _prepare(
    variant: Variant,
    setting: str,
    function: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    measurement: Measurement,
) -> Callable[[], Any]:
    graphs = setting == "graphs"
    if variant.backend is None:
        call = variants.compile_and_call(variant, function, inputs).call
        return _capture(call) if graphs else call
    options: Mapping[str, Any] = {"triton.cudagraphs": True} if graphs else {}
    compiled = variants.compile_and_call(variant, function, inputs, options)
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
    inductor = [
        variant
        for variant in variants.VARIANTS.values()
        if variant.name in measurements and variant.is_stock
    ]
    shared = [key for key in ("ours", "eager") if key in measurements]

    for variant in inductor:
        items = {name: measurements[name] for name in (*shared, variant.name)}
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
                        f"{setting}, {variant.title}",
                        "ms",
                        {name: sample.median * 1e3 for name, sample in samples.items()},
                        variant.name,
                        floor=bound,
                        spread=max(sample.spread for sample in samples.values()),
                        note=notes or None,
                    )
                )
        for metric, unit in (("compile", "s"), ("error", "1")):
            values = {name: getattr(item, metric) for name, item in items.items()}
            if values[variant.name] is not None:
                title = f"{metric}, {variant.title}"
                rows.append(variants.make_row(model, title, unit, values, variant.name))
    return rows


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


class _ModelRunner:
    """Measures models one after the other.

    Args:
        names: names of the variants.
        rounds: see `measure_model`.
        seconds: whether compile times are part of the results.
        freezing: whether weights are constants; the model's name in the results then says so.
    """

    def __init__(
        self, names: Sequence[str], rounds: int, seconds: bool = True, freezing: bool = False
    ) -> None:
        self.variants = variants.select(names)
        self.rounds, self.seconds, self.freezing = rounds, seconds, freezing
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        variants.start_workers(self.variants, self.device)

    @torch.no_grad()
    def __call__(self, name: str) -> resumable.CaseResult:
        """Measure a model."""
        model = gemm_models.MODELS[name]
        # Dynamo also reads the option, before the options of the compile are applied.
        with inductor_config.patch(freezing=self.freezing):
            measurements = measure_model(model, self.variants, self.device, self.rounds)
        if not self.seconds:
            for item in measurements.values():
                item.compile = None
        torch._dynamo.reset()
        if self.device == "cuda":
            torch.cuda.empty_cache()
        bound = compute_lower_bound(model, self.device)
        return resumable.CaseResult(
            make_rows(name + ", frozen" * self.freezing, measurements, bound),
            f"{name}:\n{_format_lines(measurements)}",
            failed=any(item.failure for item in measurements.values()),
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. The exit code is 1 if a variant failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--models", nargs="+", choices=list(gemm_models.MODELS), default=list(gemm_models.MODELS)
    )
    variants.add_argument(parser)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="measurements per variant")
    parser.add_argument(
        "--freezing", action="store_true", help="compile with the weights as constants"
    )
    resumable.add_arguments(parser)
    options = parser.parse_args(arguments)
    start = time.monotonic()
    header = results.collect_header("e2e", results.format_command(), commit=options.commit)
    ledger = resumable.Ledger(header, options.json_out, options.resume)
    todo = [name for name in options.models if name not in ledger.cases]
    make = functools.partial(
        _ModelRunner, options.variants, options.rounds, freezing=options.freezing
    )
    case_results = gpu_lock.run(todo, make, options.processes, options.budget_seconds)
    _, failed = ledger.add_all(case_results)
    print(f"{len(ledger.cases)} models in {time.monotonic() - start:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
