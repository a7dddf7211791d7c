"""The FX pass that decides which kernel every matmul of a graph gets.

It runs after Inductor's post-grad passes, on the graph that is about to be lowered:

1. It decides on the multi-node fusions that the `match_*` modules find, and replaces those that
   save most time by one call (`gemm.fused`).
2. It attaches a `Plan` to every other matmul, as node metadata that the lowering reads, or replaces
   the matmul and its epilogue by a call of a CUTLASS kernel (`gemm.cutlass`).
3. If M is dynamic and the best kernel depends on M, it moves the nodes into `torch.cond` branches
   (`dynamic_m`) and plans each branch for its range of M.

A matmul without a better kernel keeps Inductor's lowering, and a graph without matmuls on a CUDA
device is not changed. Settings: `gemm_templates`, `gemm_rows`, `gemm_fuse_*`, `cutlass_*`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch._dynamo.utils import counters

from inductor_ext import _compat, events, numerics
from inductor_ext.autotune import cutlass_kernels, cutlass_options, decide, results_db
from inductor_ext.autotune.decision import STOCK, Decision
from inductor_ext.lowerings import gemm
from inductor_ext.lowerings.graph import (
    dynamic_m,
    epilogue_region,
    explain_records,
    match_cutlass,
    match_dequantized,
    match_int8_scales,
    match_row_amax,
    match_shared_input,
    matmul_nodes,
    undo_woq_int8,
)
from inductor_ext.lowerings.graph.formula import is_cast, is_view
from inductor_ext.lowerings.graph.fusion import Fusion, apply, is_written_between, named_graph
from inductor_ext.settings import Settings, parse_rows
from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.device import Device
from inductor_ext.templates.format import config_words, problem_words
from inductor_ext.templates.problem import GemmProblem, size_of
from inductor_ext.templates.triton.config import GemmConfig

__all__ = ["cache_key", "run"]


_REPEATED = 0.03
"""Minimum speedup, as a fraction of kernel time, for fusing the norm."""


_NEAR = 0.75
"""If a fused kernel closes this fraction of the gap between Inductor and the roofline, do not tune
its smaller alternatives."""

_FEW = 64
"""Up to this M a matmul is bound by reading its weight."""


@dataclass(frozen=True)
class _Site:
    """A set of nodes that one kernel can replace."""

    problem: GemmProblem
    """With the size hints as sizes."""
    nodes: tuple[fx.Node, ...]
    """The nodes that the kernel replaces, in graph order, without the epilogue that Inductor fuses.
    """
    outputs: tuple[fx.Node, ...]
    """Those of the nodes that are used outside."""
    a: fx.Node
    """Operand A."""
    axes: tuple[int, ...]
    """The axes of `a` whose sizes multiply to M."""
    fusion: Fusion | None = None
    """How the nodes become one; None for an unfused matmul."""
    reading: match_cutlass.Reading | None = None
    """What a CUTLASS kernel would compute; None if no CUTLASS kernel is requested."""
    covered: Callable[[GemmProblem], bool] = lambda problem: False
    """Whether a CUTLASS kernel is requested for a problem."""

    @property
    def rows(self) -> Any:
        """M, an int or a SymInt."""
        return math.prod(self.a.meta["val"].shape[axis] for axis in self.axes)

    @property
    def others(self) -> set[sympy.Symbol]:
        """The symbols in N, K and the batch size."""
        own = self.a.meta["val"].shape
        sizes = [size for axis, size in enumerate(own) if axis not in self.axes]
        if self.fusion is None:
            # The N of a fusion is static.
            sizes.append(self.nodes[0].meta["val"].shape[-1])
        return {symbol for size in sizes for symbol in sympy.sympify(size).free_symbols}

    def at(self, rows: int) -> GemmProblem:
        """Return the problem for a value of M. Other sizes, and strides, that contain the symbol of
        M follow it.
        """
        found = self._at(rows)
        if self.reading is None:
            return found
        told = self.reading.told(found)
        return told if self.covered(told) else found

    def _at(self, rows: int) -> GemmProblem:
        if self.fusion is None and not isinstance(self.rows, int):
            symbol = self.rows.node.expr
            strides = (sympy.sympify(item) for item in self.a.meta["val"].stride())
            if symbol in self.others or any(stride.has(symbol) for stride in strides):
                hints = {symbol: rows}
                problem = matmul_nodes.problem_of(self.nodes[0], hints)
                if problem is not None:
                    return epilogue_region.with_epilogue(self.nodes[0], problem, hints)
        return dataclasses.replace(self.problem, m=rows)


def _is_together(site: _Site) -> bool:
    """Whether a site's kernel fuses several dequantized matmuls with small M."""
    problem = site.problem
    together = problem.operation == "mixed" and len(problem.parts) > 1
    # A kernel that also computes the norm may be slower than one that does not.
    plain = problem.prologue is None or not problem.prologue.normalizes
    return together and plain and isinstance(site.rows, int) and site.rows <= _FEW


def _gains_little(site: _Site) -> bool:
    """Whether a site's kernel saves only launches, so that it may lose to cuBLAS: a shared-input
    kernel with large M, whose separate matmuls would read A from L2 anyway.
    """
    return len(site.outputs) > 1 and isinstance(site.rows, int) and site.rows > _FEW


def run(gm: fx.GraphModule, settings: Settings) -> None:
    """Plan the matmuls of a graph and of its subgraphs, after all other passes.

    Graphs for which `use_post_grad_passes` is off are not planned.
    """
    from torch._inductor import config

    def plan(graph: fx.GraphModule) -> None:
        if config.use_post_grad_passes:
            _run(graph, settings)

    _visit_graphs(gm, plan)


def _visit_graphs(
    gm: fx.GraphModule,
    visit: Callable[[fx.GraphModule], None],
    call: fx.Node | None = None,
    visited: set[fx.GraphModule] | None = None,
) -> None:
    """Visit a graph and the subgraphs of its operators, each once, subgraphs first.

    Each graph is visited under the Inductor options with which it is lowered: those of its
    `nested_compile_region`, on top of those of the enclosing regions.

    Args:
        gm: the graph.
        visit: called with each graph.
        call: the node that calls the graph; None for the top-level graph.
        visited: graphs to skip; the graphs that are visited are added.
    """
    from torch._inductor import config

    visited = set() if visited is None else visited
    visited.add(gm)
    patches = _compat.region_patches(gm, call)
    with config.patch(dict(patches)) if patches else contextlib.nullcontext():
        for node in gm.graph.find_nodes(op="get_attr"):
            subgraph = named_graph(gm, node)
            # Passes over loops keep the `get_attr` of the original graph without users.
            if node.users and subgraph is not None and subgraph not in visited:
                _visit_graphs(subgraph, visit, next(iter(node.users)), visited)
        visit(gm)


def _run(gm: fx.GraphModule, settings: Settings) -> None:
    if decide.compares(settings):
        # Without a comparison of kernels, keep Inductor's replacement.
        undo_woq_int8.restore(gm.graph)
    allowed = settings.gemm_templates and numerics.gemm_obstacle() is None
    first = next(iter(_products(gm.graph)), None) if allowed else None
    if first is not None:
        index = first.meta["val"].device.index
        device = Device.described(torch.cuda.get_device_properties(index))
        _Planner(gm, settings, device, index).plan()
        gm.recompile()
    explain_records.emit(gm.graph, settings)


def _may_tune() -> bool:
    """Whether kernels may be benchmarked during this compile."""
    return decide.may_tune("TRITON") or decide.may_tune("CUTLASS")


def _products(graph: fx.Graph) -> dict[fx.Node, GemmProblem]:
    """Return the matmuls that a `GemmProblem` can describe."""
    calls = (node for node in graph.nodes if node.op == "call_function")
    found = ((node, matmul_nodes.problem_of(node)) for node in calls)
    return {node: problem for node, problem in found if problem is not None}


class _Planner:
    """The planner of one graph and of the branches that it creates."""

    def __init__(
        self,
        gm: fx.GraphModule,
        settings: Settings,
        device: Device,
        index: int,
        rows: int | None = None,
    ) -> None:
        """Set up the planner; `plan` does the work.

        Args:
            gm: the graph.
            settings: of the compile.
            device: the GPU of the graph's matmuls.
            index: the index of that GPU.
            rows: in a branch, the value of M for which the branch is planned.
        """
        self.gm = gm
        self.settings = settings
        self.device = device
        self.index = index
        self.rows = rows
        from inductor_ext.lowerings import cutlass_call

        nothing = cutlass_options.Options(wanted=False, tunes=False)
        self.options = cutlass_options.current() if cutlass_call.supported() else nothing
        self.known: dict[GemmProblem, Decision] = {}
        self.fused: set[fx.Node] = set()
        """The nodes of fusions that are not decided yet."""

    def plan(self) -> None:
        """Plan the graph as the module docstring describes."""
        graph, settings = self.gm.graph, self.settings
        dequantized = match_dequantized.find(graph, settings)
        scaled = [match_dequantized.with_scales(item) for item in dequantized]
        found = [*match_shared_input.find(graph, settings, scaled), *dequantized]
        reduced = match_row_amax.find(graph, settings, found)
        fusions = [self._fused_site(item) for item in (*reduced, *found)]
        self.fused = {node for site in fusions for node in site.nodes}
        likely = {node for site in fusions if _gains_little(site) for node in site.nodes}
        alone = self._plain_sites(self.fused - likely)
        taken: set[fx.Node] = set()
        for sites in self._in_turn(fusions, alone):
            left = [site for site in sites if taken.isdisjoint(site.nodes)]
            for site in self._by_gain(left):
                if not taken.isdisjoint(site.nodes) or not self._pays(site):
                    continue
                taken |= self._place(self._now(site, taken))
        self.fused = set()
        for site in fusions:
            if taken.isdisjoint(site.nodes):
                problem = self._problems(site)[-1]
                decision = self.known[problem]
                explain_records.decline(site.nodes, problem, self._why_not(site, decision))
        plain = self._plain_sites()
        if numerics.has_exact_pointwise():
            for site in plain:
                explain_records.decline_fusions(site.nodes)
        self._decide(plain)
        taken.clear()
        for site in plain:
            taken |= self._place(self._now(site, taken))
        for node in list(graph.nodes):
            plan = gemm.plan_of(node)
            value = node.meta.get("val")
            ours = plan is not None and isinstance(plan.decision.config, GemmConfig)
            if not ours or not isinstance(value, torch.Tensor):
                continue
            if value.dim() == 2:
                epilogue_region.flatten(graph, node)
                self._take_scales(node)

    def _take_scales(self, node: fx.Node) -> None:
        """Fuse the scales that follow a planned int8 matmul into its kernel."""
        plan = gemm.plan_of(node)
        assert plan is not None
        if node.target is not torch.ops.aten._int_mm.default or not gemm.finishes(plan):
            return
        call, replaced = match_int8_scales.take(self.gm.graph, node, gemm.scaled_int_mm)
        if replaced:
            call.meta[gemm.PLAN] = plan
            inside = (item for item in (*replaced[1:], call) if not is_cast(item))
            call.meta[explain_records.FUSED] = explain_records.operators(inside)

    def _fused_site(self, fusion: Fusion) -> _Site:
        problem = fusion.problem
        if len(fusion.outputs) == 1:
            problem = epilogue_region.with_epilogue(fusion.outputs[0], problem)
        a = fusion.inputs[0]
        axes = tuple(range(a.meta["val"].dim() - 1))
        return self._read(_Site(problem, fusion.nodes, fusion.outputs, a, axes, fusion))

    def _plain_sites(self, without: Set[fx.Node] = frozenset()) -> list[_Site]:
        """Return a site for each matmul that has no plan yet."""
        return [
            self._plain_site(node, problem)
            for node, problem in _products(self.gm.graph).items()
            if gemm.plan_of(node) is None and node not in without
        ]

    def _plain_site(self, node: fx.Node, problem: GemmProblem) -> _Site:
        biased = node.target in (torch.ops.aten.addmm.default, torch.ops.aten.baddbmm.default)
        a = node.args[1 if biased else 0]
        assert isinstance(a, fx.Node)
        rows = a.meta["val"].dim() - 2
        whole = epilogue_region.with_epilogue(node, problem)
        return self._read(_Site(whole, (node,), (node,), a, (rows,)))

    def _read(self, site: _Site) -> _Site:
        """Return a site with what a CUTLASS kernel would compute there, if one is requested for any
        size.
        """
        if not self.options.wanted or site.others or len(site.outputs) > 1:
            return site
        (output,), fuses = site.outputs, self.options.fuses
        for reading in match_cutlass.readings(output, site.problem, site.fusion, fuses=fuses):
            found = dataclasses.replace(site, reading=reading, covered=self._is_wanted)
            if not decide.is_forced():
                if _is_one_kernel_alone(reading):
                    return found
                continue
            # Take the longest epilogue for which the caller forces a CUTLASS kernel.
            asked = (
                problem for problem in self._problems(found) if problem.epilogue.tree is not None
            )
            if any(isinstance(decide.forced_on(item), CutlassConfig) for item in asked):
                return found
        return site

    def _is_wanted(self, problem: GemmProblem) -> bool:
        """Whether a problem is large enough for CUTLASS and has a CUTLASS kernel."""
        if decide.is_forced():
            return self.options.covers(problem)
        return self.options.has_any(problem, self.device)

    def _now(self, site: _Site, taken: set[fx.Node]) -> _Site:
        """Return the site after other sites have replaced nodes of its epilogue."""
        if site.reading is None or taken.isdisjoint(site.reading.nodes):
            return site
        configs = (self.known[problem].config for problem in self._problems(site))
        if not any(isinstance(config, CutlassConfig) for config in configs):
            return site
        if site.fusion is not None:
            now = self._fused_site(site.fusion)
        else:
            problem = matmul_nodes.problem_of(site.nodes[0])
            assert problem is not None
            now = self._plain_site(site.nodes[0], problem)
        self._decide([now])
        return now

    def _sizes(self, site: _Site) -> list[int]:
        """Return the values of M to decide at, ascending; only one if M is static."""
        rows = site.rows
        if isinstance(rows, int):
            return [site.problem.m]
        if self.rows is not None:
            return [self.rows]
        if not rows.node.expr.is_symbol and rows.node.expr.free_symbols & site.others:
            # The other sizes cannot be computed from a value of M.
            return [site.problem.m]
        sizes = _tuned_sizes(rows, self.settings)
        if sizes and site.reading is not None:
            # CUTLASS is not used for M below the threshold.
            edge = self.options.threshold(site.problem) - 1
            if _bounds(rows)[0] <= edge < sizes[-1]:
                sizes = sorted({*sizes, max(1, edge)})
        return sizes or [site.problem.m]

    def _problems(self, site: _Site) -> list[GemmProblem]:
        return [site.at(size) for size in self._sizes(site)]

    def _decide(self, sites: Sequence[_Site]) -> None:
        """Add decisions for all problems of the sites to `known`."""
        wanted = [problem for site in sites for problem in self._problems(site)]
        unknown = [problem for problem in dict.fromkeys(wanted) if problem not in self.known]
        trees = [problem for problem in unknown if problem.epilogue.tree is not None]
        if trees:
            self.known |= self._with_cutlass(trees)
        self.known |= self._without_cutlass([item for item in unknown if item not in trees])

    def _without_cutlass(self, unknown: Sequence[GemmProblem]) -> dict[GemmProblem, Decision]:
        """Decide among Triton kernels and Inductor's lowering."""
        if not unknown:
            return {}
        if not decide.is_asked("TRITON") and not decide.is_forced():
            # Ignore stored tuning results, too.
            return dict.fromkeys(unknown, STOCK)
        tune = self._tune if decide.may_tune("TRITON") else None
        return decide.decide(unknown, self.device, self.settings, tune)

    def _with_cutlass(self, unknown: Sequence[GemmProblem]) -> dict[GemmProblem, Decision]:
        """Decide among all kernels. Problems without a stored CUTLASS result that cannot be tuned
        now, and problems whose CUTLASS kernel is still being built, are decided without CUTLASS.
        """
        tune = self._tune_with_cutlass if self.options.tunes else None
        found = decide.decide(
            unknown,
            self.device,
            self.settings,
            tune,
            circumstances=self.options.circumstances,
            allowed=self.options.allows,
        )
        chosen = {
            problem: decision.config
            for problem, decision in found.items()
            if isinstance(decision.config, CutlassConfig)
        }
        later = cutlass_kernels.awaited(
            {problem: [config] for problem, config in chosen.items()}, self.settings
        )
        others = {
            problem: _without_tree(problem)
            for problem, decision in found.items()
            if decision.origin == "unknown" or problem in later
        }
        decided = self._without_cutlass(list(dict.fromkeys(others.values())))
        found |= {problem: decided[other] for problem, other in others.items()}
        wanted = [item for item in chosen.items() if item[0] not in later]
        for (problem, config), why in cutlass_kernels.prepare(wanted, self.settings).items():
            events.warn_once(
                f"cutlass_kernel:{config.name}",
                f"{config_words(config)} is not used for {problem_words(problem)}, but stock's "
                f"path: {why}",
            )
            found[problem] = dataclasses.replace(found[problem], config=None)
        return found

    def _tune_with_cutlass(self, unknown: Sequence[GemmProblem]) -> dict[GemmProblem, Decision]:
        """Tune the problems whose CUTLASS kernels are available now."""
        wanted = {
            problem: [config for config, _ in self.options.rank(problem, self.device)]
            for problem in unknown
        }
        later = cutlass_kernels.awaited(wanted, self.settings)
        later |= cutlass_kernels.unobtainable(wanted, self.settings)
        return self._tune([item for item in unknown if item not in later])

    def _tune(self, unknown: Sequence[GemmProblem]) -> dict[GemmProblem, Decision]:
        from inductor_ext.autotune import inductor_benchmark, tuner

        return tuner.tune(
            unknown,
            self.device,
            inductor_benchmark.cuda_bench,
            self.settings,
            index=self.index,
            dependent=decide.launches_dependents(),
        )

    def _in_turn(
        self, sites: Sequence[_Site], alone: Sequence[_Site]
    ) -> tuple[list[_Site], list[_Site]]:
        """Split fused sites into those to choose from first, and those to try on the nodes that are
        left.

        If one kernel can compute several dequantized matmuls with small M together and is near the
        roofline, its smaller alternatives come second and are usually never tuned: they could save
        little more.

        Unfused matmuls that the fusions will probably not cover are tuned in the first batch, so
        that their kernels compile in parallel. Those with a CUTLASS candidate wait: CUTLASS builds
        take minutes, and fusions may change the epilogues.

        Args:
            sites: the fusions.
            alone: unfused matmuls that the fusions will probably not cover.
        """
        around: dict[fx.Node, list[_Site]] = defaultdict(list)
        for site in filter(_is_together, sites):
            for node in site.nodes:
                around[node].append(site)
        wholes = {
            id(site): [item for item in around[site.nodes[0]] if set(site.nodes) < set(item.nodes)]
            for site in sites
        }
        first = [site for site in sites if not wholes[id(site)]]
        self._decide([*first, *(site for site in alone if site.reading is None)])
        near = {id(site) for site in first if self._is_near(site)}
        turns: tuple[list[_Site], list[_Site]] = ([], [])
        for site in sites:
            turns[any(id(whole) in near for whole in wholes[id(site)])].append(site)
        return turns

    def _is_near(self, site: _Site) -> bool:
        """Whether a site's kernel closes most of the gap between Inductor and the roofline, at all
        sizes.
        """
        for problem in self._problems(site):
            decision = self.known[problem]
            ours, stock = (decision.microseconds(item) for item in (decision.config, None))
            if ours is None or stock is None:
                return False
            if stock - ours < _NEAR * (stock - problem.roofline(self.device)):
                return False
        return True

    def _by_gain(self, sites: Sequence[_Site]) -> list[_Site]:
        """Return the sites that have a kernel that is not slower than Inductor, largest saving
        first.
        """
        self._decide(sites)
        worth = [
            site
            for site in sites
            if any(self.known[problem].config is not None for problem in self._problems(site))
        ]
        gains = {id(site): self._gain(site) for site in worth}
        worth = [site for site in worth if gains[id(site)] >= 0]
        return sorted(worth, key=lambda site: gains[id(site)], reverse=True)

    def _gain(self, site: _Site) -> float:
        """Return the microseconds that a site's kernel saves, the maximum over all sizes; 0 if
        unknown.

        A kernel with a norm must also save `_REPEATED` of its time: every CTA recomputes the norm,
        which costs more among other kernels than in isolation. SwiGLU with M = 16 took 6 % longer
        on an H200, the norm 4 %. If the norm's input is pointwise (a residual), which the norm's
        own kernel would compute first, then it becomes a separate kernel, whose cost is added.
        """
        saved = []
        for problem in self._problems(site):
            decision = self.known[problem]
            ours = decision.microseconds(decision.config)
            stock = decision.microseconds(None)
            if decision.config is not None and ours is not None and stock is not None:
                prologue = problem.prologue
                if prologue is not None and (prologue.normalizes or prologue.standardizes):
                    ours *= 1 + _REPEATED
                    if epilogue_region.is_computed(site.a):
                        written = size_of(problem.m * problem.k, problem.a.dtype)
                        ours += self.device.launch / 2 + written / self.device.bandwidth * 1e6
                saved.append(stock - ours)
        return max(saved, default=0.0)

    def _pays(self, site: _Site) -> bool:
        """Whether a fused kernel saves at least as much as the unfused kernel that could replace
        it.
        """
        plain = self._alone(site)
        if plain is None:
            return True
        self._decide([plain])
        return self._gain(site) >= self._gain(plain)

    def _why_not(self, site: _Site, decision: Decision) -> str:
        """Return why a fusion with a decision is not applied."""
        if decision.config is not None and not self._pays(site):
            return "a product alone saves more"
        return explain_records.reason(decision)

    def _alone(self, site: _Site) -> _Site | None:
        """Return the site of the unfused matmul whose kernel could replace the kernel of a fusion.

        For a row amax it is the matmul without the amax. For a gate it is the matmul whose CUTLASS
        kernel computes the whole epilogue and reads the result of the other matmul. Most fusions
        have none.
        """
        if isinstance(site.fusion, match_row_amax.RowMaxima):
            node = site.fusion.plain
            problem = None if node is None else matmul_nodes.problem_of(node)
            return None if node is None or problem is None else self._plain_site(node, problem)
        if not self.options.wanted or not site.problem.epilogue.gated:
            return None
        computing = {node for node in site.nodes if not is_view(node) and not is_cast(node)}
        products = [node for node in site.nodes if matmul_nodes.is_product(node)]
        for node in products:
            problem = matmul_nodes.problem_of(node)
            found = None if problem is None else self._plain_site(node, problem)
            inside = found.reading.nodes if found is not None and found.reading else ()
            if computing <= {*products, *inside}:
                return found
        return None

    def _place(self, site: _Site) -> frozenset[fx.Node]:
        """Apply the decision for a site to the graph.

        Returns:
            The nodes that were replaced by kernels or moved into branches.
        """
        asked = self._problems(site)
        decisions = [self.known[problem] for problem in asked]
        if len({decision.config for decision in decisions}) > 1:
            return self._dispatch(site, self._sizes(site), decisions)
        # All sizes agree. Take the largest, whose problem holds for all of them.
        problem, decision = asked[-1], decisions[-1]
        if isinstance(decision.config, CutlassConfig):
            assert site.reading is not None
            counters["inductor"]["cutlass_epilogue_fusion_counter"] += site.reading.epilogue_nodes
            inside = (
                node for node in site.reading.nodes[1:] if not is_view(node) and not is_cast(node)
            )
            fused = explain_records.operators(inside)
            call, options = match_cutlass.apply(self.gm.graph, site.reading, gemm.cutlass)
            self._leave(call, problem, decision, options)
            call.meta[explain_records.FUSED] = fused
            return frozenset((*site.nodes, *site.reading.replaced))
        if site.fusion is None:
            self._leave(site.nodes[0], problem, decision, {})
            return frozenset()
        if decision.config is None:
            return frozenset()
        if isinstance(site.fusion, match_row_amax.RowMaxima):
            call = match_row_amax.apply(self.gm.graph, site.fusion, gemm.with_row_maxima)
        else:
            call = apply(self.gm.graph, site.fusion, gemm.fused)
        self._leave(call, problem, decision, site.fusion.options)
        return frozenset(site.nodes)

    def _leave(self, node: fx.Node, problem: GemmProblem, decision: Decision, options: Any) -> None:
        node.meta[gemm.PLAN] = gemm.Plan(problem, decision, self.device, options)

    def _dispatch(
        self, site: _Site, sizes: Sequence[int], decisions: Sequence[Decision]
    ) -> frozenset[fx.Node]:
        """Move a site into branches, one for each range of M with the same configuration.

        Returns:
            The nodes that were moved.
        """
        configs = [decision.config for decision in decisions]
        # Each range of M with one configuration is represented by its largest size.
        following = [*configs[1:], object()]
        limits = [
            size
            for size, config, after in zip(sizes, configs, following, strict=True)
            if config != after
        ]
        nodes, outputs = site.nodes, site.outputs
        if any(isinstance(config, CutlassConfig) for config in configs):
            assert site.reading is not None
            nodes, outputs = site.reading.replaced, site.reading.outputs
        elif isinstance(site.fusion, match_row_amax.RowMaxima):
            together = {*nodes, *site.fusion.behind}
            if not is_written_between(together):
                nodes = tuple(sorted(together))
                outputs = tuple(node for node in nodes if not set(node.users) <= together)
        elif len(outputs) == 1:
            behind = epilogue_region.region(outputs[0], self.fused.difference(nodes), nodes)
            nodes, outputs = (*nodes, *behind[1:]), (behind[-1],)
        ranges = [(limit, self._planner(limit)) for limit in limits]
        dynamic_m.by_rows(self.gm, nodes, outputs, (site.a, site.axes), ranges)
        return frozenset(nodes)

    def _planner(self, rows: int) -> Callable[[fx.GraphModule], None]:
        """Return the function that plans the branch for a value of M."""

        def plan(branch: fx.GraphModule) -> None:
            planner = _Planner(branch, self.settings, self.device, self.index, rows)
            planner.known = self.known
            planner.plan()
            explain_records.emit(branch.graph, self.settings)

        return plan


def _is_one_kernel_alone(reading: match_cutlass.Reading) -> bool:
    """Whether Inductor would compute the epilogue in exactly one kernel, as the reference program
    does against which a fused kernel is timed.
    """
    inside = reading.nodes
    if len(inside) == 1:
        return True

    def is_read_only_within(node: fx.Node) -> bool:
        passed = (user for user in node.users if user not in inside)
        return all(
            (is_view(item) or is_cast(item)) and is_read_only_within(item) for item in passed
        )

    # Inductor fuses into that kernel the producers that only it reads, and the kernel itself into
    # its readers: see `epilogue_region.with_epilogue`.
    before = filter(epilogue_region.is_computed, reading.fused.inputs)
    return not (
        any(map(is_read_only_within, before))
        or any(epilogue_region.is_read_by_inductor(output, inside) for output in reading.outputs)
    )


def _without_tree(problem: GemmProblem) -> GemmProblem:
    epilogue = dataclasses.replace(problem.epilogue, tree=None)
    return dataclasses.replace(problem, epilogue=epilogue)


def cache_key(settings: Settings, gm: fx.GraphModule | None = None) -> str:
    """Return a text that changes if the same graph may get other kernels than before.

    Without tuning, the stored tuning results determine the generated code. With tuning, results
    that were measured in the meantime make no difference: a compile measures what it does not know.

    Args:
        settings: of the compile.
        gm: the graph. Its regions may have options of their own, see `_compat.region_patches`.
    """
    if not settings.gemm_templates or not torch.cuda.is_available():
        return ""
    keys = [_cache_key(settings)]
    if gm is not None:
        _visit_graphs(gm, lambda _: keys.append(_cache_key(settings)))
    return "-".join(dict.fromkeys(keys))


def _cache_key(settings: Settings) -> str:
    """Return the `cache_key` for the current Inductor options."""
    known = results_db.of_settings(settings).generation(tuning=_may_tune())
    # Inductor's own cache keys do not include all of these flags.
    flags = numerics.matmul_flags()
    if flags is not None:
        known = f"{known}-{flags}"
    if not decide.is_asked("CUTLASS"):
        return known
    # Whether CUTLASS kernels can be built affects which kernels a graph gets.
    return f"{known}-{cutlass_kernels.generation(settings)}"


def _bounds(rows: Any) -> tuple[int, int | None]:
    """Return the lower and upper bound of M, at least 1; an upper bound of None means unbounded."""
    known = rows.node.shape_env.bound_sympy(rows.node.expr)
    lower, upper = (
        int(item) if isinstance(item, sympy.Integer) else None
        for item in (known.lower, known.upper)
    )
    return max(1, lower or 1), upper


def _tuned_sizes(rows: Any, settings: Settings) -> list[int]:
    """Return the values of M at which to decide if M is dynamic; an empty list means only the size
    hint.
    """
    from torch._inductor import config

    if config.triton.cudagraphs:
        # Each size is a CUDA graph of its own, and a branch on M would split the recording.
        return []
    asked = parse_rows(settings.gemm_rows)
    lower, upper = _bounds(rows)
    if upper is None:
        upper = max(lower, *asked)
    return sorted({min(max(item, lower), upper) for item in asked})
