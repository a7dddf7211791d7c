"""Fixes for exported programs: inputs that are not tensors, and constants that change."""

from __future__ import annotations

import functools
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
)


def install_hooks() -> None:
    """Install the dispatchers, once per process."""
    dispatchers = {
        "exported_inputs": _dispatch_exported_inputs,
        "constant_items": _dispatch_may_turn_const,
    }
    registry.install(HOOKS, dispatchers)


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
