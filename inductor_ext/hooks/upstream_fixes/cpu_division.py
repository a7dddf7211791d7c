"""Fixes for the division of integers in C++.

The processor's division ends the process if the divisor is zero, and for -1 if the quotient
overflows. Eager mode raises an error for zero, and the quotient wraps around. Inductor checks the
divisor in none of its functions (torch 2.11), or not in a truncated division. Where it does, it
also divides in the lanes of a vector that are not used, such as the border of `pad(x // y)`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from inductor_ext.hooks import context, registry
from inductor_ext.hooks.registry import Hook

_CODEGEN = "torch._inductor.codegen.cpp"

_SIGNS_DIFFER = "a % b != 0 && (a < 0) != (b < 0)"
_RESULTS = {
    "truncdiv": ("a / b", "0 - U(a)"),
    "floordiv": (f"a / b - ({_SIGNS_DIFFER})", "0 - U(a)"),
    "mod": ("a % b", "0"),
    "remainder": (f"a % b + ({_SIGNS_DIFFER} ? b : T(0))", "0"),
}
"""C++ of the result by the operation of Inductor's IR, for other divisors and for -1.

`a` and `b` are numbers of the type `T`, `U` is the unsigned one of the same size.
"""

_SCALAR = ("truncdiv", "floordiv", "mod")
_VECTOR = ("truncdiv", "floordiv", "remainder")
_OWNER = "hooks.upstream_fixes.cpu_division"
_WHY = (
    "A division by zero, or by -1 if it overflows, ends the process; or lanes of a vector that "
    "are not used are divided by zero, which is an error."
)

HOOKS = (
    *(
        Hook(
            f"{kind}_integer_{operation}",
            "replaced",
            (f"{_CODEGEN}.{owner}.{operation}",),
            _OWNER,
            _WHY,
            parameters=("a", "b"),
            relies_on=(f"{_CODEGEN}.CppKernel.assert_function",),
        )
        for kind, owner, operations in (
            ("scalar", "CppOverrides", _SCALAR),
            ("vector", "CppVecOverrides", _VECTOR),
        )
        for operation in operations
    ),
    Hook(
        "vector_integer_mod",
        "replaced",
        (f"{_CODEGEN}.CppVecOverrides.__new__",),
        _OWNER,
        f"{_WHY} Inductor makes this operation of that of numbers when it is imported.",
    ),
)


def install_hooks() -> None:
    """Install the dispatchers, once per process."""
    dispatchers = {hook.name: _dispatch_division for hook in HOOKS}
    registry.install(HOOKS, {**dispatchers, "vector_integer_mod": _dispatch_create})


def _dispatch_division(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def operation(a: Any, b: Any) -> Any:
        if context.settings() is None or not (_is_integer(a) and _is_integer(b)):
            return stock(a, b)
        from torch._inductor.virtualized import V

        divide = _divide(stock.__name__, V.kernel.assert_function)
        if a.is_vec or b.is_vec:
            return _divide_lanes(divide, a, b)
        return f"{divide}({a}, {b})"

    return operation


def _dispatch_create(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:
        self = stock(cls, *args, **kwargs)
        if context.settings() is not None:
            self.mod = functools.partial(_mod, self.mod)
        return self

    return __new__


def _mod(stock: Callable[..., Any], a: Any, b: Any) -> Any:
    """The remainder of a truncated division."""
    if not (_is_integer(a) and _is_integer(b) and (a.is_vec or b.is_vec)):
        return stock(a, b)
    from torch._inductor.virtualized import V

    return V.ops.sub(a, V.ops.mul(V.ops.truncdiv(a, b), b))


def _is_integer(value: Any) -> bool:
    """Whether a value is a variable of an integer dtype, not bool."""
    import torch

    dtype = getattr(value, "dtype", None)
    if not isinstance(dtype, torch.dtype) or dtype == torch.bool:
        return False
    return not (dtype.is_floating_point or dtype.is_complex)


def _divide(operation: str, check: str) -> str:
    """A C++ function of two numbers."""
    usual, by_minus_one = _RESULTS[operation]
    return (
        "[](auto x, auto y) { using T = std::common_type_t<decltype(x), decltype(y)>; "
        "using U [[maybe_unused]] = std::make_unsigned_t<T>; const T a = x, b = y; "
        f'{check}(b != 0, "ZeroDivisionError"); '
        f"if (std::is_signed_v<T> && b == T(-1)) return T({by_minus_one}); return T({usual}); }}"
    )


def _divide_lanes(divide: str, a: Any, b: Any) -> str:
    """Divide the lanes of the kernel's iterations where the mask of a masked block is true."""
    from torch._inductor.codegen.cpp_utils import cexpr_index
    from torch._inductor.virtualized import V

    kernel = V.kernel
    count = kernel.tail_size or kernel.tiling_factor
    mask = kernel._load_mask
    used = f"if ({mask}.is_masked(i)) " if mask is not None and mask.is_vec else ""
    return (
        "[&](auto x, auto y) { using V = decltype(x); using T = typename V::value_type; "
        "alignas(64) T a[V::size()], b[V::size()]; x.store(a); y.store(b); "
        f"for (int64_t i = 0; i < {cexpr_index(count)}; ++i) {used}a[i] = {divide}(a[i], b[i]); "
        f"return V::loadu(a); }}({a}, {b})"
    )
