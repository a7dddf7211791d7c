"""Compiles a graph within `memory_budget`: by recomputing activations, and in chunks.

`compile_within` compiles as without a budget first. If a planned peak is above the budget, it tries
what costs time but saves memory, and returns the cheapest compile that fits:

- In chunks (`lowerings.graph.chunks`): large values, such as logits, are computed for some rows at
  a time. This takes more, smaller kernels, and in training a second computation of these values.
- With recomputation, in training (`lowerings.graph.recompute_segments`): what a forward saves for
  its backward is most of the peak of a step. The smallest share of the layers that fits is
  searched.
- Both, if neither suffices.

The event `memory_budget` reports what was done and what it costs. If nothing fits, the error has
the table of the live buffers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from inductor_ext import events, exc
from inductor_ext.flops import count_flops
from inductor_ext.hooks import context
from inductor_ext.settings import Settings, parse_bytes
from inductor_ext.toolchain import compiler_errors

_LARGE = (1.0, 0.75)
"""Shares that are tried first. All segments may need more than some: what the backward computes
again is live beside what is left."""

_STEPS = 3
"""Number of shares that are tried between none, which does not fit, and one that does."""

_CHUNK_STEPS = 4
"""Maximum number of compiles in chunks with one share."""


@dataclasses.dataclass(frozen=True)
class MemoryBudgetRecord(events.Record):
    """How a graph was made to fit into `memory_budget`."""

    name: ClassVar[str] = "memory_budget"

    budget: int
    """Bytes."""
    share: float
    """Share of the forward's segments that the backward computes again."""
    compiles: int
    """Number of times that the graph was compiled."""
    flops: int
    """FLOPs of all graphs, as `torch.utils.flop_counter` counts them."""
    recomputed_flops: int
    """FLOPs of operators of the forward in the backward; part of `flops`."""
    chunks: int = 0
    """Largest number of chunks in which a value is computed; 0 if none is."""
    chunked_regions: int = 0
    """Number of parts of the graphs that are computed in chunks."""
    added_operators: int = 0
    """Number of operators that the graphs have more because of the chunks. A part of them, which
    Inductor does not fuse, is launched as kernels."""

    def describe(self) -> str:
        """Return a one-line, human-readable description."""
        done = []
        if self.share:
            done.append(
                f"the backward computes {100 * self.share:.1f} % of the forward's segments again"
            )
        if self.chunks:
            done.append(
                f"{self.chunked_regions} parts are computed in up to {self.chunks} chunks "
                f"({self.added_operators} operators more)"
            )
        percent = 100 * self.recomputed_flops / (self.flops or 1)
        return (
            f"memory_budget: fits in {self.budget} bytes if {' and '.join(done)}; {percent:.1f} % "
            f"of the FLOPs are recomputation ({self.compiles} compiles)"
        )


@dataclasses.dataclass(frozen=True)
class GraphCost:
    """FLOPs of a graph."""

    kind: str
    """Kind of the graph: "forward", "backward", "inference", or "aot" for that of a package."""
    flops: int
    recomputed_flops: int


class ChunkedGraph(Protocol):
    """How a graph was divided into chunks: `lowerings.graph.chunks.ChunkedGraph`."""

    count: int
    regions: int
    operators: int
    peak_before: int
    peak: int


@dataclasses.dataclass(frozen=True)
class Chunking:
    """Which graphs of a compile are computed in chunks."""

    saved: dict[str, int]
    """Bytes by which the peak should fall, by the kind of the graph."""
    errors: dict[str, exc.MemoryBudgetError]
    """The errors of the graphs without it."""
    results: dict[str, ChunkedGraph] = dataclasses.field(default_factory=dict)
    """How the graphs were divided, by kind."""

    @property
    def key(self) -> str:
        """A text that differs where the graphs may be divided differently."""
        return "chunk" + ",".join(f"{kind}{size}" for kind, size in sorted(self.saved.items()))


def reduce_peak(kind: str, gm: Any, chunk_graph: Callable[[Any, int], Any]) -> None:
    """Divide a graph that is about to be compiled into chunks, if the search asks for it.

    Args:
        kind: as in `GraphCost`.
        gm: the GraphModule, with fake tensors as values; changed in place.
        chunk_graph: `lowerings.graph.chunks.chunk_graph`.

    Raises:
        exc.MemoryBudgetError: nothing of the graph can be computed in chunks.
    """
    chunking = context.current().chunking
    if chunking is None or kind not in chunking.saved:
        return
    result = chunk_graph(gm, chunking.saved[kind])
    if result is None:
        # What a compile would find is known.
        raise exc.MemoryBudgetError(**chunking.errors[kind].fields)
    chunking.results[kind] = result


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
    """Compile a graph such that the planned peaks of all its graphs fit into the budget.

    Args:
        compile_: compiles a new copy of the graph.
        settings: of the compile; `memory_budget` is set.

    Returns:
        What `compile_` returns.

    Raises:
        exc.MemoryBudgetError: the graph does not fit, whatever is tried.
    """
    search = _Search(compile_)
    first = search.attempt(0.0)
    if first.error is None:
        return first.output
    search.default_error = first.error
    best = search.find_cheapest(first)
    if best is None:
        raise search.describe_failure(first) from first.error
    graphs = best.chunking.results.values() if best.chunking else ()
    record = MemoryBudgetRecord(
        budget=parse_bytes(settings.memory_budget or 0),
        share=best.share,
        compiles=len(search.attempts),
        flops=sum(cost.flops for cost in best.costs),
        recomputed_flops=sum(cost.recomputed_flops for cost in best.costs),
        chunks=max((graph.count for graph in graphs), default=0),
        chunked_regions=sum(graph.regions for graph in graphs),
        added_operators=sum(graph.operators for graph in graphs),
    )
    events.emit(record, event_log=settings.event_log)
    return best.output


@dataclasses.dataclass(frozen=True)
class _Attempt:
    """The result of a compile."""

    share: float
    """Share of the segments that the backward computes again."""
    chunking: Chunking | None
    output: Any
    error: exc.MemoryBudgetError | None
    costs: list[GraphCost]

    @property
    def is_differentiated(self) -> bool:
        return any(cost.kind in ("forward", "backward") for cost in self.costs)

    @property
    def cost(self) -> tuple[float, int]:
        """What the compile costs in time: recomputation first, then launches."""
        graphs = self.chunking.results.values() if self.chunking else ()
        operators = sum(graph.operators for graph in graphs)
        flops = sum(cost.flops for cost in self.costs)
        return sum(cost.recomputed_flops for cost in self.costs) / (flops or 1), operators


class _Search:
    """The compiles of one graph."""

    def __init__(self, compile_: Callable[[], Any]) -> None:
        self.compile_ = compile_
        self.attempts: list[_Attempt] = []
        self.default_error: exc.MemoryBudgetError | None = None
        """The error as without a budget, which stands for one that only other compiles cause."""

    def find_cheapest(self, first: _Attempt) -> _Attempt | None:
        """Return the cheapest compile that fits; None if none does.

        Args:
            first: the compile without recomputation and chunks, which does not fit.
        """
        chunked = self.chunk(first)
        if not first.is_differentiated:
            return chunked
        shares = self.recompute()
        fitting = [attempt for attempt in (chunked, shares) if attempt is not None]
        if fitting:
            return min(fitting, key=lambda attempt: attempt.cost)
        large = [attempt for attempt in self.attempts if attempt.share and not attempt.chunking]
        for attempt in large:
            both = self.chunk(attempt)
            if both is not None:
                return self.lower_share(both)
        return None

    def recompute(self) -> _Attempt | None:
        """Return the compile that fits with the least recomputation; None if none does."""
        for share in _LARGE:
            attempt = self.attempt(share)
            if attempt.error is None:
                return self.lower_share(attempt)
        return None

    def lower_share(self, best: _Attempt) -> _Attempt:
        """Return the compile that fits with the least recomputation.

        Args:
            best: a compile that fits.
        """
        low, high = 0.0, best.share
        for _ in range(_STEPS):
            attempt = self.attempt((low + high) / 2, best.chunking)
            if attempt.error is None:
                best, high = attempt, attempt.share
            else:
                low = attempt.share
        return best

    def chunk(self, failed: _Attempt) -> _Attempt | None:
        """Return a compile in chunks that fits; None if there is none.

        Args:
            failed: a compile that does not fit, whose share of recomputation is kept.
        """
        saved: dict[str, int] = {}
        errors: dict[str, exc.MemoryBudgetError] = {}
        attempt = failed
        for _ in range(_CHUNK_STEPS):
            error = attempt.error
            if error is None or "excess" not in error.fields:
                break
            kind = error.fields["kind"]
            before = attempt.chunking.results.get(kind) if attempt.chunking else None
            if kind in saved and before is None:
                break
            estimated = before.peak_before - before.peak if before else 0
            saved = {**saved, kind: estimated + error.fields["excess"]}
            errors = {kind: error, **errors}
            attempt = self.attempt(failed.share, Chunking(saved, errors))
            if attempt.error is None:
                return attempt
            assert attempt.chunking is not None
            same_kind = attempt.error.fields.get("kind") == kind
            if before is not None and (
                attempt.chunking.results.get(kind) == before
                or (same_kind and attempt.error.fields.get("excess", 0) >= error.fields["excess"])
            ):
                break
        return None

    def describe_failure(self, first: _Attempt) -> exc.MemoryBudgetError:
        """Return the error of the compile that is closest to the budget, with what was tried."""
        assert first.error is not None
        errors = [attempt.error for attempt in self.attempts if attempt.error is not None]
        error = min(errors, key=lambda error: error.fields.get("excess", float("inf")))
        tried = []
        if first.is_differentiated:
            tried.append("the backward recomputes the activations of all layers but the last")
        graphs = [
            graph
            for attempt in self.attempts
            if attempt.chunking
            for graph in attempt.chunking.results.values()
        ]
        if graphs:
            count = max(graph.count for graph in graphs)
            tried.append(f"large values are computed in up to {count} chunks")
        text = f", although {' and '.join(tried)}" if tried else ""
        return exc.MemoryBudgetError(**{**error.fields, "tried": text})

    def attempt(self, share: float, chunking: Chunking | None = None) -> _Attempt:
        """Compile with recomputation of a share of the segments, and in chunks.

        Args:
            share: of the segments.
            chunking: which graphs to compute in chunks; its results are not used.
        """
        if chunking is not None:
            chunking = dataclasses.replace(chunking, results={})
        attempt = _try(self.compile_, share, chunking, self.default_error)
        self.attempts.append(attempt)
        return attempt


def _try(
    compile_: Callable[[], Any],
    share: float,
    chunking: Chunking | None,
    default_error: exc.MemoryBudgetError | None,
) -> _Attempt:
    """Compile a graph; the arguments are those of `_Search`."""
    from torch._functorch import config as functorch_config

    costs: list[GraphCost] = []
    with (
        # The backward must be compiled now, to know whether it fits.
        functorch_config.patch(force_non_lazy_backward_lowering=True),
        context.enter(graph_costs=costs, recomputed_share=share, chunking=chunking),
    ):
        try:
            return _Attempt(share, chunking, compile_(), None, costs)
        except Exception as error:
            for cause in compiler_errors.walk_causes(error):
                if isinstance(cause, exc.MemoryBudgetError):
                    return _Attempt(share, chunking, None, cause, costs)
            if default_error is None:
                raise
            events.warn_once(
                f"memory_budget:{type(error).__name__}",
                f"memory_budget: a compile with recomputed activations or in chunks failed "
                f"({compiler_errors.describe(error)}); please report this",
            )
            return _Attempt(share, chunking, None, default_error, costs)


def _count_flops(kind: str, graph: Any) -> GraphCost:
    total = recomputed = 0
    for node in graph.nodes:
        flops = count_flops(node)
        total += flops
        if kind == "backward" and node.meta.get("partitioner_tag") != "is_backward":
            recomputed += flops
    return GraphCost(kind, total, recomputed)
