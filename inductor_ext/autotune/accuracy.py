"""Whether a kernel computes its problem: the error of its output against float64, and its bound.

An error is the largest |found - exact| / (|exact| + s) of all elements, s being the root mean
square of the exact output: relative for large elements, absolute for those that are small by
cancellation. A candidate is right if its error is within

    u_out + 8 (sqrt(K) u_acc + u_in)

or within twice that of stock's own result, which pays for more roundings where it has a fused chain
in pieces. u_out is the unit roundoff of the stored dtype, u_acc of the accumulators, and u_in of
what is rounded on the way to the tensor cores: to tf32, or to a's dtype by a prologue.

That sums of K terms err by the order of sqrt(K) and not of K is the probabilistic bound of Higham
and Mary (A new approach to probabilistic rounding error analysis, SIAM J. Sci. Comput. 41, 2019); a
constant of 8 is passed with a probability below 1e-13. As the inputs here are random with mean
zero, a sum of K terms of size 1 is itself of the order of sqrt(K) (the same authors, Sharper
probabilistic backward error analysis, SIAM J. Sci. Comput. 42, 2020), so that the bound is one
relative to s. Tensor cores do not round but cut off, which doubles u_acc (Fasi, Higham, Mikaitis,
Pranesh, Numerical behavior of NVIDIA tensor cores, PeerJ Comput. Sci. 7, 2021), and keep about 14
bits of a sum of fp8 products on Hopper (DeepSeek-V3 technical report, 2024, section 3.3.2).

Infinity or NaN is wrong: no exact output has any. An integer product that is stored as such is
exact; a number that is stored as an integer may be half of one away, and the wrong one of two bools
is an error of what the number is away from 0. Of a tall output float64 is computed for some rows
only, spread evenly; all of it is held to agree with stock's to twice what is allowed. Needs torch,
no Inductor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from inductor_ext.autotune.reference_programs import FILLING, Program, rounds, select
from inductor_ext.templates.problem import BATCHED, GemmProblem, size_of

__all__ = ["Verifier", "bound", "error"]

_DEVIATIONS = 8.0
"""The constant of the probabilistic bound."""

_INT8 = 2.0**-4
"""Half of an integer, beside rows whose largest element is 127 and root mean square 8 or more, or
beside what programs fill a range with."""

_STOCK_FACTOR = 2.0

_STOCK_LIMIT = 0.25
"""What stock's error is believed up to: beyond it stock itself is wrong."""

ROWS = 1024
"""Rows of all matrices together of which float64 results are computed."""


def bound(problem: GemmProblem, *, reduced: bool = False, dtype: str | None = None) -> float:
    """The error that a right kernel stays within; see above.

    Args:
        problem: what is computed.
        reduced: of what is reduced over N, which nothing rounds more than the product.
        dtype: that is stored, if it is not the problem's.
    """
    dtype = dtype or (problem.kernel_stores if reduced else problem.stored)
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
        # Some kernels let the hardware cut off what others round.
        read = 2.0**-10
    elif problem.prologue is not None:
        read = _roundoff(problem.multiplied)
    return stored + _DEVIATIONS * (math.sqrt(problem.k) * accumulated + read)


def _roundoff(dtype: str) -> float:
    return float(torch.finfo(getattr(torch, dtype)).eps) / 2


def error(found: torch.Tensor, exact: torch.Tensor, scale: float) -> float:
    """The largest |found - exact| / (|exact| + scale); infinite if something found is not finite.

    Args:
        found: any dtype; bools are whether numbers are positive.
        exact: of the same shape, finite.
        scale: added to the size of each element; above 0.
    """
    wide = found.to(exact.dtype)
    if found.dtype is torch.bool:
        wide = torch.where(found == (exact > 0), exact, torch.zeros_like(exact))
    # NaN passes through abs, the division and amax.
    largest = float(((wide - exact).abs() / (exact.abs() + scale)).amax())
    return largest if math.isfinite(largest) else math.inf


def _scale(exact: torch.Tensor, usual: float) -> float:
    """Root mean square; of a few elements, which may all be small by chance, what is usual or more.

    Programs are made so that products have variance 1, or fill the range of integers.
    """
    found = float(exact.square().mean().sqrt())
    return found if exact.numel() >= 256 else max(found, usual)


def sampled_rows(problem: GemmProblem) -> list[int]:
    """Rows of M to check against float64, ascending: all, or some with both ends among them."""
    count = max(16, ROWS // problem.outputs)
    if problem.m <= count:
        return list(range(problem.m))
    return sorted({round(index * (problem.m - 1) / (count - 1)) for index in range(count)})


class Verifier:
    """What is known to be right of a program's outputs for some inputs."""

    def __init__(self, program: Program, inputs: Sequence[torch.Tensor]) -> None:
        """Compute the reference, on the inputs' device.

        Args:
            program: of the problem.
            inputs: as `Program.make_inputs` makes them.
        """
        self._problem = program.problem
        # Of the rows in outputs.
        batched = self._problem.operation in BATCHED or self._problem.divided == "k"
        self._dimension = 1 if batched else 0
        rows = sampled_rows(self._problem)
        self._all_rows = len(rows) == self._problem.m
        self._rows = torch.tensor(rows, device=inputs[0].device)
        exact = program.reference(inputs, self._rows)
        filled = rounds(self._problem) and self._problem.stored != "bool"
        self._scales = [_scale(each, FILLING if filled else 1.0) for each in exact]
        # Half the memory; its roundoff is far below what any bound allows, but for integers.
        integer = not getattr(torch, self._problem.stored).is_floating_point
        self._exact = exact if integer else tuple(each.to(torch.float32) for each in exact)
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
        """Take stock's outputs for comparison.

        Returns:
            Why stock is beyond the bound itself, if so.
        """
        errors = [self._error(index, each) for index, each in enumerate(outputs)]
        wrong = self._judge(errors)
        if all(each <= _STOCK_LIMIT for each in errors):
            self._allowed = [
                max(allowed, _STOCK_FACTOR * each)
                for allowed, each in zip(self._allowed, errors, strict=True)
            ]
            if not self._all_rows:
                self._stock = tuple(outputs)
        return wrong

    def check(self, call: Callable[[], Sequence[torch.Tensor]]) -> str | None:
        """Run a candidate twice; returns why its outputs are wrong, or None.

        Before it runs, memory like that of its outputs is filled with NaN, or with -1, and
        given back to torch's allocator, which hands it out again: an element that the
        candidate does not write is wrong, and not by chance what another has left there.
        """
        first: Sequence[torch.Tensor] | None = None
        for _ in range(2):
            self._poison()
            outputs = call()
            if len(outputs) != len(self._exact):
                return f"it returned {len(outputs)} results, and there are {len(self._exact)}"
            errors = [self._error(index, each) for index, each in enumerate(outputs)]
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
        found = output if self._all_rows else select(output, self._dimension, self._rows)
        if found.shape != exact.shape:
            return math.inf
        return error(found, exact, self._scales[index])

    def _judge(self, errors: Sequence[float]) -> str | None:
        for index, (found, allowed) in enumerate(zip(errors, self._allowed, strict=True)):
            if found > allowed:
                return self._words(index, found, "float64", allowed)
        return None

    def _compare(self, outputs: Sequence[torch.Tensor]) -> str | None:
        for index, (output, stock) in enumerate(zip(outputs, self._stock, strict=False)):
            allowed = 2 * self._allowed[index]
            # One after the other: a whole output in float32 may be large.
            found = max(
                _difference(a, b, self._scales[index])
                for a, b in zip(output.split(ROWS), stock.split(ROWS), strict=True)
            )
            if found > allowed:
                return self._words(index, found, "stock", allowed)
        return None

    def _words(self, index: int, found: float, against: str, allowed: float) -> str:
        which = f" in output {index}" if len(self._exact) > 1 else ""
        if math.isinf(found):
            return f"wrong: NaN, infinity or another shape{which}"
        return f"wrong: error {found:.2g}{which} against {against}, allowed {allowed:.2g}"

    def _poison(self) -> None:
        kept = []
        for exact in self._exact:
            elements = exact.numel() // len(self._rows) * self._problem.m
            size = size_of(elements, self._problem.stored)
            # NaN in every format of floats, and -1.
            kept.append(torch.full((size,), 0xFF, dtype=torch.uint8, device=exact.device))


def _difference(found: torch.Tensor, stock: torch.Tensor, scale: float) -> float:
    """The error against stock; of bools, which do not tell how near they are, the share of those
    that differ.
    """
    if found.dtype is torch.bool:
        return float((found != stock).to(torch.float32).mean())
    return error(found, stock.to(torch.float32), scale)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """NaN is equal to itself here, and fp8 has no equality of its own everywhere."""
    return tensor.contiguous().view(torch.uint8)
