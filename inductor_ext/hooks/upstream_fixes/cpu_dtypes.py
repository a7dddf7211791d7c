"""Fixes for C++ kernels that compute a number in another dtype than Inductor assumes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from inductor_ext.hooks import context, registry
from inductor_ext.hooks.registry import Hook

_INT_RESULTS = ("abs", "sign")
"""Operations of Inductor's IR whose C++ code has the type int for smaller integers."""

_ROUNDED = {"rounded_numbers": "CppOverrides", "rounded_vectors": "CppVecOverrides"}
"""Names of hooks, and the classes that they are about."""

HOOKS = (
    *(
        Hook(
            f"small_integer_{name}",
            "replaced",
            (f"torch._inductor.codegen.cpp.CppOverrides.{name}",),
            "hooks.upstream_fixes.cpu_dtypes",
            "The result for integers of 8 or 16 bits is an int in C++. Functions of two numbers "
            "of one type, such as the combination of a reduction, do not compile.",
        )
        for name in _INT_RESULTS
    ),
    Hook(
        "float8_conversion",
        "replaced",
        ("torch._inductor.codegen.cpp.CppVecKernel.get_to_dtype_expr",),
        "hooks.upstream_fixes.cpu_dtypes",
        "Vectors of an 8-bit floating-point dtype can be converted only to and from float.",
        parameters=("src", "dtype", "src_dtype"),
    ),
    *(
        Hook(
            name,
            "replaced",
            (f"torch._inductor.codegen.cpp.{owner}.to_dtype",),
            "hooks.upstream_fixes.cpu_dtypes",
            "A value that is rounded to 16 bits and converted back is taken for the value before "
            "that, if the kernel also stores it: one side of a comparison is not rounded.",
            parameters=("x", "dtype", "src_dtype", "use_compute_types"),
            relies_on=("torch._inductor.codegen.cpp.CppKernel.cache_dtype_convert",),
        )
        for name, owner in _ROUNDED.items()
    ),
    Hook(
        "masked_booleans",
        "replaced",
        ("torch._inductor.codegen.cpp.CppVecOverrides.masked",),
        "hooks.upstream_fixes.cpu_dtypes",
        "The Booleans of a masked block are taken for a mask of float vectors. Those of integers "
        "and float64, as in `pad(x > 3)`, are a mask of such vectors, and do not compile.",
        parameters=("mask", "body", "other"),
        relies_on=("torch._inductor.codegen.cpp.CppVecKernel._get_mask_cast",),
    ),
)


def install_hooks() -> None:
    """Install the dispatchers, once per process."""
    dispatchers = {f"small_integer_{name}": _dispatch_small_integers for name in _INT_RESULTS}
    dispatchers |= {
        "float8_conversion": _dispatch_conversion,
        "masked_booleans": _dispatch_masked,
        **dict.fromkeys(_ROUNDED, _dispatch_to_dtype),
    }
    registry.install(HOOKS, dispatchers)


def _dispatch_small_integers(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def operation(x: Any, *others: Any) -> Any:
        from torch._inductor.virtualized import V

        code = stock(x, *others)
        dtype = getattr(x, "dtype", None)
        if context.settings() is None or not _is_small_integer(dtype):
            return code
        number = V.kernel.cse.generate(V.kernel.compute, code, dtype=dtype)
        return f"decltype({x})({number})"

    return operation


def _is_small_integer(dtype: Any) -> bool:
    import torch

    return dtype in (torch.int8, torch.uint8, torch.int16, torch.uint16)


def _dispatch_conversion(stock: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(stock)
    def get_to_dtype_expr(
        self: Any, src: Any, dtype: Any, src_dtype: Any, *args: Any, **kwargs: Any
    ) -> str:
        import torch

        # The dtype of some values is unknown.
        is_unsupported = (
            None not in (dtype, src_dtype)
            and dtype != src_dtype
            and torch.float not in (dtype, src_dtype)
            and (_is_float8(dtype) or _is_float8(src_dtype))
        )
        if context.settings() is not None and src.is_vec and is_unsupported:
            number = self.cse.generate(self.compute, stock(self, src, torch.float, src_dtype))
            number.dtype, number.is_vec = torch.float, True
            number.dependent_itervars = src.dependent_itervars
            src, src_dtype = number, torch.float
        return stock(self, src, dtype, src_dtype, *args, **kwargs)

    return get_to_dtype_expr


def _dispatch_to_dtype(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def to_dtype(x: Any, dtype: Any, src_dtype: Any = None, use_compute_types: bool = True) -> Any:
        import torch

        is_rounded = not use_compute_types and dtype in (torch.float16, torch.bfloat16)
        if context.settings() is None or not is_rounded or x.dtype != torch.float32:
            return stock(x, dtype, src_dtype, use_compute_types)
        from torch._inductor.virtualized import V

        # Another text than that of the conversion of a store, whose inverse is x.
        code = f"({V.kernel.get_to_dtype_expr(x, dtype, x.dtype)})"
        number = V.kernel.cse.generate(V.kernel.compute, code)
        number.update_on_args("to_dtype", (x, dtype), {"src_dtype": x.dtype})
        return number

    return to_dtype


def _is_float8(dtype: Any) -> bool:
    return bool(dtype.is_floating_point) and dtype.itemsize == 1


def _dispatch_masked(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def masked(mask: Any, body: Callable[[], Any], other: Any) -> Any:
        if context.settings() is not None:
            body = functools.partial(_cast_mask, body)
        return stock(mask, body, other)

    return masked


def _cast_mask(body: Callable[[], Any]) -> Any:
    """Return the result of a masked block; as a mask of float vectors if it is a mask."""
    import torch
    from torch._inductor.virtualized import V

    result = body()
    if result.dtype != torch.bool or not result.is_vec:
        return result
    code = V.kernel._get_mask_cast(result, torch.float)
    cast = V.kernel.cse.generate(V.kernel.compute, code, dtype=torch.bool)
    cast.is_vec = True
    return cast
