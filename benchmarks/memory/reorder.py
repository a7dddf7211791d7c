"""How much the extension's kernel order lowers the peak memory of the `memory.models`.

Every graph (inference, and the forward and backward of a training step) is scheduled by Inductor.
The peaks in Inductor's order and in the extension's order are those of the schedule, before buffers
are reused, counted as in the generated code (see `inductor_ext.memory.reorder_kernels`). The floor
is a lower bound over all orders. The search's CPU time is compared with that of the whole compile.
C++ kernels are replaced by empty ones and not compiled, since only the order matters.

    python -m benchmarks.memory.reorder [--models NAME ...] [--json-out DIR]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.harness import results
from benchmarks.memory import models as memory_models
from inductor_ext.memory import reorder_kernels

__all__ = ["Graph", "rows", "schedule"]

MIB = 2**20

Graph = tuple[str, reorder_kernels.Reordering, float]
"""Kind of graph, result of the reordering, CPU seconds of the model's whole compile."""


@contextmanager
def _noted() -> Iterator[list[reorder_kernels.Reordering]]:
    """Collect the reorderings of all graphs compiled inside, with kernels that do nothing."""
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.virtualized import V

    found: list[reorder_kernels.Reordering] = []
    improve = reorder_kernels.improve

    def note(*args: Any) -> Any:
        order = improve(*args)
        outcome = reorder_kernels.reordering(V.graph)
        if outcome is not None:
            found.append(outcome)
        return order

    with (
        mock.patch.object(reorder_kernels, "improve", note),
        mock.patch.object(AsyncCompile, "cpp_pybinding", return_value=lambda *_tensors: None),
        config.patch(force_disable_caches=True, size_asserts=False),
    ):
        yield found


def schedule(name: str) -> list[Graph]:
    """Compile a model's graphs; with graph breaks, several graphs of one kind are numbered."""
    import torch

    model = memory_models.MODELS[name]
    module, inputs = model.make()
    graphs: list[Graph] = []

    def add(kind: str, found: Sequence[reorder_kernels.Reordering], start: float) -> None:
        seconds = time.process_time() - start
        for number, outcome in enumerate(found):
            graphs.append((kind if number == 0 else f"{kind} {number}", outcome, seconds))

    torch._dynamo.reset()
    with _noted() as found, torch.no_grad():
        start = time.process_time()
        torch.compile(module, backend="inductor_ext")(*inputs)
    add("inference", found, start)
    if not model.training:
        return graphs
    torch._dynamo.reset()
    with _noted() as found:
        start = time.process_time()
        output = torch.compile(module.train(), backend="inductor_ext")(*inputs)
    add("forward", found, start)
    with _noted() as found:
        start = time.process_time()
        leaves = torch.utils._pytree.tree_leaves(output)
        sum(leaf.sum() for leaf in leaves if leaf.requires_grad).backward()
    add("backward", found, start)
    return graphs


def rows(name: str, graphs: Sequence[Graph]) -> list[results.Row]:
    """Return, for one model, the peak of every graph, and the CPU time of search and compile."""
    table: list[results.Row] = []
    for kind, outcome, _ in graphs:
        if not outcome.peak_before:
            continue  # not reordered
        table.append(
            {
                "case": f"{name}, {kind}",
                "metric": "peak of the schedule",
                "unit": "MiB",
                "better": "lower",
                "ours": outcome.peak / MIB,
                "stock": outcome.peak_before / MIB,
                "eager": None,
                "floor": outcome.lower_bound / MIB,
                "spread": None,
                "note": f"{outcome.steps} steps" + (f"; {outcome.why}" if outcome.why else ""),
            }
        )
    table.append(
        {
            "case": name,
            "metric": "CPU time of ordering, of all its graphs",
            "unit": "s",
            "better": "lower",
            "ours": sum(outcome.seconds for _, outcome, _ in graphs),
            "stock": None,
            "eager": None,
            "floor": None,
            "spread": None,
            "note": f"of {_compile_seconds(graphs):.1f} s of compiling without C++ kernels",
        }
    )
    return table


def _compile_seconds(graphs: Sequence[Graph]) -> float:
    return sum({kind.split()[0]: seconds for kind, _, seconds in graphs}.values())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = sorted(memory_models.MODELS)
    parser.add_argument("--models", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--json-out", type=Path, metavar="DIR")
    args = parser.parse_args(argv)
    header = results.collect_header(
        "kernel-order", results.command_line(), results.hardware_slug("cpu")
    )
    table: list[results.Row] = []
    ratios: list[float] = []
    failed = 0
    for name in args.models:
        try:
            graphs = schedule(name)
        except Exception as error:  # some models cannot run on data that no kernel computed
            print(f"{name}: {type(error).__name__}: {error}")
            failed += 1
            continue
        for kind, outcome, _ in graphs:
            if outcome.peak_before:
                ratios.append(outcome.peak / outcome.peak_before)
            print(f"{name}, {kind}: {outcome}", flush=True)
        table += rows(name, graphs)
    document: results.Document = {**header, "rows": table}
    print(results.render_table(document))
    print(f"geometric mean of ours / stock: {statistics.geometric_mean(ratios):.4f}")
    if args.json_out is not None:
        results.write(args.json_out, document)
    return int(failed == len(args.models))


if __name__ == "__main__":
    sys.exit(main())
