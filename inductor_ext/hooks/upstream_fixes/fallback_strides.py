"""Fixes for operators whose results have other strides than Inductor predicts.

Inductor predicts the strides of a fallback operator's result by running the operator on fake
tensors, and generates code that reads the result with these strides. The fake implementation of an
operator may be wrong. Inductor's generated code then fails in an assertion, or, in AOT packages and
with `size_asserts=False`, reads the wrong elements. Here a result with other strides is copied to
the predicted strides. A result of another size still fails the assertion.
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
)


def install_hooks() -> None:
    """Install the dispatchers, once per process."""
    registry.install(HOOKS, {"fallback_strides": _dispatch_codegen_size_asserts})


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
