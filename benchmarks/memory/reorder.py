"""How much the extension's kernel order lowers the peak memory of the `memory.models`.

Every graph (inference, and the forward and backward of a training step) is scheduled by Inductor.
The peaks in Inductor's order and in the extension's order are those of the schedule, before buffers
are reused, counted as in the generated code (see `inductor_ext.memory.reorder_kernels`). The lower
bound is over all orders. The search's CPU time is compared with that of the whole compile.
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

__all__ = ["Graph", "compile_graphs", "make_rows"]

MIB = 2**20

Graph = tuple[str, reorder_kernels.Reordering, float]
"""Kind of graph, result of the reordering, CPU seconds of the model's whole compile."""


@contextmanager
def _record_reorderings() -> Iterator[list[reorder_kernels.Reordering]]:
    """Collect the reorderings of all graphs compiled inside, with kernels that do nothing."""
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.virtualized import V

    reorderings: list[reorder_kernels.Reordering] = []
    improve = reorder_kernels.improve

    def improve_and_record(*args: Any) -> Any:
        order = improve(*args)
        reordering = reorder_kernels.reordering(V.graph)
        if reordering is not None:
            reorderings.append(reordering)
        return order

    with (
        mock.patch.object(reorder_kernels, "improve", improve_and_record),
        mock.patch.object(AsyncCompile, "cpp_pybinding", return_value=lambda *_tensors: None),
        config.patch(force_disable_caches=True, size_asserts=False),
    ):
        yield reorderings


def compile_graphs(name: str) -> list[Graph]:
    """Compile a model's graphs; with graph breaks, several graphs of one kind are numbered."""
    import torch

    model = memory_models.MODELS[name]
    module, inputs = model.make()
    graphs: list[Graph] = []

    def add(kind: str, reorderings: Sequence[reorder_kernels.Reordering], start: float) -> None:
        seconds = time.process_time() - start
        for number, reordering in enumerate(reorderings):
            graphs.append((kind if number == 0 else f"{kind} {number}", reordering, seconds))

    torch._dynamo.reset()
    with _record_reorderings() as reorderings, torch.no_grad():
        start = time.process_time()
        torch.compile(module, backend="inductor_ext")(*inputs)
    add("inference", reorderings, start)
    if not model.training:
        return graphs
    torch._dynamo.reset()
    with _record_reorderings() as reorderings:
        start = time.process_time()
        output = torch.compile(module.train(), backend="inductor_ext")(*inputs)
    add("forward", reorderings, start)
    with _record_reorderings() as reorderings:
        start = time.process_time()
        leaves = torch.utils._pytree.tree_leaves(output)
        sum(leaf.sum() for leaf in leaves if leaf.requires_grad).backward()
    add("backward", reorderings, start)
    return graphs


def make_rows(name: str, graphs: Sequence[Graph]) -> list[results.Row]:
    """Return, for one model, the peak of every graph, and the CPU time of search and compile."""
    table: list[results.Row] = []
    for kind, reordering, _ in graphs:
        if not reordering.peak_before:
            continue  # not reordered
        reason = f"; {reordering.why}" if reordering.why else ""
        table.append(
            results.make_row(
                f"{name}, {kind}",
                "peak of the schedule",
                "MiB",
                ours=reordering.peak / MIB,
                stock=reordering.peak_before / MIB,
                floor=reordering.lower_bound / MIB,
                note=f"{reordering.steps} steps{reason}",
            )
        )
    table.append(
        results.make_row(
            name,
            "CPU time of ordering, of all its graphs",
            "s",
            ours=sum(reordering.seconds for _, reordering, _ in graphs),
            note=f"of {_sum_compile_seconds(graphs):.1f} s of compiling without C++ kernels",
        )
    )
    return table


def _sum_compile_seconds(graphs: Sequence[Graph]) -> float:
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
        "kernel-order", results.format_command(), results.name_hardware("cpu")
    )
    table: list[results.Row] = []
    ratios: list[float] = []
    failed = 0
    for name in args.models:
        try:
            graphs = compile_graphs(name)
        except Exception as error:  # some models cannot run on data that no kernel computed
            print(f"{name}: {type(error).__name__}: {error}")
            failed += 1
            continue
        for kind, reordering, _ in graphs:
            if reordering.peak_before:
                ratios.append(reordering.peak / reordering.peak_before)
            print(f"{name}, {kind}: {reordering}", flush=True)
        table += make_rows(name, graphs)
    document: results.Document = {**header, "rows": table}
    print(results.render_table(document))
    print(
        f"geometric mean of extension / Inductor (default): {statistics.geometric_mean(ratios):.4f}"
    )
    if args.json_out is not None:
        results.write(args.json_out, document)
    return int(failed == len(args.models))


if __name__ == "__main__":
    sys.exit(main())
