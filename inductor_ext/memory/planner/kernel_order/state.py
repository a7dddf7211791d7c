"""An order of the steps with its loads, which are updated when a part of the order changes."""

from __future__ import annotations

from collections.abc import Sequence

from inductor_ext.memory.planner.kernel_order.problem import StepGraph


class SearchBudget:
    """Elementary operations that are left to spend."""

    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        self.left = left


class OrderState:
    """An order and its loads, which are updated when a part of the order changes."""

    def __init__(self, graph: StepGraph, order: Sequence[int]) -> None:
        steps = graph.steps
        self.graph = graph
        self.order = list(order)
        self.position = [0] * steps
        self.last = [-1] * len(graph.buffers)  # position of the last use
        self.loads = [0] * steps
        self.live = [0] * steps  # bytes live before the step, without those whose free is deferred
        self.deferred = [0] * steps  # bytes whose free is deferred to the end of the previous batch
        for index, step in enumerate(self.order):
            self.position[step] = index
            for buffer in graph.uses[step]:
                self.last[buffer] = index
        if steps:
            self.live[0] = graph.input_bytes
            self._update_loads(0, steps)

    def peak(self) -> int:
        """Return the highest load in bytes."""
        return max(self.loads, default=0)

    def batches(self) -> int:
        """Return the number of batches."""
        batched = self.graph.batched
        count = 0
        inside = False
        for step in self.order:
            count += batched[step] and not inside
            inside = batched[step]
        return count

    def _update_loads(self, begin: int, end: int) -> int:
        """Recompute loads from `begin` to `end` and on to the end of a batch; return the stop
        index."""
        graph = self.graph
        order, last, loads = self.order, self.last, self.loads
        live, deferred = self.live[begin], self.deferred[begin]
        late, batched, sizes = graph.frees_late, graph.batched, graph.sizes
        index = begin
        while index < graph.steps:
            step = order[index]
            runs_on = late and batched[step]
            self.live[index], self.deferred[index] = live, deferred
            if index >= end and not runs_on:
                break  # live bytes here depend on which steps ran before, not on their order
            if late and not runs_on:
                deferred = 0
            freed_bytes = graph.scratch[step]
            for buffer in graph.uses[step]:
                if last[buffer] == index:
                    freed_bytes += sizes[buffer]
            in_place_bytes = self._in_place_bytes(step, index) if graph.in_place[step] else 0
            loads[index] = live + deferred + graph.allocates[step] - in_place_bytes
            live += graph.allocates[step] - freed_bytes
            if runs_on:
                deferred += freed_bytes - in_place_bytes
            index += 1
        return index

    def _in_place_bytes(self, step: int, index: int) -> int:
        """Return the bytes that `step` at position `index` does not allocate because it runs in
        place."""
        reused: list[int] = []
        for candidates in self.graph.in_place[step]:
            for buffer in candidates:
                if self.last[buffer] == index and buffer not in reused:
                    reused.append(buffer)
                    break
        return sum(self.graph.sizes[buffer] for buffer in reused)

    def replace(self, begin: int, part: Sequence[int]) -> int:
        """Replace the steps at `begin` by a permutation of them; return where the new loads end."""
        graph = self.graph
        self.order[begin : begin + len(part)] = part
        touched: dict[int, None] = {}
        for index, step in enumerate(part, begin):
            self.position[step] = index
            touched.update(dict.fromkeys(graph.uses[step]))
        end = begin + len(part)
        for buffer in touched:
            # A last use after the part keeps its position.
            if self.last[buffer] < end:
                self.last[buffer] = max(
                    self.position[step] for step in graph.buffers[buffer].consumers
                )
        return self._update_loads(begin, end)

    def try_replace(
        self, begin: int, part: Sequence[int], peak: int, limit: int, budget: SearchBudget
    ) -> bool:
        """Put `part` at `begin` if that is an improvement; return whether it is.

        It is if fewer steps then reach `peak`, no step exceeds it, and the number of batches does
        not grow beyond `limit`.
        """
        graph = self.graph
        before = self.order[begin : begin + len(part)]
        batches = self.batches() if graph.has_batches else 0
        peak_count = self.loads.count(peak)
        end = self.replace(begin, part)
        budget.left -= 2 * (end - begin)
        if (
            max(self.loads[begin : min(end + 1, graph.steps)]) <= peak
            and self.loads.count(peak) < peak_count
            and (not graph.has_batches or self.batches() <= max(limit, batches))
        ):
            return True
        self.replace(begin, before)
        return False
