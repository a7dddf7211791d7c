"""Matching of matmuls whose row amax is needed to quantize the output to 8 bits.

`find_row_amax_fusions` (`gemm_fuse_row_maxima`) matches y.abs().amax(-1) or y.amax(-1), where y is
what one extension kernel can compute: a matmul, or a fusion of `fusion_search` or
`match_dequantized`, with the pointwise operations after it. The amax is that of y as stored, so the
kernel applies all these operations itself (`chain`) instead of leaving them to the scheduler. y is
stored as before, for its readers.

What is timed is what the graph computes: if y is then scaled to float8 or int8 by the amax, the
problem includes that. If it is not, and y has other readers, whose kernels may compute the amax at
no cost, there is no match. Nor is there one if an operation in between is used elsewhere, if the
dtype of y differs from that of the matmul, or if Inductor is set to round as eager mode does
(`emulate_precision_casts`) or to order signed zeros (`strict_signed_zero`, torch 2.14).
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from inductor_ext import numerics
from inductor_ext.lowerings.graph import epilogue_region
from inductor_ext.lowerings.graph.fusible_matmuls import make_single_fusion
from inductor_ext.lowerings.graph.fusion import Fusion, is_closed
from inductor_ext.lowerings.graph.fx_nodes import (
    Unreadable,
    is_cast,
    is_contiguous,
    is_view,
    shape,
    size_2d,
)
from inductor_ext.lowerings.graph.matmul_nodes import call_arguments, is_matmul, problem_of
from inductor_ext.lowerings.graph.rewrite import call_operands, hoist, replace_call
from inductor_ext.lowerings.node_info import FusedCall
from inductor_ext.settings import Settings
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import QUANTIZED

if TYPE_CHECKING:
    from torch import fx


@dataclass(frozen=True)
class RowAmaxFusion(Fusion):
    """A matmul whose kernel also returns the row amax.

    `outputs` are y and the amax.
    """

    chain: fx.Graph | None = None
    """Computes y from the accumulators and further inputs, [M, columns] or broadcast to it; each of
    its nodes has its `dtype` as metadata."""
    chain_inputs: Mapping[fx.Node, fx.Node] = field(default_factory=dict)
    """The inputs of the chain besides the accumulators, each with a node that reads it."""
    matmul: fx.Node | None = None
    """The matmul, if nothing else is fused with it."""
    scaling: tuple[fx.Node, ...] = ()
    """The nodes that scale y to 8 bits by the amax, computed by other kernels, in graph order."""


def find_row_amax_fusions(
    graph: fx.Graph, settings: Settings, fusions: Sequence[Fusion]
) -> list[RowAmaxFusion]:
    """Return the matmuls of a graph whose row amax is needed.

    Args:
        graph: after `fusion_search.find_fusions`.
        settings: of the compile.
        fusions: what was found in the graph.
    """
    if not settings.gemm_fuse_row_maxima or numerics.has_exact_pointwise():
        return []
    if numerics.has_ordered_zeros():
        # The kernel may return either zero of a tie.
        return []
    reductions = [
        reduction for reduction in map(_match_reduction, graph.nodes) if reduction is not None
    ]
    if not reductions:
        return []
    search = _Search(graph, fusions)
    return [fusion for reduction in reductions for fusion in search.find(reduction)]


@dataclass(frozen=True)
class _Reduction:
    """A row amax."""

    node: fx.Node
    inner: tuple[fx.Node, ...]
    """The nodes that compute it from y, from the amax backwards."""
    sources: tuple[fx.Node, ...]
    """The nodes with the same elements (with either sign, if absolute), nearest first."""
    absolute: bool


def _match_reduction(node: fx.Node) -> _Reduction | None:
    import torch

    aten = torch.ops.aten
    inner = [node]
    call = node
    if node.target is operator.getitem and node.args[1] == 0:
        call = node.args[0]  # type: ignore[assignment]
        inner.append(call)
        if call.target is not aten.max.dim or len(call.users) > 1:
            return None
    elif node.target is not aten.amax.default:
        return None
    source: Any = call.args[0]
    dims: Any = call.args[1] if len(call.args) > 1 else ()
    try:
        last = len(shape(source)) - 1
    except Unreadable:
        return None
    if dims not in (-1, last, [-1], [last]) or last < 1:
        return None
    sources, absolute = [source], False
    while source.target is aten.abs.default or is_view(source) or _is_widening_cast(source):
        inner.append(source)
        absolute = absolute or source.target is aten.abs.default
        if source.target is aten.abs.default:
            sources.clear()
        # A view may also have sizes as inputs.
        source = source.all_input_nodes[0]
        if size_2d(source) != size_2d(inner[-1]):
            return None
        sources.append(source)
    return _Reduction(node, tuple(inner), tuple(sources), absolute)


def _is_widening_cast(node: fx.Node) -> bool:
    """Whether a node is a cast that does not round."""
    if not is_cast(node):
        return False
    source = node.all_input_nodes[0]
    return bool(node.meta["val"].dtype.itemsize > source.meta["val"].dtype.itemsize)


class _Search:
    def __init__(self, graph: fx.Graph, fusions: Sequence[Fusion]) -> None:
        import torch

        aten = torch.ops.aten
        self.regions: dict[fx.Node, list[fx.Node]] = {}
        """The pointwise nodes after each matmul."""
        self.bases = [fusion for fusion in fusions if len(fusion.outputs) == 1]
        covered = (aten.mm.default, aten.addmm.default, aten._scaled_mm.default)
        self.unfused: list[Fusion] = []
        for node in graph.nodes:
            problem = problem_of(node) if node.target in covered else None
            if problem is not None and all(isinstance(size, int) for size in shape(node)[1:]):
                self.unfused.append(_unfused(node, problem))

    def find(self, reduction: _Reduction) -> Iterator[RowAmaxFusion]:
        """Yield the fusions that compute a row amax."""
        for source in reversed(reduction.sources):
            bases = [base for base in self.bases if self.pointwise_run(base, source) is not None]
            gated = {node for base in bases if base.problem.epilogue.gated for node in base.nodes}
            # If y is computed from two matmuls, take the last one, whose kernel can read the
            # other's result.
            plain = [
                fusion for fusion in self.unfused if self.pointwise_run(fusion, source) is not None
            ][-1:]
            bases += [fusion for fusion in plain if gated.isdisjoint(fusion.nodes)]
            fusions = [self.extend(base, source, reduction) for base in bases]
            if any(fusions):
                yield from (fusion for fusion in fusions if fusion is not None)
                return

    def pointwise_run(self, base: Fusion, y: fx.Node) -> list[fx.Node] | None:
        """Return the nodes from the output of a base to y, if they are pointwise and have no other
        users.
        """
        (output,) = base.outputs
        if output > y:
            return None
        if output not in self.regions:
            self.regions[output] = epilogue_region.find_region(output)
        nodes = self.regions[output]
        if y not in nodes:
            return None
        nodes = nodes[: nodes.index(y) + 1]
        closed = all(set(node.users) <= set(nodes) for node in nodes[:-1])
        return nodes if closed else None

    def extend(self, base: Fusion, y: fx.Node, reduction: _Reduction) -> RowAmaxFusion | None:
        """Return a base extended by the row amax of y."""
        nodes = self.pointwise_run(base, y)
        assert nodes is not None
        problem = epilogue_region.count_epilogue_ops(nodes, base.problem)
        biases = _biases(base)
        if (
            problem is None
            or problem.epilogue.out is not None
            or not is_contiguous(y)
            or (biases and problem.parts)
        ):
            return None
        chain = _ChainBuilder(base)
        if not all(map(chain.add, nodes[1:])):
            return None
        inner_nodes = {*base.nodes, *nodes, reduction.node}
        for node in reduction.inner[1:]:
            if node is y:
                break
            if set(node.users) <= inner_nodes:
                inner_nodes.add(node)
        scaling, dtype = self.find_scaling(y, reduction.node, inner_nodes)
        if dtype is None and self.find_readers(y) - inner_nodes:
            return None
        fusion = RowAmaxFusion(
            dataclasses.replace(
                problem, epilogue=dataclasses.replace(problem.epilogue, reductions=1, out=dtype)
            ),
            tuple(sorted(inner_nodes)),
            (y, reduction.node),
            base.operands.without_epilogue(),
            dataclasses.replace(base.constants, absolute=reduction.absolute),
            base.halves,
            chain=chain.finish(y),
            chain_inputs=chain.inputs,
            matmul=base.outputs[0] if base in self.unfused else None,
            scaling=scaling,
        )
        inputs = (*fusion.inputs, *fusion.chain_inputs)
        return fusion if is_closed(fusion.nodes, fusion.outputs, inputs) else None

    def find_readers(self, y: fx.Node) -> set[fx.Node]:
        """Return the nodes that read y, without views of it and the graph output."""
        readers: set[fx.Node] = set()
        pending = [y]
        while pending:
            for user in pending.pop().users:
                if is_view(user):
                    pending.append(user)
                elif user.op != "output":
                    readers.add(user)
        return readers

    def find_scaling(
        self, y: fx.Node, maxima: fx.Node, inner_nodes: set[fx.Node]
    ) -> tuple[tuple[fx.Node, ...], str | None]:
        """Return the nodes that scale y to 8 bits by its amax, and the dtype; empty and None if
        there are none.
        """
        dependencies: dict[fx.Node, frozenset[fx.Node]] = {
            item: frozenset((item,)) for item in (y, maxima)
        }
        """Pointwise nodes, with those of y and the amax that they depend on."""
        after = {y, maxima}
        node = y
        while (node := node.next).op != "output":
            sources = [item for item in node.all_input_nodes if item in after]
            if not sources or node in inner_nodes:
                continue
            after.add(node)
            if not _is_pointwise(node) or any(item not in dependencies for item in sources):
                continue
            dependencies[node] = frozenset().union(*(dependencies[item] for item in sources))
            dtype = str(node.meta["val"].dtype).removeprefix("torch.")
            if dtype in QUANTIZED and len(dependencies[node]) == 2 and _same_size(node, y):
                needed, pending = {node}, [node]
                while pending:
                    inputs = set(pending.pop().all_input_nodes) & dependencies.keys()
                    pending += inputs - needed - {y, maxima}
                    needed |= inputs
                needed -= {y, maxima}
                return tuple(sorted(needed)), dtype
        return (), None


def _is_pointwise(node: fx.Node) -> bool:
    import torch

    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    cast = torch.ops.prims.convert_element_type.default
    return pointwise or is_view(node) or node.target in (cast, torch.ops.aten.unsqueeze.default)


def _same_size(node: fx.Node, other: fx.Node) -> bool:
    try:
        return size_2d(node) == size_2d(other)
    except Unreadable:
        return False


def _unfused(node: fx.Node, problem: GemmProblem) -> Fusion:
    """Return an unfused matmul as a fusion."""
    fusion = make_single_fusion(node, problem)
    return dataclasses.replace(fusion, operands=fusion.operands.without_epilogue())


class _ChainBuilder:
    """Builder of the graph that computes y from the accumulators."""

    def __init__(self, base: Fusion) -> None:
        """Start with the operations of the base itself: float8 scales, and biases.

        Args:
            base: with one output, and a kernel that adds no biases itself.
        """
        import torch

        aten = torch.ops.aten
        self.graph = torch.fx.Graph()
        self.inputs: dict[fx.Node, fx.Node] = {}
        self.values: dict[fx.Node, fx.Node] = {}
        (output,) = base.outputs
        dtype = output.meta["val"].dtype
        scaled = output.target is aten._scaled_mm.default
        value = self.graph.placeholder("sums")
        value.meta["dtype"] = torch.float32 if scaled else dtype
        if scaled:
            args = call_arguments(output)
            for scale in (args["scale_a"], args["scale_b"]):
                value = self.call(aten.mul.Tensor, (value, self.read(scale, output)), torch.float32)
            if args["bias"] is not None:
                bias = self.read(args["bias"], output)
                value = self.call(aten.add.Tensor, (value, bias), torch.float32)
            value = self.call(torch.ops.prims.convert_element_type.default, (value, dtype), dtype)
        elif output.target is aten.addmm.default and not _biases(base):
            args = call_arguments(output)
            if args["alpha"] != 1:
                value = self.call(aten.mul.Tensor, (value, args["alpha"]), dtype)
            if args["beta"] != 0:
                bias = self.read(args["self"], output)
                # A single call: the scaled row by itself would not have the size of the output.
                value = self.call(aten.add.Tensor, (value, bias), dtype, alpha=args["beta"])
        for bias in _biases(base):
            value = self.call(aten.add.Tensor, (value, self.read(bias, output)), dtype)
        self.values[output] = value

    def call(self, target: Any, args: tuple[Any, ...], dtype: Any, **kwargs: Any) -> fx.Node:
        """Add a call whose result has a dtype."""
        node = self.graph.call_function(target, args, kwargs)
        node.meta["dtype"] = dtype
        return node

    def read(self, source: fx.Node, reader: fx.Node) -> fx.Node:
        """Return the chain's input for a node of the matmul's graph."""
        if source not in self.values:
            self.inputs[source] = reader
            self.values[source] = self.graph.placeholder(source.name)
        return self.values[source]

    def add(self, node: fx.Node) -> bool:
        """Compute a node of the matmul's graph in the chain; return False if that is impossible."""
        import torch
        from torch._inductor.lowering import lowerings
        from torch.fx.node import map_arg

        if is_view(node):
            self.values[node] = self.values[node.all_input_nodes[0]]
            return True
        tensors = all(
            isinstance(source.meta.get("val"), torch.Tensor) for source in node.all_input_nodes
        )
        if not tensors or node.target not in lowerings:
            return False
        args: Any = map_arg(node.args, lambda source: self.read(source, node))
        kwargs: Any = map_arg(node.kwargs, lambda source: self.read(source, node))
        self.values[node] = self.call(node.target, args, node.meta["val"].dtype, **kwargs)
        return True

    def finish(self, y: fx.Node) -> fx.Graph:
        """Return the graph, with y as its output."""
        self.graph.output(self.values[y])
        return self.graph


def _biases(base: Fusion) -> tuple[fx.Node, ...]:
    """Return the biases that the lowering of a fusion adds to the accumulators."""
    return tuple(bias.node for bias in base.operands.epilogue_operands)


def apply(
    graph: fx.Graph, fusion: RowAmaxFusion, target: Callable[..., Any]
) -> tuple[fx.Node, FusedCall]:
    """Replace the nodes of a fusion by one call, as `rewrite.apply` does.

    Args:
        graph: the graph in which the fusion was found.
        fusion: one from `find_row_amax_fusions`.
        target: a function of the matmul's operands and those of the chain, for Inductor with the
            attribute `_inductor_lowering_function`. It returns y and the amax, in their shapes.

    Returns:
        The call, and what reads its arguments.
    """
    y, maxima = fusion.outputs
    hoist(y, (*fusion.inputs, *fusion.chain_inputs))
    matmul = next(node for node in fusion.nodes if is_matmul(node))
    with graph.inserting_before(y):
        further = [
            epilogue_region.view_as_rows(graph, *pair) for pair in fusion.chain_inputs.items()
        ]
        operands = call_operands(graph, fusion, matmul)
        operands = dataclasses.replace(operands, epilogue_inputs=tuple(further))
        call = graph.call_function(target, operands.flatten())
        call.meta = {**y.meta, "val": (y.meta["val"], maxima.meta["val"])}
        call.meta.pop("eager_input_vals", None)
    replace_call(y, operator.getitem, (call, 0))
    replace_call(maxima, operator.getitem, (call, 1))
    for node in reversed(fusion.nodes):
        if node not in fusion.outputs:
            graph.erase_node(node)
    return call, FusedCall.of(operands, fusion.constants, fusion.chain)
