"""CPU time per buffer in the generated Python wrapper: a view of an arena against an allocation.

The graph is a chain of matmuls so small that their kernels hardly count, each with the result of
four steps earlier added. In `one width` all buffers have the same size, so that Inductor's reuse
applies; in `four widths` no buffer can reuse the previous one. All modes run the same kernels with
the same guards, so that differences between them are the cost of memory management. Times are CPU
time of the one thread that runs.

    python -m benchmarks.memory.wrapper [--steps N] [--rounds N] [--json-out DIR]
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.harness import measure, results
from benchmarks.memory.peak import MODES
from inductor_ext import events
from inductor_ext.memory.records import MemoryPlanRecord

__all__ = ["GRAPHS", "main", "measure_graph"]

M = 24

GRAPHS: dict[str, tuple[int, ...]] = {"one width": (24,), "four widths": (19, 23, 29, 31)}
"""N of the matmuls, repeated in this order."""

CALLS = 100
"""Number of calls that one sample averages."""

PER_BUFFER = "difference to Inductor without reuse, divided by the buffers"


def compute_chain(steps: int, x: Any, *weights: Any) -> Any:
    """Compute `steps` matmuls, repeating the weights in order; return the last result."""
    import torch

    outputs = [x]
    for step in range(steps):
        weight = weights[step % len(weights)]
        earlier = outputs[step - 3] if step >= 3 else None
        # The result of four steps earlier has the same width as this one.
        if earlier is not None and earlier.shape[1] == weight.shape[1]:
            outputs.append(torch.addmm(earlier, outputs[-1], weight))
        else:
            outputs.append(outputs[-1] @ weight)
    return outputs[-1]


def measure_graph(widths: Sequence[int], steps: int, rounds: int) -> dict[str, Any]:
    """Measure the microseconds of one call by mode, and collect the plans of the extension.

    Args:
        widths: N of the matmuls, repeated in this order.
        steps: matmuls in the chain.
        rounds: samples per mode, taken in alternation.

    Returns:
        `samples`: mode -> `measure.Sample` in microseconds; `plans`: mode -> MemoryPlanRecord.
    """
    import torch
    import torch._functorch.config
    import torch._inductor.config

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    make = functools.partial(torch.randn, generator=generator)
    x = make(M, widths[-1]) / M
    weights = [
        make(before, after) / before
        for before, after in zip((widths[-1], *widths), widths, strict=False)
    ]
    calls: dict[str, Callable[[], Any]] = {}
    plans: dict[str, MemoryPlanRecord] = {}
    uncached = (
        torch._functorch.config.patch(enable_autograd_cache=False),
        torch._inductor.config.patch(fx_graph_cache=False),
    )
    for name, mode in MODES.items():
        if mode.backend is None:
            continue
        torch._dynamo.reset()
        # A separate function per mode; otherwise dynamo would reuse the code of the first mode.
        function = functools.partial(compute_chain, steps)
        compiled = torch.compile(
            lambda *inputs, function=function: function(*inputs),
            backend=mode.backend,
            options=dict(mode.options),
            fullgraph=True,
        )
        with torch.no_grad(), uncached[0], uncached[1], events.capture() as records:
            output = compiled(x, *weights)
        torch.testing.assert_close(output, function(x, *weights))
        for record in records:
            if isinstance(record, MemoryPlanRecord):
                plans[name] = record
        calls[name] = functools.partial(compiled, x, *weights)

    def sample(call: Callable[[], Any]) -> float:
        with torch.no_grad():
            start = time.thread_time()
            for _ in range(CALLS):
                call()
            return (time.thread_time() - start) / CALLS * 1e6

    timers = {name: functools.partial(sample, call) for name, call in calls.items()}
    for timer in timers.values():
        timer()
    values = measure.alternate(timers, rounds)
    samples = {name: measure.summarize(sequence) for name, sequence in values.items()}
    return {"samples": samples, "plans": plans}


def make_rows(case: str, steps: int, measurements: dict[str, Any]) -> list[results.Row]:
    """Return the result rows of one graph.

    Args:
        case: the name of the graph.
        steps: matmuls in the chain.
        measurements: see `measure_graph`.
    """
    samples, plans = measurements["samples"], measurements["plans"]
    rows: list[results.Row] = []
    for metric, mode, other in (("call", "ours", "default"), ("call, pools", "arenas", "pools")):
        plan = plans[mode]
        storages = sum(storage.arena is not None for storage in plan.storages)
        note = f"{storages} of {len(plan.storages)} storages in {len(plan.arenas)} arenas"
        spread = max(samples[name].spread for name in (mode, other, "no reuse"))
        plain = samples["no reuse"].median
        rows.append(
            results.make_row(
                case,
                metric,
                "us",
                ours=samples[mode].median,
                stock=samples[other].median,
                spread=spread,
                note=f"{note}; stock without reuse: {plain:.1f} us",
            )
        )
        extra = {name: (samples[name].median - plain) / steps for name in (mode, other)}
        rows.append(
            results.make_row(
                case,
                f"{metric}, per buffer over a plain allocation",
                "us",
                # Without `stock`: a ratio of two differences would be meaningless.
                ours=extra[mode],
                note=f"{PER_BUFFER}; with Inductor's {other!r} mode it is {extra[other]:.2f} us",
            )
        )
    return rows


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=64, metavar="N", help="matmuls in the chain")
    parser.add_argument("--rounds", type=int, default=41, metavar="N", help="samples per mode")
    parser.add_argument("--json-out", metavar="DIR", help="folder of the result")
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.rounds < 1:
        parser.error("--steps and --rounds must be at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    options = _parse(arguments)
    header = results.collect_header(
        "memory-wrapper", results.format_command(), results.name_hardware("cpu")
    )
    rows: list[results.Row] = []
    for case, widths in GRAPHS.items():
        measurements = measure_graph(widths, options.steps, options.rounds)
        rows += make_rows(f"{options.steps} products, {case}", options.steps, measurements)
    document: results.Document = {**header, "rows": rows}
    print(results.render_table(document))
    if options.json_out:
        print(f"Written: {results.write(options.json_out, document)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
