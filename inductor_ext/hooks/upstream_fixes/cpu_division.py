"""Fixes for the division of integers in C++.

The processor's division ends the process if the divisor is zero, and for -1 if the quotient
overflows. Eager mode raises an error for zero, and the quotient wraps around. Inductor checks the
divisor in none of its functions (torch 2.11), or not in a truncated division. Where it does, it
also divides in the lanes of a vector that are not used, such as the border of `pad(x // y)`. From
torch 2.13 on, its kernels report a zero by a global pointer to a local variable, which kernels that
run at the same time overwrite. The divisions here need no such pointer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from inductor_ext.hooks import context, registry
from inductor_ext.hooks.registry import Hook
from inductor_ext.hooks.upstream_fixes.parallel_errors import dispatch_kernels

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
        "broadcast_bounds",
        "replaced",
        (f"{_CODEGEN}.CppVecKernel.broadcast",),
        _OWNER,
        "The bounds of a number are not known of the vector that is made of it. If a divisor is "
        "positive, Inductor's code needs no check.",
        parameters=("scalar_var",),
    ),
    Hook(
        "vector_integer_mod",
        "replaced",
        (f"{_CODEGEN}.CppVecOverrides.__new__",),
        _OWNER,
        f"{_WHY} Inductor makes this operation of that of numbers when it is imported.",
    ),
    Hook(
        "division_flag",
        "replaced",
        (f"{_CODEGEN}.CppScheduling.define_kernel",),
        _OWNER,
        "Kernels that run at the same time write the same global pointer, which can be left "
        "pointing to memory that is no longer in use.",
        parameters=("src_code",),
        since="2.13",
    ),
)

_FLAG = "inductor_cpu_integer_div_error"


def install_hooks() -> None:
    """Install the dispatchers, once per process."""
    dispatchers: dict[str, registry.MakeDispatcher] = {
        hook.name: _dispatch_division for hook in HOOKS
    }
    dispatchers["broadcast_bounds"] = _dispatch_broadcast
    dispatchers["vector_integer_mod"] = _dispatch_create
    dispatchers["division_flag"] = dispatch_kernels(remove_flag)
    registry.install(HOOKS, dispatchers)


def remove_flag(source: str) -> str:
    """Return a C++ kernel without the statements on Inductor's flag for divisions by zero."""
    if _FLAG not in source:
        return source
    return "\n".join(line for line in source.split("\n") if _FLAG not in line)


def _dispatch_division(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def operation(a: Any, b: Any) -> Any:
        if context.settings() is None or not (_is_integer(a) and _is_integer(b)):
            return stock(a, b)
        if b.is_vec and b.bounds.lower > 0:
            return stock(a, b)
        if a.is_vec or b.is_vec:
            return _divide_lanes(stock.__name__, a, b)
        return f"{_divide(stock.__name__)}({a}, {b})"

    return operation


def _dispatch_broadcast(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def broadcast(self: Any, scalar_var: Any) -> Any:
        vector = stock(self, scalar_var)
        if context.settings() is not None:
            vector.bounds = scalar_var.bounds
        return vector

    return broadcast


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


_IS_RARE = "U(U(b) + U(1)) <= U(1)"
"""Whether `b` is 0, or -1, or the greatest unsigned number."""


def _divide(operation: str) -> str:
    """A C++ function of two numbers."""
    from torch._inductor.virtualized import V

    usual, by_minus_one = _RESULTS[operation]
    return (
        "[](auto x, auto y) { using T = std::common_type_t<decltype(x), decltype(y)>; "
        "using U = std::make_unsigned_t<T>; const T a = x, b = y; "
        f"if (C10_UNLIKELY({_IS_RARE})) {{ "
        f'{V.kernel.assert_function}(b != 0, "ZeroDivisionError"); '
        f"if (std::is_signed_v<T>) return T({by_minus_one}); }} return T({usual}); }}"
    )


def _divide_lanes(operation: str, a: Any, b: Any) -> str:
    """Divide the lanes of the kernel's iterations where the mask of a masked block is true.

    A loop without a check can be vectorized if the divisor is a constant.
    """
    from torch._inductor.codegen.cpp_utils import cexpr_index
    from torch._inductor.virtualized import V

    kernel, mask = V.kernel, V.kernel._load_mask
    lanes = f"for (int64_t i = 0; i < {cexpr_index(kernel.tail_size or kernel.tiling_factor)}; ++i)"
    unused = ""
    if mask is not None and mask.is_vec:
        unused = f"{lanes} if (!{mask}.is_masked(i)) ys[i] = 1; "
    return (
        "[&](auto x, auto y) { using V = decltype(x); using T = typename V::value_type; "
        "using U = std::make_unsigned_t<T>; alignas(64) T xs[V::size()], ys[V::size()]; "
        f"x.store(xs); y.store(ys); {unused}"
        f"bool rare = false; {lanes} {{ const T b = ys[i]; rare |= {_IS_RARE}; }} "
        f"if (C10_UNLIKELY(rare)) {{ {lanes} xs[i] = {_divide(operation)}(xs[i], ys[i]); }} else "
        f"{lanes} {{ const T a = xs[i], b = ys[i]; xs[i] = T({_RESULTS[operation][0]}); }} "
        f"return V::loadu(xs); }}({a}, {b})"
    )
