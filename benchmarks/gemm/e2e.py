"""Whole models with and without CUDA graphs: eager, Inductor's configurations, the extension.

The models are those of `gemm.models` in bfloat16. Every contender compiles twice, the second time
for CUDA graphs, like the modes max-autotune-no-cudagraphs and max-autotune; eager mode is captured
in a CUDA graph. Whole calls are timed back to back without waiting, with contenders in alternation.
Errors are relative to the same model in float32; a wrong result gets no time. Compile seconds are
those of the first compile, from empty caches to the first result.

    python -m benchmarks.gemm.e2e --budget-seconds 520 --json-out DIR --resume FILE
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._inductor import config as inductor_config

from benchmarks.gemm import models as gemm_models
from benchmarks.gemm.models import Model
from benchmarks.gemm.run import ROUNDING, WORSE, error
from benchmarks.harness import gpu_lock, measure, results, resumable, variants
from benchmarks.harness.gpu_timing import batches
from benchmarks.harness.variants import Contender
from inductor_ext.templates.device import Device

__all__ = ["Measured", "floor", "main", "measure_model", "rows"]

ROUNDS = 15

SETTINGS = ("no graphs", "graphs")
"""Without and with CUDA graphs."""


@dataclasses.dataclass
class Measured:
    """Measurements of one contender."""

    times: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    """Seconds per call of every round, by setting."""
    compile: float | None = None
    """Seconds."""
    error: float | None = None
    """Distance from float32, as a fraction of the norm."""
    failure: str | None = None


def floor(model: Model, device: str) -> float | None:
    """Return the milliseconds to read what a call must read; None if that is not the limit."""
    if device == "cpu" or not model.bytes_read:
        return None
    known = Device.from_torch(torch.cuda.get_device_properties(0))
    return model.bytes_read / known.bandwidth * 1e3


def measure_model(
    model: Model, ways: Sequence[Contender], device: str, rounds: int = ROUNDS
) -> dict[str, Measured]:
    """Compile, check and time one model.

    Args:
        model: an entry of `gemm.models.MODELS`.
        ways: the contenders.
        device: "cuda" or "cpu"; without CUDA graphs on "cpu".
        rounds: number of measurements per contender.

    Returns:
        Measurements by contender.
    """
    with gpu_lock.turn():
        exact = _in_float32(model, device)
        module, inputs = model.make(device, torch.bfloat16)

    def function(*given: torch.Tensor) -> Any:
        return module(*given)

    settings = SETTINGS[: 2 if device == "cuda" else 1]
    found = {way.name: Measured() for way in ways}
    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    for family in variants.families(ways):
        with variants.fresh_caches():
            for way in family:
                for setting in settings:
                    try:
                        calls[way.name, setting] = _prepare(
                            way, setting, function, inputs, found[way.name]
                        )
                    except Exception as failure:
                        # A failing contender must not invalidate the measurements of the others.
                        text = f"{setting}: {type(failure).__name__}: {str(failure)[:300]}"
                        found[way.name].failure = text
                    print(f"  {model.name}: {way.name}, {setting}: ready", flush=True)
    with gpu_lock.turn():
        _check(calls, error(function(*inputs), exact), exact, found)
        timed = {key: batches(call, variants.synchronize) for key, call in calls.items()}
        for (name, setting), values in measure.alternate(timed, rounds).items():
            found[name].times[setting] = values
    return found


def _check(
    calls: dict[tuple[str, str], Callable[[], Any]],
    eager: float,
    exact: Sequence[torch.Tensor],
    found: Mapping[str, Measured],
) -> None:
    """Remove the contenders with wrong results from `calls`.

    Args:
        calls: by contender and setting.
        eager: the error of eager mode.
        exact: the reference.
        found: where errors are stored.
    """
    for (name, setting), call in list(calls.items()):
        value = call()
        # The replay of a captured call returns nothing, but runs the same kernels.
        if value is None:
            continue
        deviation = error(value, exact)
        if deviation <= max(WORSE * eager, ROUNDING):
            found[name].error = max(found[name].error or 0.0, deviation)
        else:
            found[name].failure = f"{setting}: wrong: error {deviation:.1e}, eager {eager:.1e}"
            del calls[name, setting]


def _in_float32(model: Model, device: str) -> tuple[torch.Tensor, ...]:
    module, inputs = model.make(device, torch.float32)
    result = module(*inputs)
    return result if isinstance(result, tuple) else (result,)


def _prepare(
    way: Contender,
    setting: str,
    function: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    measured: Measured,
) -> Callable[[], Any]:
    graphs = setting == "graphs"
    if way.backend is None:
        call = variants.compile_and_call(way, function, inputs).call
        return _captured(call) if graphs else call
    options: Mapping[str, Any] = {"triton.cudagraphs": True} if graphs else {}
    compiled = variants.compile_and_call(way, function, inputs, options)
    # Inductor with TMA finds in the caches what Inductor without TMA has compiled.
    if measured.compile is None and way.name != "stock-max-tma":
        measured.compile = compiled.seconds
    return compiled.call


def _captured(call: Callable[[], Any]) -> Callable[[], None]:
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


def rows(
    model: str, found: Mapping[str, Measured], bound: float | None = None
) -> list[results.Row]:
    """Return the measurements of a model as result rows.

    Args:
        model: name of the model.
        found: see `measure_model`.
        bound: lower bound in milliseconds for any implementation.
    """
    made: list[results.Row] = []
    stocks = [way for way in variants.CONTENDERS.values() if way.name in found and way.is_stock]
    shared = [key for key in ("ours", "eager") if key in found]

    for way in stocks:
        names = (*shared, way.name)
        notes = "; ".join(f"{name}: {found[name].failure}" for name in names if found[name].failure)
        for setting in SETTINGS:
            samples = {
                name: measure.summarize(found[name].times[setting])
                for name in names
                if setting in found[name].times
            }
            if samples:
                made.append(
                    variants.row(
                        model,
                        f"{setting}, {way.title}",
                        "ms",
                        {name: sample.median * 1e3 for name, sample in samples.items()},
                        way.name,
                        floor=bound,
                        spread=max(sample.spread for sample in samples.values()),
                        note=notes or None,
                    )
                )
        for metric, unit in (("compile", "s"), ("error", "1")):
            values = {name: getattr(found[name], metric) for name in names}
            if values[way.name] is not None:
                made.append(variants.row(model, f"{metric}, {way.title}", unit, values, way.name))
    return made


def _lines(found: Mapping[str, Measured]) -> str:
    lines = []
    for name, item in found.items():
        shown = ", ".join(
            f"{setting} {measure.summarize(values).median * 1e3:.3f} ms"
            for setting, values in item.times.items()
        )
        seconds = f", {item.compile:.1f} s" if item.compile is not None else ""
        deviation = f", error {item.error:.1e}" if item.error is not None else ""
        failure = f", {item.failure}" if item.failure else ""
        lines.append(f"  {name}: {shown}{seconds}{deviation}{failure}")
    return "\n".join(lines)


class _Bench:
    """Measures models one after the other.

    Args:
        names: names of the contenders.
        rounds: see `measure_model`.
        seconds: whether compile times are part of the results.
        freezing: whether weights are constants; the model's name in the results then says so.
    """

    def __init__(
        self, names: Sequence[str], rounds: int, seconds: bool = True, freezing: bool = False
    ) -> None:
        self.ways = variants.chosen(names)
        self.rounds, self.seconds, self.freezing = rounds, seconds, freezing
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        variants.start_workers(self.ways, self.device)

    @torch.no_grad()
    def __call__(self, name: str) -> resumable.Outcome:
        """Measure a model."""
        model = gemm_models.MODELS[name]
        # Dynamo also reads the option, before the options of the compile are applied.
        with inductor_config.patch(freezing=self.freezing):
            found = measure_model(model, self.ways, self.device, self.rounds)
        if not self.seconds:
            for value in found.values():
                value.compile = None
        torch._dynamo.reset()
        if self.device == "cuda":
            torch.cuda.empty_cache()
        return resumable.Outcome(
            rows(name + ", frozen" * self.freezing, found, floor(model, self.device)),
            f"{name}:\n{_lines(found)}",
            failed=any(value.failure for value in found.values()),
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. The exit code is 1 if a contender failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--models", nargs="+", choices=list(gemm_models.MODELS), default=list(gemm_models.MODELS)
    )
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=list(variants.CONTENDERS),
        default=variants.USUAL,
        metavar="NAME",
        help=f"some of {', '.join(variants.CONTENDERS)}; by default all but the last",
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="measurements of each")
    parser.add_argument(
        "--freezing", action="store_true", help="weights are constants, in eager mode excepted"
    )
    resumable.add_arguments(parser)
    options = parser.parse_args(arguments)
    start = time.monotonic()
    header = results.collect_header("e2e", results.command_line(), commit=options.commit)
    ledger = resumable.Ledger(header, options.json_out, options.resume)
    todo = [name for name in options.models if name not in ledger.done]
    make = functools.partial(_Bench, options.contenders, options.rounds, freezing=options.freezing)
    outcomes = gpu_lock.outcomes(todo, make, options.processes, options.budget_seconds)
    _, failed = ledger.take(outcomes)
    print(f"{len(ledger.done)} models in {time.monotonic() - start:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
