"""Records of the decision for each matmul of a graph (`MatmulRecord`).

Matmuls that keep Inductor's lowering have records too, with the reason: they are the first thing to
look at when a model is not faster.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from inductor_ext import events, numerics
from inductor_ext.autotune import decide, default_choice
from inductor_ext.autotune.decision import Decision
from inductor_ext.lowerings import node_info
from inductor_ext.lowerings.fused import cutlass, fused, scaled_int_mm, with_row_maxima
from inductor_ext.lowerings.graph.matmul_nodes import is_matmul, problem_of, why_unsupported
from inductor_ext.lowerings.node_info import Plan
from inductor_ext.settings import Settings
from inductor_ext.templates import kernels
from inductor_ext.templates.device import Device
from inductor_ext.templates.format import problem_words
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.records import MatmulCandidate, MatmulRecord


def operator_names(nodes: Iterable[torch.fx.Node]) -> tuple[str, ...]:
    """Return the names of the operators that nodes compute, as in the model, each once."""
    calls = (node.meta.get("original_aten") or node.target for node in nodes)
    names = (str(getattr(call, "_overloadpacket", call)) for call in calls)
    return tuple(dict.fromkeys(re.sub(r"^(aten|prims)\.", "", name) for name in names))


def note_rejected_fusion(nodes: Iterable[torch.fx.Node], problem: GemmProblem, why: str) -> None:
    """Note a rejected fusion in the records of the matmuls among some nodes.

    Args:
        nodes: those that one kernel could have replaced.
        problem: of that kernel.
        why: the reason, in words.
    """
    _note(nodes, f"{problem_words(problem)} ({why})")


def note_exact_pointwise(nodes: Iterable[torch.fx.Node]) -> None:
    """Note in the records of the matmuls among some nodes that `numerics.has_exact_pointwise`
    prevents an extension kernel from fusing pointwise ops, once.
    """
    why = "emulate_precision_casts or numerics requires that every op rounds"
    text = f"matmul with pointwise ops ({why})"
    _note((node for node in nodes if text not in node_info.get(node).rejected), text)


def _note(nodes: Iterable[torch.fx.Node], text: str) -> None:
    for node in nodes:
        if is_matmul(node):
            node_info.update(node, rejected=(*node_info.get(node).rejected, text))


def emit_records(graph: torch.fx.Graph, settings: Settings) -> None:
    """Emit the records of a graph's matmuls, without those of its subgraphs.

    Args:
        graph: after its matmuls have been planned.
        settings: of the compile.
    """
    for node, record in _records(graph, settings):
        node_info.update(node, record=record)
        events.emit(record, event_log=settings.event_log)


def _records(
    graph: torch.fx.Graph, settings: Settings
) -> Iterator[tuple[torch.fx.Node, MatmulRecord]]:
    for node in graph.nodes:
        plan = node_info.plan_of(node)
        if plan is not None:
            yield node, _planned_record(node, plan, settings)
        elif is_matmul(node):
            yield node, _unplanned_record(node, settings)


def _planned_record(node: torch.fx.Node, plan: Plan, settings: Settings) -> MatmulRecord:
    bound = plan.problem.roofline(plan.device)
    return MatmulRecord(
        operator=_operator(node),
        operands=_operands(node),
        module=events.module_path(node.meta),
        problem=plan.problem,
        device=plan.device.name,
        roofline=bound if math.isfinite(bound) else None,
        chosen=plan.decision.config,
        origin=plan.decision.origin,
        reason=decision_reason(plan.decision, plan.problem, plan.device, settings),
        candidates=_candidates(plan.problem, plan.decision, plan.device),
        declined=node_info.get(node).rejected,
    )


def _unplanned_record(node: torch.fx.Node, settings: Settings) -> MatmulRecord:
    why = why_unsupported(node) or (numerics.gemm_obstacle() if settings.gemm_templates else None)
    if why is None:
        why = (
            "it was added to the graph after the matmuls were planned"
            if settings.gemm_templates
            else "gemm_templates is off"
        )
    value = node.meta.get("val")
    return MatmulRecord(
        operator=_operator(node),
        operands=_operands(node),
        module=events.module_path(node.meta),
        problem=problem_of(node),
        device=str(value.device) if isinstance(value, torch.Tensor) else "unknown",
        roofline=None,
        chosen=None,
        origin="uncovered",
        reason=why,
        candidates=(),
        declined=node_info.get(node).rejected,
    )


def _candidates(
    problem: GemmProblem, decision: Decision, device: Device
) -> tuple[MatmulCandidate, ...]:
    return tuple(
        MatmulCandidate(
            config=timing.config,
            predicted=None
            if timing.config is None
            else kernels.predict(problem, timing.config, device),
            measured=timing.microseconds,
            failure=timing.failure,
        )
        for timing in decision.timings
    )


def decision_reason(
    decision: Decision, problem: GemmProblem, device: Device, settings: Settings
) -> str:
    """Return the reason for a decision, in words."""
    if decision.origin == "forced":
        return "forced by the caller"
    if decision.saving is not None:
        return "predicted to be faster than Inductor (max_autotune would measure it)"
    if decision.origin == "predicted":
        return "the fused operations are predicted to be faster as separate kernels"
    if decision.origin == "unknown":
        return _untuned_reason(problem, device, settings)
    inductor_time = decision.microseconds(None)
    if decision.config is not None:
        selected = decision.microseconds(decision.config)
        if selected is None or inductor_time is None:
            return "it was the fastest candidate"
        return f"{selected:.1f} us, Inductor (default) {inductor_time:.1f} us"
    others = [
        timing.microseconds
        for timing in decision.timings
        if timing.config is not None and timing.microseconds is not None
    ]
    if not others:
        failed = sum(timing.failure is not None for timing in decision.timings)
        return f"all {failed} candidates failed" if failed else "there are no candidates"
    if inductor_time is None or min(others) >= inductor_time:
        return "Inductor (default) was the fastest"
    saved = inductor_time - min(others)
    return f"the best candidate saves {saved:.1f} us over Inductor (default), within noise"


def _untuned_reason(problem: GemmProblem, device: Device, settings: Settings) -> str:
    """Return why a matmul without a tuning result keeps Inductor's kernel."""
    if not decide.backend_enabled("TRITON") and not decide.backend_enabled("CUTLASS"):
        return "max_autotune_gemm_backends names neither TRITON nor CUTLASS"
    why = "gemm_predict is off"
    if settings.gemm_predict:
        why = default_choice.explain_stock(problem, device) or "M is dynamic"
    return f"not tuned (enable max_autotune), and {why}"


def _operator(node: torch.fx.Node) -> str:
    if node.target in (cutlass, fused, scaled_int_mm, with_row_maxima):
        return "fused"
    return str(getattr(node.target, "_overloadpacket", node.target))


def _operands(node: torch.fx.Node) -> tuple[str, ...]:
    values = [source.meta.get("val") for source in node.all_input_nodes]
    return tuple(_tensor(value) for value in values if isinstance(value, torch.Tensor))


def _tensor(value: Any) -> str:
    sizes = ", ".join(map(str, value.shape))
    return f"{str(value.dtype).removeprefix('torch.')}[{sizes}]"
