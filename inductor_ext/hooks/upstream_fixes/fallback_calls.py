"""Fixes for operators that generated code calls by name: how their arguments are passed.

`cpp_wrapper/codegen/fallback_calls` generates the calls in C++.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

from inductor_ext.hooks import context, registry
from inductor_ext.hooks.registry import Hook
from inductor_ext.hooks.wrapper_codegen import root_wrapper

_KERNEL = "torch._inductor.ir.FallbackKernel"

HOOKS = (
    Hook(
        "fallback_arguments",
        "replaced",
        (f"{_KERNEL}.export_extern_kernel_node",),
        "hooks.upstream_fixes.fallback_calls",
        "Omitted arguments are counted among those of a call, but not passed, and many values of "
        "Scalar arguments and lists fail. Every argument is passed, with the type of the schema.",
        relies_on=(
            f"{_KERNEL}.codegen",
            "torch._inductor.ir.ExternKernel.cpp_kernel_name",
            "torch._inductor.virtualized._V.extern_kernel_nodes",
            "torch._export.serde.serialize.GraphModuleSerializer.serialize_inputs",
        ),
        upstream="171850",
    ),
    Hook(
        "fallback_shims",
        "replaced",
        (f"{_KERNEL}.codegen",),
        "hooks.upstream_fixes.fallback_calls",
        "C shims take a Scalar as double: an integer power of integers would be a float tensor. A "
        "number in place of a tensor would be a tensor of another dtype.",
        parameters=("wrapper",),
    ),
    Hook(
        "fallback_numbers",
        "replaced",
        ("torch._inductor.ir.ExternKernel.process_kernel",),
        "hooks.upstream_fixes.fallback_calls",
        "Inductor makes an integer of a symbolic float that an operator takes, and expects a "
        "result of an integer dtype. It takes the storage offset of every view for 0.",
        parameters=("kernel",),
        relies_on=(
            "torch.fx.experimental.symbolic_shapes.ShapeEnv.create_symfloatnode",
            "torch.fx.experimental.symbolic_shapes.ShapeEnv.create_symboolnode",
        ),
    ),
    Hook(
        "infinite_numbers",
        "replaced",
        ("torch._inductor.codegen.wrapper.PythonWrapperCodegen.val_to_arg_str",),
        "hooks.upstream_fixes.fallback_calls",
        "Generated Python code writes infinite complex numbers as `(1+infj)`, but does not import "
        "the name `infj`.",
        parameters=("self", "s"),
    ),
    Hook(
        "complex_mutation",
        "replaced",
        ("torch._inductor.pattern_matcher.fallback_node_due_to_unsupported_type",),
        "hooks.upstream_fixes.fallback_calls",
        "The pass that replaces auto_functionalized by the operator itself skips nodes with "
        "complex tensors, and the compile fails.",
        parameters=("node", "allow_cpu_inputs"),
        relies_on=("torch._inductor.fx_passes.post_grad.decompose_auto_functionalized",),
    ),
)


def install_hooks() -> None:
    """Install the dispatchers, once per process."""
    dispatchers = {
        "fallback_arguments": _dispatch_export,
        "fallback_shims": _dispatch_codegen,
        "fallback_numbers": _dispatch_process_kernel,
        "infinite_numbers": _dispatch_argument,
        "complex_mutation": _dispatch_unsupported_type,
    }
    registry.install(HOOKS, dispatchers)


def _dispatch_export(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def export_extern_kernel_node(self: Any) -> Any:
        if context.settings() is None:
            return stock(self)
        from inductor_ext.cpp_wrapper.codegen import fallback_calls

        values = _complete_arguments(self)
        if values is not None:
            return fallback_calls.export(self, values, stock)
        with fallback_calls.name_operator(self.op_overload):
            return stock(self)

    return export_extern_kernel_node


def _dispatch_codegen(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def codegen(self: Any, wrapper: Any) -> Any:
        if context.settings() is not None and not self.use_runtime_dispatch:
            self.use_runtime_dispatch = _needs_dispatch(self)
        return stock(self, wrapper)

    return codegen


def _dispatch_process_kernel(stock: Callable[..., Any]) -> Callable[..., Any]:
    # `stock` is bound to its class: the dispatcher replaces a class method.
    @functools.wraps(stock)
    def process_kernel(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if context.settings() is not None:
            from torch.utils import _pytree

            args, kwargs = _pytree.tree_map(_with_class_of_number, (args, kwargs))
        result = stock(kernel, *args, **kwargs)
        if context.settings() is not None and _is_storage_offset(kernel):
            from torch._inductor.virtualized import V

            offset = V.graph.current_node.meta["val"]
            if isinstance(result, tuple):
                return (offset, *result[1:])
            # From torch 2.14.
            return dataclasses.replace(result, example_output=offset)
        return result

    return process_kernel


def _is_storage_offset(kernel: Any) -> bool:
    import torch

    return bool(kernel == torch.ops.aten.sym_storage_offset.default)


def _with_class_of_number(value: Any) -> Any:
    """Return a SymFloat or SymBool for an expression that is no integer; else the value."""
    import sympy  # type: ignore[import-untyped]
    from torch._inductor.virtualized import V

    if not isinstance(value, sympy.Basic) or isinstance(value, sympy.Number):
        return value
    from inductor_ext.cpp_wrapper.codegen import fallback_arguments

    class_ = fallback_arguments.number_class(value)
    shape_env = V.graph.sizevars.shape_env
    if class_ is float:
        return shape_env.create_symfloatnode(value, hint=None)
    if class_ is bool and value not in (sympy.true, sympy.false):
        return shape_env.create_symboolnode(value)
    return value


def _dispatch_argument(stock: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(stock)
    def val_to_arg_str(self: Any, s: Any, *args: Any, **kwargs: Any) -> str:
        is_complex = isinstance(s, complex) and context.settings() is not None
        if is_complex and math.isinf(s.imag) and not _is_cpp():
            root_wrapper(self).add_import_once("from cmath import infj")
        return stock(self, s, *args, **kwargs)

    return val_to_arg_str


def _is_cpp() -> bool:
    from torch._inductor.virtualized import V

    return bool(V.graph.cpp_wrapper)


def _dispatch_unsupported_type(stock: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(stock)
    def fallback_node_due_to_unsupported_type(node: Any, allow_cpu_inputs: bool = True) -> bool:
        if context.settings() is not None and node.target in _functionalized_operators():
            return False
        return stock(node, allow_cpu_inputs)

    return fallback_node_due_to_unsupported_type


@functools.cache
def _functionalized_operators() -> frozenset[Any]:
    import torch

    names = ("auto_functionalized", "auto_functionalized_v2", "triton_kernel_wrapper_functional")
    operators = torch.ops.higher_order
    return frozenset(getattr(operators, name) for name in names if hasattr(operators, name))


def _needs_dispatch(kernel: Any) -> bool:
    """Whether torch would call a C shim that changes an argument's type."""
    from torch._inductor.virtualized import V

    if not V.graph.cpp_wrapper or getattr(kernel.op_overload, "namespace", "") != "aten":
        return False
    from inductor_ext.cpp_wrapper.codegen import fallback_arguments

    values = _complete_arguments(kernel)
    return values is not None and fallback_arguments.loses_type_in_shim(kernel.op_overload, values)


def _complete_arguments(kernel: Any) -> Any:
    """Return the values of a call that the extension generates; None if torch generates it."""
    import torch
    from torch._inductor.virtualized import V

    from inductor_ext.cpp_wrapper.codegen import fallback_arguments, fallback_calls

    op = kernel.op_overload
    wrapper = V.graph.wrapper_code
    if not isinstance(op, torch._ops.OpOverload):
        return None
    if not isinstance(wrapper, fallback_calls.FallbackCalls):
        return None
    args, kwargs = kernel.unflatten_args(kernel.inputs, kernel.constant_args)
    values = fallback_arguments.complete(op, args, {**kernel.kwargs, **kwargs})
    return values if fallback_calls.can_generate(op, values) else None
