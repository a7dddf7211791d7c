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
from benchmarks.memory.peak import WAYS
from inductor_ext import events
from inductor_ext.memory.records import MemoryPlanRecord

__all__ = ["GRAPHS", "main", "measure_graph"]

ROWS = 24

GRAPHS: dict[str, tuple[int, ...]] = {"one width": (24,), "four widths": (19, 23, 29, 31)}
"""N of the matmuls, in turn."""

CALLS = 100
"""Number of calls that one sample averages."""

PER_BUFFER = "difference to stock without reuse, divided by the buffers"


def chain(steps: int, x: Any, *weights: Any) -> Any:
    """Compute `steps` matmuls with the weights in turn; return the last result."""
    import torch

    found = [x]
    for step in range(steps):
        weight = weights[step % len(weights)]
        earlier = found[step - 3] if step >= 3 else None
        # The result of four steps earlier has the same width as this one.
        if earlier is not None and earlier.shape[1] == weight.shape[1]:
            found.append(torch.addmm(earlier, found[-1], weight))
        else:
            found.append(found[-1] @ weight)
    return found[-1]


def measure_graph(widths: Sequence[int], steps: int, rounds: int) -> dict[str, Any]:
    """Measure the microseconds of one call by mode, and collect the plans of the extension.

    Args:
        widths: N of the matmuls, in turn.
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
    x = make(ROWS, widths[-1]) / ROWS
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
    for name, way in WAYS.items():
        if way.backend is None:
            continue
        torch._dynamo.reset()
        # A separate function per mode; otherwise dynamo would reuse the code of the first mode.
        function = functools.partial(chain, steps)
        compiled = torch.compile(
            lambda *inputs, function=function: function(*inputs),
            backend=way.backend,
            options=dict(way.options),
            fullgraph=True,
        )
        with torch.no_grad(), uncached[0], uncached[1], events.capture() as records:
            found = compiled(x, *weights)
        torch.testing.assert_close(found, function(x, *weights))
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
    samples = {name: measure.summarize(found) for name, found in values.items()}
    return {"samples": samples, "plans": plans}


def table_rows(case: str, steps: int, found: dict[str, Any]) -> list[results.Row]:
    """Return the result rows of one graph."""
    samples, plans = found["samples"], found["plans"]
    rows: list[results.Row] = []
    for metric, ours, stock in (("call", "ours", "default"), ("call, pools", "arenas", "pools")):
        plan = plans[ours]
        storages = sum(storage.arena is not None for storage in plan.storages)
        note = f"{storages} of {len(plan.storages)} storages in {len(plan.arenas)} arenas"
        spread = max(samples[name].spread for name in (ours, stock, "no reuse"))
        plain = samples["no reuse"].median
        row: results.Row = {
            "case": case,
            "metric": metric,
            "unit": "us",
            "better": "lower",
            "ours": samples[ours].median,
            "stock": samples[stock].median,
            "eager": None,
            "floor": None,
            "spread": spread,
            "note": f"{note}; stock without reuse: {plain:.1f} us",
        }
        rows.append(row)
        over = {name: (samples[name].median - plain) / steps for name in (ours, stock)}
        rows.append(
            {
                **row,
                "metric": f"{metric}, per buffer over a plain allocation",
                "ours": over[ours],
                # A ratio of two differences would be meaningless.
                "stock": None,
                "spread": None,
                "note": f"{PER_BUFFER}; that of stock's other way is {over[stock]:.2f} us",
            }
        )
    return rows


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=64, metavar="N", help="products in a chain")
    parser.add_argument("--rounds", type=int, default=41, metavar="N", help="samples of each way")
    parser.add_argument(
        "--json-out", metavar="DIR", help="keep the table as a result in this folder"
    )
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.rounds < 1:
        parser.error("--steps and --rounds must be at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    options = _parse(arguments)
    header = results.collect_header(
        "memory-wrapper", results.command_line(), results.hardware_slug("cpu")
    )
    rows: list[results.Row] = []
    for case, widths in GRAPHS.items():
        found = measure_graph(widths, options.steps, options.rounds)
        rows += table_rows(f"{options.steps} products, {case}", options.steps, found)
    document: results.Document = {**header, "rows": rows}
    print(results.render_table(document))
    if options.json_out:
        print(f"Written: {results.write(options.json_out, document)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
