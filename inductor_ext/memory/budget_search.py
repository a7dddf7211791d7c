"""Compiles a graph within `memory_budget`, by recomputing activations if it is differentiated.

What a forward saves for its backward is most of the peak of a training step. `compile_within`
compiles with what AOTAutograd saves by default first. If a planned peak is above the budget, it
looks for the smallest share of the layers with whose recomputation forward and backward fit
(`lowerings.graph.recompute_segments`), and reports how many FLOPs are recomputed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from inductor_ext import events, exc
from inductor_ext.hooks import context
from inductor_ext.settings import Settings, parse_bytes
from inductor_ext.toolchain import compiler_errors

_LARGE = (1.0, 0.75)
"""Shares that are tried first. All segments may need more than some: what the backward computes
again is live beside what is left."""

_STEPS = 3
"""Number of shares that are tried between none, which does not fit, and one that does."""


@dataclasses.dataclass(frozen=True)
class MemoryBudgetRecord(events.Record):
    """How a training graph was made to fit into `memory_budget`."""

    name: ClassVar[str] = "memory_budget"

    budget: int
    """Bytes."""
    share: float
    """Share of the forward's segments that the backward computes again."""
    compiles: int
    """Number of times that the graph was compiled."""
    flops: int
    """FLOPs of forward and backward, as `torch.utils.flop_counter` counts them."""
    recomputed_flops: int
    """FLOPs of operators of the forward in the backward; part of `flops`."""

    def describe(self) -> str:
        """Return a one-line, human-readable description."""
        percent = 100 * self.recomputed_flops / (self.flops or 1)
        return (
            f"memory_budget: fits in {self.budget} bytes if the backward computes "
            f"{100 * self.share:.1f} % of the forward's segments again; {percent:.1f} % of the "
            f"FLOPs are recomputation ({self.compiles} compiles)"
        )


@dataclasses.dataclass(frozen=True)
class GraphCost:
    """FLOPs of a graph."""

    kind: str
    """Kind of the graph: "forward", "backward" or "inference"."""
    flops: int
    recomputed_flops: int


def note_graph(kind: str, gm: Any) -> None:
    """Count the FLOPs of a graph that is about to be compiled, for the search that is running.

    Args:
        kind: as in `GraphCost`.
        gm: the GraphModule, with fake tensors as values.
    """
    costs = context.current().graph_costs
    if costs is not None:
        costs.append(_count_flops(kind, gm.graph))


def compile_within(compile_: Callable[[], Any], settings: Settings) -> Any:
    """Compile a graph such that the planned peaks of forward and backward fit into the budget.

    Args:
        compile_: compiles a new copy of the graph.
        settings: of the compile; `memory_budget` is set.

    Returns:
        What `compile_` returns.

    Raises:
        exc.MemoryBudgetError: the graph does not fit, even if the backward recomputes everything
            that it can, or the graph is not differentiated.
    """
    first = _try(compile_, 0.0)
    if first.error is None:
        return first.output
    if not first.is_differentiated:
        raise first.error
    attempts = []
    for share in _LARGE:
        attempts.append(_try(compile_, share, first.error))
        if attempts[-1].error is None:
            break
    else:
        tried = ", although the backward recomputes the activations of all layers but the last"
        error = attempts[0].error or first.error
        raise exc.MemoryBudgetError(**{**error.fields, "tried": tried}) from error
    best = attempts[-1]
    low, high = 0.0, best.share
    for _ in range(_STEPS):
        attempts.append(_try(compile_, (low + high) / 2, first.error))
        if attempts[-1].error is None:
            best, high = attempts[-1], attempts[-1].share
        else:
            low = attempts[-1].share
    record = MemoryBudgetRecord(
        budget=parse_bytes(settings.memory_budget or 0),
        share=best.share,
        compiles=1 + len(attempts),
        flops=sum(cost.flops for cost in best.costs),
        recomputed_flops=sum(cost.recomputed_flops for cost in best.costs),
    )
    events.emit(record, event_log=settings.event_log)
    return best.output


@dataclasses.dataclass(frozen=True)
class _Attempt:
    """The result of a compile."""

    share: float
    """Share of the segments that the backward computes again."""
    output: Any
    error: exc.MemoryBudgetError | None
    costs: list[GraphCost]

    @property
    def is_differentiated(self) -> bool:
        return any(cost.kind != "inference" for cost in self.costs)


def _try(
    compile_: Callable[[], Any], share: float, default_error: exc.MemoryBudgetError | None = None
) -> _Attempt:
    """Compile with recomputation of a share of the segments.

    Args:
        compile_: as in `compile_within`.
        share: of the segments.
        default_error: the error without recomputation, which stands for one that only
            recomputation causes.
    """
    from torch._functorch import config as functorch_config

    costs: list[GraphCost] = []
    with (
        # The backward must be compiled now, to know whether it fits.
        functorch_config.patch(force_non_lazy_backward_lowering=True),
        context.enter(graph_costs=costs, recomputed_share=share),
    ):
        try:
            return _Attempt(share, compile_(), None, costs)
        except Exception as error:
            for cause in compiler_errors.walk_causes(error):
                if isinstance(cause, exc.MemoryBudgetError):
                    return _Attempt(share, None, cause, costs)
            if default_error is None:
                raise
            events.warn_once(
                f"recompute:{type(error).__name__}",
                f"memory_budget: a compile with recomputed activations failed "
                f"({compiler_errors.describe(error)}); please report this",
            )
            return _Attempt(share, None, default_error, costs)


def _count_flops(kind: str, graph: Any) -> GraphCost:
    from torch.utils.flop_counter import flop_registry

    total = recomputed = 0
    for node in graph.nodes:
        count = flop_registry.get(getattr(node.target, "overloadpacket", None))
        if node.op != "call_function" or count is None:
            continue
        args, kwargs = _values((node.args, node.kwargs))
        flops = _to_int(count(*args, **kwargs, out_val=node.meta.get("val")))
        total += flops
        if kind == "backward" and node.meta.get("partitioner_tag") != "is_backward":
            recomputed += flops
    return GraphCost(kind, total, recomputed)


def _values(arguments: Any) -> Any:
    from torch import fx

    return fx.node.map_arg(arguments, lambda node: node.meta.get("val"))


def _to_int(count: Any) -> int:
    """Return a number of FLOPs; with dynamic shapes, at the sizes of the first call."""
    hint = count.node.hint if hasattr(count, "node") else count
    return int(hint or 0)
