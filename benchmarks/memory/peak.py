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

__all__ = [
    "MODES",
    "Graph",
    "Mode",
    "find_regressions",
    "make_rows",
    "measure_model",
    "record_allocations",
]

MIB = 2**20

GRANULE = 64
"""Alignment of the CPU allocator in bytes."""


@dataclasses.dataclass(frozen=True)
class Mode:
    """One mode of sharing memory between buffers."""

    backend: str | None
    """None for eager mode."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


MODES = {
    "eager": Mode(None),
    "default": Mode("inductor"),
    "pools": Mode("inductor", {"memory_planning": True, "memory_pool": "intermediates"}),
    "no reuse": Mode("inductor", {"allow_buffer_reuse": False}),
    "ours": Mode("inductor_ext"),
    "arenas": Mode("inductor_ext", {"memory_arenas": "always"}),
}
"""By name; Inductor's modes have the backend "inductor"."""

INDUCTOR_MODES = tuple(name for name, mode in MODES.items() if mode.backend == "inductor")


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


def record_allocations(call: Callable[[], object]) -> list[int]:
    """Return allocations (positive) and frees (negative) of `call` in the CPU allocator, in order.

    Bytes, rounded up to `GRANULE`.
    """
    return [
        (1 if change > 0 else -1) * (-(-abs(change) // GRANULE) * GRANULE)
        for change in measure.record_allocations(call)
    ]


def _make_step(module: Any, training: bool) -> Callable[..., Any]:
    """Return the function to compile: the call, or the call with a loss."""

    def inference(*inputs: Any) -> Any:
        return module(*inputs)

    def loss(*inputs: Any) -> Any:
        outputs = module(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return sum(output.square().mean() for output in outputs)

    return loss if training else inference


@contextmanager
def _time_planning() -> Iterator[list[float]]:
    """Collect the CPU seconds of every run of Inductor's memory planning inside the block."""
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    seconds: list[float] = []

    def add_timer(method: Callable[[Any], None]) -> Callable[[Any], None]:
        def run(wrapper: Any) -> None:
            start = time.process_time()
            method(wrapper)
            seconds.append(time.process_time() - start)

        return run

    with ExitStack() as stack:
        for name in ("memory_plan", "memory_plan_reuse"):
            method = add_timer(getattr(PythonWrapperCodegen, name))
            stack.enter_context(mock.patch.object(PythonWrapperCodegen, name, method))
        yield seconds


def _run_mode(
    model: memory_models.Model, training: bool, mode: Mode
) -> tuple[dict[str, int], list[MemoryPlanRecord], list[float], list[Any]]:
    """Return peaks by graph kind, plans, seconds of Inductor's planning passes, and outputs."""
    import torch
    import torch._functorch.config
    import torch._inductor.config

    torch._dynamo.reset()
    module, inputs = model.make()
    module.train(training)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    call = _make_step(module, training)
    if mode.backend is not None:
        call = torch.compile(call, backend=mode.backend, options=dict(mode.options), fullgraph=True)
    outputs: list[Any] = []

    def forward() -> None:
        outputs.append(call(*inputs))

    def backward() -> None:
        outputs[-1].backward()

    def reset() -> None:
        """Restore the state before the first call."""
        outputs.clear()
        module.load_state_dict(state)
        for parameter in module.parameters():
            parameter.grad = None
        torch.manual_seed(0)

    caches = (
        torch._functorch.config.patch(enable_autograd_cache=False),
        # A graph loaded from the cache is not planned.
        torch._inductor.config.patch(fx_graph_cache=False),
    )
    with ExitStack() as stack:
        for context in (*caches, torch.set_grad_enabled(training)):
            stack.enter_context(context)
        with events.capture() as records, _time_planning() as passes:
            reset()
            forward()
            if training:
                backward()
        reset()
        changes = record_allocations(forward)
        if not training:
            peaks = {"inference": measure.find_peak(changes)}
        else:
            peaks = {"forward": measure.find_peak(changes)}
            saved = sum(changes)
            peaks["backward"] = saved + measure.find_peak(record_allocations(backward))
    plans = [record for record in records if isinstance(record, MemoryPlanRecord)]
    values = [*outputs, *(parameter.grad for parameter in module.parameters() if training)]
    return peaks, plans, passes, values


def _compute_difference(values: object, expected: object) -> float:
    """Return the largest difference of corresponding tensors, relative to the largest value."""
    import torch
    from torch.utils._pytree import tree_leaves

    worst = 0.0
    for value, right in zip(tree_leaves(values), tree_leaves(expected), strict=True):
        if isinstance(right, torch.Tensor) and right.numel():
            scale = right.detach().double().abs().max().clamp(min=1e-30)
            difference = float((value - right).detach().double().abs().max() / scale)
            worst = max(worst, difference if difference == difference else float("inf"))
    return worst


TOLERANCE = 1e-4
"""Relative to a tensor's largest value. All modes run the same kernels, but some kernels sum in an
order that depends on the threads."""


def measure_model(name: str, training: bool, modes: Sequence[str] = tuple(MODES)) -> list[Graph]:
    """Compile and measure one model in all modes of `modes`.

    Args:
        name: name of an entry of `memory.models.MODELS`.
        training: whether to measure the training step instead of inference.
        modes: names of `MODES`; values are compared with those of "no reuse".
    """
    model = memory_models.MODELS[name]
    if training:
        # Inductor ignores pools for training, which a test checks.
        modes = [mode for mode in modes if mode != "pools"]
    kinds = ("forward", "backward") if training else ("inference",)
    graphs = {kind: Graph(name, kind) for kind in kinds}
    expected = None
    for mode in sorted(modes, key=lambda mode: mode != "no reuse"):
        try:
            peaks, plans, passes, values = _run_mode(model, training, MODES[mode])
        except Exception as error:
            line = f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"
            for graph in graphs.values():
                graph.failures[mode] = line
            continue
        if mode == "no reuse":
            expected = values
        elif mode != "eager" and expected is not None:
            difference = _compute_difference(values, expected)
            if not difference <= TOLERANCE:
                for graph in graphs.values():
                    graph.failures[mode] = f"values are off by {difference:.1e}"
        for index, (kind, graph) in enumerate(graphs.items()):
            graph.peaks[mode] = peaks[kind]
            if len(passes) == len(graphs):
                graph.planning[mode] = passes[index]
            for record in plans:
                if record.kind == kind:
                    graph.plans[mode] = Plan.of(record)
    return list(graphs.values())


def _measure_in_process(name: str, training: bool) -> list[Graph]:
    """Run `measure_model` in its own process, to isolate crashes and leaks."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(measure_model, name, training).result()


# --- the table ----------------------------------------------------------------------------------


def make_rows(graphs: Sequence[Graph]) -> list[results.Row]:
    """Return the rows of the results: a summary over all graphs, then every graph."""
    return [*_summarize(graphs), *itertools.chain.from_iterable(map(_make_graph_rows, graphs))]


def _make_graph_rows(graph: Graph) -> Iterator[results.Row]:
    def mib(mode: str) -> float | None:
        return graph.peaks[mode] / MIB if mode in graph.peaks else None

    plan = graph.plans.get("ours")
    note = "stock: default reuse; floor: no reuse, the schedule's own peak"
    if plan is not None and plan.reordered_from is not None:
        note += "; ours has another order of kernels"
    yield results.make_row(
        graph.case,
        "runtime peak",
        "MiB",
        ours=mib("ours"),
        stock=mib("default"),
        eager=mib("eager"),
        floor=mib("no reuse"),
        note=note,
    )
    if mib("arenas") is not None or mib("pools") is not None:
        yield results.make_row(
            graph.case,
            "runtime peak, pools",
            "MiB",
            ours=mib("arenas"),
            stock=mib("pools"),
            floor=mib("no reuse"),
            note="ours: memory_arenas=always; stock: memory_planning, for inference alone",
        )
    if plan is None:
        return
    yield results.make_row(
        graph.case,
        "plan over lower bound",
        "1",
        ours=plan.peak / plan.lower_bound,
        stock=plan.peak_before / plan.lower_bound,
        floor=1.0,
        note=f"{plan.storages} storages, {len(plan.arenas)} arenas, strategy {plan.strategy}",
    )
    always = graph.plans.get("arenas")
    if always is not None and always.arenas:
        size, _ = max(always.arenas)
        yield results.make_row(
            graph.case,
            "arena over lower bound",
            "1",
            ours=max(size / max(bound, 1) for size, bound in always.arenas),
            floor=1.0,
            note=f"memory_arenas=always; the worst of {len(always.arenas)}, the largest "
            f"{size / MIB:.2f} MiB",
        )
    yield results.make_row(
        graph.case, "allocator calls", "1", ours=plan.calls, stock=plan.calls_before
    )
    yield results.make_row(
        graph.case,
        "planning",
        "ms",
        ours=plan.seconds * 1e3,
        stock=graph.planning["pools"] * 1e3 if "pools" in graph.planning else None,
        note="CPU time; stock: memory_planning where it plans, else its reuse",
    )
    if "ours" in graph.peaks:
        yield results.make_row(
            graph.case,
            "predicted over measured peak",
            "1",
            ours=plan.peak / graph.peaks["ours"],
            floor=1.0,
        )


def _summarize(graphs: Sequence[Graph]) -> Iterator[results.Row]:
    for metric, mode, inductor_mode in (
        ("runtime peak over no reuse", "ours", "default"),
        ("runtime peak over no reuse, pools", "arenas", "pools"),
    ):
        ratios_by_mode = {
            name: [g.peaks[name] / g.peaks["no reuse"] for g in graphs if name in g.peaks]
            for name in (mode, inductor_mode)
        }
        if not all(ratios_by_mode.values()):
            continue
        note = f"{len(ratios_by_mode[mode])} graphs"
        for label, reduce in (("geometric mean", statistics.geometric_mean), ("worst", max)):
            combine: Callable[[list[float]], float] = reduce
            yield results.make_row(
                f"all, {label}",
                metric,
                "1",
                ours=combine(ratios_by_mode[mode]),
                stock=combine(ratios_by_mode[inductor_mode]),
                floor=1.0,
                note=note,
            )
    plans = [graph.plans["ours"] for graph in graphs if "ours" in graph.plans]
    if plans:
        ratios = [plan.peak / plan.lower_bound for plan in plans]
        before = [plan.peak_before / plan.lower_bound for plan in plans]
        note = f"{sum(ratio == 1 for ratio in ratios)} of {len(ratios)} graphs exactly at the bound"
        yield results.make_row(
            "all, worst",
            "plan over lower bound",
            "1",
            ours=max(ratios),
            stock=max(before),
            floor=1.0,
            note=note,
        )
        yield results.make_row(
            "all, sum",
            "allocator calls",
            "1",
            ours=sum(plan.calls for plan in plans),
            stock=sum(plan.calls_before for plan in plans),
        )


def find_regressions(graphs: Sequence[Graph]) -> list[str]:
    """Return regressions: a peak above Inductor's lowest, or a failure of the extension."""
    regressions = []
    for graph in graphs:
        for mode in ("ours", "arenas"):
            if mode in graph.failures:
                regressions.append(f"{graph.case}, {mode}: {graph.failures[mode]}")
        inductor_peaks = [graph.peaks[mode] for mode in INDUCTOR_MODES if mode in graph.peaks]
        if inductor_peaks and graph.peaks.get("ours", 0) > min(inductor_peaks):
            excess = graph.peaks["ours"] - min(inductor_peaks)
            regressions.append(f"{graph.case}: {excess:,} bytes above Inductor's lowest peak")
    return regressions


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few models that cover most cases")
    parser.add_argument(
        "--models", nargs="+", choices=sorted(memory_models.MODELS), metavar="NAME", default=None
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="models measured at the same time; memory is not affected",
    )
    parser.add_argument("--json-out", metavar="DIR", help="folder of the result")
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
        "memory-peak", results.format_command(), results.name_hardware("cpu")
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
        for model_graphs in pool.map(_measure_in_process, *zip(*work, strict=True)):
            graphs += model_graphs
            for graph in model_graphs:
                peaks = ", ".join(f"{mode} {peak / MIB:.2f}" for mode, peak in graph.peaks.items())
                print(f"[{time.perf_counter() - begin:5.0f} s] {graph.case}: {peaks} MiB")
                for mode, failure in graph.failures.items():
                    print(f"         {mode}: {failure}")
            sys.stdout.flush()
            document: results.Document = {**header, "rows": make_rows(graphs)}
            if options.json_out:
                # Write after every model, so that an interrupted run keeps its measurements.
                results.write(options.json_out, document)
    print(f"\n{results.render_table(document)}")
    regressions = find_regressions(graphs)
    for line in regressions:
        print(line, file=sys.stderr)
    return 1 if regressions else 0


if __name__ == "__main__":
    sys.exit(main())
