"""A lower bound of the peak of all orders."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from inductor_ext.memory.planner.kernel_order.problem import StepGraph


def find_lower_bound(graph: StepGraph, order: Sequence[int], effort: int) -> int:
    """Return bytes that are live at the same time in every order.

    While a step runs, its inputs and outputs are live, and so is every buffer that is produced
    before it and used after it in every order. Only the steps with the most memory of their own are
    examined, as many as `effort` allows.

    Args:
        graph: the problem.
        order: a valid order of all steps.
        effort: elementary operations.
    """
    steps = graph.steps
    if not steps:
        return 0
    in_place_bytes = [
        sum(max(graph.sizes[buffer] for buffer in group) for group in graph.in_place[step])
        for step in range(steps)
    ]
    step_bytes = [
        graph.allocates[step]
        + sum(graph.sizes[buffer] for buffer in graph.reads[step])
        - in_place_bytes[step]
        for step in range(steps)
    ]
    bound = max(step_bytes)
    sources = [step for step in range(steps) if not graph.predecessors[step]]
    bound = max(
        bound, graph.input_bytes + min(graph.allocates[s] - in_place_bytes[s] for s in sources)
    )
    bound = max(bound, sum(buffer.size for buffer in graph.buffers if buffer.is_output))

    before = _reachable(order, graph.predecessors)
    after = _reachable(order[::-1], graph.successors)
    affordable = max(effort // (4 * (len(graph.buffers) + 1)), 1)
    for step in heapq.nlargest(
        affordable, range(steps), key=lambda step: (step_bytes[step], -step)
    ):
        earlier, later = before[step], after[step]
        load = -in_place_bytes[step]
        for buffer in graph.buffers:
            if buffer.producer is not None and not earlier >> buffer.producer & 1:
                continue
            if buffer.producer == step or buffer.is_output:
                load += buffer.size
                continue
            for consumer in buffer.consumers:
                if later >> consumer & 1:
                    load += buffer.size
                    break
        bound = max(bound, load)
    return bound


def _reachable(order: Sequence[int], edges: Sequence[Iterable[int]]) -> list[int]:
    """Return for each step, as bits, the step itself and all steps that its edges lead to.

    Args:
        order: all steps, each after those that its edges lead to.
        edges: for each step, other steps.
    """
    reachable = [0] * len(order)
    for step in order:
        bits = 1 << step
        for other in edges[step]:
            bits |= reachable[other]
        reachable[step] = bits
    return reachable
