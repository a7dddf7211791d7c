"""The reference program of a GEMM problem: PyTorch code as in a model, with matching inputs.

A problem can be compiled, verified and timed with it anywhere, without the model that it came from.
`program(problem)` returns a program with the operator that Inductor meets in a graph and, around
it, the prologue and the epilogue as plain torch ops. Its inputs are, in this order: A; the weights
B, one per fused weight, or one packed gate-up weight; inputs of the prologue (norm weights; scales
and zero points); the end offsets of the groups of a grouped GEMM; inputs of the epilogue, one per
fused weight if they extend along N.

Whatever a problem does not specify is chosen here and does not affect the cost. Row and matrix
inputs of the epilogue are added, column and scalar inputs multiplied. If weights are dequantized
without scales, the first row input is their scale and multiplies, too. The remaining pointwise ops
are activations (gelu, erf, silu, sigmoid) as far as the count allows, then cheap ops. For a problem
with a tree (`Epilogue.tree`) the program computes the tree, using the operator for the part that it
covers, so that the same tree is found again in the program's graph. Values that are stored as
integers are scaled to the integer range first, so that errors are visible; values that are stored
as bools are compared with 0.

Needs torch but not Inductor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from inductor_ext import numerics
from inductor_ext.templates import kernels
from inductor_ext.templates.cutlass.epilogue import ACCUMULATOR, Node, NotExpressible
from inductor_ext.templates.cutlass.epilogue import Epilogue as Tree
from inductor_ext.templates.problem import (
    BATCHED,
    FP8,
    INT4,
    EpilogueInput,
    GemmProblem,
    Operand,
    aligned,
    ceiling,
    size_of,
)

__all__ = [
    "ACTIVATIONS",
    "FILLING",
    "Input",
    "Program",
    "precision",
    "program",
    "rounds",
    "select",
    "unpack_int4",
]


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
        return self._view(torch.empty(self.elements, dtype=_dtype(self.dtype), device=device))

    def random(self, generator: torch.Generator) -> torch.Tensor:
        """Return a tensor with these sizes, strides and offset, with random values.

        Args:
            generator: of the device where the tensor is created.
        """
        device, dtype = generator.device, _dtype(self.dtype)
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
        return _evaluate(self.problem, self._named(tensors), _Plain(self.problem))

    def reference(
        self, tensors: Sequence[torch.Tensor], rows: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Compute some rows of the same outputs in float64, without intermediate rounding.

        Args:
            tensors: as for `function`.
            rows: indices into M, ascending, on the device of the tensors.
        """
        named = {}
        for inp, tensor in zip(self.inputs, tensors, strict=True):
            chosen = select(tensor, -2, rows) if inp.rows else tensor
            integer = inp.divided or self._packed(inp)
            named[inp.name] = chosen if integer else chosen.to(torch.float64)
        return _evaluate(self.problem, named, _Exact(self.problem, rows))

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
        tree = _tree(self.problem)
        return (
            {} if tree is None else dict(enumerate((output for output, _ in tree.outputs[1:]), 1))
        )

    def _named(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {inp.name: tensor for inp, tensor in zip(self.inputs, tensors, strict=True)}

    def _packed(self, input_: Input) -> bool:
        return input_.name.startswith("b") and self.problem.b.dtype in INT4


def program(problem: GemmProblem) -> Program:
    """Return the reference program of a problem."""
    return Program(problem, tuple(_inputs(problem)))


def rounds(problem: GemmProblem) -> bool:
    """Whether values are converted to integers or bools only when they are stored."""
    discrete = not _dtype(problem.stored).is_floating_point
    return discrete and not problem.quantized and not _stays_integer(problem)


def _stays_integer(problem: GemmProblem) -> bool:
    """Whether integer accumulators are stored without conversion, possibly with integers added."""
    integers = all(map(_is_integer, problem.epilogue.inputs))
    return problem.operation == "int_mm" and problem.stored == problem.out and integers


def _is_integer(input_: EpilogueInput) -> bool:
    return not _dtype(input_.dtype).is_floating_point


@contextlib.contextmanager
def precision(problem: GemmProblem) -> Iterator[None]:
    """Set torch's matmul precision as the problem requires, inside the context.

    For float32 this is tf32 or not; for half precision the flags of `GemmProblem.math_flags`.
    """
    with numerics.with_matmul_flags(problem.math_flags, problem.multiplied), _tf32(problem):
        yield


@contextlib.contextmanager
def _tf32(problem: GemmProblem) -> Iterator[None]:
    matmul: Any = torch.backends.cuda.matmul
    before, wanted = matmul.fp32_precision, "tf32" if problem.tf32 else "ieee"
    if problem.a.dtype != "float32" or (before == "tf32") == problem.tf32:
        yield
        return
    matmul.fp32_precision = wanted
    try:
        yield
    finally:
        matmul.fp32_precision = before


def select(tensor: torch.Tensor, dimension: int, indices: torch.Tensor) -> torch.Tensor:
    """Like `index_select`, which torch does not implement for fp8 on all devices."""
    if tensor.element_size() > 1:
        return tensor.index_select(dimension, indices)
    return tensor.view(torch.uint8).index_select(dimension, indices).view(tensor.dtype)


def unpack_int4(packed: torch.Tensor, signed: bool, high_first: bool = True) -> torch.Tensor:
    """Return the 4-bit values of packed weights.

    Args:
        packed: uint8 [N, K / 2].
        signed: whether values are in two's complement.
        high_first: whether the first value of each pair is in the upper four bits.

    Returns:
        uint8 or int8 [N, K].
    """
    halves = (packed >> 4, packed & 15) if high_first else (packed & 15, packed >> 4)
    numbers = torch.stack(halves, dim=-1).flatten(-2)
    return (numbers.to(torch.int8) ^ 8) - 8 if signed else numbers


# --- inputs -------------------------------------------------------------------------------------


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def _inputs(problem: GemmProblem) -> Iterator[Input]:
    prologue = problem.prologue
    normalized = prologue is not None and (prologue.normalizes or prologue.standardizes)
    # A uniform distribution has a third of its squared bound as variance; the matmul's is 1.
    bound = math.sqrt((3 if normalized else 9) / problem.k)
    integers = problem.operation in ("int_mm", "mixed")
    a_batch, b_batch = _batches(problem)
    a_bound = 127.0 if problem.operation == "int_mm" else 1.0
    yield _operand("a", problem.a, problem.m, problem.k, a_batch, a_bound, by_row=True)
    # Scales bring the result back to the order of 1, so 8-bit values fill their range.
    if integers:
        b_bound = 127.0 if prologue is None or prologue.scales != "none" else 8.0
    else:
        b_bound = 1.0 if problem.a.dtype in FP8 else bound
    for index, columns in enumerate(_columns(problem)):
        name = f"b{index}"
        if problem.b.dtype in INT4:
            yield _packed(name, problem, columns)
        else:
            yield _operand(name, problem.b, problem.k, columns, b_batch, b_bound)
    tree = _tree(problem)
    if prologue is not None and tree is None:
        yield from _vectors(problem)
        yield from _scales(problem, bound)
    if problem.operation == "grouped":
        length = {"m": problem.m, "n": problem.n, "k": problem.k}[problem.divided]
        yield Input("ends", (problem.batch,), (1,), "int32", 0, 0, divided=length)
    if tree is not None:
        yield from _tree_inputs(problem, tree, bound)
        return
    if problem.a.dtype in FP8:
        yield from _fp8_scales(problem, bound)
    for index, inp in enumerate(_epilogue_inputs(problem)):
        yield from _epilogue_input(problem, index, inp)


def _tree(problem: GemmProblem) -> Tree | None:
    return None if problem.epilogue.tree is None else kernels.tree_of(problem)


def _tree_inputs(problem: GemmProblem, tree: Tree, bound: float) -> Iterator[Input]:
    """Yield the inputs of a tree, then those of the rest of the epilogue."""
    scaled = dict(zip(_Own.of(problem, tree).scales, _scale_units(problem, bound), strict=False))
    for index, inp in enumerate(tree.inputs):
        if inp.behind is None:
            (found,) = _scales(problem, bound)
            yield dataclasses.replace(found, name=f"input{index}_0")
            continue
        (found,) = _epilogue_input(problem, index, inp.behind)
        if index in scaled:
            unit = scaled[index]
            found = dataclasses.replace(found, low=0.5 * unit, high=1.5 * unit)
            if problem.operation == "scaled" and inp.broadcast == "row":
                found = dataclasses.replace(found, shape=(1, problem.n), strides=(problem.n, 1))
        whole = inp.broadcast in ("matrix", "row")
        if whole and inp.alignment < aligned(inp.dtype, problem.n):
            found = dataclasses.replace(found, offset=inp.alignment)
        yield found
    for index, rest in enumerate(_rest(problem, tree), len(tree.inputs)):
        yield from _epilogue_input(problem, index, rest)


def _rest(problem: GemmProblem, tree: Tree) -> tuple[EpilogueInput, ...]:
    """Return the inputs of the epilogue that are not in its tree."""
    return problem.epilogue.inputs[len(tree.inputs) - _of_prologue(problem) :]


def _of_prologue(problem: GemmProblem) -> int:
    """Return the number of tree inputs (0 or 1) that are scales of the prologue.

    `Epilogue.inputs` does not contain these.
    """
    return int(problem.prologue is not None and problem.prologue.scales != "none")


def _scales_behind(problem: GemmProblem) -> int:
    """Return the number of prologue scales (0 or 1) that the tree applies after the main loop."""
    return int(problem.prologue is not None and problem.prologue.scales_product)


def _largest(problem: GemmProblem) -> int:
    """Return the largest magnitude of B's integers after a zero point is subtracted."""
    return 7 if problem.b.dtype in INT4 else 127


def _scale_units(problem: GemmProblem, bound: float) -> tuple[float, ...]:
    """Return typical scales: of B for dequantized weights; of A and B for fp8."""
    if problem.operation == "mixed":
        return (bound if problem.b.dtype in FP8 else bound / _largest(problem),)
    return (bound, 1.0)


@dataclass(frozen=True)
class _Own:
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
    def of(cls, problem: GemmProblem, tree: Tree) -> _Own:
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
            found = users.get(node, [])
            fits = [item for item in found if item.operation == operation]
            return next((fit for fit in fits if fit.arguments[1].operation == kind), None)

        value = ACCUMULATOR
        scales = []
        for _ in range(2 if problem.operation == "scaled" else _scales_behind(problem)):
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


def _batches(problem: GemmProblem) -> tuple[int | None, int | None]:
    """Return the batch sizes of A and of B; None for an operand without a batch dimension."""
    if problem.operation == "grouped":
        of = {"m": (False, True), "n": (True, False), "k": (False, False)}[problem.divided]
    else:
        of = (problem.operation in BATCHED,) * 2
    a, b = (problem.batch if batched else None for batched in of)
    return a, b


def _columns(problem: GemmProblem) -> tuple[int, ...]:
    """Return the number of columns of each weight."""
    one = problem.epilogue.gated and problem.epilogue.halves
    return (problem.n,) if one else problem.parts or (problem.n,)


def _operand(
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


def _packed(name: str, problem: GemmProblem, columns: int) -> Input:
    """Return packed weights as a model stores them: [N, K / 2], even if B's layout is "row"."""
    pairs = ceiling(problem.k, 2)
    return Input(name, (columns, pairs), (pairs, 1), "uint8", 0, 255)


def _vectors(problem: GemmProblem) -> Iterator[Input]:
    prologue = problem.prologue
    assert prologue is not None
    dtype = problem.a.dtype if prologue.dequantizes else prologue.scale_dtype
    for index in range(prologue.vectors):
        low, high = ((0.5, 1.5), (-0.5, 0.5))[min(index, 1)]
        yield Input(f"vector{index}", (problem.k,), (1,), dtype, low, high)


def _scales(problem: GemmProblem, bound: float) -> Iterator[Input]:
    """Yield weight scales (scalar, [N] or [N, groups]) and zero points around mid-range."""
    prologue = problem.prologue
    assert prologue is not None
    if prologue.scales == "none":
        return
    unit = bound / _largest(problem)
    middle = {"uint4": 8, "uint8": 128}.get(problem.b.dtype, 0)
    zeros = "uint8" if middle else "int8"
    for index, columns in enumerate(_columns(problem)):
        groups = ceiling(problem.k, prologue.group or 1)
        shape = {"tensor": (), "column": (columns,), "group": (columns, groups)}[prologue.scales]
        strides = (groups, 1)[2 - len(shape) :]
        yield Input(f"scale{index}", shape, strides, prologue.scale_dtype, 0.5 * unit, 1.5 * unit)
        if prologue.zero_points:
            yield Input(f"zero{index}", shape, strides, zeros, max(middle - 1, -1), middle + 1)


def _fp8_scales(problem: GemmProblem, bound: float) -> Iterator[Input]:
    """Yield the scales of A and B.

    They are row-wise if the first two inputs of the epilogue are row-wise scales, or if the GEMM is
    grouped; else there is one scale per operand.
    """
    by_row = bool(_scale_inputs(problem)) and problem.epilogue.inputs[0].broadcast == "column"
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
    for index, columns in enumerate(_columns(problem) if problem.parts else ()):
        shape, strides = ((1, columns), (columns, 1)) if by_row else ((), ())
        yield Input(f"scale_b{index}", shape, strides, "float32", 0.5, 1.5)
    if not problem.parts:
        yield Input("scale_b", *b, "float32", 0.5, 1.5)


def _scale_inputs(problem: GemmProblem) -> tuple[EpilogueInput, ...]:
    """Return the inputs of the epilogue that are scales of fp8 operands."""
    first = problem.epilogue.inputs[:2]
    kinds = tuple(item.broadcast for item in first)
    scales = kinds in (("column", "row"), ("scalar", "scalar"))
    known = problem.a.dtype in FP8 and all(tensor.dtype == "float32" for tensor in first)
    return first if scales and known else ()


def _epilogue_inputs(problem: GemmProblem) -> tuple[EpilogueInput, ...]:
    return problem.epilogue.inputs[len(_scale_inputs(problem)) :]


def _is_bias(problem: GemmProblem, index: int) -> bool:
    """Whether an epilogue input, not counting scales, is the bias argument of the operator."""
    if index or not _epilogue_inputs(problem):
        return False
    if problem.operation == "scaled":
        first = _epilogue_inputs(problem)[0]
        return first.broadcast == "row" and first.dtype == problem.out
    return problem.operation in ("addmm", "baddbmm")


def _is_added(problem: GemmProblem, index: int, input_: EpilogueInput) -> bool:
    """Whether an input of the epilogue, not counting fp8 scales, is added; else it multiplies."""
    if _is_bias(problem, index):
        return True
    if problem.operation == "int_mm":
        # The first floating-point row holds the scales of the columns; integers are added to the
        # accumulators.
        floats = (other for other in problem.epilogue.inputs[:index] if not _is_integer(other))
        second = input_.broadcast == "row" and "row" in (other.broadcast for other in floats)
        return input_.broadcast == "matrix" or _is_integer(input_) or second
    prologue = problem.prologue
    if index == 0 and input_.broadcast == "row" and prologue is not None and prologue.dequantizes:
        return prologue.scales != "none"
    return input_.broadcast in ("matrix", "row")


def _first_factor(problem: GemmProblem) -> int | None:
    """Return the index of the first epilogue input that multiplies, not counting fp8 scales."""
    inputs = enumerate(_epilogue_inputs(problem))
    return next((index for index, inp in inputs if not _is_added(problem, index, inp)), None)


def _sum_unit(problem: GemmProblem) -> float:
    """Return the factor that gives accumulators of int8 products variance 1.

    Without it they exceed the range of float16.
    """
    return 3 / math.sqrt(problem.k) / 127**2


def _range(problem: GemmProblem, index: int, input_: EpilogueInput) -> tuple[float, float]:
    """Return the bounds of the values of an epilogue input."""
    added = _is_added(problem, index, input_)
    low, high = (-1.0, 1.0) if added else (0.5, 1.5)
    if problem.operation == "int_mm":
        first = _first_factor(problem)
        if index == first:
            low, high = low * _sum_unit(problem), high * _sum_unit(problem)
        elif _is_integer(input_) and (first is None or index < first):
            low, high = -127.0, 127.0
    if _is_integer(input_):
        # An integer that multiplies must not be 0, which would hide errors.
        low, high = (low, high) if added else (1.0, 2.0)
        low = low if input_.dtype == "bool" else max(low, torch.iinfo(_dtype(input_.dtype)).min)
    return low, high


def _epilogue_input(problem: GemmProblem, index: int, input_: EpilogueInput) -> Iterator[Input]:
    parts: Sequence[int] = _columns(problem)
    if problem.epilogue.gated and not _is_bias(problem, index):
        parts = (problem.columns,)
    if input_.broadcast in ("column", "scalar"):
        parts = parts[:1]
    low, high = _range(problem, index, input_)
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


# --- evaluation ---------------------------------------------------------------------------------


class _Plain:
    """The operators as a model calls them, in the dtypes of the problem."""

    def __init__(self, problem: GemmProblem) -> None:
        self.problem = problem
        self.a_dtype = _dtype(problem.multiplied)
        self.out = _dtype(problem.out)
        self.stored = _dtype(problem.stored)

    def wide(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(torch.float32)

    def narrow(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return tensor.to(dtype)

    def round(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.round()

    def positive(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor > 0

    def product(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        named: Any,
        alpha: float = 1,
        beta: float = 1,
    ) -> torch.Tensor:
        operation, fp8 = self.problem.operation, self.problem.a.dtype in FP8
        fast = self.problem.fast_accumulation
        product: torch.Tensor
        if operation == "int_mm":
            product = torch._int_mm(a, b)
        elif operation == "grouped" and fp8:
            product = torch._scaled_grouped_mm(
                a,
                b,
                named["scale_a"],
                named["scale_b"],
                named["ends"],
                out_dtype=self.out,
                use_fast_accum=fast,
            )
        elif operation == "grouped":
            product = torch._grouped_mm(a, b, offs=named["ends"], out_dtype=self.out)
        elif fp8:
            product = torch._scaled_mm(
                a,
                b,
                named["scale_a"],
                named["scale_b"],
                bias=bias,
                out_dtype=self.out,
                use_fast_accum=fast,
            )
            return product
        elif bias is not None and bias.dtype == self.out == a.dtype:
            add = torch.addmm if operation == "addmm" else torch.baddbmm
            return add(bias, a, b, alpha=alpha, beta=beta)
        else:
            multiply = torch.bmm if operation in BATCHED else torch.mm
            product = multiply(a, b) if self.out == a.dtype else multiply(a, b, self.out)
        return product if bias is None else product + bias


class _Exact:
    """The same operators in float64."""

    def __init__(self, problem: GemmProblem, rows: torch.Tensor) -> None:
        self.problem = problem
        self.rows = rows
        self.a_dtype = torch.float64

    def wide(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(torch.float64)

    def narrow(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return tensor

    def round(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def positive(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the value itself; its distance from 0 is the error of a wrong bool."""
        return tensor

    def product(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        named: Any,
        alpha: float = 1,
        beta: float = 1,
    ) -> torch.Tensor:
        if self.problem.operation == "grouped":
            product = self._grouped(a, b, named)
        else:
            product = a @ b
            if "scale_a" in named:
                product = product * named["scale_a"] * named["scale_b"]
        return product if bias is None else alpha * product + beta * bias

    def _grouped(self, a: torch.Tensor, b: torch.Tensor, named: Any) -> torch.Tensor:
        ends = named["ends"].tolist()
        spans = [slice(begin, end) for begin, end in zip((0, *ends), ends, strict=False)]
        scaled = "scale_a" in named
        if self.problem.divided == "n":
            product = torch.cat([a[g] @ b[:, span] for g, span in enumerate(spans)], 1)
            if scaled:
                counts = named["ends"].diff(prepend=named["ends"].new_zeros(1))
                rows = named["scale_a"][:, self.rows].repeat_interleave(counts, 0)
                product = product * rows.t() * named["scale_b"]
            return product
        if self.problem.divided == "k":
            product = torch.stack([a[:, span] @ b[span] for span in spans])
            if scaled:
                rows, columns = (
                    named[name].view(len(spans), -1) for name in ("scale_a", "scale_b")
                )
                product = product * rows[:, self.rows, None] * columns[:, None]
            return product
        product = a.new_empty(a.shape[0], b.shape[2])
        for group, span in enumerate(spans):
            own = ((self.rows >= span.start) & (self.rows < span.stop)).nonzero()[:, 0]
            found = a[own] @ b[group]
            product[own] = found * named["scale_b"][group] if scaled else found
        return product * named["scale_a"][self.rows, None] if scaled else product


_Numbers = _Plain | _Exact


def _evaluate(
    problem: GemmProblem, named: Mapping[str, torch.Tensor], numbers: _Numbers
) -> tuple[torch.Tensor, ...]:
    a = named["a"]
    tree = _tree(problem)
    if tree is not None:
        return _of_tree(problem, tree, named, numbers)
    prologue = problem.prologue
    if prologue is not None and (prologue.normalizes or prologue.standardizes):
        a = _normalized(problem, a, named, numbers)
    products = []
    for part in range(len(_columns(problem))):
        bias = None
        if _is_bias(problem, 0):
            bias = _of_part(named, 0, part)
        if problem.operation == "mixed":
            products.append(_dequantized_product(problem, a, part, named, numbers))
        else:
            own = {**named, "scale_b": named[f"scale_b{part}"]} if "scale_b0" in named else named
            products.append(numbers.product(a, named[f"b{part}"], bias, own))
    if problem.epilogue.gated:
        gate, up = _gate_and_up(problem, products)
        products = [ACTIVATIONS[problem.epilogue.activation](gate) * up]
    results = [_epilogue(problem, product, part, named) for part, product in enumerate(products)]
    stored = [_stored(problem, result, numbers) for result in results]
    reduced = [
        numbers.wide(reduction(item))
        for item in stored
        for reduction in _REDUCTIONS[: problem.epilogue.reductions]
    ]
    if problem.quantized:
        stored = [_scaled(problem, stored[0], reduced[0], numbers)]
    return (*stored, *reduced)


def _gate_and_up(
    problem: GemmProblem, products: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    if problem.epilogue.halves is None:
        gate, up = products
        return gate, up
    (whole,) = products
    first, second = whole.chunk(2, dim=-1)
    return (first, second) if problem.epilogue.halves == "gate" else (second, first)


def _adds_bias(problem: GemmProblem, tree: Tree, own: _Own) -> bool:
    """Whether the operator itself adds the bias that a tree begins with."""
    if own.bias is None or problem.operation == "scaled":
        return own.bias is not None
    return tree.inputs[own.bias].dtype == problem.out == problem.a.dtype


def _parameters(tree: Tree, inside: Node) -> list[float]:
    """Return values for a tree's parameters: all different, none of them 1.

    Parameters outside of `inside`, which is what the operator computes, get values that a model
    might derive from sizes (1 / sqrt(n)).
    """
    own = {*Tree((("float32", inside),)).nodes()}
    others = {
        argument.index
        for node in tree.nodes()
        for argument in node.arguments
        if argument.operation == "parameter" and node not in own
    }
    return [
        (16 + index) ** -0.5 if index in others else 1 + (1 + index) / 64
        for index in range(tree.parameters)
    ]


def _of_tree(
    problem: GemmProblem, tree: Tree, named: Mapping[str, torch.Tensor], numbers: _Numbers
) -> tuple[torch.Tensor, ...]:
    """Return the outputs of a tree; the rest of the epilogue is applied to the first."""
    own = _Own.of(problem, tree)
    inputs = [named[f"input{index}_0"] for index in range(len(tree.inputs))]
    adds = _adds_bias(problem, tree, own)
    known = own.node if adds or own.bias is None else ACCUMULATOR
    parameters = _parameters(tree, known)
    alpha, beta = (1 if item is None else parameters[item.index] for item in (own.alpha, own.beta))
    bias = inputs[own.bias] if adds and own.bias is not None else None
    told = dict(named)
    b = named["b0"]
    if tree.packed is not None:
        b = _unpacked(problem, tree, named, numbers)
    elif problem.operation == "mixed":
        b = b.to(named["a"].dtype)
    elif own.scales:
        told |= zip(("scale_a", "scale_b"), (inputs[scale] for scale in own.scales), strict=True)
    product = numbers.product(named["a"], b, bias, told, alpha, beta)
    first, *others = tree.evaluate(
        None, inputs, parameters, known={known: product}, exact=isinstance(numbers, _Exact)
    )
    rest = _rest(problem, tree)
    for index, item in enumerate(rest, len(tree.inputs)):
        operand = named[f"input{index}_0"]
        added = item.broadcast in ("matrix", "row")
        first = first + operand if added else first * operand
    behind = problem.epilogue.pointwise - tree.operations + _scales_behind(problem)
    first = _pointwise(first, behind - len(rest))
    return numbers.narrow(first, _dtype(problem.stored)), *others


def _unpacked(
    problem: GemmProblem, tree: Tree, named: Mapping[str, torch.Tensor], numbers: _Numbers
) -> torch.Tensor:
    """Return a 4-bit B as [K, N], unpacked as the tree specifies."""
    assert tree.packed is not None
    b, dtype = named["b0"], named["a"].dtype
    weight = unpack_int4(b, problem.b.dtype == "int4", tree.packed.high_first).to(dtype)
    if tree.packed.zero:
        weight = weight - tree.packed.zero
    if tree.scales is not None:
        scales = _spread(named[f"input{tree.scales}_0"], problem).to(dtype)
        weight = numbers.narrow(weight * scales, numbers.a_dtype)
    return weight.t()


FILLING = 32.0
"""Scale from values of about 1 to integers; nearly all of them then fit into int8."""


def _stored(problem: GemmProblem, value: torch.Tensor, numbers: _Numbers) -> torch.Tensor:
    """Convert a result to the dtype that the matmul kernel stores."""
    dtype = _dtype(problem.kernel_stores)
    if not rounds(problem):
        return numbers.narrow(value, dtype)
    if dtype is torch.bool:
        return numbers.positive(value)
    least = max(-127, torch.iinfo(dtype).min)
    filled = (numbers.wide(value) * FILLING).clamp(least, 127)
    return numbers.narrow(numbers.round(filled), dtype)


def _scaled(
    problem: GemmProblem, value: torch.Tensor, maxima: torch.Tensor, numbers: _Numbers
) -> torch.Tensor:
    """Scale rows by their row amax to the full 8-bit range."""
    dtype = _dtype(problem.stored)
    most = torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max
    scales = maxima.clamp(min=1e-12) / most
    scaled = (numbers.wide(value) / scales.unsqueeze(-1)).clamp(-most, most)
    return numbers.narrow(scaled if dtype.is_floating_point else numbers.round(scaled), dtype)


def _normalized(
    problem: GemmProblem, a: torch.Tensor, named: Mapping[str, torch.Tensor], numbers: _Numbers
) -> torch.Tensor:
    prologue = problem.prologue
    assert prologue is not None
    wide = numbers.wide(a)
    if prologue.standardizes:
        squares, mean = torch.var_mean(wide, -1, correction=0, keepdim=True)
        wide = wide - mean
    else:
        squares = wide.square().mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(squares + prologue.epsilon)
    if prologue.vectors:
        wide = wide * named["vector0"]
    if prologue.vectors > 1:
        wide = wide + named["vector1"]
    return numbers.narrow(wide, numbers.a_dtype)


def _dequantized_product(
    problem: GemmProblem,
    a: torch.Tensor,
    part: int,
    named: Mapping[str, torch.Tensor],
    numbers: _Numbers,
) -> torch.Tensor:
    """Return the matmul with dequantized weights.

    Per-tensor and per-column scales are applied to the matmul result, group scales to B. From
    unsigned integers without zero points, the middle of their range is subtracted.
    """
    prologue = problem.prologue
    assert prologue is not None
    b, scale, zero = (named.get(f"{name}{part}") for name in ("b", "scale", "zero"))
    assert b is not None
    packed = problem.b.dtype in INT4
    # [N, K], as a model stores weights.
    weight = unpack_int4(b, problem.b.dtype == "int4") if packed else b.t()
    weight = weight.to(a.dtype)
    if zero is None and prologue.scales != "none":
        middle = {"uint4": 8, "uint8": 128}.get(problem.b.dtype)
        weight = weight - middle if middle else weight
    if prologue.scales == "group":
        assert scale is not None
        zeros = None if zero is None else _spread(zero.to(a.dtype), problem)
        weight = weight if zeros is None else weight - zeros
        weight = numbers.narrow(weight * _spread(scale, problem).to(a.dtype), numbers.a_dtype)
        return numbers.product(a, weight.t(), None, named)
    if zero is not None:
        weight = weight - zero.to(a.dtype).unsqueeze(-1)
    product = numbers.product(a, weight.t(), None, named)
    return product if scale is None else product * scale.to(a.dtype)


def _spread(groups: torch.Tensor, problem: GemmProblem) -> torch.Tensor:
    """Expand [N, groups] to [N, K]."""
    prologue = problem.prologue
    assert prologue is not None
    columns, count = groups.shape
    spread = groups.unsqueeze(-1).expand(columns, count, prologue.group).flatten(-2)
    return spread.narrow(1, 0, problem.k) if count * prologue.group != problem.k else spread


def _of_part(named: Mapping[str, torch.Tensor], index: int, part: int) -> torch.Tensor:
    """Return the epilogue input of a fused weight; column and scalar inputs are shared by all."""
    return named.get(f"input{index}_{part}", named[f"input{index}_0"])


def _epilogue(
    problem: GemmProblem, value: torch.Tensor, part: int, named: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    inputs = _epilogue_inputs(problem)
    sums = problem.operation == "int_mm" and not _stays_integer(problem)
    if sums:
        value = value.to(torch.promote_types(value.dtype, torch.float32))
    for index, inp in enumerate(inputs):
        if _is_bias(problem, index):
            continue
        operand = _of_part(named, index, part)
        value = value + operand if _is_added(problem, index, inp) else value * operand
    if sums and _first_factor(problem) is None:
        value = value * _sum_unit(problem)
    return _pointwise(value, problem.epilogue.pointwise - len(problem.epilogue.inputs))


ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "identity": lambda x: x,
}
"""Activations of the gate, by their names in `Epilogue.activation`."""


def _pointwise(value: torch.Tensor, count: int) -> torch.Tensor:
    """Apply pointwise ops that together cost `count` cheap ones (`Epilogue.pointwise`)."""
    for cost, operation in _COSTLY:
        while count >= cost:
            # Some ops are not implemented for integers.
            value = operation(value if value.is_floating_point() else value.to(torch.float32))
            count -= cost
    for index in range(count):
        value = _CHEAP[index % len(_CHEAP)](value)
    return value


_COSTLY: tuple[tuple[int, Callable[[torch.Tensor], torch.Tensor]], ...] = (
    (24, torch.nn.functional.gelu),
    (21, lambda x: x + torch.erf(x)),
    (12, torch.nn.functional.silu),
    (9, lambda x: x + torch.sigmoid(x)),
)
"""Ops with a cost (in cheap ops) that use many registers and branches, as the activations of models
do; the same number of cheap ops would not. If the count allows, these are actual activations (gelu,
silu), so that the model's kernel is already compiled when it is selected; else ops that change
values only a little, so that errors remain visible. The costs are those with which
`lowerings.graph.epilogue_region` counts the ops of a graph."""

_CHEAP: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    torch.relu,
    lambda x: x * 1.25,
    lambda x: x - 0.25,
)

_REDUCTIONS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda x: x.abs().amax(-1),
    lambda x: x.abs().sum(-1),
)
