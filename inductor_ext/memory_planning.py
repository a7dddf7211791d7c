"""Memory planning of generated code: reads the wrapper's lines, plans, and writes the lines back.

Once a wrapper's lines are final, Inductor decides in `run_wrapper_ir_passes` how its buffers share
memory. In compiles of the extension, `plan_wrapper` replaces that step, for Python and C++
wrappers:

1. `memory.wrapper_reader` finds the storages behind the lines and their live ranges.
2. Inductor's reuse is applied to a copy of the lines, which is read the same way for comparison.
3. `memory.planner_input` converts the storages for the pure planner, whose
   `placement_policy.decide` chooses arenas and reuse that keep the lower bound.
4. `memory.wrapper_writer` writes the plan with the lower peak, then with fewer allocator calls, as
   lines. A record reports the gain (`memory.plan_record`).

A storage that cannot be placed in an arena keeps its own memory, which reference counts protect. A
graph with lines or operations that `memory.known_ir` does not list gets Inductor's plan.

Settings: memory_arenas, memory_replan, memory_budget, memory_debug. Inductor's memory_planning,
memory_pool and allow_buffer_reuse keep their meaning.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch._inductor import config as inductor_config
from torch._inductor.codegen import wrapper as wrapper_ir
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import Max

from inductor_ext import events, exc
from inductor_ext.memory import (
    budget,
    dynamic_plan,
    extern_memory,
    known_ir,
    plan_record,
    planner_input,
)
from inductor_ext.memory.graph_buffers import list_inlined_graphs
from inductor_ext.memory.planner import arenas, peak_report, placement_policy
from inductor_ext.memory.planner.arena_plan import Arena, Request
from inductor_ext.memory.planner.symbolic.evaluator import ExpressionEvaluator
from inductor_ext.memory.records import MemoryPlanRecord
from inductor_ext.memory.symbolic_peak import SymbolicPeak, read_peak
from inductor_ext.memory.wrapper_reader import WrapperMemory, read_wrapper, record_peaks
from inductor_ext.memory.wrapper_writer import write_plan
from inductor_ext.settings import Settings, parse_bytes

_MIN_ARENA_BYTES = 512
"""Minimum size in bytes of a buffer that is placed in an arena."""

_GPU_UNUSED_SHARE = 1 / 2
"""`placement_policy.UNUSED_SHARE` on a GPU: workspaces of cuDNN and of attention are below half of
the peak there, while oneDNN copies operands and results of convolutions to blocked layouts."""


@events.timed("plan_memory")
def plan_wrapper(
    stock: Callable[[Any, bool], None], wrapper: Any, is_inference: bool, settings: Settings
) -> None:
    """Decide how the buffers of a wrapper's generated code share memory.

    `wrapper.lines` must be final.

    Args:
        stock: Inductor's `run_wrapper_ir_passes`.
        wrapper: a PythonWrapperCodegen or an instance of a subclass.
        is_inference: whether no backward graph belongs to this one.
        settings: settings of the current compile.

    Raises:
        exc.MemoryBudgetError: the planned peak on a device is above `memory_budget`.
    """
    if inductor_config.test_configs.track_memory_lifecycle:
        option = "test_configs.track_memory_lifecycle is on"
        _warn_if_forced(settings, option)
        _warn_of_unchecked_budget(settings, option)
        stock(wrapper, is_inference)
        return
    if V.graph.fx_wrapper:
        _warn_if_forced(settings, "fx_wrapper is on")
    start = time.process_time()
    lines = wrapper.lines
    kind = plan_record.graph_kind(is_inference)
    reason = _why_unplannable(lines, settings)
    if reason:
        stock(wrapper, is_inference)
        record_peaks(wrapper, None)
        _warn_of_unchecked_budget(settings, reason)
        record = plan_record.unplanned_record(wrapper, kind, start, reason)
        events.emit(record, event_log=settings.event_log)
        return
    V.graph.never_reuse_buffers.update(extern_memory.find_buffers_with_objects())
    planning_line = wrapper_ir.MemoryPlanningLine
    wrapper.lines = [copy.copy(line) if isinstance(line, planning_line) else line for line in lines]
    if inductor_config.allow_buffer_reuse:
        wrapper.estimate_peak = wrapper_ir.EfficientPeakEstimate()
    wrapper.memory_plan_reuse()
    if getattr(wrapper, "allow_stack_allocation", None):
        # Everything fits on the stack: there are no allocations to plan.
        return
    planner = _Planner(wrapper, lines, wrapper.lines, kind, settings)
    record = planner.run(start)
    if settings.memory_budget is not None:
        if planner.memory.unknown_callee:
            callee = planner.memory.unknown_callee
            _warn_of_unchecked_budget(settings, f"it calls {callee}, whose memory use is unknown")
        _check_budget(record, settings)
        budget_bytes = parse_bytes(settings.memory_budget)
        unchecked = budget.add_checks(wrapper, planner.read_peak(), budget_bytes)
        if unchecked:
            _warn_of_unchecked_budget(settings, unchecked)
    events.emit(record, event_log=settings.event_log)


def _why_unplannable(lines: Sequence[Any], settings: Settings) -> str:
    """Return why a function gets Inductor's plan; empty if the extension plans it."""
    graphs = list_inlined_graphs(lines)
    operations = [operation for graph in graphs for operation in graph.operations]
    unknown = known_ir.find_unplannable_operation(operations)
    if unknown is not None:
        return known_ir.warn_unknown(unknown, "memory plan")
    switch = known_ir.find_stream_operator(operations, switch=True)
    if switch:
        reason = f"its code switches to another stream ({switch})"
        _warn_if_forced(settings, reason)
        return reason
    match = known_ir.find_unplannable_line(lines, cpp=V.graph.cpp_wrapper)
    if match is None:
        return ""
    cls, why = match
    if not why:
        return known_ir.warn_unknown(cls, "memory plan")
    reason = f"its generated code contains a {cls.__name__} ({why})"
    _warn_if_forced(settings, reason)
    return reason


def _warn_of_unchecked_budget(settings: Settings, cause: str) -> None:
    """Warn once that a budget is set but the peak is not known."""
    if settings.memory_budget is not None:
        events.warn_once(
            f"budget:{cause}",
            f"memory_budget is not checked for a graph whose peak is unknown, because {cause}",
        )


def _warn_if_forced(settings: Settings, cause: str) -> None:
    """Warn once that arenas were requested where none can be made."""
    if _is_forced(settings):
        events.warn_once(
            f"arenas:{cause}",
            "a graph gets no arenas, although memory_planning or memory_arenas='always' requests "
            f"them, because {cause}",
        )


def _is_forced(settings: Settings) -> bool:
    return bool(inductor_config.memory_planning) or settings.memory_arenas == "always"


def _check_budget(record: MemoryPlanRecord, settings: Settings) -> None:
    limit = parse_bytes(settings.memory_budget or 0)
    for device in peak_report.devices(record):
        needed = max(peak_report.allocated_bytes(record, device), default=0)
        if needed > limit:
            raise exc.MemoryBudgetError(
                graph=record.graph,
                device=device,
                peak=peak_report.human_bytes(needed),
                budget=peak_report.human_bytes(limit),
                tried="",
                table=peak_report.peak_table(record),
                kind=record.kind,
                excess=needed - limit,
            )


class _Planner:
    """Plans the memory of one wrapper."""

    def __init__(
        self,
        wrapper: Any,
        lines: list[Any],
        inductor_plan: list[Any],
        kind: str,
        settings: Settings,
    ) -> None:
        self.wrapper = wrapper
        self.lines = lines
        self.inductor_plan = inductor_plan
        self.numbers = itertools.count()
        self.kind = kind
        self.settings = settings
        self.memory = read_wrapper(wrapper, lines, lines)
        self.inductor_memory = read_wrapper(wrapper, inductor_plan, lines)
        self.is_backward = kind == "backward"
        self.other = planner_input.list_other_memory(self.memory, backward=self.is_backward)
        self.known_from = planner_input.find_first_uses(self.memory.storages)
        self.samples = planner_input.list_samples(self.memory.storages)
        # The value of a size without a hint is unknown, so its live range is treated like unbounded
        # workspace.
        unbacked = (s for s in self.memory.storages if planner_input.unbacked_symbols(s.bytes))
        self.unbounded_steps = self.memory.unbounded_steps.union(
            *(range(storage.start, storage.end) for storage in unbacked)
        )
        self.reuse = inductor_config.allow_buffer_reuse
        self.force = _is_forced(settings)
        # The assumption of `list_other_memory` that the record reports.
        self.assumption = -1 if self.is_backward else 0
        self.applied: tuple[WrapperMemory, placement_policy.Decision | None] = self.memory, None
        """The storages and the decision of the plan that was written; set by `run`."""

    def run(self, start: float) -> MemoryPlanRecord:
        """Replace the wrapper's lines and return the record."""
        inductor_ranges = planner_input.to_live_ranges(self.inductor_memory)
        calls_before = placement_policy.count_calls(inductor_ranges)
        decision = self._decide(calls_before)
        other = planner_input.list_other_memory(self.inductor_memory, backward=self.is_backward)
        peak_before = planner_input.max_live_bytes(
            inductor_ranges, other, self.inductor_memory.steps, self.assumption
        )
        unplaced_ranges = planner_input.to_live_ranges(self.memory)
        bound = planner_input.max_live_bytes(
            unplaced_ranges, self.other, self.memory.steps, self.assumption
        )
        peak = decision.peaks[self.assumption]
        better = (sum(peak.values()), decision.calls) <= (sum(peak_before.values()), calls_before)
        # The extension's plan also keeps the lower bound at sizes other than the hint, and keeps
        # headroom for unbounded workspace. The comparison does not see either.
        better |= bool(self.known_from or self.samples or self.unbounded_steps)
        memory, calls = self.memory, decision.calls
        applied: placement_policy.Decision | None = decision
        if self.force or not self.reuse or better:
            self.wrapper.lines, variables = write_plan(
                self.wrapper, self.lines, memory, decision, self.settings
            )
            strategy = "arenas" if decision.arenas else "reuse" if decision.reused_from else "plain"
            rows = tuple(map(plan_record.arena_row, variables, decision.arenas))
        else:
            self.wrapper.lines = self.inductor_plan
            strategy, peak, calls, rows = "stock", peak_before, calls_before, ()
            memory, applied = self.inductor_memory, None
        self.applied = memory, applied
        record_peaks(self.wrapper, peak)
        record = plan_record.make_record(
            self.wrapper,
            self.kind,
            start,
            strategy=strategy,
            peak_before=sum(peak_before.values()),
            peak=sum(peak.values()),
            lower_bound=sum(bound.values()),
            steps=memory.steps,
            calls_before=calls_before,
            calls=calls,
            arenas=rows,
            storages=plan_record.storage_rows(memory, applied, inputs=self.is_backward),
            held_inputs=tuple(map(plan_record.storage_row, memory.held_inputs)),
        )
        return dynamic_plan.add_dynamic_plan(
            record,
            self.wrapper,
            (memory, self.inductor_memory, self.memory),
            applied,
            inputs=self.is_backward,
        )

    def read_peak(self) -> SymbolicPeak:
        """Return the memory that the plan uses, after `run`."""
        return read_peak(self.wrapper, *self.applied, inputs=self.is_backward)

    def _decide(self, inductor_calls: int) -> placement_policy.Decision:
        """Return arenas and reuse, given the allocator calls of Inductor's plan."""
        has_arenas = (
            self.settings.memory_arenas != "never"
            and (self.reuse or self.force)
            and not V.graph.fx_wrapper
        )
        pool = inductor_config.memory_pool if has_arenas else "none"
        decision = self._decide_for(pool if pool != "combined" else "outputs")
        if decision.arenas and not self.force:
            without = self._decide_for("none")
            few = without.calls <= decision.calls
            if any(storage.device.type != "cpu" for storage in self.memory.storages):
                # Kernels are launched while others run, so the host's time counts.
                few = without.calls <= max(decision.calls, inductor_calls) and (
                    without.host_cost <= decision.host_cost
                )
            if few:
                return without
        if pool == "combined" and self.force:
            # An arena lives as long as any output in it. Share one between outputs and
            # intermediates only if it keeps no more memory live than the outputs alone.
            combined = self._decide_for("combined")
            storages = self.memory.storages
            output_bytes = sum(storage.hint for storage in storages if storage.is_output)
            arena_bytes = sum(
                arena.peak_hint
                for arena in combined.arenas
                if any(storages[int(member.request.name)].is_output for member in arena.members)
            )
            if arena_bytes <= output_bytes:
                return combined
        return decision

    def _decide_for(self, pool: str) -> placement_policy.Decision:
        """Return the decision for a value of Inductor's memory_pool; "none" for no arenas."""
        return placement_policy.decide(
            planner_input.to_live_ranges(
                self.memory,
                pool=pool,
                reuse=self.reuse,
                known=self.known_from,
                samples=self.samples,
            ),
            self.memory.steps,
            plan=self._place,
            sizes=self._sizes,
            other_memory=self.other,
            unbounded_steps=self.unbounded_steps,
            unused_shares={
                device: _GPU_UNUSED_SHARE
                for device in {str(storage.device) for storage in self.memory.storages}
                if not device.startswith("cpu")
            },
            force=self.force,
            min_size=_MIN_ARENA_BYTES,
        )

    def _sizes(self, arena: Arena) -> list[int]:
        program = ExpressionEvaluator([arena.size], arena.definitions)
        return [program(sample)[0] for sample in self.samples]

    def _place(self, requests: Sequence[Request]) -> tuple[Arena, ...]:
        return arenas.plan_arenas(
            requests,
            hint=extern_memory.size_hint,
            make_max=lambda values: Max(*values),
            make_align=planner_input.round_up_expression,
            prefix=f"arena{next(self.numbers)}_",
        )
