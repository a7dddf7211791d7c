"""The operators that reference programs consist of, as PyTorch ops and in float64.

`PlainOperators` calls what a model calls, in the dtypes of the problem; `ExactOperators` computes
the same without intermediate rounding. Both have the same methods.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from inductor_ext import numerics
from inductor_ext.templates.problem import BATCHED, GemmProblem
from inductor_ext.templates.tensors import FP8


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of this name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


@contextlib.contextmanager
def precision(problem: GemmProblem) -> Iterator[None]:
    """Set torch's matmul precision as the problem requires, inside the context.

    For float32 this is tf32 or not; for half precision the flags of `GemmProblem.math_flags`.
    """
    with numerics.with_matmul_flags(problem.math_flags, problem.multiply_dtype), _tf32(problem):
        yield


@contextlib.contextmanager
def _tf32(problem: GemmProblem) -> Iterator[None]:
    matmul: Any = torch.backends.cuda.matmul
    before, selected = matmul.fp32_precision, "tf32" if problem.tf32 else "ieee"
    if problem.a.dtype != "float32" or (before == "tf32") == problem.tf32:
        yield
        return
    matmul.fp32_precision = selected
    try:
        yield
    finally:
        matmul.fp32_precision = before


def select(tensor: torch.Tensor, dimension: int, indices: torch.Tensor) -> torch.Tensor:
    """Like `index_select`, which torch does not implement for fp8 on all devices."""
    if tensor.element_size() > 1:
        return tensor.index_select(dimension, indices)
    return tensor.view(torch.uint8).index_select(dimension, indices).view(tensor.dtype)


ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "identity": lambda x: x,
}
"""Activations of the gate, by their names in `KernelDetails.activation`."""


def apply_pointwise(value: torch.Tensor, count: int) -> torch.Tensor:
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


class PlainOperators:
    """The operators as a model calls them, in the dtypes of the problem."""

    def __init__(self, problem: GemmProblem) -> None:
        self.problem = problem
        self.a_dtype = torch_dtype(problem.multiply_dtype)
        self.out = torch_dtype(problem.out)

    def wide(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(torch.float32)

    def narrow(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return tensor.to(dtype)

    def round(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.round()

    def positive(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor > 0

    def matmul(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        tensors: Any,
        alpha: float = 1,
        beta: float = 1,
    ) -> torch.Tensor:
        operation, fp8 = self.problem.operation, self.problem.a.dtype in FP8
        result: torch.Tensor
        if operation == "int_mm":
            result = torch._int_mm(a, b)
        elif fp8:
            scales = tensors["scale_a"], tensors["scale_b"]
            options: Any = {
                "out_dtype": self.out,
                "use_fast_accum": self.problem.fast_accumulation,
            }
            if operation != "grouped":
                result = torch._scaled_mm(a, b, *scales, bias=bias, **options)
                return result
            result = torch._scaled_grouped_mm(a, b, *scales, tensors["ends"], **options)
        elif operation == "grouped":
            result = torch._grouped_mm(a, b, offs=tensors["ends"], out_dtype=self.out)
        elif bias is not None and bias.dtype == self.out == a.dtype:
            add = torch.addmm if operation == "addmm" else torch.baddbmm
            return add(bias, a, b, alpha=alpha, beta=beta)
        else:
            multiply = torch.bmm if operation in BATCHED else torch.mm
            result = multiply(a, b) if self.out == a.dtype else multiply(a, b, self.out)
        return result if bias is None else result + bias


class ExactOperators:
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

    def matmul(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        tensors: Any,
        alpha: float = 1,
        beta: float = 1,
    ) -> torch.Tensor:
        if self.problem.operation == "grouped":
            result = self._grouped(a, b, tensors)
        else:
            result = a @ b
            if "scale_a" in tensors:
                result = result * tensors["scale_a"] * tensors["scale_b"]
        return result if bias is None else alpha * result + beta * bias

    def _grouped(self, a: torch.Tensor, b: torch.Tensor, tensors: Any) -> torch.Tensor:
        ends = tensors["ends"].tolist()
        spans = [slice(begin, end) for begin, end in zip((0, *ends), ends, strict=False)]
        scaled = "scale_a" in tensors
        if self.problem.divided == "n":
            result = torch.cat([a[g] @ b[:, span] for g, span in enumerate(spans)], 1)
            if scaled:
                counts = tensors["ends"].diff(prepend=tensors["ends"].new_zeros(1))
                rows = tensors["scale_a"][:, self.rows].repeat_interleave(counts, 0)
                result = result * rows.t() * tensors["scale_b"]
            return result
        if self.problem.divided == "k":
            result = torch.stack([a[:, span] @ b[span] for span in spans])
            if scaled:
                rows, columns = (
                    tensors[name].view(len(spans), -1) for name in ("scale_a", "scale_b")
                )
                result = result * rows[:, self.rows, None] * columns[:, None]
            return result
        result = a.new_empty(a.shape[0], b.shape[2])
        for group, span in enumerate(spans):
            indices = ((self.rows >= span.start) & (self.rows < span.stop)).nonzero()[:, 0]
            rows = a[indices] @ b[group]
            result[indices] = rows * tensors["scale_b"][group] if scaled else rows
        return result * tensors["scale_a"][self.rows, None] if scaled else result


Operators = PlainOperators | ExactOperators
