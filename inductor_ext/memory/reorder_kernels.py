"""Reorders kernels where that lowers the peak of live bytes below that of Inductor's order.

After fusion, Inductor's scheduler tries four orders of its kernels and takes the one with the
lowest estimated peak (`torch._inductor.memory.reorder_for_peak_memory`). `improve` starts from that
order and searches for a better one with `inductor_ext.memory.planner.kernel_order`. It returns
another order only if all of these hold:

- The peak falls by at least `THRESHOLD`, with buffers counted as the generated code will have them.
  Inductor's estimate does not count this way: buffers removed by fusion are excluded, kernels reuse
  memory in place where they can, incoming gradients are freed, and on CPU the loops between two
  extern kernels are one kernel, inside which nothing is freed.
- The peak does not rise if every extern kernel that allocates its outputs needs, while it runs, a
  workspace as large as its inputs and outputs together, as convolutions may for copies in other
  layouts.
- No more kernels, or CUDA graphs, are launched than before. The kernels themselves do not change
  because fusion is over, and one stream runs them sequentially, so the critical path, which is
  their sum, does not grow.

Every dependency of Inductor's memory pass is kept, including weak ones. Nodes keep their relative
order if they have side effects, draw random numbers, call subgraphs or custom operators, or define
an unbacked size. A graph keeps Inductor's order if it has collectives, several streams or several
devices, because its order controls overlap. The same holds if it has the backward of a convolution
on CPU, which needs a large unknown workspace, and if this module's replica of Inductor's estimate
differs from that estimate, which is checked each time.

Settings: `memory_reorder`, and Inductor's `reorder_for_peak_memory`, without which nothing is
reordered.
"""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from inductor_ext import exc
from inductor_ext.memory import known_ir
from inductor_ext.memory.planner.kernel_order import find_order, profile
from inductor_ext.memory.scheduler_graph import SchedulerGraph

if TYPE_CHECKING:
    from torch._inductor.graph import GraphLowering
    from torch._inductor.scheduler import BaseSchedulerNode, Scheduler

THRESHOLD = 0.01
"""Minimum saving, as a fraction of the peak, to avoid hurting locality for negligible savings."""


@dataclasses.dataclass(frozen=True)
class Reordering:
    """The result of reordering one graph's kernels."""

    peak_before: int
    """Bytes, in Inductor's order."""
    peak: int
    """Bytes, in the order that is used."""
    lower_bound: int
    """Bytes. No order has a lower peak."""
    steps: int
    """Number of kernels and other nodes of the schedule."""
    moved: bool
    """Whether the order differs from Inductor's."""
    seconds: float
    """CPU time of everything in this module."""
    why: str
    """Why Inductor's order is used; empty if it is not."""


_reorderings: weakref.WeakKeyDictionary[GraphLowering, Reordering] = weakref.WeakKeyDictionary()


def reordering(graph: GraphLowering) -> Reordering | None:
    """Return the result of reordering this graph; None if reordering was not tried."""
    return _reorderings.get(graph)


def peak_before_reorder(graph: GraphLowering) -> int | None:
    """Return the peak bytes in Inductor's order; None if the extension did not replace it."""
    result = _reorderings.get(graph)
    return result.peak_before if result is not None and result.moved else None


def improve(
    order: list[BaseSchedulerNode], graph_outputs: Collection[str]
) -> list[BaseSchedulerNode]:
    """Return an order of the same nodes with a lower peak; `order` itself if there is none.

    Must be called right after Inductor's pass has chosen `order`, while the nodes carry its
    planning info.

    Args:
        order: as `torch._inductor.memory.reorder_for_peak_memory` returns it.
        graph_outputs: names of the buffers that the graph returns.
    """
    from torch._inductor.virtualized import V

    start = time.process_time()
    outcome, better = _improve(order, graph_outputs, V.graph.scheduler)
    seconds = round(time.process_time() - start, 3)
    _reorderings[V.graph] = dataclasses.replace(outcome, seconds=seconds)
    return better


def _improve(
    order: list[BaseSchedulerNode], graph_outputs: Collection[str], scheduler: Scheduler
) -> tuple[Reordering, list[BaseSchedulerNode]]:
    same = Reordering(0, 0, 0, len(order), moved=False, seconds=0.0, why="")

    def keep_order(why: str) -> tuple[Reordering, list[BaseSchedulerNode]]:
        return dataclasses.replace(same, why=why), order

    why = _why_keep_order(order, scheduler)
    if why:
        return keep_order(why)
    graph = SchedulerGraph(order, graph_outputs, scheduler)
    if not graph.matches_estimate():
        return keep_order("Inductor's estimate of live bytes differs from the extension's")
    start = range(len(order))
    problem = graph.make_generated_problem()
    with_workspaces = graph.add_workspaces(problem)
    ceiling = profile(with_workspaces, start).peak
    try:
        ordering = find_order(problem, start)
        before, bound = ordering.peak_before, ordering.lower_bound
        same = dataclasses.replace(same, peak_before=before, peak=before, lower_bound=bound)
        if before <= bound:
            return keep_order("no order has a lower peak")
        steps = ordering.order
        if profile(with_workspaces, steps).peak > ceiling:
            steps = find_order(with_workspaces, start).order
    except exc.OrderError:
        return keep_order("Inductor's order violates a dependency")
    peak = profile(problem, steps).peak
    if peak > before * (1 - THRESHOLD):
        return keep_order("the search found no order with a clearly lower peak")
    if graph.count_launches(steps) > graph.count_launches(start):
        return keep_order("the better order launches more kernels")
    return dataclasses.replace(same, peak=peak, moved=True), [order[step] for step in steps]


def _why_keep_order(order: Sequence[BaseSchedulerNode], scheduler: Scheduler) -> str:
    """Return why this graph must keep its order; empty if it can be reordered."""
    from torch._inductor.utils import contains_collective, contains_wait

    unknown = known_ir.find_unknown_scheduler_node(order)
    if unknown is not None:
        return known_ir.warn_unknown(unknown, "order of kernels")
    if any(contains_collective(node) or contains_wait(node) for node in order):
        return "the graph has collectives"
    # torch 2.11 has no streams in a graph, but has operators that switch them or wait for events.
    operations = [part.node for node in order for part in node.get_nodes()]
    synchronizes = known_ir.find_stream_operator(operations, switch=False)
    if synchronizes or getattr(scheduler, "_multi_stream_nodes", False):
        return "the graph uses several streams"
    # From torch 2.14: a kernel allocates from the pool in whose context it was called.
    if getattr(scheduler, "_mempool_nodes", False):
        return "the graph uses CUDA memory pools"
    if len({device for node in order if (device := node.get_device()) is not None}) > 1:
        return "the graph uses several devices"
    if any(map(_may_use_im2col, order)):
        return "the graph has the backward of a convolution on CPU, whose workspace is unknown"
    return ""


def _may_use_im2col(node: BaseSchedulerNode) -> bool:
    """Whether a kernel may write a sample's patches as columns for a matmul (im2col).

    ATen does so on CPU if it has no better kernel. The workspace can exceed everything else that is
    live: the sample times the number of elements of the convolution's window.
    """
    device = node.get_device()
    overload = getattr(node.node, "op_overload", None)
    return device is not None and device.type == "cpu" and "convolution_backward" in str(overload)
