"""Verification of kernels: the error of an output against float64, and its bound.

The error is the largest |found - exact| / (|exact| + s) over all elements, where s is the root mean
square of the exact output: relative for large elements, absolute for elements that are small
because of cancellation. A candidate is correct if its error is at most

    u_out + 8 (sqrt(K) u_acc + u_in)

or at most twice the error of Inductor's own result, which allows for the additional roundings of an
unfused chain. u_out is the unit roundoff of the stored dtype, u_acc that of the accumulators, and
u_in that of operands rounded before they reach the tensor cores: to tf32, or to the dtype of A by a
prologue.

The error of a sum of K terms grows with sqrt(K) and not with K: this is the probabilistic bound of
Higham and Mary (A new approach to probabilistic rounding error analysis, SIAM J. Sci. Comput. 41,
2019). A constant of 8 is exceeded with a probability below 1e-13. Because the inputs here are
random with mean zero, a sum of K terms of size 1 is itself of the order of sqrt(K) (the same
authors, Sharper probabilistic backward error analysis, SIAM J. Sci. Comput. 42, 2020), so the bound
is relative to s. Tensor cores truncate instead of rounding, which doubles u_acc (Fasi, Higham,
Mikaitis, Pranesh, Numerical behavior of NVIDIA tensor cores, PeerJ Comput. Sci. 7, 2021), and on
Hopper they keep about 14 bits of a sum of fp8 products (DeepSeek-V3 technical report, 2024, section
3.3.2).

Infinity and NaN are wrong, because no exact output has any. An integer matmul that is stored as
integers must be exact. A value that is rounded to an integer may be off by half. A wrong bool has
the distance of its value from 0 as its error. For outputs with many rows, float64 results are
computed for an evenly spaced sample of rows only; in addition the whole output must agree with
Inductor's to twice the bound. Needs torch but not Inductor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from inductor_ext.autotune.reference import FILLING, Program, rounds, select
from inductor_ext.templates.problem import BATCHED, GemmProblem
from inductor_ext.templates.tensors import size_of

_DEVIATIONS = 8.0
"""The constant of the probabilistic bound."""

_INT8 = 2.0**-4
"""Half an integer step, relative to rows with an amax of 127 and a root mean square of 8 or more,
or to the scale `FILLING` of the programs."""

_STOCK_FACTOR = 2.0

_STOCK_LIMIT = 0.25
"""Largest error of Inductor's result that extends the bound; above it Inductor's result is
wrong."""

ROWS = 1024
"""Number of rows, over all matrices, for which float64 results are computed."""


def bound(problem: GemmProblem, *, reduced: bool = False, dtype: str | None = None) -> float:
    """Return the largest error of a correct kernel; see the module docstring.

    Args:
        problem: what is computed.
        reduced: whether the output is a reduction over N, which has no more roundings than the
            matmul.
        dtype: the stored dtype, if it is not the problem's.
    """
    dtype = dtype or (problem.kernel_dtype if reduced else problem.stored_dtype)
    if getattr(torch, dtype).is_floating_point:
        stored = _roundoff(dtype)
    elif dtype == "bool":
        stored = 0.0
    elif problem.quantized or rounds(problem):
        stored = _INT8
    else:
        return 0.0
    arithmetic = problem.arithmetic
    accumulated = {"fma": 2.0**-24, "fp8": 2.0**-13, "int8": 0.0}.get(arithmetic, 2.0**-23)
    read = 0.0
    if arithmetic == "tf32":
        # Some kernels round to tf32; others let the hardware truncate.
        read = 2.0**-10
    elif problem.prologue is not None:
        read = _roundoff(problem.multiply_dtype)
    return stored + _DEVIATIONS * (math.sqrt(problem.k) * accumulated + read)


def _roundoff(dtype: str) -> float:
    return float(torch.finfo(getattr(torch, dtype)).eps) / 2


def error(output: torch.Tensor, exact: torch.Tensor, scale: float) -> float:
    """Return the largest |output - exact| / (|exact| + scale); infinity for non-finite results.

    Args:
        output: any dtype; a bool is whether the value is positive.
        exact: of the same shape, finite.
        scale: added to the magnitude of each element; above 0.
    """
    wide = output.to(exact.dtype)
    if output.dtype is torch.bool:
        wide = torch.where(output == (exact > 0), exact, torch.zeros_like(exact))
    # NaN propagates through abs, the division and amax.
    largest = float(((wide - exact).abs() / (exact.abs() + scale)).amax())
    return largest if math.isfinite(largest) else math.inf


def _scale(exact: torch.Tensor, typical: float) -> float:
    """Return the root mean square; for fewer than 256 elements, at least `typical`.

    A few elements may all be small by chance. `typical` is the usual value: programs are built so
    that matmul results have variance 1, or fill the integer range.
    """
    rms = float(exact.square().mean().sqrt())
    return rms if exact.numel() >= 256 else max(rms, typical)


def sampled_rows(problem: GemmProblem) -> list[int]:
    """Return the rows of M to check against float64, ascending: all, or a sample with both ends."""
    count = max(16, ROWS // problem.outputs)
    if problem.m <= count:
        return list(range(problem.m))
    return sorted({round(index * (problem.m - 1) / (count - 1)) for index in range(count)})


class Verifier:
    """Checks outputs against the float64 reference of a program for given inputs."""

    def __init__(self, program: Program, inputs: Sequence[torch.Tensor]) -> None:
        """Compute the reference on the device of the inputs.

        Args:
            program: the program of the problem.
            inputs: from `Program.make_inputs`.
        """
        self._problem = program.problem
        # The dimension of outputs that holds the rows.
        batched = self._problem.operation in BATCHED or self._problem.divided == "k"
        self._dimension = 1 if batched else 0
        rows = sampled_rows(self._problem)
        self._all_rows = len(rows) == self._problem.m
        self._rows = torch.tensor(rows, device=inputs[0].device)
        exact = program.reference(inputs, self._rows)
        filled = rounds(self._problem) and self._problem.stored_dtype != "bool"
        self._scales = [_scale(tensor, FILLING if filled else 1.0) for tensor in exact]
        # float32 takes half the memory. Its roundoff is far below every bound except for integers.
        integer = not getattr(torch, self._problem.stored_dtype).is_floating_point
        self._exact = exact if integer else tuple(tensor.to(torch.float32) for tensor in exact)
        reduced = self._problem.epilogue.reductions * len(self._problem.parts or (1,))
        if self._problem.epilogue.gated:
            reduced = self._problem.epilogue.reductions
        further = program.further
        self._allowed = [
            bound(self._problem, reduced=index >= len(exact) - reduced, dtype=further.get(index))
            for index in range(len(exact))
        ]
        self._stock: tuple[torch.Tensor, ...] = ()

    def set_stock(self, outputs: Sequence[torch.Tensor]) -> str | None:
        """Set the outputs of Inductor's path for comparison.

        Returns:
            Why Inductor's path itself exceeds the bound; None if it does not.
        """
        errors = [self._error(index, output) for index, output in enumerate(outputs)]
        failure = self._judge(errors)
        if all(error <= _STOCK_LIMIT for error in errors):
            self._allowed = [
                max(limit, _STOCK_FACTOR * error)
                for limit, error in zip(self._allowed, errors, strict=True)
            ]
            if not self._all_rows:
                self._stock = tuple(outputs)
        return failure

    def check(self, call: Callable[[], Sequence[torch.Tensor]]) -> str | None:
        """Run a candidate twice; return why its outputs are wrong, or None.

        Before each run, memory of the size of the outputs is filled with NaN (or -1) and returned
        to torch's allocator, which hands it out again. An element that the candidate does not write
        is then wrong, instead of possibly holding the correct value of an earlier run.
        """
        first: Sequence[torch.Tensor] | None = None
        for _ in range(2):
            self._poison()
            outputs = call()
            if len(outputs) != len(self._exact):
                return f"it returned {len(outputs)} results, and there are {len(self._exact)}"
            errors = [self._error(index, output) for index, output in enumerate(outputs)]
            reason = self._judge(errors) or self._compare(outputs)
            if reason is not None:
                return reason
            if first is not None and self._problem.deterministic:
                pairs = zip(first, outputs, strict=True)
                if not all(torch.equal(_bytes(a), _bytes(b)) for a, b in pairs):
                    return "two runs gave different bits, and results must be deterministic"
            first = outputs if self._problem.deterministic else None
        return None

    def _error(self, index: int, output: torch.Tensor) -> float:
        exact = self._exact[index]
        values = output if self._all_rows else select(output, self._dimension, self._rows)
        if values.shape != exact.shape:
            return math.inf
        return error(values, exact, self._scales[index])

    def _judge(self, errors: Sequence[float]) -> str | None:
        for index, (largest, limit) in enumerate(zip(errors, self._allowed, strict=True)):
            if largest > limit:
                return self._describe(index, largest, "float64", limit)
        return None

    def _compare(self, outputs: Sequence[torch.Tensor]) -> str | None:
        for index, (output, stock) in enumerate(zip(outputs, self._stock, strict=False)):
            limit = 2 * self._allowed[index]
            # Process chunks, because a whole output in float32 may be large.
            largest = max(
                _difference(a, b, self._scales[index])
                for a, b in zip(output.split(ROWS), stock.split(ROWS), strict=True)
            )
            if largest > limit:
                return self._describe(index, largest, "Inductor", limit)
        return None

    def _describe(self, index: int, largest: float, against: str, limit: float) -> str:
        location = f" in output {index}" if len(self._exact) > 1 else ""
        if math.isinf(largest):
            return f"wrong: NaN, infinity or another shape{location}"
        return f"wrong: error {largest:.2g}{location} against {against}, allowed {limit:.2g}"

    def _poison(self) -> None:
        buffers = []
        for exact in self._exact:
            elements = exact.numel() // len(self._rows) * self._problem.m
            size = size_of(elements, self._problem.stored_dtype)
            # NaN in every float format, and -1 in integers.
            buffers.append(torch.full((size,), 0xFF, dtype=torch.uint8, device=exact.device))


def _difference(output: torch.Tensor, stock: torch.Tensor, scale: float) -> float:
    """Return the error against Inductor's output; for bools, the fraction that differs."""
    if output.dtype is torch.bool:
        return float((output != stock).to(torch.float32).mean())
    return error(output, stock.to(torch.float32), scale)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, for bitwise comparison.

    NaN compares equal this way, and fp8 equality is not implemented on all devices.
    """
    return tensor.contiguous().view(torch.uint8)
