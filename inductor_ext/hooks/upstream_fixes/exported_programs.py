"""Fixes for exported programs: their inputs and sizes, and constants' values and names."""

from __future__ import annotations

import functools
import keyword
from collections.abc import Callable
from typing import Any

from inductor_ext.hooks import context, registry
from inductor_ext.hooks.registry import Hook

HOOKS = (
    Hook(
        "exported_inputs",
        "replaced",
        ("torch._inductor.compile_fx._extract_inputs_from_exported_gm",),
        "hooks.upstream_fixes.exported_programs",
        "Inductor replaces the inputs of an exported program that are not tensors by None, and "
        "fails if the graph uses them.",
        parameters=("gm", "example_inputs_"),
    ),
    Hook(
        "constant_items",
        "replaced",
        ("torch._subclasses.fake_tensor.FakeTensorMode.may_turn_const",),
        "hooks.upstream_fixes.exported_programs",
        "The constants of an AOT package are real tensors during the compile, so a value that "
        "`item` reads from a buffer would be compiled in, although calls may change the buffer.",
    ),
    Hook(
        "short_constants",
        "replaced",
        ("torch._inductor.graph.GraphLowering.get_attr",),
        "hooks.upstream_fixes.exported_programs",
        "Parameters and buffers of at most 8 elements become literals of the code, which updates "
        "of the model's constants do not reach.",
        parameters=("target", "args", "kwargs"),
        relies_on=(
            "torch._inductor.graph.GraphLowering.add_tensor_constant",
            "torch._inductor.graph.GraphLowering.named_parameters",
            "torch._inductor.graph.GraphLowering.named_buffers",
        ),
    ),
    Hook(
        "scattered_constants",
        "replaced",
        ("torch._inductor.graph.GraphLowering.get_attr",),
        "hooks.upstream_fixes.exported_programs",
        "A tensor of no dimensions that `freezing` computes becomes a constant without a buffer, "
        "which the lowering of select_scatter does not accept.",
        relies_on=("torch._inductor.lowering.full", "torch._inductor.ir.Constant"),
    ),
    Hook(
        "uniform_constants",
        "replaced",
        ("torch._inductor.fx_passes.joint_graph.UniformValueConstantFolder._deduce_value",),
        "hooks.upstream_fixes.exported_programs",
        "Parameters and buffers of one element, and what is computed from them, become literals.",
        parameters=("node",),
        relies_on=("torch._inductor.constant_folding.ConstantFolder.unknown_value",),
    ),
    Hook(
        "constant_names",
        "replaced",
        ("torch._inductor.graph.GraphLowering.allocate_non_dup_const_name",),
        "hooks.upstream_fixes.exported_programs",
        "The generated C++ calls a constant by its name in the model, which may be a keyword, or a "
        "name of something else in the code. It gets a prefix.",
        parameters=("name", "data"),
        relies_on=(
            "torch._inductor.graph.GraphLowering.allocated_constant_name",
            "torch._inductor.graph.GraphLowering.dynamo_flat_name_to_original_fqn",
        ),
    ),
    Hook(
        "constant_views",
        "replaced",
        ("torch._inductor.graph.GraphLowering.add_tensor_constant",),
        "hooks.upstream_fixes.exported_programs",
        "A constant that `freezing` computes may be a conjugate or negated view. A package stores "
        "the elements of its memory, and a compile takes it for the tensor that it views.",
        parameters=("data", "name"),
    ),
    Hook(
        "smaller_sizes",
        "replaced",
        ("torch._inductor.sizevars.SizeVarAllocator.evaluate_min",),
        "hooks.upstream_fixes.exported_programs",
        "The length of a diagonal is the smaller one of the example's sizes. An AOT package gets "
        "other sizes, too, and accesses elements outside of the tensor.",
        parameters=("left", "right"),
        relies_on=("torch._inductor.sizevars.SizeVarAllocator.statically_known_leq",),
    ),
    Hook(
        "larger_sizes",
        "replaced",
        ("torch._inductor.sizevars.SizeVarAllocator.evaluate_max",),
        "hooks.upstream_fixes.exported_programs",
        "As `smaller_sizes`.",
        parameters=("left", "right"),
    ),
    Hook(
        "attribute_names",
        "replaced",
        ("torch.fx.graph._format_target",),
        "hooks.upstream_fixes.exported_programs",
        "The Python code of a graph reads a parameter named `class` as `self.class`.",
        parameters=("base", "target"),
    ),
)


def install_hooks() -> None:
    """Install the dispatchers, once per process."""
    dispatchers: dict[str, registry.MakeDispatcher] = {
        "exported_inputs": _dispatch_exported_inputs,
        "constant_items": _dispatch_may_turn_const,
        "short_constants": _dispatch_get_attr,
        "scattered_constants": _dispatch_get_number,
        "uniform_constants": _dispatch_deduce_value,
        "constant_names": _dispatch_allocate_constant,
        "constant_views": _dispatch_add_constant,
        "smaller_sizes": _dispatch_comparison("Min"),
        "larger_sizes": _dispatch_comparison("Max"),
        "attribute_names": _dispatch_format_target,
    }
    registry.install(HOOKS, dispatchers)


def _may_change(name: str) -> bool:
    """Whether the value of a constant may change after the compile."""
    from torch._inductor import config

    # A tensor that the program creates from numbers is no parameter or buffer.
    is_literal = name.startswith("_tensor_constant")
    return context.current().is_aot and not config.freezing and not is_literal


def _dispatch_get_attr(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def get_attr(self: Any, target: str, args: Any, kwargs: Any) -> Any:
        if _may_change(target):
            value = self.named_parameters.get(target, self.named_buffers.get(target))
            # torch copies a constant on the CPU, which a GPU kernel reads, under another name.
            if value is not None and value.device.type == self.device_type:
                return self.add_tensor_constant(value, target)
        return stock(self, target, args, kwargs)

    return get_attr


def _dispatch_get_number(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def get_attr(self: Any, target: str, args: Any, kwargs: Any) -> Any:
        import torch
        from torch._inductor import ir, lowering

        value = stock(self, target, args, kwargs)
        if context.settings() is None or not isinstance(value, ir.Constant):
            return value
        scatter = torch.ops.aten.select_scatter.default
        if all(user.target is not scatter for user in self.current_node.users):
            return value
        return lowering.full([], value.value, dtype=value.dtype, device=value.device)

    return get_attr


def _dispatch_deduce_value(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def deduce_value(self: Any, node: Any) -> Any:
        if node.op == "get_attr" and _may_change(node.target):
            return self.unknown_value
        return stock(self, node)

    return deduce_value


def _dispatch_allocate_constant(stock: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(stock)
    def allocate_non_dup_const_name(self: Any, name: str | None, data: Any) -> str:
        # Names of subgraphs' constants begin with the graph's name.
        if context.settings() is None or not self.aot_mode or self.name is not None:
            return stock(self, name, data)
        from inductor_ext.cpp_wrapper.codegen import constant_names

        return constant_names.allocate(self, name, data, stock)

    return allocate_non_dup_const_name


def _dispatch_add_constant(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def add_tensor_constant(self: Any, data: Any, name: str | None = None) -> Any:
        if context.settings() is not None and (data.is_conj() or data.is_neg()):
            data = data.new_empty_strided(data.shape, data.stride()).copy_(data)
        return stock(self, data, name)

    return add_tensor_constant


def _dispatch_comparison(function: str) -> registry.MakeDispatcher:
    """A dispatcher that keeps a function of two sizes, "Min" or "Max", as an expression."""

    def make(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def evaluate(self: Any, left: Any, right: Any) -> Any:
            if not _is_decided_by_example(self, left, right):
                return stock(self, left, right)
            from torch.utils._sympy import functions

            return getattr(functions, function)(left, right)

        return evaluate

    return make


def _is_decided_by_example(sizevars: Any, left: Any, right: Any) -> bool:
    """Whether only the inputs of the export decide which of two sizes is smaller."""
    if not context.current().is_aot or context.settings() is None:
        return False
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return not (
        free_unbacked_symbols([left, right])
        or sizevars.statically_known_leq(left, right)
        or sizevars.statically_known_leq(right, left)
    )


def _dispatch_format_target(stock: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(stock)
    def format_target(base: str, target: str) -> str:
        # An exported program becomes a module before the scope of the compile.
        if context.settings() is None and context.current().overrides is None:
            return stock(base, target)
        for part in target.split("."):
            is_plain = part.isidentifier() and not keyword.iskeyword(part)
            base = f"{base}.{part}" if is_plain else f"getattr({base}, {part!r})"
        return base

    return format_target


def _dispatch_may_turn_const(stock: Callable[..., bool]) -> Callable[..., bool]:
    # The attributes of an AOT graph are real tensors, and fake tensors constant-fold with them: a
    # value that `item` reads from a buffer would be the same in all calls, although the buffer
    # changes.
    @functools.wraps(stock)
    def may_turn_const(self: Any, tensor: Any) -> bool:
        return not context.current().is_aot and stock(self, tensor)

    return may_turn_const


def _dispatch_exported_inputs(stock: Callable[..., Any]) -> Callable[..., Any]:
    # Inductor replaces inputs that are not tensors by None, and fails if the graph uses them.
    @functools.wraps(stock)
    def extract_inputs(gm: Any, example_inputs: Any) -> Any:
        inputs = stock(gm, example_inputs)
        if context.settings() is None:
            return inputs
        from inductor_ext.cpp_wrapper.signature import from_export

        return from_export.restore_scalar_inputs(gm, inputs)

    return extract_inputs
