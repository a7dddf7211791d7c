"""Peak memory and time of a call on a GPU: Inductor's memory planning modes and the extension's.

The models are those of `memory.models`. Memory is counted by the caching allocator: the maximum of
allocated bytes during a call, above the level before. Time is that of a whole call, with the modes
in alternation.

    python -m benchmarks.memory.gpu [--models NAME ...] [--training] [--json-out DIR]
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._dynamo
from torch._inductor import config as inductor_config

import inductor_ext
from benchmarks.harness import measure, results, variants
from benchmarks.memory import models as memory_models
from benchmarks.memory.peak import MIB, MODES, Mode
from inductor_ext import events, settings
from inductor_ext.memory.records import MemoryPlanRecord

__all__ = ["measure_model"]

MODE_NAMES = ("default", "pools", "no reuse", "ours", "arenas")

DEFAULT_MODELS = ("bert", "llama", "t5", "vit", "unet", "mixer", "densenet", "ragged_mlp")

ROUNDS = 30

_EXTENSION_SETTINGS = frozenset(settings.names())


@contextlib.contextmanager
def _configure(mode: Mode) -> Iterator[list[MemoryPlanRecord]]:
    options = dict(mode.options)
    extension_options = {
        key: options.pop(key) for key in list(options) if key in _EXTENSION_SETTINGS
    }
    with (
        inductor_config.patch({"fx_graph_cache": False, **options}),
        inductor_ext.config.patch(extension_options),
        events.capture(MemoryPlanRecord) as records,
    ):
        yield records


def measure_model(name: str, training: bool) -> list[results.Row]:
    """Measure one model, for inference or for a training step.

    Args:
        name: name of an entry of `memory.models.MODELS`.
        training: whether to run forward and backward.
    """
    case = f"{name}, {'training step' if training else 'inference'}"
    peaks: dict[str, int] = {}
    calls: dict[str, Callable[[], Any]] = {}
    plans: list[MemoryPlanRecord] = []
    for mode in MODE_NAMES:
        if training and mode == "pools":
            continue
        module, inputs = memory_models.MODELS[name].make()
        module = module.cuda().train(training)
        cuda_inputs = tuple(value.cuda() for value in inputs)
        torch._dynamo.reset()
        with _configure(MODES[mode]) as records, torch.set_grad_enabled(training):
            run = torch.compile(module, backend=MODES[mode].backend or "eager")

            def call(run: Any = run, args: Any = cuda_inputs, module: Any = module) -> None:
                with torch.set_grad_enabled(training):
                    output = run(*args)
                    if training:
                        first = output if isinstance(output, torch.Tensor) else output[0]
                        first.float().square().mean().backward()
                        module.zero_grad(set_to_none=True)

            try:
                call()
            except Exception as error:
                print(f"{case}, {mode}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                continue
        if mode == "ours":
            plans = records
        call()
        torch.cuda.empty_cache()
        peaks[mode] = measure.measure_gpu_peak(call)
        calls[mode] = call
    timers = {mode: variants.make_timer(call) for mode, call in calls.items()}
    times = measure.alternate(timers, ROUNDS)
    samples = {mode: measure.summarize(values) for mode, values in times.items()}
    text = ", ".join(f"{mode} {peak / MIB:.3f}" for mode, peak in peaks.items())
    print(f"{case}: {text} MiB", flush=True)

    def make_row(metric: str, unit: str, mode: str, other: str, note: str) -> results.Row | None:
        if mode not in peaks or other not in peaks:
            return None
        if unit == "MiB":
            own, stock, floor = (peaks[key] / MIB for key in (mode, other, "no reuse"))
            spread = None
        else:
            own, stock = (samples[key].median * 1e3 for key in (mode, other))
            floor, spread = None, max(samples[key].spread for key in (mode, other))
        return results.make_row(
            case, metric, unit, ours=own, stock=stock, floor=floor, spread=spread, note=note
        )

    plan_notes = "; ".join(
        f"{p.kind}: {p.strategy}, {p.calls_before} to {p.calls} calls" for p in plans
    )
    rows = [
        make_row("peak", "MiB", "ours", "default", f"floor: stock without reuse; {plan_notes}"),
        make_row("peak, pools", "MiB", "arenas", "pools", "ours: memory_arenas=always"),
        make_row("call", "ms", "ours", "default", "wall time"),
    ]
    return [row for row in rows if row is not None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--models", nargs="+", choices=sorted(memory_models.MODELS), default=DEFAULT_MODELS
    )
    parser.add_argument("--training", action="store_true", help="training steps as well")
    parser.add_argument("--json-out", metavar="DIR", help="folder of the result")
    options = parser.parse_args(arguments)
    header = results.collect_header("memory-gpu", results.format_command())
    rows: list[results.Row] = []
    for name in options.models:
        for training in (False, True)[: 1 + options.training]:
            rows += measure_model(name, training)
    document: results.Document = {**header, "rows": rows}
    print(f"\n{results.render_table(document)}")
    if options.json_out:
        print(f"Written: {results.write(options.json_out, document)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
