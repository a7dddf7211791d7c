"""The reference program of a GEMM problem, evaluated in its own dtypes or in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from inductor_ext.autotune.reference.inputs import (
    Input,
    accumulator_unit,
    columns_per_weight,
    epilogue_inputs,
    first_multiplied_input,
    is_added,
    is_bias,
    program_inputs,
)
from inductor_ext.autotune.reference.operators import (
    ACTIVATIONS,
    ExactOperators,
    Operators,
    PlainOperators,
    apply_pointwise,
    select,
)
from inductor_ext.autotune.reference.stored_values import (
    convert_stored,
    expand_groups,
    quantize_rows,
    stays_integer,
    unpack_int4,
)
from inductor_ext.autotune.reference.tree_program import epilogue_tree, evaluate_tree
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import INT4


@dataclass(frozen=True)
class Program:
    """A function of torch tensors that computes a problem."""

    problem: GemmProblem
    inputs: tuple[Input, ...]

    def function(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Compute the problem as a model would.

        Args:
            tensors: one for each of `inputs`.

        Returns:
            The output [M, N] or [batch, M, N], or, for fused weights that do not gate each other,
            one output [M, columns] per weight. Then the values reduced over N, [M] each, of one
            output after the other. If rows are quantized by their row amax, the output is the
            quantized one.
        """
        return _evaluate(self.problem, self._named(tensors), PlainOperators(self.problem))

    def reference(
        self, tensors: Sequence[torch.Tensor], rows: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Compute some rows of the same outputs in float64, without intermediate rounding.

        Args:
            tensors: as for `function`.
            rows: indices into M, ascending, on the device of the tensors.
        """
        exact_tensors = {}
        for inp, tensor in zip(self.inputs, tensors, strict=True):
            sampled = select(tensor, -2, rows) if inp.rows else tensor
            integer = inp.divided or self._packed(inp)
            exact_tensors[inp.name] = sampled if integer else sampled.to(torch.float64)
        return _evaluate(self.problem, exact_tensors, ExactOperators(self.problem, rows))

    def make_inputs(self, device: torch.device | str, seed: int = 0) -> list[torch.Tensor]:
        """Return random inputs, for which outputs are of the order of 1."""
        generator = torch.Generator(device)
        generator.manual_seed(seed)
        return [inp.random(generator) for inp in self.inputs]

    def empty_inputs(self, device: torch.device | str) -> list[torch.Tensor]:
        """Return uninitialized inputs; under a fake mode, fake tensors."""
        return [inp.empty(device) for inp in self.inputs]

    @property
    def bytes(self) -> int:
        """Bytes of the storages of the inputs."""
        return sum(inp.bytes for inp in self.inputs)

    @property
    def further(self) -> Mapping[int, str]:
        """The dtypes of the outputs of a tree, except the first, by index."""
        tree = epilogue_tree(self.problem)
        outputs = () if tree is None else tree.outputs[1:]
        return {index: dtype for index, (dtype, _) in enumerate(outputs, 1)}

    def _named(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {inp.name: tensor for inp, tensor in zip(self.inputs, tensors, strict=True)}

    def _packed(self, input_: Input) -> bool:
        return input_.name.startswith("b") and self.problem.b.dtype in INT4


def program(problem: GemmProblem) -> Program:
    """Return the reference program of a problem."""
    return Program(problem, tuple(program_inputs(problem)))


def _evaluate(
    problem: GemmProblem, tensors: Mapping[str, torch.Tensor], ops: Operators
) -> tuple[torch.Tensor, ...]:
    a = tensors["a"]
    tree = epilogue_tree(problem)
    if tree is not None:
        return evaluate_tree(problem, tree, tensors, ops)
    if problem.norm is not None:
        a = _normalize(problem, a, tensors, ops)
    results = []
    for part in range(len(columns_per_weight(problem))):
        bias = None
        if is_bias(problem, 0):
            bias = _epilogue_operand(tensors, 0, part)
        if problem.operation == "mixed":
            results.append(_dequantized_matmul(problem, a, part, tensors, ops))
        else:
            part_tensors = (
                {**tensors, "scale_b": tensors[f"scale_b{part}"]}
                if "scale_b0" in tensors
                else tensors
            )
            results.append(ops.matmul(a, tensors[f"b{part}"], bias, part_tensors))
    if problem.epilogue.gated:
        gate, up = _gate_and_up(problem, results)
        results = [ACTIVATIONS[problem.details.activation](gate) * up]
    results = [
        _apply_epilogue(problem, result, part, tensors) for part, result in enumerate(results)
    ]
    stored = [convert_stored(problem, result, ops) for result in results]
    reduced = [
        ops.wide(reduction(result))
        for result in stored
        for reduction in _REDUCTIONS[: problem.epilogue.reductions]
    ]
    if problem.quantized:
        stored = [quantize_rows(problem, stored[0], reduced[0], ops)]
    return (*stored, *reduced)


def _gate_and_up(
    problem: GemmProblem, results: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    if problem.details.packed_first is None:
        gate, up = results
        return gate, up
    (whole,) = results
    first, second = whole.chunk(2, dim=-1)
    return (first, second) if problem.details.packed_first == "gate" else (second, first)


def _normalize(
    problem: GemmProblem, a: torch.Tensor, tensors: Mapping[str, torch.Tensor], ops: Operators
) -> torch.Tensor:
    norm = problem.norm
    assert norm is not None
    wide = ops.wide(a)
    if norm.kind == "layer":
        squares, mean = torch.var_mean(wide, -1, correction=0, keepdim=True)
        wide = wide - mean
    else:
        squares = wide.square().mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(squares + problem.details.epsilon)
    if norm.vectors:
        wide = wide * tensors["vector0"]
    if norm.vectors > 1:
        wide = wide + tensors["vector1"]
    return ops.narrow(wide, ops.a_dtype)


def _dequantized_matmul(
    problem: GemmProblem,
    a: torch.Tensor,
    part: int,
    tensors: Mapping[str, torch.Tensor],
    ops: Operators,
) -> torch.Tensor:
    """Return the matmul with dequantized weights.

    Per-tensor and per-column scales are applied to the matmul result, group scales to B. From
    unsigned integers without zero points, the middle of their range is subtracted.
    """
    dequant = problem.dequant
    assert dequant is not None
    b, scale, zero = (tensors.get(f"{name}{part}") for name in ("b", "scale", "zero"))
    assert b is not None
    packed = problem.b.dtype in INT4
    # [N, K], as a model stores weights.
    weight = unpack_int4(b, problem.b.dtype == "int4") if packed else b.t()
    weight = weight.to(a.dtype)
    if zero is None and dequant.scales != "none":
        middle = {"uint4": 8, "uint8": 128}.get(problem.b.dtype)
        weight = weight - middle if middle else weight
    if dequant.scales == "group":
        assert scale is not None
        zeros = None if zero is None else expand_groups(zero.to(a.dtype), problem)
        weight = weight if zeros is None else weight - zeros
        weight = ops.narrow(weight * expand_groups(scale, problem).to(a.dtype), ops.a_dtype)
        return ops.matmul(a, weight.t(), None, tensors)
    if zero is not None:
        weight = weight - zero.to(a.dtype).unsqueeze(-1)
    result = ops.matmul(a, weight.t(), None, tensors)
    return result if scale is None else result * scale.to(a.dtype)


def _epilogue_operand(tensors: Mapping[str, torch.Tensor], index: int, part: int) -> torch.Tensor:
    """Return the epilogue input of a fused weight; column and scalar inputs are shared by all."""
    return tensors.get(f"input{index}_{part}", tensors[f"input{index}_0"])


def _apply_epilogue(
    problem: GemmProblem, value: torch.Tensor, part: int, tensors: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    inputs = epilogue_inputs(problem)
    sums = problem.operation == "int_mm" and not stays_integer(problem)
    if sums:
        value = value.to(torch.promote_types(value.dtype, torch.float32))
    for index, inp in enumerate(inputs):
        if is_bias(problem, index):
            continue
        operand = _epilogue_operand(tensors, index, part)
        value = value + operand if is_added(problem, index, inp) else value * operand
    if sums and first_multiplied_input(problem) is None:
        value = value * accumulator_unit(problem)
    return apply_pointwise(value, problem.epilogue.pointwise - len(problem.epilogue.inputs))


_REDUCTIONS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda x: x.abs().amax(-1),
    lambda x: x.abs().sum(-1),
)
