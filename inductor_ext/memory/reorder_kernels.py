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
import itertools
import time
import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from inductor_ext import exc
from inductor_ext.memory import known_ir
from inductor_ext.memory.planner.kernel_order import Buffer, OrderProblem, find_order, profile

if TYPE_CHECKING:
    from torch._inductor.graph import GraphLowering
    from torch._inductor.scheduler import BaseSchedulerNode, Scheduler

__all__ = ["THRESHOLD", "Reordering", "improve", "peak_before_reorder", "reordering"]

THRESHOLD = 0.01
"""Minimum saving, as a fraction of the peak, to avoid hurting locality for negligible savings."""

_PURE_NAMESPACES = frozenset(
    {"aten", "prims", "mkl", "mkldnn", "mkldnn_prepacked", "onednn", "quantized", "_quantized"}
)
"""Namespaces of operators whose schemas declare all their effects."""


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
    found = _reorderings.get(graph)
    return found.peak_before if found is not None and found.moved else None


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
    why = _hands_off(order, scheduler)
    if why:
        return dataclasses.replace(same, why=why), order
    converted = _Converted(order, graph_outputs, scheduler)
    if not converted.follows_stock():
        return dataclasses.replace(same, why="stock counts memory in another way"), order
    start = range(len(order))
    problem = converted.as_generated()
    cautious = converted.with_workspaces(problem)
    ceiling = profile(cautious, start).peak
    try:
        found = find_order(problem, start)
        same = dataclasses.replace(
            same,
            peak_before=found.peak_before,
            peak=found.peak_before,
            lower_bound=found.lower_bound,
        )
        if found.peak_before <= found.lower_bound:
            return dataclasses.replace(same, why="it is as good as any"), order
        chosen = found.order
        if profile(cautious, chosen).peak > ceiling:
            chosen = find_order(cautious, start).order
    except exc.OrderError:
        return dataclasses.replace(same, why="stock's order breaks a dependency"), order
    peak = profile(problem, chosen).peak
    if peak > found.peak_before * (1 - THRESHOLD):
        return dataclasses.replace(same, why="none better was found"), order
    if converted.launches(chosen) > converted.launches(start):
        return dataclasses.replace(same, why="there would be more kernels"), order
    better = [order[step] for step in chosen]
    return dataclasses.replace(same, peak=peak, moved=True), better


def _hands_off(order: Sequence[BaseSchedulerNode], scheduler: Scheduler) -> str:
    """Return why this graph must keep its order; empty if it can be reordered."""
    from torch._inductor.utils import contains_collective, contains_wait

    unknown = known_ir.unknown_scheduler_node(order)
    if unknown is not None:
        return known_ir.warn_unknown(unknown, "order of kernels")
    if any(contains_collective(node) or contains_wait(node) for node in order):
        return "there are collectives"
    # torch 2.11 has no streams in a graph.
    if getattr(scheduler, "_multi_stream_nodes", False):
        return "there are several streams"
    # From torch 2.14: a kernel allocates from the pool in whose context it was called.
    if getattr(scheduler, "_mempool_nodes", False):
        return "there are CUDA memory pools"
    if len({device for node in order if (device := node.get_device()) is not None}) > 1:
        return "there are several devices"
    if any(map(_takes_columns, order)):
        return "convolutions' backward on CPU takes memory that cannot be told beforehand"
    return ""


def _takes_columns(node: BaseSchedulerNode) -> bool:
    """Whether a kernel may write a sample's patches as columns for a matmul (im2col).

    ATen does so on CPU if it has no better kernel. The workspace can exceed everything else that is
    live: the sample times the number of elements of the convolution's window.
    """
    device = node.get_device()
    overload = getattr(node.node, "op_overload", None)
    return device is not None and device.type == "cpu" and "convolution_backward" in str(overload)


def _keeps_its_turn(node: BaseSchedulerNode) -> bool:
    """Whether a node depends on what has run before it, beyond what it reads."""
    import torch
    from torch._inductor import ir

    if node.has_side_effects():
        return True
    for leaf in node.get_nodes():
        operation: Any = leaf.node
        if not isinstance(operation, ir.ExternKernel):
            continue
        if known_ir.runs_in_turn(operation):
            return True
        overload = getattr(operation, "op_overload", None)
        if isinstance(overload, torch._ops.OpOverload):
            if torch.Tag.nondeterministic_seeded in overload.tags:
                return True
            # Not only for fallbacks: torch 2.13 calls the out variant of a custom op that has one.
            if overload.namespace not in _PURE_NAMESPACES:
                return True
        elif isinstance(operation, ir.FallbackKernel) and overload is not None:
            return True  # a higher-order operator
        if operation.get_unbacked_symbol_defs():
            return True
    return False


class _Converted:
    """The scheduler's nodes as order problems: step i is node i of `order`."""

    def __init__(
        self,
        order: list[BaseSchedulerNode],
        graph_outputs: Collection[str],
        scheduler: Scheduler,
    ) -> None:
        self._order = order
        self._outputs = graph_outputs
        self._scheduler = scheduler
        self._step = {node: step for step, node in enumerate(order)}
        self._inputs = {
            buffer.get_name(): buffer
            for node in order
            for buffer in node.mpi_node.pred_buffers
            if buffer.get_name() not in scheduler.name_to_buf
        }
        self._names: list[str] = []
        self.batched, self._frees_late = self._batches()
        self.as_stock = self._problem()

    def follows_stock(self) -> bool:
        """Whether the loads of `as_stock` match Inductor's estimate, in the given order."""
        from torch._inductor.memory import estimate_peak_memory

        _, estimate = estimate_peak_memory(self._order, self._inputs, self._outputs)  # type: ignore[arg-type]
        ours = profile(self.as_stock, range(len(self._order))).loads
        # torch 2.11 subtracts the outputs at the start, so all its loads are lower by a constant.
        return len({load - theirs for load, theirs in zip(ours, estimate, strict=False)}) <= 1

    def launches(self, order: Iterable[int]) -> int:
        """Return the number of batches in `order` that have code."""
        from torch._inductor.scheduler import NopKernelSchedulerNode

        count = 0
        inside = False
        for step in order:
            if isinstance(self._order[step], NopKernelSchedulerNode):
                continue
            now = step in self.batched
            count += now and not inside
            inside = now
        return count

    def as_generated(self) -> OrderProblem:
        """Return the problem with buffers counted as the generated code will have them."""
        removed = self._removed()
        in_place = self._in_place()
        buffers = self._with_parts_in_place()
        numbers = {name: number for number, name in enumerate(self._names)}
        for number, name in enumerate(self._names):
            if name in removed:
                buffers[number] = dataclasses.replace(buffers[number], size=0)
        for name, sources in in_place.items():
            made = buffers[numbers[name]]
            in_place_candidates = tuple(
                numbers[source]
                for source in sources
                if source in numbers
                and made.producer in buffers[numbers[source]].consumers
                and made.size == buffers[numbers[source]].size > 0
                and not buffers[numbers[source]].is_output
            )
            buffers[numbers[name]] = dataclasses.replace(
                made, in_place_candidates=in_place_candidates
            )
        buffers += self._incoming_gradients()
        return dataclasses.replace(
            self.as_stock,
            buffers=tuple(buffers),
            batched=self.batched,
            batch_frees_late=self._frees_late,
        )

    def with_workspaces(self, problem: OrderProblem) -> OrderProblem:
        """Return `problem` with a high guess of the workspace of extern kernels."""
        from torch._inductor import ir
        from torch._inductor.virtualized import V

        made = [0] * len(self._order)
        for buffer in problem.buffers:
            if buffer.producer is not None:
                made[buffer.producer] += buffer.size
        workspaces: list[Buffer] = []
        for step, node in enumerate(self._order):
            if isinstance(node.node, ir.ExternKernelAlloc):
                size = sum(V.graph.get_dep_size_hint(read) for read in node.read_writes.reads)
                size += made[step]
                workspaces.append(Buffer(size, step, ()))
        return dataclasses.replace(problem, buffers=(*problem.buffers, *workspaces))

    def _incoming_gradients(self) -> list[Buffer]:
        """Return the gradients that autograd passes to a backward, which frees them after last use.

        Inductor's estimate counts them as memory that the caller keeps.
        """
        from torch._inductor.virtualized import V

        sizes: dict[str, int] = {}
        readers: dict[str, list[int]] = {}
        for step, node in enumerate(self._order):
            for name in {read.name: None for read in node.read_writes.reads}:
                local = name.removeprefix(f"{V.graph.name}_") if V.graph.name else name
                if local.startswith("tangents") and name in V.graph.graph_inputs:
                    readers.setdefault(name, []).append(step)
            for read in node.read_writes.reads:
                if read.name in readers:
                    size = V.graph.get_dep_size_hint(read)
                    sizes[read.name] = max(size, sizes.get(read.name, 0))
        return [
            Buffer(sizes[name], None, tuple(steps), is_output=name in self._outputs)
            for name, steps in readers.items()
        ]

    def _with_parts_in_place(self) -> list[Buffer]:
        """Return the buffers, with the inputs of a concatenation not counted twice.

        An input that is written directly into the concatenation counts as its own memory with the
        live range of the whole. The generated code allocates the whole with the first input, a
        little earlier than assumed here.
        """
        from torch._inductor import ir

        buffers = list(self.as_stock.buffers)
        numbers = {name: number for number, name in enumerate(self._names)}
        whole_of: dict[int, int] = {}
        for node in self._order:
            for part in node.get_outputs():
                layout: Any = part.node.layout
                if isinstance(layout, ir.NonOwningLayout):
                    whole = numbers.get(layout.view.get_name())
                    if whole is not None:
                        whole_of[numbers[part.get_name()]] = whole
        for number in whole_of:
            whole = whole_of[number]
            rest = buffers[whole].size - self.as_stock.buffers[number].size
            buffers[whole] = dataclasses.replace(buffers[whole], size=max(rest, 0))
        for number, whole in whole_of.items():
            readers = set(buffers[number].consumers)
            is_output = buffers[number].is_output
            seen = {number}
            while whole not in seen:
                seen.add(whole)
                readers |= set(self.as_stock.buffers[whole].consumers)
                is_output |= self.as_stock.buffers[whole].is_output
                whole = whole_of.get(whole, whole)
            readers -= {buffers[number].producer}
            buffers[number] = dataclasses.replace(
                buffers[number], consumers=tuple(sorted(readers)), is_output=is_output
            )
        return buffers

    def _problem(self) -> OrderProblem:
        """Return the problem as Inductor sees it; fill `_names` with the name of each buffer."""
        step_of = self._step
        buffers: list[Buffer] = []
        allocated_by = self._allocated_by()
        found: list[tuple[str, Any, int | None]] = [
            (name, buffer, None) for name, buffer in self._inputs.items()
        ]
        for step, node in enumerate(self._order):
            found += [(buffer.get_name(), buffer, step) for buffer in node.get_outputs()]
        for name, buffer, maker in found:
            info = buffer.mpi_buffer
            readers = {step_of[node] for node in info.succ_nodes} - {maker}
            producer = maker
            if maker is not None and info.size_free and not info.size_alloc:
                # One output of a multi-output kernel, which has allocated it.
                producer = allocated_by.get(name, maker)
                if producer != maker:
                    readers.add(maker)
            self._names.append(name)
            buffers.append(
                Buffer(
                    size=info.size_free,
                    producer=producer,
                    consumers=tuple(sorted(readers)),
                    is_output=name in self._outputs,
                )
            )
        edges = [
            (step, step_of[later])
            for step, node in enumerate(self._order)
            for later in node.mpi_node.succ_nodes
        ]
        in_turn = [step for step, node in enumerate(self._order) if _keeps_its_turn(node)]
        edges += itertools.pairwise(in_turn)
        return OrderProblem(len(self._order), tuple(buffers), tuple(edges))

    def _allocated_by(self) -> dict[str, int]:
        """Map each output of a multi-output kernel to the step that allocates it.

        Nested outputs are allocated by the outermost kernel.
        """
        from torch._inductor import ir

        found: dict[str, int] = {}

        def walk(buffer: Any, step: int) -> None:
            for user in buffer.users:
                for part in getattr(user.node, "get_outputs", list)():
                    if isinstance(part.node, ir.MultiOutput) and part.get_name() not in found:
                        found[part.get_name()] = step
                        if isinstance(part.node.layout, ir.MultiOutputLayout):
                            walk(part, step)

        for index, node in enumerate(self._order):
            for buffer in node.get_outputs():
                if isinstance(buffer.node.layout, ir.MultiOutputLayout):
                    walk(buffer, found.get(buffer.get_name(), index))
        return found

    def _batches(self) -> tuple[frozenset[int], bool]:
        """Return the steps launched together if adjacent, and whether they free together."""
        from torch._inductor import config
        from torch._inductor.codegen.cpp import CppScheduling

        device = next((d for node in self._order if (d := node.get_device()) is not None), None)
        if device is None:
            return frozenset(), False
        if isinstance(self._scheduler.get_backend(device), CppScheduling):
            # The C++ backend collects loops in one function until an extern kernel comes.
            loops = (
                step
                for step, node in enumerate(self._order)
                if not node.is_extern() and not node.is_template()
            )
            return frozenset(loops), True
        if config.graph_partition and config.triton.cudagraphs:
            recorded = (
                step
                for step, node in enumerate(self._order)
                if self._scheduler.should_partition(node) is None
            )
            return frozenset(recorded), False
        return frozenset(), False

    def _removed(self) -> set[str]:
        """Return buffers that stay in one kernel, in registers or in a scratch array of a tile."""
        from torch._inductor.scheduler import FusedSchedulerNode
        from torch.utils._ordered_set import OrderedSet

        removed: set[str] = set()
        for node in self._order:
            if not isinstance(node, FusedSchedulerNode):
                continue
            operations = OrderedSet(leaf.get_name() for leaf in node.get_nodes())
            removed.update(
                buffer.get_name()
                for leaf in node.get_nodes()
                # On CPU, users of a reduction's result are in another loop and read it from memory.
                if not (self._frees_late and leaf.is_reduction())
                for buffer in leaf.get_outputs()
                if buffer.get_name() not in self._outputs
                and self._scheduler.can_buffer_be_removed_through_fusion(
                    buffer.get_name(), operations
                )
            )
        return removed

    def _in_place(self) -> dict[str, list[str]]:
        """Map a buffer to those whose memory its kernel can reuse in place after their last use."""
        from torch._inductor import config, ir
        from torch._inductor.codegen.wrapper import can_match_buffer_size
        from torch._inductor.scheduler import SchedulerNode

        found: dict[str, list[str]] = {}
        if not config.inplace_buffers:
            return found
        donated = self._scheduler.name_to_donated_buffer
        leaves = [leaf for node in self._order for leaf in node.get_nodes()]
        for leaf in leaves:
            if not isinstance(leaf, SchedulerNode):
                continue
            for output in leaf.get_outputs():
                made: Any = output.node
                if (
                    not made.should_allocate()
                    or made.get_inputs_that_alias_output()
                    or made.get_mutation_names()
                ):
                    continue
                for read in leaf.read_writes.reads:
                    source = donated.get(read.name) or self._scheduler.name_to_buf.get(read.name)
                    if (
                        source is not None
                        and any(user.node is leaf and user.can_inplace for user in source.users)
                        and not isinstance(
                            source.node.layout,
                            (ir.NoneLayout, ir.MultiOutputLayout, ir.MutationLayoutSHOULDREMOVE),
                        )
                        and can_match_buffer_size(source.node, made)
                    ):
                        found.setdefault(output.get_name(), []).append(read.name)
        return found
