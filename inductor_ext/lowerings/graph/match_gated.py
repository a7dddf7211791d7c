"""Matching of gated MLPs: act(x @ w1 + b1) * (x @ w2 + b2), in one kernel (`gemm_fuse_gated`).

There are two weights or one packed gate-up weight, both sides with a bias or both without. The
activation is recognized by its formula, so it may be written in any way.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import sympy  # type: ignore[import-untyped]

from inductor_ext.lowerings.graph.formula import FormulaReader, canonicalize, relu, symbol_of
from inductor_ext.lowerings.graph.fusible_matmuls import (
    FusibleMatmuls,
    is_biased_by_row,
    views_of,
)
from inductor_ext.lowerings.graph.fusion import Fusion, ViewedNode, is_closed
from inductor_ext.lowerings.graph.fx_nodes import (
    Unreadable,
    is_cast,
    shape,
    size_2d,
    skip_views,
)
from inductor_ext.lowerings.graph.matmul_nodes import dtype_of
from inductor_ext.templates.fused_ops import Epilogue
from inductor_ext.templates.problem import GemmProblem, Operation
from inductor_ext.templates.tensors import EpilogueInput

if TYPE_CHECKING:
    import torch
    from torch import fx

X = sympy.Dummy("x", real=True)
"""The variable of formulas of one variable."""


@dataclass(frozen=True)
class _Side:
    """One side of a gate: the gate or the up projection."""

    matmul: fx.Node
    bias: fx.Node | None = None
    """The vector [N] that is added to the rows of the matmul."""
    begin: int | None = None
    """The first column, if this is half of the columns of the matmul."""
    nodes: frozenset[fx.Node] = frozenset()
    """The nodes from the matmul to this side, without the matmul."""


def find_gated_fusions(matmuls: FusibleMatmuls) -> Iterator[Fusion]:
    """Yield every act(x @ w1 + b1) * (x @ w2 + b2); no two of them share a node."""
    import torch

    used: set[fx.Node] = set()
    target = torch.ops.aten.mul.Tensor
    for node in matmuls.graph.find_nodes(op="call_function", target=target):
        fusion = _match_gate(matmuls, node)
        if fusion is not None and used.isdisjoint(fusion.nodes):
            used.update(fusion.nodes)
            yield fusion


def _match_gate(matmuls: FusibleMatmuls, root: fx.Node) -> Fusion | None:
    """Return the gate that ends in the multiplication `root`."""
    leaves: dict[fx.Node, _Side] = {}

    def leaf(node: fx.Node) -> sympy.Expr | None:
        side = _match_side(matmuls, node)
        if side is None:
            return None
        if size_2d(node) != size_2d(root):
            raise Unreadable
        leaves[node] = side
        return symbol_of(node)

    try:
        reader = FormulaReader(root, leaf)
        split = _split(reader.read(root), list(leaves))
    except Unreadable:
        return None
    if split is None:
        return None
    gate, up, activation = split
    sides = (leaves[gate], leaves[up])
    if not _are_compatible(*sides):
        return None
    inner_nodes = {
        node for side in sides for node in (*side.nodes, *matmuls.by_output[side.matmul].nodes)
    }
    output = _cast_of(root, sides[0].matmul.meta["val"].dtype)
    nodes = tuple(sorted({*inner_nodes, *reader.inner, output}))
    return _fuse_gate(matmuls, sides, activation, nodes, output)


def _are_compatible(gate: _Side, up: _Side) -> bool:
    """Whether two sides are different halves of one matmul with one bias, or two matmuls, and both
    or none have a bias.
    """
    if (gate.begin is None) != (up.begin is None) or (gate.bias is None) != (up.bias is None):
        return False
    if gate.begin is None:
        return gate.matmul is not up.matmul
    return gate.matmul is up.matmul and gate.begin != up.begin and gate.bias is up.bias


def _fuse_gate(
    matmuls: FusibleMatmuls,
    sides: tuple[_Side, _Side],
    activation: str,
    nodes: tuple[fx.Node, ...],
    output: fx.Node,
) -> Fusion | None:
    """Return the fusion of a gate and an up projection; None if they cannot share a kernel.

    Args:
        matmuls: of the graph.
        sides: the gate and the up projection.
        activation: of the gate.
        nodes: all nodes of the fusion.
        output: the last one.
    """
    gate, up = sides
    halves = None if gate.begin is None or up.begin is None else (gate.begin, up.begin)
    outputs = list(dict.fromkeys((gate.matmul, up.matmul)))
    problem = matmuls.common_problem(outputs, halves=halves is not None)
    if problem is None:
        return None
    biases = tuple(ViewedNode(side.bias) for side in sides[: len(outputs)] if side.bias is not None)
    fusion = matmuls.fuse(_gated_problem(problem, activation, sides, output), outputs, halves)
    # The kernel adds these biases, each to its side, and nothing else is added.
    operands = dataclasses.replace(fusion.operands.without_epilogue(), gate_biases=biases)
    fusion = dataclasses.replace(
        fusion,
        nodes=nodes,
        outputs=(output,),
        operands=operands,
        constants=dataclasses.replace(fusion.constants, activation=activation),
    )
    return fusion if is_closed(fusion.nodes, fusion.outputs, fusion.inputs) else None


def _gated_problem(
    problem: GemmProblem, activation: str, sides: tuple[_Side, _Side], output: fx.Node
) -> GemmProblem:
    """Return the problem of two matmuls with the gate after them."""
    gate = sides[0]
    out = dtype_of(output.meta["val"])
    first: Literal["gate", "up"] = "gate" if gate.begin == 0 else "up"
    epilogue = Epilogue(out=out if out != problem.out else None, gated=True)
    details = dataclasses.replace(
        problem.details, activation=activation, packed_first=None if gate.begin is None else first
    )
    operation: Operation = problem.operation
    if gate.bias is not None:
        operation = "addmm"
        row = EpilogueInput(problem.out, "row")
        epilogue = dataclasses.replace(epilogue, inputs=(row,), pointwise=1)
    return dataclasses.replace(problem, operation=operation, epilogue=epilogue, details=details)


def _match_side(matmuls: FusibleMatmuls, node: fx.Node) -> _Side | None:
    """Return the matmul, with or without its bias, whose result or half-result a node is."""
    whole = _match_whole(matmuls, node)
    if whole is not None:
        return whole
    half = _half(node)
    if half is None:
        return None
    source, begin, between = half
    views = set(views_of(source))
    whole = _match_whole(matmuls, skip_views(source))
    if whole is None or matmuls.by_output[whole.matmul].problem.n != shape(source)[-1]:
        return None
    return dataclasses.replace(whole, begin=begin, nodes=whole.nodes | between | views)


def _match_whole(matmuls: FusibleMatmuls, node: fx.Node) -> _Side | None:
    """Return the matmul, with or without its bias, that a node is."""
    import torch

    if node in matmuls.by_output:
        matmul = matmuls.by_output[node]
        operands = matmul.operands
        if not operands.epilogue_operands:
            return _Side(node)
        is_addmm = matmul.problem.operation == "addmm" and is_biased_by_row(matmul)
        return _Side(node, operands.biases[0].node) if is_addmm else None
    if node.target is not torch.ops.aten.add.Tensor or node.kwargs:
        return None
    # An addition written by the model, on a reshaped matmul result.
    addends = node.all_input_nodes
    for added, bias in zip(addends, reversed(addends), strict=True):
        source = skip_views(added)
        problem = matmuls.by_output[source].problem if source in matmuls.by_output else None
        if (
            problem is not None
            and problem.operation == "mm"
            and size_2d(added)[1] == problem.n
            and shape(bias) == (problem.n,)
            and node.meta["val"].dtype == source.meta["val"].dtype == bias.meta["val"].dtype
        ):
            return _Side(source, bias, nodes=frozenset({node, *views_of(added)}))
    return None


def _half(node: fx.Node) -> tuple[fx.Node, int, set[fx.Node]] | None:
    """Match a node that is half of another along the last dimension.

    Returns:
        The whole; the first index of the half; the nodes in between, including `node`.
    """
    import torch

    aten = torch.ops.aten
    if node.target is operator.getitem:
        split: Any = node.args[0]
        index: Any = node.args[1]
        if split.target not in (aten.split.Tensor, aten.split_with_sizes.default):
            return None
        source, sizes, *axis = split.args
        begin = index * sizes if isinstance(sizes, int) else sum(sizes[:index])
        between = {node, split}
    elif node.target is aten.slice.Tensor and len(node.args) == 4:
        source, *axis, begin, _ = node.args
        between = {node}
    else:
        return None
    size = shape(source)
    if axis not in ([-1], [len(size) - 1]) or 2 * shape(node)[-1] != size[-1]:
        return None
    return (source, begin, between) if begin in (0, size[-1] // 2) else None


@functools.cache
def _activations() -> Mapping[sympy.Expr, str]:
    """Return the supported gate activations, as formulas of `X`."""
    half = sympy.Rational(1, 2)
    sigmoid = 1 / (1 + sympy.exp(-X))
    formulas = {
        "silu": X * sigmoid,
        "gelu": half * X * (1 + sympy.erf(X * math.sqrt(0.5))),
        "gelu_tanh": half * X * (1 + sympy.tanh(math.sqrt(2 / math.pi) * (X + 0.044715 * X**3))),
        "relu": relu(X),
        "sigmoid": sigmoid,
        "identity": X,
    }
    return {canonicalize(formula): name for name, formula in formulas.items()}


def _split(formula: sympy.Expr, leaves: Sequence[fx.Node]) -> tuple[fx.Node, fx.Node, str] | None:
    """Return the gate node, the up-projection node, and the activation.

    Args:
        formula: of the symbols of the leaves.
        leaves: the nodes that were read.
    """
    if len(leaves) != 2:
        return None
    for gate, up in (leaves, reversed(leaves)):
        activation, rest = formula.as_independent(symbol_of(up), as_Add=False)
        if rest == symbol_of(up):
            name = _activations().get(canonicalize(activation.xreplace({symbol_of(gate): X})))
            if name is not None:
                return gate, up, name
    return None


def _cast_of(root: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Return the cast of a node to a dtype if it is the only user of the node, else the node."""
    (user, *others) = root.users
    if root.meta["val"].dtype != dtype and not others and is_cast(user):
        return user
    return root
