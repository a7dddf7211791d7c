"""Sites: sets of FX nodes that one kernel can replace, and the sizes at which to decide on them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
from torch import fx

from inductor_ext.lowerings.graph import epilogue_region, match_cutlass
from inductor_ext.lowerings.graph.fusion import SMALL_M, Fusion
from inductor_ext.lowerings.graph.fx_nodes import is_cast, is_view
from inductor_ext.lowerings.graph.matmul_nodes import problem_of
from inductor_ext.settings import Settings, parse_rows
from inductor_ext.templates.problem import GemmProblem


@dataclass(frozen=True)
class Site:
    """A set of nodes that one kernel can replace."""

    problem: GemmProblem
    """With the size hints as sizes."""
    nodes: tuple[fx.Node, ...]
    """The nodes that the kernel replaces, in graph order, without the epilogue that Inductor fuses.
    """
    outputs: tuple[fx.Node, ...]
    """The nodes among them that are used outside."""
    a: fx.Node
    """Operand A."""
    axes: tuple[int, ...]
    """The axes of `a` whose sizes multiply to M."""
    fusion: Fusion | None = None
    """How the nodes become one; None for an unfused matmul."""
    cutlass: match_cutlass.CutlassMatch | None = None
    """The nodes that a CUTLASS kernel would compute; None if no CUTLASS kernel is requested."""
    requests_cutlass: Callable[[GemmProblem], bool] = lambda problem: False
    """Whether a CUTLASS kernel is requested for a problem."""
    _by_m: dict[int, GemmProblem] = dataclasses.field(
        default_factory=dict, compare=False, repr=False
    )
    """The problems without CUTLASS, by M. They are kept, because the epilogues in the graph change
    when other sites are applied, after this site's problems were decided."""

    @property
    def m(self) -> Any:
        """M, an int or a SymInt."""
        return math.prod(self.a.meta["val"].shape[axis] for axis in self.axes)

    @property
    def other_symbols(self) -> set[sympy.Symbol]:
        """The symbols in N, K and the batch size."""
        shape = self.a.meta["val"].shape
        sizes = [size for axis, size in enumerate(shape) if axis not in self.axes]
        if self.fusion is None:
            # The N of a fusion is static.
            sizes.append(self.nodes[0].meta["val"].shape[-1])
        return {symbol for size in sizes for symbol in sympy.sympify(size).free_symbols}

    def problem_at(self, m: int) -> GemmProblem:
        """Return the problem for a value of M. Other sizes, and strides, that contain the symbol of
        M follow it.
        """
        if m not in self._by_m:
            self._by_m[m] = self._problem_at(m)
        problem = self._by_m[m]
        if self.cutlass is None:
            return problem
        kernel_problem = self.cutlass.kernel_problem(problem)
        return kernel_problem if self.requests_cutlass(kernel_problem) else problem

    def _problem_at(self, m: int) -> GemmProblem:
        if self.fusion is None and not isinstance(self.m, int):
            symbol = self.m.node.expr
            strides = (sympy.sympify(item) for item in self.a.meta["val"].stride())
            if symbol in self.other_symbols or any(stride.has(symbol) for stride in strides):
                hints = {symbol: m}
                problem = problem_of(self.nodes[0], hints)
                if problem is not None:
                    return epilogue_region.add_epilogue(self.nodes[0], problem, hints)
        return dataclasses.replace(self.problem, m=m)


def find_matmuls(graph: fx.Graph) -> dict[fx.Node, GemmProblem]:
    """Return the matmuls that a `GemmProblem` can describe."""
    calls = (node for node in graph.nodes if node.op == "call_function")
    problems = ((node, problem_of(node)) for node in calls)
    return {node: problem for node, problem in problems if problem is not None}


def is_small_group(site: Site) -> bool:
    """Whether a site's kernel fuses several dequantized matmuls with small M."""
    problem = site.problem
    together = problem.operation == "mixed" and len(problem.parts) > 1
    # A kernel that also computes the norm may be slower than one that does not.
    plain = problem.norm is None or problem.norm.kind != "rms"
    return together and plain and isinstance(site.m, int) and site.m <= SMALL_M


def saves_only_launches(site: Site) -> bool:
    """Whether a site's kernel saves only launches, so that it may lose to cuBLAS: a shared-input
    kernel with large M, whose separate matmuls would read A from L2 anyway.
    """
    return len(site.outputs) > 1 and isinstance(site.m, int) and site.m > SMALL_M


def is_one_inductor_kernel(match: match_cutlass.CutlassMatch) -> bool:
    """Whether Inductor would compute the epilogue in exactly one kernel, as the reference program
    does against which a fused kernel is timed.
    """
    inside = match.nodes
    if len(inside) == 1:
        return True

    def is_read_only_within(node: fx.Node) -> bool:
        outside = (user for user in node.users if user not in inside)
        return all(
            (is_view(item) or is_cast(item)) and is_read_only_within(item) for item in outside
        )

    # Inductor fuses into that kernel the producers that only it reads, and the kernel itself into
    # its readers: see `epilogue_region.add_epilogue`.
    before = filter(epilogue_region.is_computed, match.epilogue.inputs)
    return not (
        any(map(is_read_only_within, before))
        or any(epilogue_region.is_read_by_inductor(output, inside) for output in match.outputs)
    )


def m_bounds(m: Any) -> tuple[int, int | None]:
    """Return the lower and upper bound of M, at least 1; an upper bound of None means unbounded."""
    bounds = m.node.shape_env.bound_sympy(m.node.expr)
    lower, upper = (
        int(bound) if isinstance(bound, sympy.Integer) else None
        for bound in (bounds.lower, bounds.upper)
    )
    return max(1, lower or 1), upper


def tuned_sizes(m: Any, settings: Settings) -> list[int]:
    """Return the values of M at which to decide if M is dynamic; an empty list means only the size
    hint.
    """
    from torch._inductor import config

    if config.triton.cudagraphs:
        # Each size is a CUDA graph of its own, and a branch on M would split the recording.
        return []
    sizes = parse_rows(settings.gemm_rows)
    lower, upper = m_bounds(m)
    if upper is None:
        upper = max(lower, *sizes)
    return sorted({min(max(size, lower), upper) for size in sizes})
