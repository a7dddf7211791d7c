"""The search for an order with a lower peak: windows, moves of carried buffers, list schedules."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from inductor_ext.memory.planner.kernel_order.list_schedule import (
    schedule_backwards,
    schedule_forwards,
)
from inductor_ext.memory.planner.kernel_order.lower_bound import find_lower_bound
from inductor_ext.memory.planner.kernel_order.problem import OrderProblem, StepGraph
from inductor_ext.memory.planner.kernel_order.state import OrderState, SearchBudget
from inductor_ext.memory.planner.kernel_order.window import WINDOWS, reorder_window

EFFORT = 450
"""Elementary operations that a search may spend per step of the problem, each below 1 us."""

_MAX_MOVED = 256
"""Maximum number of steps that are moved together."""

_MAX_CARRIED = 12
"""Number of buffers live across one peak that the search tries to move away, largest first."""


@dataclass(frozen=True, slots=True)
class Profile:
    """The cost of an order."""

    peak: int
    """Bytes: the highest load."""
    loads: tuple[int, ...]
    """Live bytes while the step at each position runs, including its inputs and outputs."""
    batches: int
    """Number of runs of adjacent batched steps."""


@dataclass(frozen=True, slots=True)
class Ordering:
    """A valid order that is no worse than the given one."""

    order: tuple[int, ...]
    peak: int
    """Bytes."""
    peak_before: int
    """Bytes, of the given order."""
    lower_bound: int
    """Bytes. No order has a lower peak."""
    operations: int
    """Elementary operations that the search has spent."""


def profile(problem: OrderProblem, order: Sequence[int]) -> Profile:
    """Compute the loads of `order`.

    Raises:
        exc.OrderError: the order is not a permutation of the steps, or an edge points backwards.
    """
    graph = StepGraph(problem)
    graph.check(order)
    state = OrderState(graph, order)
    return Profile(state.peak(), tuple(state.loads), state.batches())


def find_order(problem: OrderProblem, start: Sequence[int]) -> Ordering:
    """Search for an order with a lower peak than that of `start`.

    Args:
        problem: steps, buffers and edges.
        start: a topological order of all steps.

    Raises:
        exc.OrderError: `start` is not a topological order, which is always so if the edges form a
            cycle.
    """
    graph = StepGraph(problem)
    graph.check(start)
    state = OrderState(graph, start)
    before = state.peak()
    effort = EFFORT * problem.steps
    bound = find_lower_bound(graph, start, effort)
    budget = SearchBudget(effort)
    limit = state.batches()
    if before > bound:
        _improve(state, bound, limit, budget, budget.left // 2)
        orders = {tuple(start), tuple(state.order)}
        rivals: list[tuple[int, OrderState]] = []
        for schedule in (schedule_backwards, schedule_forwards):
            for depth_first in (False, True):
                if state.peak() <= bound or budget.left <= 0:
                    break
                order = schedule(graph, depth_first)
                budget.left -= 3 * problem.steps
                if tuple(order) not in orders:
                    orders.add(tuple(order))
                    rival = OrderState(graph, order)
                    rivals.append((rival.peak(), rival))
        rivals.sort(key=lambda rival: rival[0])
        for index, (_, rival) in enumerate(rivals):
            if state.peak() <= bound or budget.left <= 0:
                break
            share = budget.left // (len(rivals) - index)
            _improve(rival, bound, max(limit, rival.batches()), budget, share)
            if rival.peak() < state.peak() and rival.batches() <= limit:
                state = rival
    graph.check(state.order)
    return Ordering(tuple(state.order), state.peak(), before, bound, effort - budget.left)


def _improve(state: OrderState, bound: int, limit: int, budget: SearchBudget, share: int) -> None:
    """Lower the peak of `state` down to `bound`, until `share` of the budget is spent."""
    reserve = budget.left - share
    while budget.left > reserve:
        peak = state.peak()
        budget.left -= state.graph.steps // 20 + 1
        if peak <= bound:
            return
        at = state.loads.index(peak)
        if not (
            reorder_window(state, at, peak, limit, budget, reserve, WINDOWS[:2])
            or _move_carried(state, at, peak, limit, budget, reserve)
            or reorder_window(state, at, peak, limit, budget, reserve, WINDOWS[2:])
        ):
            return


def _move_carried(
    state: OrderState, at: int, peak: int, limit: int, budget: SearchBudget, reserve: int
) -> bool:
    """Consume a buffer that is live across position `at` before it, or produce it after it."""
    graph = state.graph
    position, last = state.position, state.last
    peak_step = state.order[at]
    candidates: list[tuple[int, int]] = []
    for index, buffer in enumerate(graph.buffers):
        if not buffer.size:
            continue
        start = -1 if buffer.producer is None else position[buffer.producer]
        end = graph.steps if buffer.is_output else last[index]
        if start < at < end:
            candidates.append((-buffer.size, index))
    budget.left -= len(graph.buffers) // 4
    for _, index in heapq.nsmallest(_MAX_CARRIED, candidates):
        if budget.left <= reserve:
            return False
        buffer = graph.buffers[index]
        if not buffer.is_output:
            later = [step for step in buffer.consumers if position[step] > at]
            steps = _reachable(later, graph.predecessors, lambda step: position[step] >= at, budget)
            if steps and peak_step not in steps:
                end = last[index] + 1
                part = sorted(steps, key=position.__getitem__)
                part += [step for step in state.order[at:end] if step not in steps]
                if state.try_replace(at, part, peak, limit, budget):
                    return True
        if buffer.producer is not None:
            steps = _reachable(
                [buffer.producer], graph.successors, lambda step: position[step] <= at, budget
            )
            if steps and peak_step not in steps:
                begin = position[buffer.producer]
                part = [step for step in state.order[begin : at + 1] if step not in steps]
                part += sorted(steps, key=position.__getitem__)
                if state.try_replace(begin, part, peak, limit, budget):
                    return True
    return False


def _reachable(
    seeds: Sequence[int],
    edges: Sequence[Sequence[int]],
    within: Callable[[int], bool],
    budget: SearchBudget,
) -> set[int]:
    """Return the steps reachable from `seeds` inside `within`; empty if more than `_MAX_MOVED`."""
    steps = set(seeds)
    stack = list(seeds)
    while stack:
        for other in edges[stack.pop()]:
            if other not in steps and within(other):
                steps.add(other)
                stack.append(other)
        if len(steps) > _MAX_MOVED:
            return set()
    budget.left -= len(steps)
    return steps
