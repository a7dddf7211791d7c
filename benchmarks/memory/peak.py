"""Peak memory of the models in `memory.models`, from allocator events, compared with the plans.

Every graph (inference, and the forward and backward of a training step) is compiled in five modes:
Inductor's default reuse, Inductor's pools, Inductor without reuse, the extension, and the extension
with every possible buffer in an arena. Without reuse every buffer is freed after its last use, so
that peak is the one of the schedule; a planning mode can at best reach it, unless it changes the
order of kernels.

Memory is counted in bytes handed out by the CPU allocator, every allocation rounded up to 64, above
the level before the call. For a backward, that is the level before its forward: saved tensors
count.

    python -m benchmarks.memory.peak [--quick] [--models NAME ...] [--jobs N] [--json-out DIR]
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from benchmarks.harness import measure, results
from benchmarks.memory import models as memory_models
from inductor_ext import events
from inductor_ext.memory.records import MemoryPlanRecord

__all__ = ["WAYS", "Graph", "Way", "measure_model", "table_rows"]

MIB = 2**20

GRANULE = 64
"""Alignment of the CPU allocator in bytes."""


@dataclasses.dataclass(frozen=True)
class Way:
    """One mode of sharing memory between buffers."""

    backend: str | None
    """None for eager mode."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


WAYS = {
    "eager": Way(None),
    "default": Way("inductor"),
    "pools": Way("inductor", {"memory_planning": True, "memory_pool": "intermediates"}),
    "no reuse": Way("inductor", {"allow_buffer_reuse": False}),
    "ours": Way("inductor_ext"),
    "arenas": Way("inductor_ext", {"memory_arenas": "always"}),
}
"""By name; Inductor's modes have the backend "inductor"."""

STOCK = tuple(name for name, way in WAYS.items() if way.backend == "inductor")


@dataclasses.dataclass(frozen=True)
class Plan:
    """The data of a plan's record, without its storages."""

    peak: int
    lower_bound: int
    peak_before: int
    reordered_from: int | None
    calls: int
    calls_before: int
    storages: int
    arenas: tuple[tuple[int, int], ...]
    """(bytes, lower bound) of every arena."""
    strategy: str
    seconds: float

    @classmethod
    def of(cls, record: MemoryPlanRecord) -> Plan:
        """Convert a record."""
        return cls(
            peak=record.peak,
            lower_bound=record.lower_bound,
            peak_before=record.peak_before,
            reordered_from=record.peak_reordered_from,
            calls=record.calls,
            calls_before=record.calls_before,
            storages=len(record.storages),
            arenas=tuple((arena.bytes, arena.lower_bound) for arena in record.arenas),
            strategy=record.strategy,
            seconds=record.seconds,
        )


@dataclasses.dataclass
class Graph:
    """Measurements of one graph of one model, for every mode."""

    model: str
    kind: str
    """"inference", "forward" or "backward"."""
    peaks: dict[str, int] = dataclasses.field(default_factory=dict)
    """Bytes by mode."""
    plans: dict[str, Plan] = dataclasses.field(default_factory=dict)
    """By mode of the extension."""
    planning: dict[str, float] = dataclasses.field(default_factory=dict)
    """CPU seconds of Inductor's memory planning passes, by mode."""
    failures: dict[str, str] = dataclasses.field(default_factory=dict)
    """By mode: the error, or how far the values are off."""

    @property
    def case(self) -> str:
        """The name of the graph in tables."""
        return f"{self.model} {self.kind}"


def allocator_changes(call: Callable[[], object]) -> list[int]:
    """Return allocations (positive) and frees (negative) of `call` in the CPU allocator, in order.

    Bytes, rounded up to `GRANULE`.
    """
    return [
        (1 if change > 0 else -1) * (-(-abs(change) // GRANULE) * GRANULE)
        for change in measure.allocated(call)
    ]


def _step(module: Any, training: bool) -> Callable[..., Any]:
    """Return the function to compile: the call, or the call with a loss."""

    def inference(*inputs: Any) -> Any:
        return module(*inputs)

    def loss(*inputs: Any) -> Any:
        outputs = module(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return sum(output.square().mean() for output in outputs)

    return loss if training else inference


@contextmanager
def _timed_passes(found: list[float]) -> Iterator[None]:
    """Append to `found` the CPU seconds of every run of Inductor's memory planning."""
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    def timed(method: Callable[[Any], None]) -> Callable[[Any], None]:
        def run(wrapper: Any) -> None:
            start = time.process_time()
            method(wrapper)
            found.append(time.process_time() - start)

        return run

    with ExitStack() as stack:
        for name in ("memory_plan", "memory_plan_reuse"):
            method = timed(getattr(PythonWrapperCodegen, name))
            stack.enter_context(mock.patch.object(PythonWrapperCodegen, name, method))
        yield


def _run_way(
    model: memory_models.Model, training: bool, way: Way
) -> tuple[dict[str, int], list[MemoryPlanRecord], list[float], list[Any]]:
    """Return peaks by graph kind, plans, seconds of Inductor's planning passes, and outputs."""
    import torch
    import torch._functorch.config
    import torch._inductor.config

    torch._dynamo.reset()
    module, inputs = model.make()
    module.train(training)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    call = _step(module, training)
    if way.backend is not None:
        call = torch.compile(call, backend=way.backend, options=dict(way.options), fullgraph=True)
    kept: list[Any] = []

    def forward() -> None:
        kept.append(call(*inputs))

    def backward() -> None:
        kept[-1].backward()

    def again() -> None:
        """Restore the state before the first call."""
        kept.clear()
        module.load_state_dict(state)
        for parameter in module.parameters():
            parameter.grad = None
        torch.manual_seed(0)

    passes: list[float] = []
    caches = (
        torch._functorch.config.patch(enable_autograd_cache=False),
        # A graph loaded from the cache is not planned.
        torch._inductor.config.patch(fx_graph_cache=False),
    )
    with ExitStack() as stack:
        for context in (*caches, torch.set_grad_enabled(training)):
            stack.enter_context(context)
        with events.capture() as records, _timed_passes(passes):
            again()
            forward()
            if training:
                backward()
        again()
        changes = allocator_changes(forward)
        if not training:
            peaks = {"inference": measure.peak_of_changes(changes)}
        else:
            peaks = {"forward": measure.peak_of_changes(changes)}
            saved = sum(changes)
            peaks["backward"] = saved + measure.peak_of_changes(allocator_changes(backward))
    plans = [record for record in records if isinstance(record, MemoryPlanRecord)]
    values = [*kept, *(parameter.grad for parameter in module.parameters() if training)]
    return peaks, plans, passes, values


def _difference(values: object, expected: object) -> float:
    """Return the largest difference of corresponding tensors, relative to the largest value."""
    import torch
    from torch.utils._pytree import tree_leaves

    worst = 0.0
    for value, right in zip(tree_leaves(values), tree_leaves(expected), strict=True):
        if isinstance(right, torch.Tensor) and right.numel():
            scale = right.detach().double().abs().max().clamp(min=1e-30)
            found = float((value - right).detach().double().abs().max() / scale)
            worst = max(worst, found if found == found else float("inf"))
    return worst


TOLERANCE = 1e-4
"""Relative to a tensor's largest value. All modes run the same kernels, but some kernels sum in an
order that depends on the threads."""


def measure_model(name: str, training: bool, ways: Sequence[str] = tuple(WAYS)) -> list[Graph]:
    """Compile and measure one model in all modes of `ways`.

    Args:
        name: name of an entry of `memory.models.MODELS`.
        training: whether to measure the training step instead of inference.
        ways: names of `WAYS`; values are compared with those of "no reuse".
    """
    model = memory_models.MODELS[name]
    if training:
        # Inductor ignores pools for training, which a test checks.
        ways = [way for way in ways if way != "pools"]
    kinds = ("forward", "backward") if training else ("inference",)
    graphs = {kind: Graph(name, kind) for kind in kinds}
    expected = None
    for way in sorted(ways, key=lambda way: way != "no reuse"):
        try:
            peaks, plans, passes, values = _run_way(model, training, WAYS[way])
        except Exception as error:
            line = f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"
            for graph in graphs.values():
                graph.failures[way] = line
            continue
        if way == "no reuse":
            expected = values
        elif way != "eager" and expected is not None:
            difference = _difference(values, expected)
            if not difference <= TOLERANCE:
                for graph in graphs.values():
                    graph.failures[way] = f"values are off by {difference:.1e}"
        for index, (kind, graph) in enumerate(graphs.items()):
            graph.peaks[way] = peaks[kind]
            if len(passes) == len(graphs):
                graph.planning[way] = passes[index]
            for record in plans:
                if record.kind == kind:
                    graph.plans[way] = Plan.of(record)
    return list(graphs.values())


def _alone(name: str, training: bool) -> list[Graph]:
    """Run `measure_model` in its own process, to isolate crashes and leaks."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(measure_model, name, training).result()


# --- the table ----------------------------------------------------------------------------------


def _row(
    case: str,
    metric: str,
    unit: str,
    ours: float | None,
    stock: float | None,
    *,
    eager: float | None = None,
    floor: float | None = None,
    note: str | None = None,
) -> results.Row:
    return {
        "case": case,
        "metric": metric,
        "unit": unit,
        "better": "lower",
        "ours": ours,
        "stock": stock,
        "eager": eager,
        "floor": floor,
        "spread": None,
        "note": note,
    }


def table_rows(graphs: Sequence[Graph]) -> list[results.Row]:
    """Return the rows of the results: a summary over all graphs, then every graph."""
    return [*_summary(graphs), *itertools.chain.from_iterable(map(_rows, graphs))]


def _rows(graph: Graph) -> Iterator[results.Row]:
    def mib(way: str) -> float | None:
        return graph.peaks[way] / MIB if way in graph.peaks else None

    plan = graph.plans.get("ours")
    note = "stock: default reuse; floor: no reuse, the schedule's own peak"
    if plan is not None and plan.reordered_from is not None:
        note += "; ours has another order of kernels"
    yield _row(
        graph.case,
        "runtime peak",
        "MiB",
        mib("ours"),
        mib("default"),
        eager=mib("eager"),
        floor=mib("no reuse"),
        note=note,
    )
    if mib("arenas") is not None or mib("pools") is not None:
        yield _row(
            graph.case,
            "runtime peak, pools",
            "MiB",
            mib("arenas"),
            mib("pools"),
            floor=mib("no reuse"),
            note="ours: memory_arenas=always; stock: memory_planning, for inference alone",
        )
    if plan is None:
        return
    yield _row(
        graph.case,
        "plan over lower bound",
        "1",
        plan.peak / plan.lower_bound,
        plan.peak_before / plan.lower_bound,
        floor=1.0,
        note=f"{plan.storages} storages, {len(plan.arenas)} arenas, strategy {plan.strategy}",
    )
    always = graph.plans.get("arenas")
    if always is not None and always.arenas:
        size, _ = max(always.arenas)
        yield _row(
            graph.case,
            "arena over lower bound",
            "1",
            max(size / max(bound, 1) for size, bound in always.arenas),
            None,
            floor=1.0,
            note=f"memory_arenas=always; the worst of {len(always.arenas)}, the largest "
            f"{size / MIB:.2f} MiB",
        )
    yield _row(graph.case, "allocator calls", "1", plan.calls, plan.calls_before)
    yield _row(
        graph.case,
        "planning",
        "ms",
        plan.seconds * 1e3,
        graph.planning["pools"] * 1e3 if "pools" in graph.planning else None,
        note="CPU time; stock: memory_planning where it plans, else its reuse",
    )
    if "ours" in graph.peaks:
        yield _row(
            graph.case,
            "predicted over measured peak",
            "1",
            plan.peak / graph.peaks["ours"],
            None,
            floor=1.0,
        )


def _summary(graphs: Sequence[Graph]) -> Iterator[results.Row]:
    for metric, way, stock in (
        ("runtime peak over no reuse", "ours", "default"),
        ("runtime peak over no reuse, pools", "arenas", "pools"),
    ):
        of_way = {
            name: [g.peaks[name] / g.peaks["no reuse"] for g in graphs if name in g.peaks]
            for name in (way, stock)
        }
        if not all(of_way.values()):
            continue
        note = f"{len(of_way[way])} graphs"
        for label, reduce in (("geometric mean", statistics.geometric_mean), ("worst", max)):
            values: Callable[[list[float]], float] = reduce
            ours, theirs = values(of_way[way]), values(of_way[stock])
            yield _row(f"all, {label}", metric, "1", ours, theirs, floor=1.0, note=note)
    plans = [graph.plans["ours"] for graph in graphs if "ours" in graph.plans]
    if plans:
        ratios = [plan.peak / plan.lower_bound for plan in plans]
        before = [plan.peak_before / plan.lower_bound for plan in plans]
        note = f"{sum(ratio == 1 for ratio in ratios)} of {len(ratios)} graphs exactly at the bound"
        yield _row(
            "all, worst",
            "plan over lower bound",
            "1",
            max(ratios),
            max(before),
            floor=1.0,
            note=note,
        )
        yield _row(
            "all, sum",
            "allocator calls",
            "1",
            sum(plan.calls for plan in plans),
            sum(plan.calls_before for plan in plans),
        )


def regressions(graphs: Sequence[Graph]) -> list[str]:
    """Return regressions: a peak above Inductor's lowest, or a failure of the extension."""
    found = []
    for graph in graphs:
        for way in ("ours", "arenas"):
            if way in graph.failures:
                found.append(f"{graph.case}, {way}: {graph.failures[way]}")
        stock = [graph.peaks[way] for way in STOCK if way in graph.peaks]
        if stock and graph.peaks.get("ours", 0) > min(stock):
            excess = graph.peaks["ours"] - min(stock)
            found.append(f"{graph.case}: {excess:,} bytes above the lowest of stock's")
    return found


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few models that differ much")
    parser.add_argument(
        "--models", nargs="+", choices=sorted(memory_models.MODELS), metavar="NAME", default=None
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="models measured at a time; bytes stay bytes",
    )
    parser.add_argument(
        "--json-out", metavar="DIR", help="keep the table as a result in this folder"
    )
    options = parser.parse_args(arguments)
    if options.models is None:
        options.models = memory_models.QUICK if options.quick else tuple(memory_models.MODELS)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 1 if the extension fails or needs more memory."""
    options = _parse(arguments)
    # Silences the profiler's own log lines.
    os.environ["KINETO_LOG_LEVEL"] = "99"
    header = results.collect_header(
        "memory-peak", results.command_line(), results.hardware_slug("cpu")
    )
    begin = time.perf_counter()
    graphs: list[Graph] = []
    work = [
        (name, training)
        for training in (False, True)
        for name in options.models
        if memory_models.MODELS[name].training or not training
    ]
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for found in pool.map(_alone, *zip(*work, strict=True)):
            graphs += found
            for graph in found:
                peaks = ", ".join(f"{way} {peak / MIB:.2f}" for way, peak in graph.peaks.items())
                print(f"[{time.perf_counter() - begin:5.0f} s] {graph.case}: {peaks} MiB")
                for way, failure in graph.failures.items():
                    print(f"         {way}: {failure}")
            sys.stdout.flush()
            document: results.Document = {**header, "rows": table_rows(graphs)}
            if options.json_out:
                # Write after every model, so that an interrupted run keeps its measurements.
                results.write(options.json_out, document)
    print(f"\n{results.render_table(document)}")
    failed = regressions(graphs)
    for line in failed:
        print(line, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
