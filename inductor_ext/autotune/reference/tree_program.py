"""Reference programs of problems whose epilogue is a tree (`Epilogue.tree`).

The operator computes the part of the tree that it covers, and the tree is evaluated from there, so
that the same tree is matched again in the program's graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from inductor_ext.autotune.reference.operators import (
    ExactOperators,
    Operators,
    apply_pointwise,
    torch_dtype,
)
from inductor_ext.autotune.reference.stored_values import expand_groups, unpack_int4
from inductor_ext.templates.cutlass.epilogue import ACCUMULATOR, Node, NotExpressible
from inductor_ext.templates.cutlass.epilogue import Epilogue as Tree
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import EpilogueInput


def epilogue_tree(problem: GemmProblem) -> Tree | None:
    """Return the tree of a problem's epilogue; None without one."""
    return problem.epilogue.tree


@dataclass(frozen=True)
class OperatorPart:
    """The part of a tree that the matmul operator itself computes."""

    node: Node
    scales: tuple[int, ...] = ()
    """Indices of the inputs that are scales: of B for dequantized weights, which the operator does
    not apply itself; of A and B for fp8."""
    bias: int | None = None
    """Index of the input that is added."""
    alpha: Node | None = None
    beta: Node | None = None

    @classmethod
    def of(cls, problem: GemmProblem, tree: Tree) -> OperatorPart:
        """Return the operator's part of a tree.

        Raises:
            NotExpressible: the tree lacks an operation that the operator always performs.
        """
        users: dict[Node, list[Node]] = {}
        for node in tree.nodes():
            if len(node.arguments) == 2:
                users.setdefault(node.arguments[0], []).append(node)

        def above(node: Node, operation: str, kind: str) -> Node | None:
            """Return the `operation` on `node` and a second operand of `kind`; None without one."""
            fits = (user for user in users.get(node, []) if user.operation == operation)
            return next((fit for fit in fits if fit.arguments[1].operation == kind), None)

        value = ACCUMULATOR
        scales = []
        for _ in range(2 if problem.operation == "scaled" else _scales_after_matmul(problem)):
            scaled = above(value, "mul", "read")
            if scaled is None:
                raise NotExpressible("scales are missing")
            scales.append(scaled.arguments[1].index)
            value = scaled
        if problem.operation == "mixed":
            return cls(ACCUMULATOR, tuple(scales))
        alpha = beta = None
        if problem.operation in ("addmm", "baddbmm"):
            multiplied = above(value, "mul", "parameter")
            if multiplied is not None:
                value, alpha = multiplied, multiplied.arguments[1]
            added = above(value, "add", "mul")
            if added is not None:
                bias, beta = added.arguments[1].arguments
                if (bias.operation, beta.operation) == ("read", "parameter"):
                    return cls(added, (), bias.index, alpha, beta)
        if problem.operation in ("addmm", "baddbmm", "scaled"):
            added = above(value, "add", "read")
            if added is not None:
                return cls(added, tuple(scales), added.arguments[1].index, alpha)
        return cls(ACCUMULATOR if not scales else value, tuple(scales))


def inputs_outside_tree(problem: GemmProblem, tree: Tree) -> tuple[EpilogueInput, ...]:
    """Return the inputs of the epilogue that are not in its tree."""
    return problem.epilogue.inputs[len(tree.inputs) - _prologue_scales_in_tree(problem) :]


def _prologue_scales_in_tree(problem: GemmProblem) -> int:
    """Return the number of tree inputs (0 or 1) that are scales of the prologue.

    `Epilogue.inputs` does not contain these.
    """
    return int(problem.dequant is not None and problem.dequant.scales != "none")


def _scales_after_matmul(problem: GemmProblem) -> int:
    """Return the number of prologue scales (0 or 1) that the tree applies after the main loop."""
    return int(problem.dequant is not None and problem.dequant.scales_accumulators)


def evaluate_tree(
    problem: GemmProblem, tree: Tree, tensors: Mapping[str, torch.Tensor], ops: Operators
) -> tuple[torch.Tensor, ...]:
    """Return the outputs of a tree; the rest of the epilogue is applied to the first."""
    operator_part = OperatorPart.of(problem, tree)
    inputs = [tensors[f"input{index}_0"] for index in range(len(tree.inputs))]
    adds = _adds_bias(problem, tree, operator_part)
    start = operator_part.node if adds or operator_part.bias is None else ACCUMULATOR
    parameters = _parameter_values(tree, start)
    alpha, beta = (
        1 if node is None else parameters[node.index]
        for node in (operator_part.alpha, operator_part.beta)
    )
    bias = inputs[operator_part.bias] if adds and operator_part.bias is not None else None
    operands = dict(tensors)
    b = tensors["b0"]
    if tree.packed is not None:
        b = _unpack_weight(problem, tree, tensors, ops)
    elif problem.operation == "mixed":
        b = b.to(tensors["a"].dtype)
    elif operator_part.scales:
        operands |= zip(
            ("scale_a", "scale_b"), (inputs[scale] for scale in operator_part.scales), strict=True
        )
    result = ops.matmul(tensors["a"], b, bias, operands, alpha, beta)
    first, *others = tree.evaluate(
        None, inputs, parameters, known={start: result}, exact=isinstance(ops, ExactOperators)
    )
    rest = inputs_outside_tree(problem, tree)
    for index, inp in enumerate(rest, len(tree.inputs)):
        operand = tensors[f"input{index}_0"]
        added = inp.broadcast in ("matrix", "row")
        first = first + operand if added else first * operand
    remaining = problem.epilogue.pointwise - tree.operations + _scales_after_matmul(problem)
    first = apply_pointwise(first, remaining - len(rest))
    return ops.narrow(first, torch_dtype(problem.stored_dtype)), *others


def _adds_bias(problem: GemmProblem, tree: Tree, operator_part: OperatorPart) -> bool:
    """Whether the operator itself adds the bias that a tree begins with."""
    if operator_part.bias is None or problem.operation == "scaled":
        return operator_part.bias is not None
    return tree.inputs[operator_part.bias].dtype == problem.out == problem.a.dtype


def _parameter_values(tree: Tree, inside: Node) -> list[float]:
    """Return values for a tree's parameters: all different, none of them 1.

    Parameters outside of `inside`, which is what the operator computes, get values that a model
    might derive from sizes (1 / sqrt(n)).
    """
    operator_nodes = {*Tree((("float32", inside),)).nodes()}
    others = {
        argument.index
        for node in tree.nodes()
        for argument in node.arguments
        if argument.operation == "parameter" and node not in operator_nodes
    }
    return [
        (16 + index) ** -0.5 if index in others else 1 + (1 + index) / 64
        for index in range(tree.parameters)
    ]


def _unpack_weight(
    problem: GemmProblem, tree: Tree, tensors: Mapping[str, torch.Tensor], ops: Operators
) -> torch.Tensor:
    """Return a 4-bit B as [K, N], unpacked as the tree specifies."""
    assert tree.packed is not None
    b, dtype = tensors["b0"], tensors["a"].dtype
    weight = unpack_int4(b, problem.b.dtype == "int4", tree.packed.high_first).to(dtype)
    if tree.packed.zero:
        weight = weight - tree.packed.zero
    if tree.scales is not None:
        scales = expand_groups(tensors[f"input{tree.scales}_0"], problem).to(dtype)
        weight = ops.narrow(weight * scales, ops.a_dtype)
    return weight.t()
