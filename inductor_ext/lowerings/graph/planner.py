"""The FX pass that decides which kernel every matmul of a graph gets.

It runs after Inductor's post-grad passes, on the graph that is about to be lowered:

1. It decides on the multi-node fusions that the `match_*` modules find, and replaces those that
   save most time by one call (`fused.fused`).
2. It attaches a `Plan` to every other matmul, as node metadata that the lowering reads, or replaces
   the matmul and its epilogue by a call of a CUTLASS kernel (`fused.cutlass`).
3. If M is dynamic and the best kernel depends on M, it moves the nodes into `torch.cond` branches
   (`dynamic_m`) and plans each branch for its range of M.

A matmul without a better kernel keeps Inductor's lowering, and a graph without matmuls on a CUDA
device is not changed. Settings: `gemm_templates`, `gemm_rows`, `gemm_fuse_*`, `cutlass_*`.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence, Set

import torch
from torch import fx
from torch._dynamo.utils import counters

from inductor_ext import numerics
from inductor_ext.autotune import decide
from inductor_ext.autotune.decision import Decision
from inductor_ext.lowerings import fused as fused_calls
from inductor_ext.lowerings import node_info
from inductor_ext.lowerings.graph import (
    dynamic_m,
    epilogue_region,
    explain_records,
    fusion_search,
    match_cutlass,
    match_dequantized,
    match_int8_scales,
    match_row_amax,
)
from inductor_ext.lowerings.graph.decisions import Decider
from inductor_ext.lowerings.graph.fusion import Fusion, is_written_between
from inductor_ext.lowerings.graph.fx_nodes import is_cast, is_view
from inductor_ext.lowerings.graph.matmul_nodes import is_matmul, problem_of
from inductor_ext.lowerings.graph.rewrite import apply
from inductor_ext.lowerings.graph.site import (
    Site,
    find_matmuls,
    is_one_inductor_kernel,
    is_small_group,
    m_bounds,
    saves_only_launches,
    tuned_sizes,
)
from inductor_ext.settings import Settings
from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import size_of
from inductor_ext.templates.triton.config import GemmConfig

NORM_OVERHEAD = 0.03
"""Minimum speedup, as a fraction of kernel time, for fusing the norm."""

NEAR_ROOFLINE = 0.75
"""If a fused kernel closes this fraction of the gap between Inductor and the roofline, do not tune
its smaller alternatives."""


class Planner:
    """The planner of one graph and of the branches that it creates."""

    def __init__(
        self, gm: fx.GraphModule, settings: Settings, decider: Decider, m: int | None = None
    ) -> None:
        """Set up the planner; `plan` does the work.

        Args:
            gm: the graph.
            settings: of the compile.
            decider: decides on the problems of the graph and of its branches.
            m: in a branch, the value of M for which the branch is planned.
        """
        self.gm = gm
        self.settings = settings
        self.decider = decider
        self.options = decider.options
        self.device = decider.device
        self.m = m
        self.fused: set[fx.Node] = set()
        """The nodes of fusions that are not decided yet."""

    def plan(self) -> None:
        """Plan the graph as the module docstring describes."""
        fusions = self._find_fusions()
        self.fused = {node for site in fusions for node in site.nodes}
        likely = {node for site in fusions if saves_only_launches(site) for node in site.nodes}
        unfused = self._make_unfused_sites(self.fused - likely)
        replaced: set[fx.Node] = set()
        for sites in self._split_by_priority(fusions, unfused):
            remaining = [site for site in sites if replaced.isdisjoint(site.nodes)]
            for site in self._sort_by_gain(remaining):
                if replaced.isdisjoint(site.nodes) and self._beats_unfused(site):
                    replaced |= self._apply(self._refresh_site(site, replaced))
        self.fused = set()
        for site in fusions:
            if replaced.isdisjoint(site.nodes):
                problem = self._problems(site)[-1]
                why = self._rejection_reason(site, self.decider[problem])
                explain_records.note_rejected_fusion(site.nodes, problem, why)
        self._plan_unfused()
        self._prepare_epilogues()

    def _find_fusions(self) -> list[Site]:
        """Return a site for each fusion that the graph offers; sites may share nodes."""
        graph, settings = self.gm.graph, self.settings
        dequantized = match_dequantized.find_dequantized_matmuls(graph, settings)
        scaled = [match_dequantized.add_scales(fusion) for fusion in dequantized]
        fusions = [*fusion_search.find_fusions(graph, settings, scaled), *dequantized]
        reduced = match_row_amax.find_row_amax_fusions(graph, settings, fusions)
        return [self._make_fused_site(fusion) for fusion in (*reduced, *fusions)]

    def _plan_unfused(self) -> None:
        """Plan the matmuls that no fusion has replaced."""
        sites = self._make_unfused_sites()
        if numerics.has_exact_pointwise():
            for site in sites:
                explain_records.note_exact_pointwise(site.nodes)
        self._decide(sites)
        replaced: set[fx.Node] = set()
        for site in sites:
            replaced |= self._apply(self._refresh_site(site, replaced))

    def _prepare_epilogues(self) -> None:
        """Rewrite the epilogues of planned Triton matmuls so that they are fused."""
        graph = self.gm.graph
        for node in list(graph.nodes):
            plan = node_info.plan_of(node)
            value = node.meta.get("val")
            if plan is None or not isinstance(plan.decision.config, GemmConfig):
                continue
            if isinstance(value, torch.Tensor) and value.dim() == 2:
                epilogue_region.flatten_epilogue(graph, node)
                self._fuse_int8_scales(node, plan)

    def _fuse_int8_scales(self, node: fx.Node, plan: node_info.Plan) -> None:
        """Fuse the scales that follow a planned int8 matmul into its kernel."""
        if node.target is not torch.ops.aten._int_mm.default or not plan.applies_epilogue:
            return
        call, replaced = match_int8_scales.fuse_int8_scales(
            self.gm.graph, node, fused_calls.scaled_int_mm
        )
        if replaced:
            inside = (other for other in (*replaced[1:], call) if not is_cast(other))
            fused = explain_records.operator_names(inside)
            node_info.update(call, plan=plan, fused=fused)

    def _make_fused_site(self, fusion: Fusion) -> Site:
        problem = fusion.problem
        if len(fusion.outputs) == 1:
            problem = epilogue_region.add_epilogue(fusion.outputs[0], problem)
        a = fusion.operands.a.node
        axes = tuple(range(a.meta["val"].dim() - 1))
        return self._with_cutlass_match(
            Site(problem, fusion.nodes, fusion.outputs, a, axes, fusion)
        )

    def _make_unfused_sites(self, without: Set[fx.Node] = frozenset()) -> list[Site]:
        """Return a site for each matmul that has no plan yet."""
        return [
            self._make_unfused_site(node, problem)
            for node, problem in find_matmuls(self.gm.graph).items()
            if node_info.plan_of(node) is None and node not in without
        ]

    def _make_unfused_site(self, node: fx.Node, problem: GemmProblem) -> Site:
        biased = node.target in (torch.ops.aten.addmm.default, torch.ops.aten.baddbmm.default)
        a = node.args[1 if biased else 0]
        assert isinstance(a, fx.Node)
        axis = a.meta["val"].dim() - 2
        problem = epilogue_region.add_epilogue(node, problem)
        return self._with_cutlass_match(Site(problem, (node,), (node,), a, (axis,)))

    def _with_cutlass_match(self, site: Site) -> Site:
        """Return a site with what a CUTLASS kernel would compute there, if one is requested for any
        size.
        """
        if not self.options.enabled or site.other_symbols or len(site.outputs) > 1:
            return site
        (output,), fuses = site.outputs, self.options.fuses
        for match in match_cutlass.find_cutlass_matches(
            output, site.problem, site.fusion, fuses=fuses
        ):
            candidate = dataclasses.replace(
                site, cutlass=match, requests_cutlass=self.decider.wants_cutlass
            )
            if not decide.is_forced():
                if is_one_inductor_kernel(match):
                    return candidate
                continue
            # Take the longest epilogue for which the caller forces a CUTLASS kernel.
            problems = (
                problem
                for problem in self._problems(candidate)
                if problem.epilogue.tree is not None
            )
            if any(
                isinstance(decide.forced_config(problem), CutlassConfig) for problem in problems
            ):
                return candidate
        return site

    def _refresh_site(self, site: Site, replaced: set[fx.Node]) -> Site:
        """Return the site after other sites have replaced nodes of its epilogue."""
        if site.cutlass is None or replaced.isdisjoint(site.cutlass.nodes):
            return site
        configs = (self.decider[problem].config for problem in self._problems(site))
        if not any(isinstance(config, CutlassConfig) for config in configs):
            return site
        if site.fusion is not None:
            refreshed = self._make_fused_site(site.fusion)
        else:
            problem = problem_of(site.nodes[0])
            assert problem is not None
            refreshed = self._make_unfused_site(site.nodes[0], problem)
        self._decide([refreshed])
        return refreshed

    def _sizes(self, site: Site) -> list[int]:
        """Return the values of M to decide at, ascending; only one if M is static."""
        m = site.m
        if isinstance(m, int):
            return [site.problem.m]
        if self.m is not None:
            return [self.m]
        if not m.node.expr.is_symbol and m.node.expr.free_symbols & site.other_symbols:
            # The other sizes cannot be computed from a value of M.
            return [site.problem.m]
        sizes = tuned_sizes(m, self.settings)
        if sizes and site.cutlass is not None:
            # CUTLASS is not used for M below the threshold.
            edge = self.options.threshold(site.problem) - 1
            if m_bounds(m)[0] <= edge < sizes[-1]:
                sizes = sorted({*sizes, max(1, edge)})
        return sizes or [site.problem.m]

    def _problems(self, site: Site) -> list[GemmProblem]:
        return [site.problem_at(size) for size in self._sizes(site)]

    def _decide(self, sites: Sequence[Site]) -> None:
        """Decide on all problems of the sites. With a dynamic M, no kernel is taken without a
        measurement: each range of M would become a branch.
        """
        for is_static in (True, False):
            problems = [
                problem
                for site in sites
                if isinstance(site.m, int) == is_static
                for problem in self._problems(site)
            ]
            self.decider.decide(problems, predict=is_static)

    def _split_by_priority(
        self, sites: Sequence[Site], unfused: Sequence[Site]
    ) -> tuple[list[Site], list[Site]]:
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
            unfused: unfused matmuls that the fusions will probably not cover.
        """
        around: dict[fx.Node, list[Site]] = defaultdict(list)
        for site in filter(is_small_group, sites):
            for node in site.nodes:
                around[node].append(site)
        wholes = {
            id(site): [
                whole for whole in around[site.nodes[0]] if set(site.nodes) < set(whole.nodes)
            ]
            for site in sites
        }
        first = [site for site in sites if not wholes[id(site)]]
        self._decide([*first, *(site for site in unfused if site.cutlass is None)])
        near = {id(site) for site in first if self._is_near(site)}
        priorities: tuple[list[Site], list[Site]] = ([], [])
        for site in sites:
            priorities[any(id(whole) in near for whole in wholes[id(site)])].append(site)
        return priorities

    def _is_near(self, site: Site) -> bool:
        """Whether a site's kernel closes most of the gap between Inductor and the roofline, at all
        sizes.
        """
        for problem in self._problems(site):
            decision = self.decider[problem]
            kernel_time, baseline = (
                decision.microseconds(config) for config in (decision.config, None)
            )
            if kernel_time is None or baseline is None:
                return False
            if baseline - kernel_time < NEAR_ROOFLINE * (baseline - problem.roofline(self.device)):
                return False
        return True

    def _sort_by_gain(self, sites: Sequence[Site]) -> list[Site]:
        """Return the sites that have a kernel that is not slower than Inductor, largest saving
        first.
        """
        self._decide(sites)
        candidates = [
            site
            for site in sites
            if any(self.decider[problem].config is not None for problem in self._problems(site))
        ]
        gains = {id(site): self._gain(site) for site in candidates}
        candidates = [site for site in candidates if gains[id(site)] >= 0]
        return sorted(candidates, key=lambda site: gains[id(site)], reverse=True)

    def _gain(self, site: Site) -> float:
        """Return the microseconds that a site's kernel saves, the maximum over all sizes; 0 if
        unknown.

        A kernel with a norm must also save `NORM_OVERHEAD` of its time: every CTA recomputes the
        norm, which costs more among other kernels than in isolation. SwiGLU with M = 16 took 6 %
        longer on an H200, the norm 4 %. If the norm's input is pointwise (a residual), which the
        norm's own kernel would compute first, then it becomes a separate kernel, whose cost is
        added.
        """
        savings = []
        for problem in self._problems(site):
            decision = self.decider[problem]
            if decision.saving is not None:
                savings.append(decision.saving)
            kernel_time = decision.microseconds(decision.config)
            baseline = decision.microseconds(None)
            if decision.config is not None and kernel_time is not None and baseline is not None:
                if problem.norm is not None:
                    kernel_time *= 1 + NORM_OVERHEAD
                    if epilogue_region.is_computed(site.a):
                        written = size_of(problem.m * problem.k, problem.a.dtype)
                        kernel_time += (
                            self.device.launch / 2 + written / self.device.bandwidth * 1e6
                        )
                savings.append(baseline - kernel_time)
        return max(savings, default=0.0)

    def _beats_unfused(self, site: Site) -> bool:
        """Whether a fused kernel saves at least as much as the unfused kernel that could replace
        it.
        """
        unfused = self._find_unfused_alternative(site)
        if unfused is None:
            return True
        self._decide([unfused])
        return self._gain(site) >= self._gain(unfused)

    def _rejection_reason(self, site: Site, decision: Decision) -> str:
        """Return why a fusion with a decision is not applied."""
        if decision.config is not None and not self._beats_unfused(site):
            return "a kernel for one of its GEMMs alone saves more"
        return explain_records.decision_reason(decision, site.problem, self.device, self.settings)

    def _find_unfused_alternative(self, site: Site) -> Site | None:
        """Return the site of the unfused matmul whose kernel could replace the kernel of a fusion.

        For a row amax it is the matmul without the amax. For a gate it is the matmul whose CUTLASS
        kernel computes the whole epilogue and reads the result of the other matmul. Most fusions
        have none.
        """
        if isinstance(site.fusion, match_row_amax.RowAmaxFusion):
            node = site.fusion.matmul
            problem = None if node is None else problem_of(node)
            if node is None or problem is None:
                return None
            return self._make_unfused_site(node, problem)
        if not self.options.enabled or not site.problem.epilogue.gated:
            return None
        computing = {node for node in site.nodes if not is_view(node) and not is_cast(node)}
        matmuls = [node for node in site.nodes if is_matmul(node)]
        for node in matmuls:
            problem = problem_of(node)
            unfused = None if problem is None else self._make_unfused_site(node, problem)
            inside = unfused.cutlass.nodes if unfused is not None and unfused.cutlass else ()
            if computing <= {*matmuls, *inside}:
                return unfused
        return None

    def _apply(self, site: Site) -> frozenset[fx.Node]:
        """Apply the decision for a site to the graph.

        Returns:
            The nodes that were replaced by kernels or moved into branches.
        """
        problems = self._problems(site)
        decisions = [self.decider[problem] for problem in problems]
        if len({decision.config for decision in decisions}) > 1:
            return self._dispatch(site, self._sizes(site), decisions)
        # All sizes agree. Take the largest, whose problem holds for all of them.
        problem, decision = problems[-1], decisions[-1]
        graph = self.gm.graph
        if isinstance(decision.config, CutlassConfig):
            assert site.cutlass is not None
            return self._apply_cutlass(site, site.cutlass, problem, decision)
        if site.fusion is None:
            self._set_plan(site.nodes[0], problem, decision)
            return frozenset()
        if decision.config is None:
            return frozenset()
        if isinstance(site.fusion, match_row_amax.RowAmaxFusion):
            call, info = match_row_amax.apply(graph, site.fusion, fused_calls.with_row_maxima)
        else:
            call, info = apply(graph, site.fusion, fused_calls.fused)
        self._set_plan(call, problem, decision, info)
        return frozenset(site.nodes)

    def _apply_cutlass(
        self,
        site: Site,
        match: match_cutlass.CutlassMatch,
        problem: GemmProblem,
        decision: Decision,
    ) -> frozenset[fx.Node]:
        """Replace the nodes of a match by a CUTLASS call; return what was replaced."""
        counters["inductor"]["cutlass_epilogue_fusion_counter"] += match.epilogue_nodes
        inside = (node for node in match.nodes[1:] if not is_view(node) and not is_cast(node))
        fused = explain_records.operator_names(inside)
        call, arguments = match_cutlass.apply(self.gm.graph, match, fused_calls.cutlass)
        self._set_plan(call, problem, decision, arguments)
        node_info.update(call, fused=fused)
        return frozenset((*site.nodes, *match.replaced))

    def _set_plan(
        self,
        node: fx.Node,
        problem: GemmProblem,
        decision: Decision,
        call: node_info.FusedCall | node_info.CutlassArguments | None = None,
    ) -> None:
        node_info.update(node, plan=node_info.Plan(problem, decision, self.device, call))

    def _dispatch(
        self, site: Site, sizes: Sequence[int], decisions: Sequence[Decision]
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
            assert site.cutlass is not None
            nodes, outputs = site.cutlass.replaced, site.cutlass.outputs
        elif isinstance(site.fusion, match_row_amax.RowAmaxFusion):
            together = {*nodes, *site.fusion.scaling}
            if not is_written_between(together):
                nodes = tuple(sorted(together))
                outputs = tuple(node for node in nodes if not set(node.users) <= together)
        elif len(outputs) == 1:
            region = epilogue_region.find_region(outputs[0], self.fused.difference(nodes), nodes)
            nodes, outputs = (*nodes, *region[1:]), (region[-1],)
        ranges = [(limit, self._branch_planner(limit)) for limit in limits]
        dynamic_m.dispatch_on_m(self.gm, nodes, outputs, (site.a, site.axes), ranges)
        return frozenset(nodes)

    def _branch_planner(self, m: int) -> Callable[[fx.GraphModule], None]:
        """Return the function that plans the branch for a value of M."""

        def plan(branch: fx.GraphModule) -> None:
            Planner(branch, self.settings, self.decider, m).plan()
            explain_records.emit_records(branch.graph, self.settings)

        return plan
