"""Matmuls with their configurations: operands, results in float64, and generated code.

`render` lowers one matmul by one configuration as for a GPU (`fake_cuda`) and returns the module
that Inductor generates. `kernel_interpreter` runs such modules, `kernel_compiler` compiles them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest import mock

import torch

from inductor_ext.autotune.reference import ACTIVATIONS
from inductor_ext.templates.fused_ops import Prologue
from inductor_ext.templates.problem import BATCHED, GemmProblem
from inductor_ext.templates.tensors import FP8, Operand
from inductor_ext.templates.triton.config import GemmConfig
from test.support import fake_cuda


def as_bfloat16(problem: GemmProblem) -> GemmProblem:
    """A problem in bfloat16, interpreted in float16."""
    a, prologue = problem.a, problem.prologue
    if a.dtype != "float16":
        return problem
    if problem.dequant is not None and problem.dequant.scale_dtype == "float16":
        dequant = dataclasses.replace(problem.dequant, scale_dtype="bfloat16")
        prologue = Prologue(problem.norm, dequant)
    elif problem.norm is not None and problem.norm.dtype == "float16":
        prologue = Prologue(dataclasses.replace(problem.norm, dtype="bfloat16"))
    b = problem.b
    return dataclasses.replace(
        problem,
        a=dataclasses.replace(a, dtype="bfloat16"),
        b=dataclasses.replace(b, dtype="bfloat16") if b.dtype == "float16" else b,
        out="bfloat16" if problem.out == "float16" else problem.out,
        prologue=prologue,
    )


@dataclass(frozen=True)
class Case:
    """One matmul by one configuration."""

    problem: GemmProblem
    config: GemmConfig
    options: Mapping[str, Any] = field(default_factory=dict)
    """Constants of the kernel: ACTIVATION, EPSILON."""
    after: Callable[[torch.Tensor], torch.Tensor] | None = None
    """An epilogue for Inductor to fuse."""
    offsets: tuple[int, ...] = ()
    """Ends of the groups of a grouped matmul."""
    offset: int = 0
    """Storage offsets of a and b, in elements."""
    mean: float = 0.0
    """A tensor that is added to a."""
    bias: Literal["row", "matrix"] | None = None
    """A tensor that the template's own epilogue adds, with prefix arguments."""
    multiprocessors: int = 0
    """The number of SMs that the kernel is compiled for, of 132; 0 for all."""


def _matrix(
    operand: Operand, rows: int, columns: int, batch: int, offset: int, device: str
) -> torch.Tensor:
    shape = (rows, columns) if batch == 0 else (batch, rows, columns)
    strides = operand.strides if batch == 0 else (operand.batch_stride, *operand.strides)
    dtype = getattr(torch, operand.dtype)
    span = offset + operand.span(rows, columns, max(1, batch))
    if device == "meta":
        storage = torch.empty(span, dtype=dtype, device="meta")
    elif dtype.is_floating_point:
        storage = torch.randn(span, device=device).to(dtype)
    else:
        storage = torch.randint(-8, 8, (span,), device=device).to(dtype)
    return storage.as_strided(shape, strides, offset)


def inputs(case: Case, device: str = "cpu", seed: int = 0) -> list[torch.Tensor]:
    """Operands of a case: a; every b, with scales and zero points; other inputs of its prologue;
    biases of gates; offsets; a bias.

    Parts are separate matrices with b's layout.
    """
    torch.manual_seed(seed)
    problem = case.problem
    batch = problem.batch if problem.operation in BATCHED else 0
    groups = problem.batch if problem.operation == "grouped" else 0
    a_batch = groups if groups and problem.divided == "n" else batch
    b_batch = groups if groups and problem.divided == "m" else batch
    operands = [_matrix(problem.a, problem.m, problem.k, a_batch, case.offset, device)]
    if case.mean:
        operands[0] += case.mean
    for part in problem.parts or (problem.n,):
        b = problem.b
        if problem.parts:
            strides = (part, 1) if b.layout == "row" else b.strides
            b = Operand.of(b.dtype, (problem.k, part), strides)
        if b.dtype in ("int4", "uint4"):
            pairs = torch.randint(256, (part, problem.k // 2), device=device)
            operands.append(pairs.to(torch.uint8).t())
        else:
            operands.append(_matrix(b, problem.k, part, b_batch, case.offset, device))
    dequant = problem.dequant
    if dequant is not None:
        dtype = getattr(torch, dequant.scale_dtype)
        zeros = []
        for part in problem.parts or (problem.n,):
            if dequant.scales in ("column", "tensor"):
                count = part if dequant.scales == "column" else 1
                operands.append(torch.rand(count, device=device).to(dtype))
            elif dequant.scales == "group":
                groups = (part, -(-problem.k // dequant.group))
                operands.append(torch.rand(groups, device=device).to(dtype).t())
                if dequant.zero_points:
                    zeros.append(torch.randint(-4, 4, groups, device=device).to(torch.int8).t())
        operands += zeros
    if problem.norm is not None:
        operands += [
            torch.rand(problem.k, device=device).to(operands[0].dtype)
            for _ in range(problem.norm.vectors)
        ]
    if problem.epilogue.gated and problem.operation == "addmm":
        operands += [
            torch.randn(part, device=device).to(operands[0].dtype) for part in problem.parts
        ]
    if case.offsets:
        operands.append(torch.tensor(case.offsets, dtype=torch.int32, device=device))
        if problem.a.dtype in FP8:
            # One per row of a and column of b for each group, but only one if groups divide them.
            for size, axis in ((problem.m, "m"), (problem.n, "n")):
                count = size * (1 if problem.divided == axis else problem.batch)
                operands.append(torch.rand(count, device=device))
    if case.bias:
        size = _size(case) if case.bias == "matrix" else [problem.columns]
        operands.append(torch.randn(size, device=device).to(operands[0].dtype))
    return operands


def reference(case: Case, values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The result in float64."""
    problem = case.problem
    parts = len(problem.parts or (problem.n,))
    a, *rest = values
    weights, rest = rest[:parts], rest[parts:]
    a, weights = a.double(), [_numbers(case, factor) for factor in weights]
    norm, dequant = problem.norm, problem.dequant
    scales: list[torch.Tensor] = []
    if dequant is not None and dequant.scales != "none":
        scales, rest = [item.double() for item in rest[:parts]], rest[parts:]
    if dequant is not None and dequant.scales == "group":

        def spread(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.double().repeat_interleave(dequant.group, 0)[: problem.k]

        if dequant.zero_points:
            zeros, rest = rest[:parts], rest[parts:]
            weights = [b - spread(zero) for b, zero in zip(weights, zeros, strict=True)]
        weights = [b * spread(scale) for b, scale in zip(weights, scales, strict=True)]
    if norm is not None and norm.kind == "rms":
        scale = torch.rsqrt(a.square().mean(-1, keepdim=True) + case.options["EPSILON"])
        a = a * scale * (rest.pop(0).double() if norm.vectors else 1)
    if norm is not None and norm.kind == "layer":
        variance, mean = torch.var_mean(a, -1, correction=0, keepdim=True)
        a = (a - mean) * torch.rsqrt(variance + case.options["EPSILON"])
        vectors = [rest.pop(0).double() for _ in range(norm.vectors)]
        a = a * vectors[0] if vectors else a
        a = a + vectors[1] if len(vectors) > 1 else a
    if case.offsets:
        matmul = _grouped(a, weights[0], case.offsets)
        if problem.a.dtype in FP8:
            rows, columns = (
                item.double().view(1 if problem.divided == axis else problem.batch, -1)
                for item, axis in zip(rest[1:3], "mn", strict=True)
            )
            counts = torch.tensor((0, *case.offsets)).diff().to(columns.device)
            if problem.divided == "m":
                rows, columns = rows.t(), columns.repeat_interleave(counts, 0)
            elif problem.divided == "n":
                rows = rows.repeat_interleave(counts, 0).t()
            else:
                rows, columns = rows[:, :, None], columns[:, None]
            matmul = matmul * rows * columns
        matmuls = [matmul]
    else:
        matmuls = [a @ factor for factor in weights]
    if dequant is not None and dequant.scales in ("column", "tensor"):
        matmuls = [matmul * scale for matmul, scale in zip(matmuls, scales, strict=True)]
    if problem.epilogue.gated and problem.operation == "addmm":
        matmuls = [matmul + rest.pop(0).double() for matmul in matmuls]
    if problem.epilogue.gated:
        activation = ACTIVATIONS[case.options["ACTIVATION"].strip("'")]
        result = activation(matmuls[0]) * matmuls[1]
    else:
        result = torch.cat(matmuls, -1)
    if case.bias:
        result = result + values[-1].double()
    return result if case.after is None else case.after(result)


def _numbers(case: Case, b: torch.Tensor) -> torch.Tensor:
    """The values of an operand b, without the scales and zero points of groups."""
    kind = case.problem.b.dtype
    if kind in ("int4", "uint4"):
        pair = (b >> 4, b & 15) if case.options.get("HIGH_FIRST") else (b & 15, b >> 4)
        b = torch.stack(pair, 1).flatten(0, 1).int()
        b = (b ^ 8) - 8 if kind == "int4" else b
    return b.double() - case.options.get("ZERO", 0)


def _grouped(a: torch.Tensor, b: torch.Tensor, offsets: Sequence[int]) -> torch.Tensor:
    begins = (0, *offsets[:-1])
    spans = [slice(begin, end) for begin, end in zip(begins, offsets, strict=True)]
    if a.dim() == 2 and b.dim() == 3:
        return torch.cat([a[span] @ b[g] for g, span in enumerate(spans)])
    if a.dim() == 3:
        return torch.cat([a[g] @ b[:, span] for g, span in enumerate(spans)], 1)
    return torch.stack([a[:, span] @ b[span] for span in spans])


@torch.library.custom_op("inductor_ext_test::product", mutates_args=())
def _product(operands: list[torch.Tensor], size: list[int], dtype: torch.dtype) -> torch.Tensor:
    raise NotImplementedError("it is lowered, and not called")


@_product.register_fake
def _(operands: list[torch.Tensor], size: list[int], dtype: torch.dtype) -> torch.Tensor:
    return operands[0].new_empty(size, dtype=dtype)


def _size(case: Case) -> list[int]:
    problem = case.problem
    split = partial_sums(case)
    if problem.operation in BATCHED:
        return [problem.batch, split * problem.m, problem.columns]
    if problem.divided == "k":
        return [problem.batch, problem.m, problem.columns]
    return [split * problem.m, problem.columns]


def partial_sums(case: Case) -> int:
    """The number of split-K partial results for a second kernel; 1 if the kernel reduces them."""
    return 1 if case.config.fused_split_k else case.config.split_k


def _dtype(case: Case) -> torch.dtype:
    problem = case.problem
    name = problem.accumulator if partial_sums(case) > 1 else problem.out
    dtype: torch.dtype = getattr(torch, name)
    return dtype


@contextlib.contextmanager
def lowering_of(case: Case) -> Iterator[Callable[..., torch.Tensor]]:
    """A function of `inputs`, which Inductor lowers to the case's kernel inside this context."""
    from torch._inductor import lowering
    from torch._inductor.ir import FixedLayout
    from torch._inductor.kernel.mm_common import addmm_epilogue, realize_inputs

    from inductor_ext.templates.triton import inductor_template

    def lower(operands: Any, size: Any, dtype: torch.dtype) -> Any:
        rest: dict[str, Any] = {}
        if case.bias:
            operands = [lowering.expand(operands[-1], size), *operands[:-1]]
            rest = {"prefix_args": 1, "epilogue_fn": addmm_epilogue(dtype, 1, 1)}
        nodes = realize_inputs(*operands)
        layout = FixedLayout(nodes[-1].get_device(), dtype, size)
        choice = inductor_template.choice(
            case.problem, case.config, nodes, layout, options=case.options, **rest
        )
        return choice.output_node()

    def function(*tensors: torch.Tensor) -> torch.Tensor:
        matmul = torch.ops.inductor_ext_test.product(list(tensors), _size(case), _dtype(case))
        return matmul if case.after is None else case.after(matmul)

    operator = torch.ops.inductor_ext_test.product.default
    with mock.patch.dict(lowering.lowerings, {operator: lower}):
        yield function


def render(case: Case, capability: tuple[int, int] = (9, 0)) -> fake_cuda.Lowered:
    """Inductor's generated code for a case."""
    others = case.multiprocessors and 132 - case.multiprocessors
    with (
        mock.patch.object(torch._C, "_get_sm_carveout_experimental", return_value=others),
        lowering_of(case) as function,
    ):
        return fake_cuda.lower(function, *inputs(case, "meta"), capability=capability)
