"""Peak memory and time of a call on a GPU: Inductor's memory planning modes and the extension's.

The models are those of `memory.models`. Memory is counted by the caching allocator: the maximum of
allocated bytes during a call, above the level before. Time is that of a whole call, with contenders
in alternation.

    python -m benchmarks.memory.gpu [--models NAME ...] [--training] [--json-out DIR]
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._dynamo
from torch._inductor import config as inductor_config

import inductor_ext
from benchmarks.harness import measure, results
from benchmarks.memory import models as memory_models
from benchmarks.memory.peak import MIB, WAYS, Way
from inductor_ext import events, settings
from inductor_ext.memory.records import MemoryPlanRecord

__all__ = ["measure_model"]

SHOWN = ("default", "pools", "no reuse", "ours", "arenas")

MODELS = ("bert", "llama", "t5", "vit", "unet", "mixer", "densenet", "ragged_mlp")

ROUNDS = 30

_OWN = frozenset(settings.names())


@contextlib.contextmanager
def _configured(way: Way) -> Iterator[list[MemoryPlanRecord]]:
    options = dict(way.options)
    own = {key: options.pop(key) for key in list(options) if key in _OWN}
    with (
        inductor_config.patch({"fx_graph_cache": False, **options}),
        inductor_ext.config.patch(own),
        events.capture(MemoryPlanRecord) as records,
    ):
        yield records


def _peak(call: Callable[[], Any]) -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _timed(call: Callable[[], Any]) -> Callable[[], float]:
    def once() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    return once


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
    for way in SHOWN:
        if training and way == "pools":
            continue
        module, inputs = memory_models.MODELS[name].make()
        module = module.cuda().train(training)
        cuda = tuple(value.cuda() for value in inputs)
        torch._dynamo.reset()
        with _configured(WAYS[way]) as records, torch.set_grad_enabled(training):
            run = torch.compile(module, backend=WAYS[way].backend or "eager")

            def call(run: Any = run, cuda: Any = cuda, module: Any = module) -> None:
                with torch.set_grad_enabled(training):
                    output = run(*cuda)
                    if training:
                        first = output if isinstance(output, torch.Tensor) else output[0]
                        first.float().square().mean().backward()
                        module.zero_grad(set_to_none=True)

            try:
                call()
            except Exception as error:
                print(f"{case}, {way}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                continue
        if way == "ours":
            plans = records
        call()
        peaks[way] = _peak(call)
        calls[way] = call
    times = measure.alternate({way: _timed(call) for way, call in calls.items()}, ROUNDS)
    samples = {way: measure.summarize(values) for way, values in times.items()}
    shown = ", ".join(f"{way} {peak / MIB:.3f}" for way, peak in peaks.items())
    print(f"{case}: {shown} MiB", flush=True)

    def row(metric: str, unit: str, way: str, stock: str, note: str) -> results.Row | None:
        if way not in peaks or stock not in peaks:
            return None
        if unit == "MiB":
            ours, theirs, floor = (peaks[key] / MIB for key in (way, stock, "no reuse"))
            spread = None
        else:
            ours, theirs = samples[way].median * 1e3, samples[stock].median * 1e3
            floor, spread = None, max(samples[way].spread, samples[stock].spread)
        return results.Row(
            case=case,
            metric=metric,
            unit=unit,
            better="lower",
            ours=ours,
            stock=theirs,
            eager=None,
            floor=floor,
            spread=spread,
            note=note,
        )

    planned = "; ".join(
        f"{p.kind}: {p.strategy}, {p.calls_before} to {p.calls} calls" for p in plans
    )
    rows = [
        row("peak", "MiB", "ours", "default", f"floor: stock without reuse; {planned}"),
        row("peak, pools", "MiB", "arenas", "pools", "ours: memory_arenas=always"),
        row("call", "ms", "ours", "default", "wall time"),
    ]
    return [found for found in rows if found is not None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--models", nargs="+", choices=sorted(memory_models.MODELS), default=MODELS)
    parser.add_argument("--training", action="store_true", help="training steps as well")
    parser.add_argument("--json-out", metavar="DIR", help="keep the table as a result")
    options = parser.parse_args(arguments)
    header = results.collect_header("memory-gpu", results.command_line())
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
