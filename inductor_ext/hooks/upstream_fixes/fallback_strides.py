"""Fixes for operators whose results have other strides than Inductor predicts.

Inductor predicts the strides of a fallback operator's result by running the operator on fake
tensors, and generates code that reads the result with these strides. The fake implementation of an
operator may be wrong. Inductor's generated code then fails in an assertion, or, in AOT packages and
with `size_asserts=False`, reads the wrong elements. Here a result with other strides is copied to
the predicted strides. A result of another size still fails the assertion.

Operators that Inductor lowers do not get strides with which the elements of a result overlap.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from inductor_ext.hooks import context, registry
from inductor_ext.hooks.registry import Hook

_OWNER = "hooks.upstream_fixes.fallback_strides"

HOOKS = (
    Hook(
        "fallback_strides",
        "replaced",
        ("torch._inductor.ir.ExternKernel.codegen_size_asserts",),
        _OWNER,
        "Inductor asserts here that the result of a kernel has the predicted strides. A result "
        "with other strides is copied instead.",
        parameters=("wrapper",),
        relies_on=(
            "torch._inductor.codegen.wrapper.WrapperLine",
            "torch._inductor.ir.FallbackKernel.get_inputs_that_alias_output",
            "torch._inductor.ir.MultiOutput",
            "torch._inductor.ir.ExternKernelAlloc",
        ),
        upstream="#196251",
    ),
    Hook(
        "scattered_strides",
        "replaced",
        ("torch._inductor.ir.ExternKernel.require_exact_strides",),
        _OWNER,
        "The fake implementations of as_strided_scatter and, until torch 2.13, slice_scatter, "
        "select_scatter and diagonal_scatter return the strides of an expanded input, with which "
        "the elements of the result overlap.",
        parameters=("x", "exact_strides"),
        relies_on=("torch._inductor.ir.ExpandView", "torch._inductor.ir.ReinterpretView"),
    ),
)


def install_hooks() -> None:
    """Install the dispatchers, once per process."""
    dispatchers = {
        "fallback_strides": _dispatch_codegen_size_asserts,
        "scattered_strides": _dispatch_require_exact_strides,
    }
    registry.install(HOOKS, dispatchers)


def _dispatch_require_exact_strides(stock: Callable[..., Any]) -> Callable[..., Any]:
    # `stock` is bound to its class: the dispatcher replaces a class method.
    @functools.wraps(stock)
    def require_exact_strides(x: Any, exact_strides: Any, *args: Any, **kwargs: Any) -> Any:
        if context.settings() is not None and exact_strides is not None:
            # A stride may be a symbol, whose comparison would be a guard.
            pairs = zip(x.get_size(), exact_strides, strict=True)
            if any(str(stride) == "0" and str(size) != "1" for size, stride in pairs):
                exact_strides = _without_overlap(x, exact_strides)
        return stock(x, exact_strides, *args, **kwargs)

    return require_exact_strides


def _without_overlap(x: Any, strides: Any) -> Any:
    """The strides of a tensor in memory of its own; `strides` if it is a view of other memory, or
    the result of an operator that Inductor does not lower, which exists with its strides.
    """
    from torch._inductor import ir

    value = x
    while isinstance(value, (ir.MutableBox, ir.BaseView)):
        if isinstance(value, (ir.ExpandView, ir.ReinterpretView)):
            return strides
        value = value.data
    if isinstance(value, (ir.InputBuffer, ir.MultiOutput, ir.ExternKernel)):
        return strides
    return ir.FlexibleLayout.contiguous_strides(x.get_size())


def _dispatch_codegen_size_asserts(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def codegen_size_asserts(self: Any, wrapper: Any) -> None:
        if context.settings() is not None and _is_predicted(self, wrapper):
            from torch._inductor.virtualized import V

            from inductor_ext.hooks.upstream_fixes.stride_lines import MatchStridesLine

            wrapper.writeline(MatchStridesLine.create(wrapper, self))
            if not V.graph.cpp_wrapper:
                return  # `match_strides` raises the assertion's error.
        stock(self, wrapper)

    return codegen_size_asserts


def _is_predicted(node: Any, wrapper: Any) -> bool:
    """Whether a node's buffer is allocated by its kernel, with strides from a fake tensor."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    if V.graph.cpp_wrapper and not hasattr(wrapper, "generate_match_strides"):
        return False
    if getattr(V.graph, "fx_wrapper", False) or V.graph.sizevars.statically_known_equals(
        node.get_numel(), 0
    ):
        return False
    if type(node) is ir.MultiOutput:
        kernel = node.inputs[0]
        # A copy of a result that is a view would no longer change with its base.
        return type(kernel) is ir.FallbackKernel and not kernel.get_inputs_that_alias_output()
    # From torch 2.14 on, a fallback operator with one result is that result's buffer.
    return (
        isinstance(node, ir.ExternKernelAlloc)
        and (type(node) is ir.FallbackKernel or not isinstance(node, ir.FallbackKernel))
        and not node.mutation_outputs
        and not node.get_mutation_names()
        and not node.get_inputs_that_alias_output()
    )
