"""What the operator sweep compares: `disagreement` and `layouts` of two runs."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

TOLERANCES = {
    # Inductor's and eager mode's elementary functions differ by a few units in the last place, and
    # their sums add in different orders.
    torch.float64: (1e-7, 1e-7),
    torch.float32: (1e-5, 1e-5),
    torch.complex64: (1e-5, 1e-5),
    # Inductor computes fused operators in float32 and rounds once; eager rounds after each one.
    torch.float16: (2e-3, 1e-3),
    torch.bfloat16: (1.6e-2, 1e-2),
}
"""(relative, absolute) by dtype. Any other dtype must agree exactly."""


@dataclasses.dataclass
class Run:
    """The results of a list of calls, and the arguments as the calls left them."""

    arguments: list[Any]
    results: list[Any]
    gradients: list[Any] = dataclasses.field(default_factory=list)
    """For each call the gradients of its arguments, None for one that has none."""

    def leaves(self) -> list[Any]:
        """Everything observable: results first, then the arguments, which may be mutated."""
        return pytree.tree_leaves((self.results, self.arguments, self.gradients))

    def part(self, first: int, count: int) -> Run:
        """The run of `count` of the calls."""
        last = first + count
        return Run(self.arguments[first:last], self.results[first:last], self.gradients[first:last])


def disagreement(
    expected: Run,
    actual: Run,
    *,
    values: bool = True,
    run_exactly: Callable[[], Run | None] = lambda: None,
) -> str:
    """How two runs differ in what a user can observe; empty where they agree.

    Compared are the structure of the results, the type of every leaf (a tensor is no scalar), and
    of tensors dtype, device, layout (strided, sparse), shape and, within `TOLERANCES`, values, NaN
    being equal to NaN. Arguments are compared after the calls as results are, for mutations, and
    so are gradients.

    Args:
        expected: eager mode's run.
        actual: the run that is compared with it.
        values: whether tensors' values are compared.
        run_exactly: returns the run in double precision, if there is one. A floating-point value
            beyond the tolerance agrees if it is about as near to this run as eager mode's value.
    """
    if pytree.tree_structure(expected.results) != pytree.tree_structure(actual.results):
        return "the results are nested differently"
    for index, (left, right) in enumerate(zip(expected.leaves(), actual.leaves(), strict=True)):
        if type(left) is not type(right):
            return f"{type(right).__name__} instead of {type(left).__name__}"
        try:
            if isinstance(left, torch.Tensor):
                _assert_tensors_agree(left, right, values=values)
            elif isinstance(left, (int, float, complex)):
                torch.testing.assert_close(right, left, equal_nan=True)
            elif isinstance(left, (str, tuple, torch.dtype)):
                assert right == left, f"{right} instead of {left}"
        except AssertionError as error:
            exact = run_exactly() if values else None
            if exact is None or not _is_as_exact(right, left, exact.leaves()[index]):
                return reason(error)
    return ""


def _assert_tensors_agree(left: torch.Tensor, right: torch.Tensor, *, values: bool) -> None:
    if not values:
        left, right = torch.zeros_like(left), torch.zeros_like(right)
    rtol, atol = TOLERANCES.get(left.dtype, (0.0, 0.0))
    torch.testing.assert_close(right, left, rtol=rtol, atol=atol, equal_nan=True)


_ERROR_RATIO = 2.0
"""An error of this times eager mode's largest error is a rounding error."""

_PLAUSIBLE_ERROR = 0.1
"""Eager mode's largest error, relative to the largest value, if double precision computes the same
function."""


def _is_as_exact(actual: Any, expected: Any, exact: Any) -> bool:
    """Whether a tensor is about as near to double precision's as eager mode's is."""
    if not all(isinstance(tensor, torch.Tensor) for tensor in (actual, expected, exact)):
        return False
    # dtype, device, layout and shape still have to agree.
    if (actual.dtype, actual.layout, actual.shape) != (
        expected.dtype,
        expected.layout,
        expected.shape,
    ):
        return False
    inexact = expected.is_floating_point() or expected.is_complex()
    if not inexact or expected.layout is not torch.strided or exact.shape != expected.shape:
        return False
    epsilon = torch.finfo(expected.dtype).eps
    finite = expected.isfinite() & exact.isfinite()
    others = (actual == expected) | (actual.isnan() & expected.isnan())
    if not (finite | others).all() or not finite.any():
        return False
    actual, expected, exact = (
        tensor.detach()[finite].to(torch.complex128) for tensor in (actual, expected, exact)
    )
    scale = exact.abs().max()
    eager_error = (expected - exact).abs().max()
    error = (actual - exact).abs().max()
    return bool(
        eager_error <= _PLAUSIBLE_ERROR * scale
        and error <= _ERROR_RATIO * eager_error + epsilon * scale
    )


def layouts(run: Run) -> list[tuple[tuple[int, ...], int | None]]:
    """For each strided tensor in the results its strides and the argument whose memory it shares.

    Inductor does not promise eager mode's strides, so inductor_ext must have them only where
    Inductor (default) does. Empty tensors are left out, and the stride of a dimension of size one,
    which has no meaning, is 0. Without shared memory the argument's index is None.
    """
    owners: dict[int, int] = {}
    for index, leaf in enumerate(pytree.tree_leaves(run.arguments)):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.numel():
            owners.setdefault(leaf.untyped_storage().data_ptr(), index)
    described = []
    for leaf in pytree.tree_leaves(run.results):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.numel():
            strides = (s if n > 1 else 0 for s, n in zip(leaf.stride(), leaf.shape, strict=True))
            described.append((tuple(strides), owners.get(leaf.untyped_storage().data_ptr())))
    return described


_PATH = re.compile(r"(?:/[\w.+@=-]+){2,}")

_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")


def reason(error: BaseException) -> str:
    """An exception as one line of a committed file: without paths and addresses."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # torch.testing's message has three lines, and dynamo's begins by naming the backend.
    begins = bool(lines) and lines[0].endswith(":")
    minimum = 3 if isinstance(error, AssertionError) else 1 + begins
    text = " ".join(lines[:minimum])
    text = _PATH.sub(lambda match: os.path.basename(match.group()), text)
    return _ADDRESS.sub("0x...", f"{type(error).__name__}: {text}")[:240]
