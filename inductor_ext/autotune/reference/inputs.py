"""The inputs of a reference program: names, shapes, strides and ranges of random values.

Their order is: A; the weights B, one per fused weight, or one packed gate-up weight; inputs of the
prologue (norm weights; scales and zero points); the end offsets of the groups of a grouped GEMM;
inputs of the epilogue, one per fused weight if they extend along N. The ranges give outputs of the
order of 1.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from inductor_ext.autotune.reference.operators import torch_dtype
from inductor_ext.autotune.reference.stored_values import is_integer
from inductor_ext.autotune.reference.tree_program import (
    OperatorPart,
    epilogue_tree,
    inputs_outside_tree,
)
from inductor_ext.templates.cutlass.epilogue import Epilogue as Tree
from inductor_ext.templates.problem import BATCHED, GemmProblem
from inductor_ext.templates.tensors import (
    FP8,
    INT4,
    EpilogueInput,
    Operand,
    aligned,
    ceiling,
    size_of,
)


@dataclass(frozen=True)
class Input:
    """An input tensor of the program."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    """torch's name; 4-bit values are packed in uint8."""
    low: float
    high: float
    """Values are drawn from the range `low` to `high`; for integers, both ends are included."""
    offset: int = 0
    """Elements from the start of the storage, which is aligned to at least 16 bytes."""
    rows: bool = False
    """Whether the second to last dimension is M, so that a row of the result needs only one row of
    it."""
    divided: int = 0
    """If above 0, the tensor is not random: it holds the end offset of each group, where the groups
    divide this many rows, columns or steps of K evenly."""

    @property
    def elements(self) -> int:
        """Number of elements of the storage."""
        spans = ((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return self.offset + sum(spans) + 1

    @property
    def bytes(self) -> int:
        """Bytes of the storage."""
        return size_of(self.elements, self.dtype)

    def empty(self, device: torch.device | str) -> torch.Tensor:
        """Return an uninitialized tensor with these sizes, strides and offset."""
        return self._view(torch.empty(self.elements, dtype=torch_dtype(self.dtype), device=device))

    def random(self, generator: torch.Generator) -> torch.Tensor:
        """Return a tensor with these sizes, strides and offset, with random values.

        Args:
            generator: of the device where the tensor is created.
        """
        device, dtype = generator.device, torch_dtype(self.dtype)
        if self.divided:
            groups = self.shape[0]
            ends = [self.divided * (group + 1) // groups for group in range(groups)]
            return torch.tensor(ends, dtype=dtype, device=device)
        storage = torch.empty(self.elements, dtype=dtype, device=device)
        if dtype is torch.bool and self.low > 0:
            storage.fill_(True)
        elif dtype is torch.bool:
            storage.random_(generator=generator)
        elif not dtype.is_floating_point:
            storage.random_(int(self.low), int(self.high) + 1, generator=generator)
        elif self.dtype in FP8:
            wide = torch.empty(self.elements, dtype=torch.bfloat16, device=device)
            storage.copy_(wide.uniform_(self.low, self.high, generator=generator))
        else:
            storage.uniform_(self.low, self.high, generator=generator)
        return self._view(storage)

    def _view(self, storage: torch.Tensor) -> torch.Tensor:
        return storage.as_strided(self.shape, self.strides, self.offset)


def program_inputs(problem: GemmProblem) -> Iterator[Input]:
    """Yield the inputs of a problem's program in their order."""
    dequant = problem.dequant
    # A uniform distribution has a third of its squared bound as variance; the matmul's is 1.
    bound = math.sqrt((3 if problem.norm is not None else 9) / problem.k)
    integers = problem.operation in ("int_mm", "mixed")
    a_batch, b_batch = _batches(problem)
    a_bound = 127.0 if problem.operation == "int_mm" else 1.0
    yield _matrix_input("a", problem.a, problem.m, problem.k, a_batch, a_bound, by_row=True)
    # Scales bring the result back to the order of 1, so 8-bit values fill their range.
    if integers:
        b_bound = 127.0 if dequant is None or dequant.scales != "none" else 8.0
    else:
        b_bound = 1.0 if problem.a.dtype in FP8 else bound
    for index, columns in enumerate(columns_per_weight(problem)):
        name = f"b{index}"
        if problem.b.dtype in INT4:
            yield _int4_weight(name, problem, columns)
        else:
            yield _matrix_input(name, problem.b, problem.k, columns, b_batch, b_bound)
    tree = epilogue_tree(problem)
    if tree is None:
        yield from _norm_inputs(problem)
        yield from _weight_scales(problem, bound)
    if problem.operation == "grouped":
        length = {"m": problem.m, "n": problem.n, "k": problem.k}[problem.divided]
        yield Input("ends", (problem.batch,), (1,), "int32", 0, 0, divided=length)
    if tree is not None:
        yield from _tree_inputs(problem, tree, bound)
        return
    if problem.a.dtype in FP8:
        yield from _fp8_scales(problem, bound)
    for index, inp in enumerate(epilogue_inputs(problem)):
        yield from _epilogue_tensors(problem, index, inp)


def _tree_inputs(problem: GemmProblem, tree: Tree, bound: float) -> Iterator[Input]:
    """Yield the inputs of a tree, then those of the rest of the epilogue."""
    scaled = dict(
        zip(OperatorPart.of(problem, tree).scales, _scale_units(problem, bound), strict=False)
    )
    for index, inp in enumerate(tree.inputs):
        if inp.epilogue_input is None:
            (tensor,) = _weight_scales(problem, bound)
            yield dataclasses.replace(tensor, name=f"input{index}_0")
            continue
        (tensor,) = _epilogue_tensors(problem, index, inp.epilogue_input)
        if index in scaled:
            unit = scaled[index]
            tensor = dataclasses.replace(tensor, low=0.5 * unit, high=1.5 * unit)
            if problem.operation == "scaled" and inp.broadcast == "row":
                tensor = dataclasses.replace(tensor, shape=(1, problem.n), strides=(problem.n, 1))
        whole = inp.broadcast in ("matrix", "row")
        if whole and inp.alignment < aligned(inp.dtype, problem.n):
            tensor = dataclasses.replace(tensor, offset=inp.alignment)
        yield tensor
    for index, rest in enumerate(inputs_outside_tree(problem, tree), len(tree.inputs)):
        yield from _epilogue_tensors(problem, index, rest)


def _largest(problem: GemmProblem) -> int:
    """Return the largest magnitude of B's integers after a zero point is subtracted."""
    return 7 if problem.b.dtype in INT4 else 127


def _scale_units(problem: GemmProblem, bound: float) -> tuple[float, ...]:
    """Return typical scales: of B for dequantized weights; of A and B for fp8."""
    if problem.operation == "mixed":
        return (bound if problem.b.dtype in FP8 else bound / _largest(problem),)
    return (bound, 1.0)


def _batches(problem: GemmProblem) -> tuple[int | None, int | None]:
    """Return the batch sizes of A and of B; None for an operand without a batch dimension."""
    if problem.operation == "grouped":
        of = {"m": (False, True), "n": (True, False), "k": (False, False)}[problem.divided]
    else:
        of = (problem.operation in BATCHED,) * 2
    a, b = (problem.batch if batched else None for batched in of)
    return a, b


def columns_per_weight(problem: GemmProblem) -> tuple[int, ...]:
    """Return the number of columns of each weight."""
    one = problem.epilogue.gated and problem.details.packed_first
    return (problem.n,) if one else problem.parts or (problem.n,)


def _matrix_input(
    name: str,
    operand: Operand,
    rows: int,
    columns: int,
    batch: int | None,
    bound: float,
    by_row: bool = False,
) -> Input:
    shape, strides = (rows, columns), operand.strides
    if operand.layout == "row" and rows > 1 and strides[0] < columns:
        # The strides are those of a narrower one of several fused weights.
        strides = (ceiling(columns, operand.alignment) * operand.alignment, 1)
    natural = Operand.of(
        operand.dtype, shape, strides, batch=batch or 1, batch_stride=operand.batch_stride
    )
    low = 0.0 if operand.dtype == "uint8" else -bound
    high = 255.0 if operand.dtype == "uint8" and bound == 127 else bound
    if batch is not None:
        shape, strides = (batch, *shape), (operand.batch_stride, *strides)  # type: ignore[assignment]
    offset = operand.alignment if operand.alignment < natural.alignment else 0
    return Input(name, shape, strides, operand.dtype, low, high, offset, by_row)


def _int4_weight(name: str, problem: GemmProblem, columns: int) -> Input:
    """Return packed weights as a model stores them: [N, K / 2], even if B's layout is "row"."""
    pairs = ceiling(problem.k, 2)
    return Input(name, (columns, pairs), (pairs, 1), "uint8", 0, 255)


def _norm_inputs(problem: GemmProblem) -> Iterator[Input]:
    norm = problem.norm
    if norm is None:
        return
    dtype = norm.dtype if problem.dequant is None else problem.a.dtype
    for index in range(norm.vectors):
        low, high = ((0.5, 1.5), (-0.5, 0.5))[min(index, 1)]
        yield Input(f"vector{index}", (problem.k,), (1,), dtype, low, high)


def _weight_scales(problem: GemmProblem, bound: float) -> Iterator[Input]:
    """Yield weight scales (scalar, [N] or [N, groups]) and zero points around mid-range."""
    dequant = problem.dequant
    if dequant is None or dequant.scales == "none":
        return
    unit = bound / _largest(problem)
    middle = {"uint4": 8, "uint8": 128}.get(problem.b.dtype, 0)
    zeros = "uint8" if middle else "int8"
    for index, columns in enumerate(columns_per_weight(problem)):
        groups = ceiling(problem.k, dequant.group or 1)
        shape = {"tensor": (), "column": (columns,), "group": (columns, groups)}[dequant.scales]
        strides = (groups, 1)[2 - len(shape) :]
        yield Input(f"scale{index}", shape, strides, dequant.scale_dtype, 0.5 * unit, 1.5 * unit)
        if dequant.zero_points:
            yield Input(f"zero{index}", shape, strides, zeros, max(middle - 1, -1), middle + 1)


def _fp8_scales(problem: GemmProblem, bound: float) -> Iterator[Input]:
    """Yield the scales of A and B.

    They are row-wise if the first two inputs of the epilogue are row-wise scales, or if the GEMM is
    grouped; else there is one scale per operand.
    """
    by_row = bool(_fp8_scale_inputs(problem)) and problem.epilogue.inputs[0].broadcast == "column"
    by_row = by_row or problem.operation == "grouped"
    m, n, batch = problem.m, problem.n, problem.batch
    groups = problem.operation == "grouped"
    shapes: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    if groups:
        shapes = {
            "m": ((m,), (batch, n)),
            "n": ((batch, m), (n,)),
            "k": ((batch * m,), (batch * n,)),
        }[problem.divided]
    elif by_row:
        shapes = (m, 1), (1, n)
    a, b = ((shape, (*shape[1:], 1)[: len(shape)]) for shape in shapes)
    rows = by_row and not groups
    yield Input("scale_a", *a, "float32", 0.5 * bound, 1.5 * bound, rows=rows)
    for index, columns in enumerate(columns_per_weight(problem) if problem.parts else ()):
        shape, strides = ((1, columns), (columns, 1)) if by_row else ((), ())
        yield Input(f"scale_b{index}", shape, strides, "float32", 0.5, 1.5)
    if not problem.parts:
        yield Input("scale_b", *b, "float32", 0.5, 1.5)


def _epilogue_tensors(problem: GemmProblem, index: int, input_: EpilogueInput) -> Iterator[Input]:
    parts: Sequence[int] = columns_per_weight(problem)
    if problem.epilogue.gated and not is_bias(problem, index):
        parts = (problem.columns,)
    if input_.broadcast in ("column", "scalar"):
        parts = parts[:1]
    low, high = _value_range(problem, index, input_)
    batch = (problem.batch,) if problem.operation in BATCHED else ()
    for part, columns in enumerate(parts):
        shape: tuple[int, ...] = {
            "matrix": (*batch, problem.m, columns),
            "row": (columns,),
            "column": (*batch, problem.m, 1),
            "scalar": (),
        }[input_.broadcast]
        strides = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
        by_row = input_.broadcast in ("matrix", "column")
        yield Input(f"input{index}_{part}", shape, strides, input_.dtype, low, high, rows=by_row)


def _value_range(problem: GemmProblem, index: int, input_: EpilogueInput) -> tuple[float, float]:
    """Return the bounds of the values of an epilogue input."""
    added = is_added(problem, index, input_)
    low, high = (-1.0, 1.0) if added else (0.5, 1.5)
    if problem.operation == "int_mm":
        first = first_multiplied_input(problem)
        if index == first:
            low, high = low * accumulator_unit(problem), high * accumulator_unit(problem)
        elif is_integer(input_) and (first is None or index < first):
            low, high = -127.0, 127.0
    if is_integer(input_):
        # An integer that multiplies must not be 0, which would hide errors.
        low, high = (low, high) if added else (1.0, 2.0)
        if input_.dtype != "bool":
            low = max(low, torch.iinfo(torch_dtype(input_.dtype)).min)
    return low, high


def _fp8_scale_inputs(problem: GemmProblem) -> tuple[EpilogueInput, ...]:
    """Return the inputs of the epilogue that are scales of fp8 operands."""
    first = problem.epilogue.inputs[:2]
    kinds = tuple(scale.broadcast for scale in first)
    scales = kinds in (("column", "row"), ("scalar", "scalar"))
    fp8 = problem.a.dtype in FP8 and all(scale.dtype == "float32" for scale in first)
    return first if scales and fp8 else ()


def epilogue_inputs(problem: GemmProblem) -> tuple[EpilogueInput, ...]:
    """Return the inputs of the epilogue without the scales of fp8 operands."""
    return problem.epilogue.inputs[len(_fp8_scale_inputs(problem)) :]


def is_bias(problem: GemmProblem, index: int) -> bool:
    """Whether an epilogue input, not counting scales, is the bias argument of the operator."""
    if index or not epilogue_inputs(problem):
        return False
    if problem.operation == "scaled":
        first = epilogue_inputs(problem)[0]
        return first.broadcast == "row" and first.dtype == problem.out
    return problem.operation in ("addmm", "baddbmm")


def is_added(problem: GemmProblem, index: int, input_: EpilogueInput) -> bool:
    """Whether an input of the epilogue, not counting fp8 scales, is added; else it multiplies."""
    if is_bias(problem, index):
        return True
    if problem.operation == "int_mm":
        # The first floating-point row holds the scales of the columns; integers are added to the
        # accumulators.
        floats = (other for other in problem.epilogue.inputs[:index] if not is_integer(other))
        second = input_.broadcast == "row" and "row" in (other.broadcast for other in floats)
        return input_.broadcast == "matrix" or is_integer(input_) or second
    dequant = problem.dequant
    if index == 0 and input_.broadcast == "row" and dequant is not None:
        return dequant.scales != "none"
    return input_.broadcast in ("matrix", "row")


def first_multiplied_input(problem: GemmProblem) -> int | None:
    """Return the index of the first epilogue input that multiplies, not counting fp8 scales."""
    inputs = enumerate(epilogue_inputs(problem))
    return next((index for index, inp in inputs if not is_added(problem, index, inp)), None)


def accumulator_unit(problem: GemmProblem) -> float:
    """Return the scale that gives accumulators of int8 operands variance 1.

    Without it they exceed the range of float16.
    """
    return 3 / math.sqrt(problem.k) / 127**2
