"""Fixes for vectorized reductions in the C++ kernels of Inductor."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from inductor_ext.hooks import context, registry
from inductor_ext.hooks.registry import Hook

HOOKS = (
    Hook(
        "vector_reduction",
        "replaced",
        ("torch._inductor.codegen.cpp.CppVecKernel.reduction",),
        "hooks.upstream_fixes.cpu_reductions",
        "A vector of 8-bit integers has more lanes than a kernel loads elements, but all lanes "
        "enter the result of a reduction. Reductions of bool take a mask for a number, or do not "
        "compile.",
        parameters=("dtype", "src_dtype", "reduction_type", "value"),
        relies_on=(
            "torch._inductor.codegen.cpp.reduction_combine",
            "torch._inductor.codegen.cpp_utils.unify_mask_base_type",
            "torch._inductor.codegen.cpp.CppVecKernel._get_raw_num_vectors",
            "torch._inductor.codegen.cpp.CppVecKernel._get_vec_type",
        ),
        upstream="191499",
    ),
    Hook(
        "vector_combination",
        "replaced",
        ("torch._inductor.codegen.cpp.CppVecKernel.reduction_combine_vec",),
        "hooks.upstream_fixes.cpu_reductions",
        "In the tail of a loop, Inductor combines masks by a function that masks of two vectors "
        "do not have. In torch 2.11 and 2.12, the index of argmin and argmax in a kernel with two "
        "tiled loops lacks the position in the outer tile.",
        parameters=("reduction_type", "var", "next_value", "index", "src_dtype"),
        relies_on=("torch._inductor.codegen.cpp.CppTile2DKernel.transform_indexing",),
        upstream="178964",
    ),
    Hook(
        "repeated_results",
        "replaced",
        ("torch._inductor.codegen.cpp.CppVecKernel.store_reduction",),
        "hooks.upstream_fixes.cpu_reductions",
        "A kernel that stores the result of a reduction in float16 or bfloat16 twice declares the "
        "converted value twice.",
        parameters=("name", "index", "value"),
        relies_on=("torch._inductor.codegen.common.DeferredLine",),
    ),
    Hook(
        "tail_suffix",
        "replaced",
        ("torch._inductor.codegen.cpp.CppKernelProxy.aggregate_reduction_buffers",),
        "hooks.upstream_fixes.cpu_reductions",
        "Results of a reduction are stored as full vectors also by the tail of a tiled loop, if "
        "another loop is between that loop and the reduction.",
        parameters=("inner_loop_reduction_outer_not", "outer_loop"),
        upstream="196681",
    ),
)


def install_hooks() -> None:
    """Install the dispatchers, once per process."""
    registry.install(
        HOOKS,
        {
            "vector_reduction": _dispatch_reduction,
            "vector_combination": _dispatch_combination,
            "repeated_results": _dispatch_store_reduction,
            "tail_suffix": _dispatch_tail_suffix,
        },
    )


def _dispatch_reduction(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def reduction(self: Any, dtype: Any, src_dtype: Any, reduction_type: str, value: Any) -> Any:
        if context.settings() is None:
            return stock(self, dtype, src_dtype, reduction_type, value)
        src_dtype, reduction_type, value = _legalize_bool(src_dtype, reduction_type, value)
        lines = self.reduction_suffix._lines
        line_count = len(lines)
        result = stock(self, dtype, src_dtype, reduction_type, value)
        # A result that the kernel has already computed adds no line.
        if len(lines) > line_count:
            is_index = reduction_type in ("argmin", "argmax")
            code = _reduce_active_lanes(self, reduction_type, src_dtype if is_index else dtype)
            if code:
                lines[-1] = code
        return result

    return reduction


def _legalize_bool(src_dtype: Any, reduction_type: str, value: Any) -> tuple[Any, str, Any]:
    """Return dtype, type and operand for which Inductor generates correct code.

    A vector of bool is a mask, with as many lanes and bits as the dtype that was compared. Inductor
    combines masks of 32 bits only. Compared as floating-point values, their bits are NaN.
    """
    import torch
    from torch._inductor.codegen.cpp_utils import unify_mask_base_type
    from torch._inductor.virtualized import V, ops

    if src_dtype != torch.bool:
        return src_dtype, reduction_type, value
    if reduction_type in ("argmin", "argmax"):
        operand, *index = value if isinstance(value, tuple) else (value,)
        number = ops.to_dtype(operand, torch.float, src_dtype=torch.bool).value
        return torch.float, reduction_type, (number, *index) if index else number
    if value.is_vec:
        (mask,) = unify_mask_base_type(V.kernel.compute, (value,))
        mask.dtype, mask.is_vec = torch.bool, True
        mask.dependent_itervars = value.dependent_itervars
        value = mask
    # Inductor generates no code for the maximum.
    return src_dtype, "any" if reduction_type == "max" else reduction_type, value


def _dispatch_combination(stock: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(stock)
    def reduction_combine_vec(
        self: Any, reduction_type: str, var: Any, next_value: Any, *args: Any, **kwargs: Any
    ) -> str:
        import torch
        from torch._inductor.codegen import cpp

        if context.settings() is None:
            return stock(self, reduction_type, var, next_value, *args, **kwargs)
        if _lacks_position_in_tile(self, reduction_type) and kwargs.get("index") is not None:
            kwargs["index"] = self.transform_indexing(kwargs["index"])
        is_mask = reduction_type == "min" and kwargs.get("src_dtype") == torch.bool
        if is_mask and self.tail_size:
            tail_size = cpp.cexpr_index(self.tail_size)
            return f"decltype({var})::set({var}, {var} & {next_value}, {tail_size})"
        return stock(self, reduction_type, var, next_value, *args, **kwargs)

    return reduction_combine_vec


def _lacks_position_in_tile(kernel: Any, reduction_type: str) -> bool:
    """Whether Inductor omits the position in the outer tile from the index of a reduction."""
    from torch._inductor.codegen import cpp

    is_tiled_twice = isinstance(kernel, cpp.CppTile2DKernel)
    # The method adds the position since torch 2.13.
    is_fixed = hasattr(kernel, "_adjust_argreduce_index")
    return is_tiled_twice and not is_fixed and reduction_type in ("argmin", "argmax")


def _reduce_active_lanes(kernel: Any, reduction_type: str, dtype: Any) -> str:
    """Return C++ that reduces the accumulator's lanes with elements; empty if all have elements.

    A kernel loads `tiling_factor` elements at a time, as many as a vector has lanes of 32 bits (of
    16 bits, if the kernel computes in a 16-bit floating-point dtype). A vector of 8-bit integers
    has more lanes. The others contain what the computation makes of zeros.
    """
    import torch
    from torch._inductor.codegen import cpp

    is_horizontal = kernel.tiling_idx >= kernel.reduction_depth
    # Vectors of other dtypes are computed in 32 bits or more.
    if not is_horizontal or dtype not in (torch.int8, torch.uint8):
        return ""
    if kernel._get_raw_num_vectors(dtype) >= 1:
        return ""
    # The names of the scalar and of the vector that this reduction has just added.
    accumulator, vector = kernel.reduction_var_names[-3:-1]
    vector_type = kernel._get_vec_type(dtype)
    declare = "__at_align__ std::array<{0}, {1}::size()> {2}; {3}.store({2}.data());"
    scalar_type = cpp.DTYPE_TO_CPP[dtype]
    if reduction_type in ("argmin", "argmax"):
        index_type = kernel._get_vec_type(torch.int64)
        load = declare.format(scalar_type, vector_type, "values", f"{vector}.value")
        load += declare.format("int64_t", index_type, "indices", f"{vector}.index")
        combined = f"{reduction_type}_combine({accumulator}, values[lane], indices[lane])"
    else:
        load = declare.format(scalar_type, vector_type, "values", vector)
        combined = cpp.reduction_combine(reduction_type, accumulator, "values[lane]")
    loop = f"for (int lane = 0; lane < {kernel.tiling_factor}; lane++)"
    return f"{{ {load} {loop} {accumulator} = {combined}; }}"


def _dispatch_store_reduction(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def store_reduction(self: Any, name: str, index: Any, value: Any) -> None:
        lines = self.reduction_suffix._lines
        line_count = len(lines)
        stock(self, name, index, value)
        if context.settings() is None or len(lines) <= line_count + 1:
            return
        from torch._inductor.codegen.common import DeferredLine

        # The lines are dropped together if nothing reads the buffer.
        lines.insert(line_count, DeferredLine(name, "{"))
        lines.append(DeferredLine(name, "}"))

    return store_reduction


def _dispatch_tail_suffix(stock: Callable[..., Any]) -> Callable[..., Any]:
    # Inductor has code that stores the results of the tail separately. It runs only if the loop
    # directly inside the tiled loop is the reduction.
    @functools.wraps(stock)
    def aggregate_reduction_buffers(
        self: Any, inner_loop_reduction_outer_not: bool, outer_loop: Any
    ) -> None:
        if context.settings() is not None and outer_loop is not None:
            inner_loop_reduction_outer_not |= _is_around_reduction(self.loop_nest.loops, outer_loop)
        stock(self, inner_loop_reduction_outer_not, outer_loop)

    return aggregate_reduction_buffers


def _is_around_reduction(loops: Any, tiled: Any) -> bool:
    """Whether a tiled loop is not a reduction and a loop inside it is."""
    position = next(i for i, loop in enumerate(loops) if loop.var == tiled.var)
    return not tiled.is_reduction and any(loop.is_reduction for loop in loops[position + 1 :])
