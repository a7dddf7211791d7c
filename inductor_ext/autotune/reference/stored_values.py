"""Values as tensors store them: packed 4-bit weights, scales of groups, integers and bools."""

from __future__ import annotations

import torch

from inductor_ext.autotune.reference.operators import Operators, torch_dtype
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import EpilogueInput


def rounds(problem: GemmProblem) -> bool:
    """Whether values are converted to integers or bools only when they are stored."""
    discrete = not torch_dtype(problem.stored_dtype).is_floating_point
    return discrete and not problem.quantized and not stays_integer(problem)


def stays_integer(problem: GemmProblem) -> bool:
    """Whether integer accumulators are stored without conversion, possibly with integers added."""
    integers = all(map(is_integer, problem.epilogue.inputs))
    return problem.operation == "int_mm" and problem.stored_dtype == problem.out and integers


def is_integer(input_: EpilogueInput) -> bool:
    """Whether an epilogue input holds integers or bools."""
    return not torch_dtype(input_.dtype).is_floating_point


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
    values = torch.stack(halves, dim=-1).flatten(-2)
    return (values.to(torch.int8) ^ 8) - 8 if signed else values


def expand_groups(groups: torch.Tensor, problem: GemmProblem) -> torch.Tensor:
    """Expand [N, groups] to [N, K]."""
    dequant = problem.dequant
    assert dequant is not None
    columns, count = groups.shape
    spread = groups.unsqueeze(-1).expand(columns, count, dequant.group).flatten(-2)
    return spread.narrow(1, 0, problem.k) if count * dequant.group != problem.k else spread


FILLING = 32.0
"""Scale from values of about 1 to integers; nearly all of them then fit into int8."""


def convert_stored(problem: GemmProblem, value: torch.Tensor, ops: Operators) -> torch.Tensor:
    """Convert a result to the dtype that the matmul kernel stores."""
    dtype = torch_dtype(problem.kernel_dtype)
    if not rounds(problem):
        return ops.narrow(value, dtype)
    if dtype is torch.bool:
        return ops.positive(value)
    least = max(-127, torch.iinfo(dtype).min)
    scaled = (ops.wide(value) * FILLING).clamp(least, 127)
    return ops.narrow(ops.round(scaled), dtype)


def quantize_rows(
    problem: GemmProblem, value: torch.Tensor, maxima: torch.Tensor, ops: Operators
) -> torch.Tensor:
    """Scale rows by their row amax to the full 8-bit range."""
    dtype = torch_dtype(problem.stored_dtype)
    most = torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max
    scales = maxima.clamp(min=1e-12) / most
    scaled = (ops.wide(value) / scales.unsqueeze(-1)).clamp(-most, most)
    return ops.narrow(scaled if dtype.is_floating_point else ops.round(scaled), dtype)
