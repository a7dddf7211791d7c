"""Converts the scheduler's nodes to problems of `memory.planner.kernel_order`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from inductor_ext.memory import known_ir
from inductor_ext.memory.planner.kernel_order import Buffer, OrderProblem, profile

if TYPE_CHECKING:
    from torch._inductor.scheduler import BaseSchedulerNode, Scheduler


class SchedulerGraph:
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
        self.batched, self._frees_late = self._find_batches()
        self.inductor_problem = self._make_problem()
        """The problem as Inductor's memory pass sees it."""

    def matches_estimate(self) -> bool:
        """Whether the loads of `inductor_problem` match Inductor's estimate, in the given order."""
        from torch._inductor.memory import estimate_peak_memory

        _, estimate = estimate_peak_memory(self._order, self._inputs, self._outputs)  # type: ignore[arg-type]
        loads = profile(self.inductor_problem, range(len(self._order))).loads
        # torch 2.11 subtracts the outputs at the start, so all its loads are lower by a constant.
        differences = {load - estimated for load, estimated in zip(loads, estimate, strict=False)}
        return len(differences) <= 1

    def count_launches(self, order: Iterable[int]) -> int:
        """Return the number of batches in `order` that have code."""
        from torch._inductor.scheduler import NopKernelSchedulerNode

        count = 0
        inside = False
        for step in order:
            if isinstance(self._order[step], NopKernelSchedulerNode):
                continue
            is_batched = step in self.batched
            count += is_batched and not inside
            inside = is_batched
        return count

    def make_generated_problem(self) -> OrderProblem:
        """Return the problem with buffers counted as the generated code will have them."""
        removed = self._find_fused_away()
        in_place = self._find_in_place_sources()
        buffers = self._count_concat_inputs_once()
        numbers = {name: number for number, name in enumerate(self._names)}
        for number, name in enumerate(self._names):
            if name in removed:
                buffers[number] = dataclasses.replace(buffers[number], size=0)
        for name, sources in in_place.items():
            output = buffers[numbers[name]]
            in_place_candidates = tuple(
                numbers[source]
                for source in sources
                if source in numbers
                and output.producer in buffers[numbers[source]].consumers
                and output.size == buffers[numbers[source]].size > 0
                and not buffers[numbers[source]].is_output
            )
            buffers[numbers[name]] = dataclasses.replace(
                output, in_place_candidates=in_place_candidates
            )
        buffers += self._list_incoming_gradients()
        return dataclasses.replace(
            self.inductor_problem,
            buffers=tuple(buffers),
            batched=self.batched,
            batch_frees_late=self._frees_late,
        )

    def add_workspaces(self, problem: OrderProblem) -> OrderProblem:
        """Return `problem` with a high guess of the workspace of extern kernels."""
        from torch._inductor import ir
        from torch._inductor.virtualized import V

        allocated = [0] * len(self._order)
        for buffer in problem.buffers:
            if buffer.producer is not None:
                allocated[buffer.producer] += buffer.size
        workspaces: list[Buffer] = []
        for step, node in enumerate(self._order):
            if isinstance(node.node, ir.ExternKernelAlloc):
                size = sum(V.graph.get_dep_size_hint(dep) for dep in node.read_writes.reads)
                size += allocated[step]
                workspaces.append(Buffer(size, step, ()))
        return dataclasses.replace(problem, buffers=(*problem.buffers, *workspaces))

    def _list_incoming_gradients(self) -> list[Buffer]:
        """Return the gradients that autograd passes to a backward, which frees them after last use.

        Inductor's estimate counts them as memory that the caller keeps.
        """
        from torch._inductor.virtualized import V

        sizes: dict[str, int] = {}
        readers: dict[str, list[int]] = {}
        for step, node in enumerate(self._order):
            for name in {dep.name: None for dep in node.read_writes.reads}:
                local = name.removeprefix(f"{V.graph.name}_") if V.graph.name else name
                if local.startswith("tangents") and name in V.graph.graph_inputs:
                    readers.setdefault(name, []).append(step)
            for dep in node.read_writes.reads:
                if dep.name in readers:
                    size = V.graph.get_dep_size_hint(dep)
                    sizes[dep.name] = max(size, sizes.get(dep.name, 0))
        return [
            Buffer(sizes[name], None, tuple(steps), is_output=name in self._outputs)
            for name, steps in readers.items()
        ]

    def _count_concat_inputs_once(self) -> list[Buffer]:
        """Return the buffers, with the inputs of a concatenation not counted twice.

        An input that is written directly into the concatenation counts as its own memory with the
        live range of the whole. The generated code allocates the whole with the first input, a
        little earlier than assumed here.
        """
        from torch._inductor import ir

        buffers = list(self.inductor_problem.buffers)
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
            rest = buffers[whole].size - self.inductor_problem.buffers[number].size
            buffers[whole] = dataclasses.replace(buffers[whole], size=max(rest, 0))
        for number, whole in whole_of.items():
            readers = set(buffers[number].consumers)
            is_output = buffers[number].is_output
            visited = {number}
            while whole not in visited:
                visited.add(whole)
                readers |= set(self.inductor_problem.buffers[whole].consumers)
                is_output |= self.inductor_problem.buffers[whole].is_output
                whole = whole_of.get(whole, whole)
            readers -= {buffers[number].producer}
            buffers[number] = dataclasses.replace(
                buffers[number], consumers=tuple(sorted(readers)), is_output=is_output
            )
        return buffers

    def _make_problem(self) -> OrderProblem:
        """Return the problem as Inductor sees it; fill `_names` with the name of each buffer."""
        step_of = self._step
        buffers: list[Buffer] = []
        allocated_by = self._allocating_steps()
        entries: list[tuple[str, Any, int | None]] = [
            (name, buffer, None) for name, buffer in self._inputs.items()
        ]
        for step, node in enumerate(self._order):
            entries += [(buffer.get_name(), buffer, step) for buffer in node.get_outputs()]
        for name, buffer, writer in entries:
            info = buffer.mpi_buffer
            readers = {step_of[node] for node in info.succ_nodes} - {writer}
            producer = writer
            if writer is not None and info.size_free and not info.size_alloc:
                # One output of a multi-output kernel, which has allocated it.
                producer = allocated_by.get(name, writer)
                if producer != writer:
                    readers.add(writer)
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
        ordered = [step for step, node in enumerate(self._order) if _keeps_relative_order(node)]
        edges += itertools.pairwise(ordered)
        return OrderProblem(len(self._order), tuple(buffers), tuple(edges))

    def _allocating_steps(self) -> dict[str, int]:
        """Map each output of a multi-output kernel to the step that allocates it.

        Nested outputs are allocated by the outermost kernel.
        """
        from torch._inductor import ir

        allocated_by: dict[str, int] = {}

        def visit(buffer: Any, step: int) -> None:
            for user in buffer.users:
                for part in getattr(user.node, "get_outputs", list)():
                    if (
                        isinstance(part.node, ir.MultiOutput)
                        and part.get_name() not in allocated_by
                    ):
                        allocated_by[part.get_name()] = step
                        if isinstance(part.node.layout, ir.MultiOutputLayout):
                            visit(part, step)

        for index, node in enumerate(self._order):
            for buffer in node.get_outputs():
                if isinstance(buffer.node.layout, ir.MultiOutputLayout):
                    visit(buffer, allocated_by.get(buffer.get_name(), index))
        return allocated_by

    def _find_batches(self) -> tuple[frozenset[int], bool]:
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
            cudagraph_steps = (
                step
                for step, node in enumerate(self._order)
                if self._scheduler.should_partition(node) is None
            )
            return frozenset(cudagraph_steps), False
        return frozenset(), False

    def _find_fused_away(self) -> set[str]:
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

    def _find_in_place_sources(self) -> dict[str, list[str]]:
        """Map a buffer to those whose memory its kernel can reuse in place after their last use."""
        from torch._inductor import config, ir
        from torch._inductor.codegen.wrapper import can_match_buffer_size
        from torch._inductor.scheduler import SchedulerNode

        sources: dict[str, list[str]] = {}
        if not config.inplace_buffers:
            return sources
        donated = self._scheduler.name_to_donated_buffer
        leaves = [leaf for node in self._order for leaf in node.get_nodes()]
        for leaf in leaves:
            if not isinstance(leaf, SchedulerNode):
                continue
            for output in leaf.get_outputs():
                buffer: Any = output.node
                if (
                    not buffer.should_allocate()
                    or buffer.get_inputs_that_alias_output()
                    or buffer.get_mutation_names()
                ):
                    continue
                for dep in leaf.read_writes.reads:
                    source = donated.get(dep.name) or self._scheduler.name_to_buf.get(dep.name)
                    if (
                        source is not None
                        and any(user.node is leaf and user.can_inplace for user in source.users)
                        and not isinstance(
                            source.node.layout,
                            (ir.NoneLayout, ir.MultiOutputLayout, ir.MutationLayoutSHOULDREMOVE),
                        )
                        and can_match_buffer_size(source.node, buffer)
                    ):
                        sources.setdefault(output.get_name(), []).append(dep.name)
        return sources


_PURE_NAMESPACES = frozenset(
    {"aten", "prims", "mkl", "mkldnn", "mkldnn_prepacked", "onednn", "quantized", "_quantized"}
)
"""Namespaces of operators whose schemas declare all their effects."""


def _keeps_relative_order(node: BaseSchedulerNode) -> bool:
    """Whether a node depends on what has run before it, beyond what it reads."""
    import torch
    from torch._inductor import ir

    if node.has_side_effects():
        return True
    for leaf in node.get_nodes():
        operation: Any = leaf.node
        if not isinstance(operation, ir.ExternKernel):
            continue
        if known_ir.has_order_dependence(operation):
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
