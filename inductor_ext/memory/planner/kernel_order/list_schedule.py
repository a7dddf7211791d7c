"""List schedules: orders built step by step, from the inputs or from the outputs."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from inductor_ext.memory.planner.kernel_order.problem import StepGraph


def schedule_forwards(graph: StepGraph, depth_first: bool) -> list[int]:
    """Schedule from the inputs, lowest change of the live bytes first.

    Among steps that increase the live bytes, `depth_first` prefers the one that became ready last.
    """
    remaining = [len(buffer.consumers) for buffer in graph.buffers]
    # Identifies the last of the remaining consumers.
    consumer_sum = [sum(buffer.consumers) for buffer in graph.buffers]
    change = [
        graph.allocates[step]
        - graph.scratch[step]
        - sum(graph.sizes[buffer] for buffer in graph.uses[step] if remaining[buffer] == 1)
        for step in range(graph.steps)
    ]
    queue = _ReadyQueue(graph, change, depth_first, list(map(len, graph.predecessors)))
    for step in range(graph.steps):
        queue.push(step)
    order: list[int] = []
    for step in queue:
        order.append(step)
        for buffer in graph.uses[step]:
            remaining[buffer] -= 1
            consumer_sum[buffer] -= step
            if remaining[buffer] == 1:
                other = consumer_sum[buffer]
                change[other] -= graph.sizes[buffer]
                queue.push(other)
        queue.release(graph.successors[step])
    return order


def schedule_backwards(graph: StepGraph, depth_first: bool) -> list[int]:
    """Schedule from the outputs, in reverse: a step frees its outputs and makes its inputs live."""
    is_live = [buffer.is_output for buffer in graph.buffers]
    change = [
        sum(graph.sizes[buffer] for buffer in graph.uses[step])
        - graph.allocates[step]
        + graph.scratch[step]
        for step in range(graph.steps)
    ]
    queue = _ReadyQueue(graph, change, depth_first, list(map(len, graph.successors)))
    for step in reversed(range(graph.steps)):
        queue.push(step)
    order: list[int] = []
    for step in queue:
        order.append(step)
        for buffer in graph.uses[step]:
            if is_live[buffer]:
                continue
            is_live[buffer] = True
            for other in graph.buffers[buffer].consumers:
                change[other] -= graph.sizes[buffer]
                queue.push(other)
        queue.release(graph.predecessors[step])
    order.reverse()
    return order


class _ReadyQueue:
    """A queue of the steps that are ready: those with 0 in `num_pending`.

    The caller updates `change`, the change of the live bytes at each step. If there are batches,
    steps of the same kind as the last one are taken as long as there are any.
    """

    def __init__(
        self, graph: StepGraph, change: list[int], depth_first: bool, num_pending: list[int]
    ) -> None:
        self._batched = graph.batched
        self._change = change
        self._depth_first = depth_first
        self._num_pending = num_pending
        self._done = [False] * graph.steps
        self._heaps: tuple[list[tuple[int, int, int, int]], ...] = ([], [])
        self._kind = 0
        self._pushed = 0

    def release(self, steps: Iterable[int]) -> None:
        """Push the steps for which only the last scheduled one was missing."""
        for step in steps:
            self._num_pending[step] -= 1
            self.push(step)

    def push(self, step: int) -> None:
        """Push a step if it is ready; again if its change of the live bytes has fallen."""
        if self._done[step] or self._num_pending[step]:
            return
        change = self._change[step]
        self._pushed += 1
        if self._depth_first and change > 0:
            key = (1, -self._pushed, change, step)
        else:
            key = (0 if self._depth_first else 1, change, self._pushed, step)
        heapq.heappush(self._heaps[self._batched[step]], key)

    def __iter__(self) -> _ReadyQueue:
        return self

    def __next__(self) -> int:
        for kind in (self._kind, 1 - self._kind):
            heap = self._heaps[kind]
            while heap:
                step = heapq.heappop(heap)[3]
                if not self._done[step]:
                    self._done[step] = True
                    self._kind = kind
                    return step
        raise StopIteration
