"""What the graph fuzzer compares: a compiled run of a program with its run in eager mode.

Compared are results, inputs and buffers after the calls, gradients, and which results share memory
with inputs, buffers or each other. Integers must be equal. Floating-point values may differ by a
multiple of the dtype's precision, of what a rounding error of the inputs changes, and of eager
mode's own distance from double precision. What a program computes in half precision may also differ
by a few roundings, because Inductor does not round between the operators of a kernel: by a share of
the value, and by what the roundings of the operators change where values cancel each other.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from test.fuzz.graph_programs import Program, RoundingErrors, Run, run_eager, to_double

_PRECISION = {torch.float16: 4e-3, torch.bfloat16: 3e-2}

_HALF_ROUNDING = {"float16": 2.0**-11, "f16": 2.0**-11, "bfloat16": 2.0**-9, "bf16": 2.0**-9}
"""The largest relative error of rounding to a dtype, by its names in programs."""

_CANCELLED = 1e-8
"""What may be left of a sum whose terms cancel each other exactly in another order."""


def find_difference(program: Program, actual: Run) -> str:
    """How a run differs from eager mode in what a user can observe; empty if it does not."""
    expected = run_eager(program)
    perturbed: Run | None = None
    double: Run | None = None
    unobserved = set() if actual.has_module else _find_results_in_buffers(expected)
    for name, right in expected.values.items():
        if name in unobserved:
            continue
        if name not in actual.values:
            if name.startswith("buffer"):
                continue
            return f"{name} is missing"
        value = actual.values[name]
        if right is None or value is None:
            # AOTAutograd gives zeros to what no loss depends on.
            is_zero = value is not None and not value.any()
            if right is not value and not is_zero:
                return f"{name}: {_describe(value)} instead of {_describe(right)}"
            continue
        if (value.shape, value.dtype) != (right.shape, right.dtype):
            return f"{name}: {_describe(value)} instead of {_describe(right)}"
        if torch.equal(value, right) or _is_close(value, right):
            continue
        if right.dtype.is_floating_point or right.dtype.is_complex:
            perturbed = perturbed or run_eager(program, perturbed=True)
            double = double or run_eager(program, double=True)
            exact = double.values[name]
            other = perturbed.values[name]
            assert exact is not None
            assert other is not None
            rounding = _rounding_of(program)
            if _is_as_exact(value, right, other, exact, rounding):
                continue
            if rounding in _HALF_ROUNDING.values():
                with RoundingErrors():
                    other = run_eager(program).values[name]
                assert other is not None
                if _is_as_exact(value, right, other, exact, rounding):
                    continue
        return f"{name}: {_describe_difference(value, right)}"
    return _find_alias(expected, actual)


def _find_results_in_buffers(expected: Run) -> set[str]:
    """The results that later calls of the module may change, because they are its buffers.

    The buffers of a package are its own: an exported program returns copies of them.
    """
    pairs = (pair for pair in expected.aliases if "buffer" in pair[0])
    return {f"{first.split(':')[0]}: {result}" for first, result in pairs}


def _describe(value: Tensor | None) -> str:
    return "None" if value is None else f"{value.dtype}{[*value.shape]}"


def _describe_difference(value: Tensor, right: Tensor) -> str:
    wrong = ~torch.isclose(value, right, rtol=1e-3, atol=1e-5, equal_nan=True)
    wrong = wrong if wrong.any() else value != right
    first = tuple(wrong.nonzero()[0].tolist())
    return (
        f"{int(wrong.sum())} of {value.numel()} elements of {_describe(right)} are wrong, "
        f"at {[*first]} {value[first].item()} instead of {right[first].item()}"
    )


def _is_close(value: Tensor, right: Tensor) -> bool:
    if not (right.dtype.is_floating_point or right.dtype.is_complex) or not right.numel():
        return False
    allowed = _PRECISION.get(right.dtype, 1e-4)
    wide = to_double(right)
    scale = float(wide.abs().nan_to_num().max())
    return bool(
        torch.isclose(
            to_double(value), wide, rtol=allowed, atol=allowed * scale / 4, equal_nan=True
        ).all()
    )


def _rounding_of(program: Program) -> float:
    """The largest relative error of one rounding in a program."""
    sources = [*program.inputs, *program.buffers]
    text = " ".join([program.source(), *(str(s.dtype) for s in sources)])
    dtypes = set(re.findall(r"\b(?:float16|f16|bfloat16|bf16)\b", text))
    return max([2.5e-6, *(_HALF_ROUNDING[d] for d in dtypes)])


def _is_as_exact(
    value: Tensor, right: Tensor, perturbed: Tensor, exact: Tensor, rounding: float
) -> bool:
    """Whether the value is near eager mode's, given how inexact that is."""
    value, right, perturbed, exact = map(to_double, (value, right, perturbed, exact))
    scale = float(right.abs().nan_to_num().max())
    inexact = 8 * (perturbed - right).abs().max() + 4 * (right - exact).abs().max()
    allowed = inexact + 4 * rounding * scale + _CANCELLED
    return bool(((value - right).abs() <= allowed).all())


def _find_alias(expected: Run, actual: Run) -> str:
    """The first pair of tensors that share memory, but not in eager mode."""
    right = set(expected.aliases)
    for pair in actual.aliases:
        if pair not in right:
            return f"{pair[0]} and {pair[1]} share memory"
    return ""
