"""The pass over a graph that decides which kernel every product gets.

It runs after Inductor's own passes, on the graph that is about to be lowered. Products that are
best fused are replaced by one call (`gemm.fused`), and the others get their `Plan` as metadata,
which their lowering reads. A graph without products on a CUDA device stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from inductor_ext.lowerings import gemm_records, problems
from inductor_ext.lowerings.gemm import PLAN, Plan
from inductor_ext.selection import choose
from inductor_ext.selection.decision import Decision
from inductor_ext.settings import Settings
from inductor_ext.templates.device import Device
from inductor_ext.templates.problem import GemmProblem

__all__ = ["run"]


def run(gm: torch.fx.GraphModule, settings: Settings) -> None:
    """Plan the products of one graph, without those of its subgraphs, which get their own run."""
    _plan(gm, settings)
    gemm_records.emit(gm.graph, settings)


def _plan(gm: torch.fx.GraphModule, settings: Settings) -> None:
    sites = list(_sites(gm.graph))
    if not sites or not settings.gemm_templates:
        return
    device = _device()
    decisions = choose.decide(
        (problem for _, problem in sites), device, _lookup(settings), _measure(settings)
    )
    for node, problem in sites:
        node.meta[PLAN] = Plan(problem, decisions[problem], device)


def _sites(graph: torch.fx.Graph) -> Iterator[tuple[torch.fx.Node, GemmProblem]]:
    for node in graph.nodes:
        if node.op == "call_function":
            problem = problems.problem_of(node)
            if isinstance(problem, GemmProblem):
                yield node, problem


def _device() -> Device:
    properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Device.from_properties(
        properties.name,
        (properties.major, properties.minor),
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,
        properties.L2_cache_size,
        shared_memory_sm=properties.shared_memory_per_multiprocessor,
        registers_sm=properties.regs_per_multiprocessor,
    )


def _lookup(settings: Settings) -> Callable[[GemmProblem], Decision | None]:
    return lambda problem: None


def _measure(settings: Settings) -> choose.Measure | None:
    return None
