"""The ordering problem: steps, their buffers and dependencies, and the same indexed by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inductor_ext import exc


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
    is_output: bool = False
    """Never freed: an output of the graph."""
    in_place_candidates: tuple[int, ...] = ()
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


class StepGraph:
    """The problem, indexed by step."""

    def __init__(self, problem: OrderProblem) -> None:
        steps = problem.steps
        self.steps = steps
        self.buffers = problem.buffers
        self.allocates = [0] * steps
        self.scratch = [0] * steps  # freed at the step that allocates it
        self.input_bytes = 0  # bytes live before the first step
        self.uses: list[list[int]] = [[] for _ in range(steps)]  # buffers that are freed eventually
        self.reads: list[list[int]] = [[] for _ in range(steps)]  # buffers, including outputs
        self.in_place: list[list[tuple[int, ...]]] = [[] for _ in range(steps)]
        self.sizes = [buffer.size for buffer in problem.buffers]
        self.batched = [step in problem.batched for step in range(steps)]
        self.has_batches = bool(problem.batched)
        self.frees_late = problem.batch_frees_late and self.has_batches
        successors: list[dict[int, None]] = [{} for _ in range(steps)]
        for index, buffer in enumerate(problem.buffers):
            if buffer.producer is None:
                self.input_bytes += buffer.size
            else:
                self.allocates[buffer.producer] += buffer.size
                for step in buffer.consumers:
                    successors[buffer.producer][step] = None
                if buffer.in_place_candidates:
                    self.in_place[buffer.producer].append(buffer.in_place_candidates)
                if not buffer.consumers and not buffer.is_output:
                    self.scratch[buffer.producer] += buffer.size
            for step in buffer.consumers:
                self.reads[step].append(index)
                if not buffer.is_output:
                    self.uses[step].append(index)
        for earlier, later in problem.edges:
            successors[earlier][later] = None
        self.successors = [list(later) for later in successors]
        self.predecessors: list[list[int]] = [[] for _ in range(steps)]
        for step, successors_of_step in enumerate(self.successors):
            for later in successors_of_step:
                self.predecessors[later].append(step)

    def check(self, order: Sequence[int]) -> None:
        """Check that an order contains every step once and keeps all dependencies.

        Raises:
            exc.OrderError: it does not.
        """
        position = [-1] * self.steps
        for index, step in enumerate(order):
            if not 0 <= step < self.steps or position[step] >= 0:
                raise exc.OrderError(why=f"step {step} is unknown or occurs twice")
            position[step] = index
        if len(order) != self.steps:
            raise exc.OrderError(why=f"it has {len(order)} of {self.steps} steps")
        for step, successors in enumerate(self.successors):
            for later in successors:
                if position[later] <= position[step]:
                    raise exc.OrderError(why=f"step {later} needs step {step}, which follows it")
