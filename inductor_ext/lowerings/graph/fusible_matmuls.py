"""The matmuls of a graph that can be fused with others, and what they must have in common.

`FusibleMatmuls` holds them for the matchers `match_gated`, `match_shared_input` and
`match_normed_input`: the graph's own matmuls, or matmuls with a B that is dequantized in the graph.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Container, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING

from inductor_ext.lowerings.graph.fusion import Fusion, ViewedNode, is_closed
from inductor_ext.lowerings.graph.fx_nodes import is_view, shape, skip_views
from inductor_ext.lowerings.graph.matmul_nodes import matmul_operands, problem_of, value_of
from inductor_ext.lowerings.operands import FusedOperands
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import Operand

if TYPE_CHECKING:
    from torch import fx


def make_single_fusion(node: fx.Node, problem: GemmProblem) -> Fusion:
    """Return aten.mm, addmm or _scaled_mm as a fusion of this node alone."""
    a, b, *rest = map(ViewedNode, matmul_operands(node))
    count = 2 if problem.operation == "scaled" else 0
    scales, biases = tuple(rest[:count]), tuple(rest[count:])
    operands = FusedOperands(a, (b,), fp8_scales=scales, biases=biases)
    return Fusion(problem, (node,), (node,), operands)


class FusibleMatmuls:
    """The matmuls of one graph that can be fused, by output node."""

    def __init__(
        self, graph: fx.Graph, dequantized: Sequence[Fusion] = (), without: Container[fx.Node] = ()
    ) -> None:
        """Collect the matmuls.

        Args:
            graph: its nodes must not change while this object is used.
            dequantized: matmuls to fuse instead of the graph's own.
            without: matmuls of the graph that are not to be fused.
        """
        import torch

        aten = torch.ops.aten
        self.graph = graph
        self.by_output: dict[fx.Node, Fusion] = {}
        if dequantized:
            for matmul in sorted(dequantized, key=lambda fusion: fusion.outputs[0]):
                if is_closed(matmul.nodes, matmul.outputs, matmul.inputs):
                    self.by_output[matmul.outputs[0]] = matmul
            return
        targets = (aten.mm.default, aten.addmm.default, aten._scaled_mm.default)
        for node in graph.nodes:
            if node.target in targets and node not in without:
                problem = problem_of(node)
                b = matmul_operands(node)[1]
                # Only M may be symbolic.
                if problem is not None and all(isinstance(size, int) for size in value_of(b).shape):
                    self.by_output[node] = make_single_fusion(node, problem)

    def fuse(
        self, problem: GemmProblem, nodes: Sequence[fx.Node], halves: tuple[int, int] | None = None
    ) -> Fusion:
        """Return matmuls with the same operand A as one fusion, with all their results as outputs.

        Args:
            problem: of the fusion.
            nodes: the outputs of the matmuls.
            halves: the halves of the weight, if there is only one matmul.
        """
        matmuls = [self.by_output[node] for node in nodes]
        first = matmuls[0].operands

        def joined(field: str) -> tuple[ViewedNode, ...]:
            fields = [getattr(matmul.operands, field) for matmul in matmuls]
            return tuple(itertools.chain.from_iterable(zip(*fields, strict=True)))

        operands = FusedOperands(
            first.a,
            joined("weights"),
            joined("scales"),
            joined("zero_points"),
            # A has one scale, and each weight has its own.
            fp8_scales=(
                *first.fp8_scales[:1],
                *(scale for matmul in matmuls for scale in matmul.operands.fp8_scales[1:]),
            ),
            biases=joined("biases"),
        )
        inner_nodes = {node for matmul in matmuls for node in matmul.nodes}
        constants = matmuls[0].constants
        return Fusion(
            problem, tuple(sorted(inner_nodes)), tuple(nodes), operands, constants, halves
        )

    def common_problem(self, nodes: Sequence[fx.Node], *, halves: bool) -> GemmProblem | None:
        """Return the problem of matmuls with the same operand A; None if they cannot share a
        kernel.

        Args:
            nodes: matmuls.
            halves: whether there is only one matmul, fused as two halves of its columns.
        """
        matmuls = [self.by_output[node] for node in nodes]
        if any(group_key(matmul) != group_key(matmuls[0]) for matmul in matmuls[1:]):
            return None
        problems = [matmul.problem for matmul in matmuls]
        parts = tuple(problem.n for problem in problems)
        operand = min((problem.b for problem in problems), key=lambda operand: operand.alignment)
        if halves:
            parts = (parts[0] // 2,) * 2
            operand = _half_of(operand, problems[0].k, parts[0])
        if min(parts) == 1:
            # With N = 1 the stride between columns is arbitrary, and the kernel would use it.
            return None
        biases = [bias.node for matmul in matmuls for bias in matmul.operands.biases]
        if problems[0].operation == "scaled":
            # The kinds of the scales are in the epilogue. Biases must be vectors.
            if any(len(shape(bias)) != 1 for bias in biases):
                return None
        elif (problems[0].operation == "addmm" or biases) and (
            not all(map(is_biased_by_row, matmuls))
            or len({problem.epilogue for problem in problems}) > 1
        ):
            return None
        return dataclasses.replace(problems[0], n=sum(parts), b=operand, parts=parts)


def is_biased_by_row(matmul: Fusion) -> bool:
    """Whether an unscaled vector [N] is added, by aten.addmm or after the scales."""
    epilogue, biases = matmul.problem.epilogue, matmul.operands.biases
    return (
        bool(biases)
        and len(shape(biases[0].node)) == 1
        and [inp.broadcast for inp in epilogue.inputs] == ["row"]
        and epilogue.pointwise == 1
    )


def group_key(matmul: Fusion) -> Hashable:
    """Return what matmuls that share a kernel must have in common."""
    operands, problem = matmul.operands, matmul.problem
    values = [operand.value for operand in operands.a_and_weights[1:]]
    scales: tuple[object, ...] = ()
    if problem.operation == "scaled":
        # fp8 scales are applied to the accumulators, in the kernel.
        scales = (operands.fp8_scales[0].node, problem.epilogue, problem.fast_accumulation)
    return (
        (skip_views(operands.a.node), shape(operands.a.node)),
        (problem.operation, problem.b.dtype, problem.out, problem.prologue),
        (values[0].dtype, values[0].shape[0], *(value.stride() for value in values)),
        matmul.constants,
        scales,
        len(operands.epilogue_operands),
    )


def views_of(node: fx.Node) -> Iterator[fx.Node]:
    """Yield a node and its sources as long as they are views."""
    while is_view(node):
        yield node
        node = node.all_input_nodes[0]


def _half_of(operand: Operand, k: int, columns: int) -> Operand:
    """Return half of the columns of an operand, with the alignment that holds for both halves."""
    offset = columns * operand.strides[1]
    half = Operand.of(operand.dtype, (k, columns), operand.strides, offset=offset)
    return dataclasses.replace(half, alignment=min(half.alignment, operand.alignment))
