"""Searches for an order of kernels with a lower peak of live bytes (pure).

Kernels are steps 0, 1, ...; a buffer has a size, a producer step and consumer steps. A step
allocates its outputs while its inputs are live; buffers with no later consumer are freed after it.
Every topological order is valid, and the peak is the highest load of a step. Finding the lowest
peak is NP-complete (Sethi, "Complete register allocation problems", SIAM J. Comput. 4(3), 1975), so
`find_order` improves a given order and never returns a worse one:

1. Windows around the peak are reordered by dynamic programming over the sets of steps already run,
   with the current peak as the ceiling. Both ideas are from Ahn et al., "Ordering Chaos:
   Memory-Aware Scheduling of Irregularly Wired Neural Networks for Edge Devices", MLSys 2020. Only
   the best states of each size are kept, so that windows can be long.
2. A buffer that is live across the peak but not used there is consumed before the peak or produced
   after it, together with all steps that must move along.
3. List schedules, forwards from the inputs and backwards from the outputs, are further starting
   points.

The search stops at the lower bound or when its effort is spent. Effort is counted in elementary
operations and not in time, so the same problem gives the same order on every machine. An invalid
order raises exc.OrderError.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from inductor_ext import exc

__all__ = ["EFFORT", "Buffer", "OrderProblem", "Ordering", "Profile", "find_order", "profile"]

EFFORT = 450
"""Elementary operations that a search may spend per step of the problem, each below 1 us."""

_WINDOWS = ((12, 48), (24, 48), (48, 24), (96, 12), (192, 6))
"""Steps in a window and number of states kept per size, in the order in which they are tried."""

_CLOSURE = 256
"""Maximum number of steps that are moved together."""

_CARRIED = 12
"""Number of buffers live across one peak that the search tries to move away, largest first."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory that is allocated at one step and freed after its last consumer."""

    size: int
    """Bytes."""
    producer: int | None
    """The step that allocates it; None for a graph input that is freed during the schedule."""
    consumers: tuple[int, ...]
    """The steps that read it, each listed once. Without consumers it is live during its producer
    only."""
    kept: bool = False
    """Never freed: an output of the graph."""
    takes_over: tuple[int, ...] = ()
    """Buffers of the same size that its producer reads. If the last use of one of them is there,
    its memory is reused in place, and the load of the step counts both buffers once."""


@dataclass(frozen=True, slots=True)
class OrderProblem:
    """Steps 0 to `steps` - 1, their buffers and their dependencies."""

    steps: int
    buffers: tuple[Buffer, ...]
    edges: tuple[tuple[int, int], ...] = ()
    """(earlier, later), in addition to those from producers to consumers."""
    batched: frozenset[int] = frozenset()
    """Steps that are launched as one if they are adjacent. The search returns no order with more
    batches than the given one."""
    batch_frees_late: bool = False
    """Whether memory that becomes free inside a batch is freed only after the batch's last step."""


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
    graph = _Graph(problem)
    graph.check(order)
    state = _State(graph, order)
    return Profile(state.peak(), tuple(state.loads), state.batches())


def find_order(problem: OrderProblem, start: Sequence[int], *, effort: int = EFFORT) -> Ordering:
    """Search for an order with a lower peak than that of `start`.

    Args:
        problem: steps, buffers and edges.
        start: a topological order of all steps.
        effort: elementary operations per step; 0 for no search, which returns `start`.

    Raises:
        exc.OrderError: `start` is not a topological order, which is always so if the edges form a
            cycle.
    """
    graph = _Graph(problem)
    graph.check(start)
    state = _State(graph, start)
    before = state.peak()
    bound = _lower_bound(graph, state, effort * problem.steps)
    budget = _Budget(effort * problem.steps)
    limit = state.batches()
    if before > bound and budget.left > 0:
        _improve(state, bound, limit, budget, budget.left // 2)
        seen = {tuple(start), tuple(state.order)}
        rivals: list[tuple[int, _State]] = []
        for schedule in (_backwards, _forwards):
            for depth_first in (False, True):
                if state.peak() <= bound or budget.left <= 0:
                    break
                order = schedule(graph, depth_first)
                budget.left -= 3 * problem.steps
                if tuple(order) not in seen:
                    seen.add(tuple(order))
                    rival = _State(graph, order)
                    rivals.append((rival.peak(), rival))
        rivals.sort(key=lambda entry: entry[0])
        for index, (_, rival) in enumerate(rivals):
            if state.peak() <= bound or budget.left <= 0:
                break
            share = budget.left // (len(rivals) - index)
            _improve(rival, bound, max(limit, rival.batches()), budget, share)
            if rival.peak() < state.peak() and rival.batches() <= limit:
                state = rival
    graph.check(state.order)
    spent = effort * problem.steps - budget.left
    return Ordering(tuple(state.order), state.peak(), before, bound, spent)


class _Budget:
    """Elementary operations that are left to spend."""

    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        self.left = left


class _Graph:
    """The problem, indexed by step."""

    def __init__(self, problem: OrderProblem) -> None:
        steps = problem.steps
        self.steps = steps
        self.buffers = problem.buffers
        self.allocates = [0] * steps
        self.scratch = [0] * steps  # freed at the step that allocates it
        self.entered = 0  # bytes live before the first step
        self.uses: list[list[int]] = [[] for _ in range(steps)]  # buffers that are freed eventually
        self.reads: list[list[int]] = [[] for _ in range(steps)]  # buffers, including kept ones
        self.outputs: list[list[int]] = [[] for _ in range(steps)]
        self.in_place: list[list[tuple[int, ...]]] = [[] for _ in range(steps)]
        self.sizes = [buffer.size for buffer in problem.buffers]
        self.batched = [step in problem.batched for step in range(steps)]
        self.has_batches = bool(problem.batched)
        self.late = problem.batch_frees_late and self.has_batches
        successors: list[dict[int, None]] = [{} for _ in range(steps)]
        for index, buffer in enumerate(problem.buffers):
            if buffer.producer is None:
                self.entered += buffer.size
            else:
                self.allocates[buffer.producer] += buffer.size
                self.outputs[buffer.producer].append(index)
                for step in buffer.consumers:
                    successors[buffer.producer][step] = None
                if buffer.takes_over:
                    self.in_place[buffer.producer].append(buffer.takes_over)
                if not buffer.consumers and not buffer.kept:
                    self.scratch[buffer.producer] += buffer.size
            for step in buffer.consumers:
                self.reads[step].append(index)
                if not buffer.kept:
                    self.uses[step].append(index)
        for earlier, later in problem.edges:
            successors[earlier][later] = None
        self.successors = [list(found) for found in successors]
        self.predecessors: list[list[int]] = [[] for _ in range(steps)]
        for step, found in enumerate(self.successors):
            for later in found:
                self.predecessors[later].append(step)

    def check(self, order: Sequence[int]) -> None:
        position = [-1] * self.steps
        for index, step in enumerate(order):
            if not 0 <= step < self.steps or position[step] >= 0:
                raise exc.OrderError(why=f"step {step} is unknown or stands there twice")
            position[step] = index
        if len(order) != self.steps:
            raise exc.OrderError(why=f"it has {len(order)} of {self.steps} steps")
        for step, found in enumerate(self.successors):
            for later in found:
                if position[later] <= position[step]:
                    raise exc.OrderError(why=f"step {later} needs step {step}, which follows it")


class _State:
    """An order and its loads, which are updated when a part of the order changes."""

    def __init__(self, graph: _Graph, order: Sequence[int]) -> None:
        steps = graph.steps
        self.graph = graph
        self.order = list(order)
        self.position = [0] * steps
        self.last = [-1] * len(graph.buffers)  # position of the last use
        self.loads = [0] * steps
        self.alive = [0] * steps  # bytes live before the step, without those whose free is deferred
        self.waiting = [0] * steps  # bytes whose free is deferred to the end of the previous batch
        for index, step in enumerate(self.order):
            self.position[step] = index
            for buffer in graph.uses[step]:
                self.last[buffer] = index
        if steps:
            self.alive[0] = graph.entered
            self._sweep(0, steps)

    def peak(self) -> int:
        return max(self.loads, default=0)

    def batches(self) -> int:
        return _batches(self.graph, self.order, 0, len(self.order))

    def _sweep(self, begin: int, end: int) -> int:
        """Recompute loads from `begin` to `end` and on to the end of a batch; return the stop
        index."""
        graph = self.graph
        order, last, loads = self.order, self.last, self.loads
        alive, waiting = self.alive[begin], self.waiting[begin]
        late, batched, sizes = graph.late, graph.batched, graph.sizes
        index = begin
        while index < graph.steps:
            step = order[index]
            runs_on = late and batched[step]
            self.alive[index], self.waiting[index] = alive, waiting
            if index >= end and not runs_on:
                break  # live bytes here depend on which steps ran before, not on their order
            if late and not runs_on:
                waiting = 0
            dies = graph.scratch[step]
            for buffer in graph.uses[step]:
                if last[buffer] == index:
                    dies += sizes[buffer]
            saved = self._saved(step, index) if graph.in_place[step] else 0
            loads[index] = alive + waiting + graph.allocates[step] - saved
            alive += graph.allocates[step] - dies
            if runs_on:
                waiting += dies - saved
            index += 1
        return index

    def _saved(self, step: int, index: int) -> int:
        """Return the bytes that `step` at position `index` does not allocate because it runs in
        place."""
        taken: list[int] = []
        for candidates in self.graph.in_place[step]:
            for buffer in candidates:
                if self.last[buffer] == index and buffer not in taken:
                    taken.append(buffer)
                    break
        return sum(self.graph.sizes[buffer] for buffer in taken)

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
        return self._sweep(begin, end)


def _batches(graph: _Graph, order: Sequence[int], begin: int, end: int) -> int:
    """Count the batches that begin in a part of an order."""
    batched = graph.batched
    count = 0
    inside = begin > 0 and batched[order[begin - 1]]
    for index in range(begin, end):
        now = batched[order[index]]
        count += now and not inside
        inside = now
    return count


def _improve(state: _State, bound: int, limit: int, budget: _Budget, share: int) -> None:
    """Lower the peak of `state` down to `bound`, until `share` of the budget is spent."""
    floor = budget.left - share
    while budget.left > floor:
        peak = state.peak()
        budget.left -= state.graph.steps // 20 + 1
        if peak <= bound:
            return
        at = state.loads.index(peak)
        if not (
            _reorder_window(state, at, peak, limit, budget, floor, _WINDOWS[:2])
            or _move_carried(state, at, peak, limit, budget, floor)
            or _reorder_window(state, at, peak, limit, budget, floor, _WINDOWS[2:])
        ):
            return


def _accept(
    state: _State, begin: int, part: Sequence[int], peak: int, limit: int, budget: _Budget
) -> bool:
    """Put `part` at `begin` if fewer steps then reach `peak`, no step exceeds it, and the number of
    batches does not grow beyond `limit`."""
    graph = state.graph
    end = begin + len(part)
    before = state.order[begin:end]
    batches = state.batches() if graph.has_batches else 0
    reached = state.loads.count(peak)
    done = state.replace(begin, part)
    budget.left -= 2 * (done - begin)
    stop = min(done + 1, graph.steps)
    if (
        max(state.loads[begin:stop]) <= peak
        and state.loads.count(peak) < reached
        and (not graph.has_batches or state.batches() <= max(limit, batches))
    ):
        return True
    state.replace(begin, before)
    return False


def _reorder_window(
    state: _State,
    at: int,
    peak: int,
    limit: int,
    budget: _Budget,
    floor: int,
    windows: Sequence[tuple[int, int]],
) -> bool:
    steps = state.graph.steps
    tried: set[tuple[int, int]] = set()
    for length, width in windows:
        # Position of the peak in the window: the middle, near the end, near the start.
        for before in (length // 2, length * 5 // 6, length // 6):
            begin = max(min(at - before, steps - length), 0)
            end = min(begin + length, steps)
            if (begin, end) in tried:
                continue
            tried.add((begin, end))
            if budget.left <= floor:
                return False
            part = _best_part(state, begin, end, peak, width, budget)
            if part is not None and _accept(state, begin, part, peak, limit, budget):
                return True
        if length >= steps:
            return False
    return False


_Entry = tuple[int, int, int, int, int, int, int]
"""Peak, deferred frees, batches, live bytes, ready steps (one bit each), previous state, step
taken."""


def _best_part(
    state: _State, begin: int, end: int, ceiling: int, width: int, budget: _Budget
) -> list[int] | None:
    """Return the steps of a window in an order with loads below `ceiling`; None if none was found.

    The key of a state is the set of the window's steps already run, as bits, times 2, plus 1 if a
    batch is open. The live bytes depend only on that set, except for deferred frees in an open
    batch; there, the state with fewer deferred bytes is considered better.
    """
    graph = state.graph
    window = state.order[begin:end]
    index_of = {step: index for index, step in enumerate(window)}
    late, has_batches = graph.late, graph.has_batches
    allocates = [graph.allocates[step] for step in window]
    scratch = [graph.scratch[step] for step in window]
    batched = [int(graph.batched[step]) for step in window]
    masks: dict[int, int] = {}  # per buffer freed in the window: the steps that use it there
    for index, step in enumerate(window):
        for buffer in graph.uses[step]:
            if state.last[buffer] < end:
                masks[buffer] = masks.get(buffer, 0) | 1 << index
    dying = [
        [(masks[buffer], graph.sizes[buffer]) for buffer in graph.uses[step] if buffer in masks]
        for step in window
    ]
    in_place = [
        [
            [(masks[buffer], graph.sizes[buffer], buffer) for buffer in group if buffer in masks]
            for group in graph.in_place[step]
        ]
        for step in window
    ]
    needs = [0] * len(window)
    enables: list[list[int]] = [[] for _ in window]
    ready = 0
    for index, step in enumerate(window):
        for earlier in graph.predecessors[step]:
            other = index_of.get(earlier)
            if other is not None:
                needs[index] |= 1 << other
                enables[other].append(index)
        if not needs[index]:
            ready |= 1 << index
    budget.left -= 4 * len(window)

    opened = int(has_batches and begin > 0 and graph.batched[state.order[begin - 1]])
    first: _Entry = (0, state.waiting[begin] if opened else 0, 0, state.alive[begin], ready, 0, -1)
    layers: list[dict[int, _Entry]] = [{opened: first}]
    for _ in window:
        layer: dict[int, _Entry] = {}
        spent = 0
        for key, (peak, waits, batches, alive, choices, _, _) in layers[-1].items():
            done = key >> 1
            found: list[tuple[int, int, int, int]] = []  # step, load, bytes freed, saved
            rest = choices
            while rest:
                bit = rest & -rest
                rest ^= bit
                index = bit.bit_length() - 1
                missing = ~(done | bit)
                dies = scratch[index]
                for mask, size in dying[index]:
                    if not mask & missing:
                        dies += size
                saved = 0
                if in_place[index]:
                    taken: list[int] = []
                    for group in in_place[index]:
                        for mask, size, buffer in group:
                            if not mask & missing and buffer not in taken:
                                taken.append(buffer)
                                saved += size
                                break
                load = alive + allocates[index] - saved
                if late and batched[index]:
                    load += waits
                spent += 1
                if load >= ceiling:
                    continue
                if load <= peak and allocates[index] <= dies and not has_batches:
                    # It fits under the peak and frees at least what it allocates: always run it
                    # first.
                    found = [(index, load, dies, saved)]
                    break
                found.append((index, load, dies, saved))
            for index, load, dies, saved in found:
                after = done | 1 << index
                kind = batched[index]
                state_key = after << 1 | kind
                pending = 0
                if late and kind:
                    pending = waits + dies - saved
                highest = max(peak, load)
                count = batches + (kind and not key & 1)
                old = layer.get(state_key)
                if old is not None and (old[0], old[1], old[2]) <= (highest, pending, count):
                    continue
                opens = choices & ~(1 << index)
                for other in enables[index]:
                    if not needs[other] & ~after:
                        opens |= 1 << other
                rest_alive = alive + allocates[index] - dies
                layer[state_key] = (highest, pending, count, rest_alive, opens, key, index)
        budget.left -= 2 * spent
        if not layer:
            return None
        if len(layer) > width:
            best = heapq.nsmallest(width, layer.items(), key=_rank)
            layer = dict(best)
        layers.append(layer)
    key, entry = min(layers[-1].items(), key=lambda item: item[1][:4])
    part: list[int] = []
    for layer in reversed(layers[1:]):
        entry = layer[key]
        part.append(window[entry[6]])
        key = entry[5]
    part.reverse()
    return part


def _rank(item: tuple[int, _Entry]) -> tuple[int, int, int, int]:
    """Sort key: states with few live bytes first."""
    key, (peak, waits, batches, alive, _, _, _) = item
    return (alive + waits, peak, batches, key)


def _move_carried(
    state: _State, at: int, peak: int, limit: int, budget: _Budget, floor: int
) -> bool:
    """Consume a buffer that is live across position `at` before it, or produce it after it."""
    graph = state.graph
    position, last = state.position, state.last
    here = state.order[at]
    carried: list[tuple[int, int]] = []
    for index, buffer in enumerate(graph.buffers):
        if not buffer.size:
            continue
        start = -1 if buffer.producer is None else position[buffer.producer]
        end = graph.steps if buffer.kept else last[index]
        if start < at < end:
            carried.append((-buffer.size, index))
    budget.left -= len(graph.buffers) // 4
    for _, index in heapq.nsmallest(_CARRIED, carried):
        if budget.left <= floor:
            return False
        buffer = graph.buffers[index]
        if not buffer.kept:
            later = [step for step in buffer.consumers if position[step] > at]
            moved = _closure(later, graph.predecessors, lambda step: position[step] >= at, budget)
            if moved and here not in moved:
                end = last[index] + 1
                part = sorted(moved, key=position.__getitem__)
                part += [step for step in state.order[at:end] if step not in moved]
                if _accept(state, at, part, peak, limit, budget):
                    return True
        if buffer.producer is not None:
            moved = _closure(
                [buffer.producer], graph.successors, lambda step: position[step] <= at, budget
            )
            if moved and here not in moved:
                begin = position[buffer.producer]
                part = [step for step in state.order[begin : at + 1] if step not in moved]
                part += sorted(moved, key=position.__getitem__)
                if _accept(state, begin, part, peak, limit, budget):
                    return True
    return False


def _closure(
    seeds: Sequence[int],
    neighbours: Sequence[Sequence[int]],
    within: Callable[[int], bool],
    budget: _Budget,
) -> set[int]:
    """Return the steps reachable from `seeds` inside `within`; empty if more than `_CLOSURE`."""
    reached = set(seeds)
    stack = list(seeds)
    while stack:
        for other in neighbours[stack.pop()]:
            if other not in reached and within(other):
                reached.add(other)
                stack.append(other)
        if len(reached) > _CLOSURE:
            return set()
    budget.left -= len(reached)
    return reached


def _forwards(graph: _Graph, depth_first: bool) -> list[int]:
    """Schedule from the inputs, lowest change of the live bytes first.

    Among steps that increase the live bytes, `depth_first` prefers the one that became ready last.
    """
    left = [len(buffer.consumers) for buffer in graph.buffers]
    names = [sum(buffer.consumers) for buffer in graph.buffers]  # sum of the remaining consumers
    change = [
        graph.allocates[step]
        - graph.scratch[step]
        - sum(graph.sizes[buffer] for buffer in graph.uses[step] if left[buffer] == 1)
        for step in range(graph.steps)
    ]
    waiting = [len(found) for found in graph.predecessors]
    queue = _Queue(graph, change, depth_first)
    for step in range(graph.steps):
        if not waiting[step]:
            queue.push(step)
    order: list[int] = []
    for step in queue:
        order.append(step)
        for buffer in graph.uses[step]:
            left[buffer] -= 1
            names[buffer] -= step
            if left[buffer] == 1:
                other = names[buffer]
                change[other] -= graph.sizes[buffer]
                if not waiting[other]:
                    queue.push(other)
        for other in graph.successors[step]:
            waiting[other] -= 1
            if not waiting[other]:
                queue.push(other)
    return order


def _backwards(graph: _Graph, depth_first: bool) -> list[int]:
    """Schedule from the outputs, in reverse: a step frees its outputs and makes its inputs live."""
    alive = [buffer.kept for buffer in graph.buffers]
    change = [
        sum(graph.sizes[buffer] for buffer in graph.uses[step])
        - graph.allocates[step]
        + graph.scratch[step]
        for step in range(graph.steps)
    ]
    waiting = [len(found) for found in graph.successors]
    queue = _Queue(graph, change, depth_first)
    for step in reversed(range(graph.steps)):
        if not waiting[step]:
            queue.push(step)
    order: list[int] = []
    for step in queue:
        order.append(step)
        for buffer in graph.uses[step]:
            if alive[buffer]:
                continue
            alive[buffer] = True
            for other in graph.buffers[buffer].consumers:
                change[other] -= graph.sizes[buffer]
                if other != step and not waiting[other]:
                    queue.push(other)
        for other in graph.predecessors[step]:
            waiting[other] -= 1
            if not waiting[other]:
                queue.push(other)
    order.reverse()
    return order


class _Queue:
    """A queue of ready steps. A step may be pushed again when its change of the live bytes falls.

    If there are batches, steps of the same kind as the last one are taken as long as there are any.
    """

    def __init__(self, graph: _Graph, change: list[int], depth_first: bool) -> None:
        self._batched = graph.batched
        self._change = change
        self._depth_first = depth_first
        self._done = [False] * graph.steps
        self._heaps: tuple[list[tuple[int, int, int, int]], ...] = ([], [])
        self._kind = 0
        self._pushed = 0

    def push(self, step: int) -> None:
        if self._done[step]:
            return
        change = self._change[step]
        self._pushed += 1
        if self._depth_first and change > 0:
            key = (1, -self._pushed, change, step)
        else:
            key = (0 if self._depth_first else 1, change, self._pushed, step)
        heapq.heappush(self._heaps[self._batched[step]], key)

    def __iter__(self) -> _Queue:
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


def _lower_bound(graph: _Graph, state: _State, effort: int) -> int:
    """Return bytes that are live at the same time in every order.

    While a step runs, its inputs and outputs are live, and so is every buffer that is produced
    before it and used after it in every order. Only the steps with the most memory of their own are
    examined, as many as `effort` allows.
    """
    steps = graph.steps
    if not steps:
        return 0
    saved = [
        sum(max(graph.sizes[buffer] for buffer in group) for group in graph.in_place[step])
        for step in range(steps)
    ]
    own = [
        graph.allocates[step]
        + sum(graph.sizes[buffer] for buffer in graph.reads[step])
        - saved[step]
        for step in range(steps)
    ]
    bound = max(own)
    sources = [step for step in range(steps) if not graph.predecessors[step]]
    bound = max(bound, graph.entered + min(graph.allocates[s] - saved[s] for s in sources))
    bound = max(bound, sum(buffer.size for buffer in graph.buffers if buffer.kept))

    before = [0] * steps  # bits of the step and all steps that must precede it
    for step in state.order:
        bits = 1 << step
        for earlier in graph.predecessors[step]:
            bits |= before[earlier]
        before[step] = bits
    after = [0] * steps
    for step in reversed(state.order):
        bits = 1 << step
        for later in graph.successors[step]:
            bits |= after[later]
        after[step] = bits
    affordable = max(effort // (4 * (len(graph.buffers) + 1)), 1)
    for step in heapq.nlargest(affordable, range(steps), key=lambda step: (own[step], -step)):
        earlier, later = before[step], after[step]
        load = -saved[step]
        for buffer in graph.buffers:
            if buffer.producer is not None and not earlier >> buffer.producer & 1:
                continue
            if buffer.producer == step or buffer.kept:
                load += buffer.size
                continue
            for consumer in buffer.consumers:
                if later >> consumer & 1:
                    load += buffer.size
                    break
        bound = max(bound, load)
    return bound
