"""Reorders a window of steps by dynamic programming over the sets of steps already run."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from inductor_ext.memory.planner.kernel_order.state import OrderState, SearchBudget

WINDOWS = ((12, 48), (24, 48), (48, 24), (96, 12), (192, 6))
"""Steps in a window and number of states kept per size, in the order in which they are tried."""


def reorder_window(
    state: OrderState,
    at: int,
    peak: int,
    limit: int,
    budget: SearchBudget,
    reserve: int,
    windows: Sequence[tuple[int, int]],
) -> bool:
    """Reorder the steps around position `at`, where the load is `peak`; return whether it improved.

    Args:
        state: the order to improve.
        at: position of the peak.
        peak: bytes.
        limit: maximum number of batches.
        budget: is reduced by the operations spent.
        reserve: operations of the budget that must not be spent.
        windows: numbers of steps and of states kept per size, as in `WINDOWS`.
    """
    steps = state.graph.steps
    visited: set[tuple[int, int]] = set()
    for length, width in windows:
        # Position of the peak in the window: the middle, near the end, near the start.
        for before in (length // 2, length * 5 // 6, length // 6):
            begin = max(min(at - before, steps - length), 0)
            end = min(begin + length, steps)
            if (begin, end) in visited:
                continue
            visited.add((begin, end))
            if budget.left <= reserve:
                return False
            part = _find_part(state, begin, end, peak, width, budget)
            if part is not None and state.try_replace(begin, part, peak, limit, budget):
                return True
        if length >= steps:
            return False
    return False


_Entry = tuple[int, int, int, int, int, int, int]
"""Peak, deferred frees, batches, live bytes, ready steps (one bit each), previous key, step taken.

The key of a state is the set of the window's steps already run, as bits, times 2, plus 1 if a batch
is open. The live bytes depend only on that set, except for deferred frees in an open batch; there,
the state with fewer deferred bytes is considered better.
"""


def _find_part(
    state: OrderState, begin: int, end: int, ceiling: int, width: int, budget: SearchBudget
) -> list[int] | None:
    """Return the steps of a window in an order with loads below `ceiling`; None if none exists.

    At most `width` states of each size are kept.
    """
    graph = state.graph
    window = _Window(state, begin, end)
    budget.left -= 4 * len(window.steps)
    is_open = int(graph.has_batches and begin > 0 and graph.batched[state.order[begin - 1]])
    deferred = state.deferred[begin] if is_open else 0
    layers: list[dict[int, _Entry]] = [
        {is_open: (0, deferred, 0, state.live[begin], window.ready, 0, -1)}
    ]
    for _ in window.steps:
        layer, operations = window.extend(layers[-1], ceiling)
        budget.left -= 2 * operations
        if not layer:
            return None
        if len(layer) > width:
            layer = dict(heapq.nsmallest(width, layer.items(), key=_rank))
        layers.append(layer)
    key, entry = min(layers[-1].items(), key=lambda keyed: keyed[1][:4])
    part: list[int] = []
    for layer in reversed(layers[1:]):
        entry = layer[key]
        part.append(window.steps[entry[6]])
        key = entry[5]
    part.reverse()
    return part


def _rank(keyed_entry: tuple[int, _Entry]) -> tuple[int, int, int, int]:
    """Return the sort key of a state: states with few live bytes first."""
    key, (peak, deferred, batches, live, _, _, _) = keyed_entry
    return (live + deferred, peak, batches, key)


class _Window:
    """Adjacent steps of an order, indexed from 0, with sets of them as bits."""

    def __init__(self, state: OrderState, begin: int, end: int) -> None:
        graph = state.graph
        self.steps = state.order[begin:end]
        self.has_batches, self.frees_late = graph.has_batches, graph.frees_late
        self.allocates = [graph.allocates[step] for step in self.steps]
        self.scratch = [graph.scratch[step] for step in self.steps]
        self.batched = [int(graph.batched[step]) for step in self.steps]
        users: dict[int, int] = {}  # per buffer freed in the window: the steps that use it there
        for index, step in enumerate(self.steps):
            for buffer in graph.uses[step]:
                if state.last[buffer] < end:
                    users[buffer] = users.get(buffer, 0) | 1 << index
        self.frees = [
            [(users[buffer], graph.sizes[buffer]) for buffer in graph.uses[step] if buffer in users]
            for step in self.steps
        ]
        self.in_place = [
            [
                [
                    (users[buffer], graph.sizes[buffer], buffer)
                    for buffer in group
                    if buffer in users
                ]
                for group in graph.in_place[step]
            ]
            for step in self.steps
        ]
        self.needs = [0] * len(self.steps)
        self.enables: list[list[int]] = [[] for _ in self.steps]
        self.ready = 0
        index_of = {step: index for index, step in enumerate(self.steps)}
        for index, step in enumerate(self.steps):
            for earlier in graph.predecessors[step]:
                other = index_of.get(earlier)
                if other is not None:
                    self.needs[index] |= 1 << other
                    self.enables[other].append(index)
            if not self.needs[index]:
                self.ready |= 1 << index

    def extend(self, layer: dict[int, _Entry], ceiling: int) -> tuple[dict[int, _Entry], int]:
        """Run one more step from every state of a layer; return the next layer and the operations.

        Loads stay below `ceiling`.
        """
        allocates, batched, needs, enables = self.allocates, self.batched, self.needs, self.enables
        has_batches, late = self.has_batches, self.frees_late
        successors: dict[int, _Entry] = {}
        operations = 0
        for key, (peak, deferred, batches, live, ready, _, _) in layer.items():
            done = key >> 1
            choices: list[tuple[int, int, int, int]] = []  # step, load, bytes freed, saved
            rest = ready
            while rest:
                bit = rest & -rest
                rest ^= bit
                index = bit.bit_length() - 1
                freed, saved = self.scratch[index], 0
                missing = ~(done | bit)
                for users, size in self.frees[index]:
                    if not users & missing:
                        freed += size
                if self.in_place[index]:
                    saved = self._saved(index, missing)
                load = live + allocates[index] - saved
                if late and batched[index]:
                    load += deferred
                operations += 1
                if load >= ceiling:
                    continue
                if load <= peak and allocates[index] <= freed and not has_batches:
                    # It fits under the peak and frees at least what it allocates: always run it
                    # first.
                    choices = [(index, load, freed, saved)]
                    break
                choices.append((index, load, freed, saved))
            for index, load, freed, saved in choices:
                after = done | 1 << index
                kind = batched[index]
                state_key = after << 1 | kind
                pending = deferred + freed - saved if late and kind else 0
                highest = max(peak, load)
                count = batches + (kind and not key & 1)
                previous = successors.get(state_key)
                if previous is not None and (previous[0], previous[1], previous[2]) <= (
                    highest,
                    pending,
                    count,
                ):
                    continue
                opens = ready & ~(1 << index)
                for other in enables[index]:
                    if not needs[other] & ~after:
                        opens |= 1 << other
                remaining = live + allocates[index] - freed
                successors[state_key] = (highest, pending, count, remaining, opens, key, index)
        return successors, operations

    def _saved(self, index: int, missing: int) -> int:
        """Return the bytes that a step does not allocate because it reuses memory in place."""
        in_place_bytes = 0
        buffers: list[int] = []
        for group in self.in_place[index]:
            for users, size, buffer in group:
                if not users & missing and buffer not in buffers:
                    buffers.append(buffer)
                    in_place_bytes += size
                    break
        return in_place_bytes
