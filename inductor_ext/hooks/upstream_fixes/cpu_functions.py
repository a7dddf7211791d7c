"""Fixes for functions of vectors in C++ that are inaccurate for small or large numbers.

Inductor computes `expm1(x)` as `exp(x) - 1` and `atanh(x)` as half the logarithm of
`(1 + x) / (1 - x)`. Both are 0 for |x| < 6e-8, where the result is `x`. `acosh` of the vector
library squares its argument, and is infinite for numbers whose square is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from inductor_ext.hooks import context, registry
from inductor_ext.hooks.registry import Hook

_OVERRIDES = "torch._inductor.codegen.cpp.CppVecOverrides"
_OWNER = "hooks.upstream_fixes.cpu_functions"

_LARGE = 1e9
"""acosh(x) is log(2 x) from here on: the difference is 1 / (4 x^2)."""

_FORMULAS = {
    "expm1": "{x}.expm1()",
    "atanh": "{x}.atanh()",
    "acosh": (
        "decltype({x})::blendv({x}.acosh(), {x}.log() + decltype({x})({log_2}), "
        "{x} > decltype({x})({large}))"
    ),
}
"""C++ of a function of a vector `x`."""

HOOKS = (
    Hook(
        "vector_expm1",
        "replaced",
        (f"{_OVERRIDES}.expm1",),
        _OWNER,
        "expm1(x) is computed as exp(x) - 1.",
        parameters=("x",),
        until="2.14",
    ),
    Hook(
        "vector_atanh",
        "replaced",
        (f"{_OVERRIDES}.atanh",),
        _OWNER,
        "atanh(x) is computed as log((1 + x) / (1 - x)) / 2.",
        parameters=("x",),
    ),
    Hook(
        "vector_acosh",
        "replaced",
        (f"{_OVERRIDES}.acosh",),
        _OWNER,
        "acosh(x) is infinite if the square of x is.",
        parameters=("x",),
    ),
)


def install_hooks() -> None:
    """Install the dispatchers, once per process."""
    registry.install(HOOKS, {f"vector_{name}": _dispatch_function for name in _FORMULAS})


def _dispatch_function(stock: Callable[[Any], str]) -> Callable[[Any], str]:
    formula = _FORMULAS[stock.__name__]

    @functools.wraps(stock)
    def function(x: Any) -> str:
        if context.settings() is None:
            return stock(x)
        return formula.format(x=x, log_2=math.log(2), large=_LARGE)

    return function
