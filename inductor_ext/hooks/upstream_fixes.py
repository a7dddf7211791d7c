"""Workarounds for Inductor bugs, in effect only in compiles of the extension.

Each is declared with the first torch release that no longer needs it, if known.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from inductor_ext import _compat
from inductor_ext.hooks import context, registry
from inductor_ext.hooks.registry import Hook

HOOKS = (
    Hook(
        "exported_inputs",
        "replaced",
        ("torch._inductor.compile_fx._extract_inputs_from_exported_gm",),
        "hooks.upstream_fixes",
        "Inductor replaces the inputs of an exported program that are not tensors by None, and "
        "fails if the graph uses them.",
        parameters=("gm", "example_inputs_"),
    ),
    Hook(
        "constant_items",
        "replaced",
        ("torch._subclasses.fake_tensor.FakeTensorMode.may_turn_const",),
        "hooks.upstream_fixes",
        "The constants of an AOT package are real tensors during the compile, so a value that "
        "`item` reads from a buffer would be compiled in, although calls may change the buffer.",
    ),
    Hook(
        "branch_symbols",
        "replaced",
        (
            "torch._inductor.ir.Switch.get_free_symbol_uses",
            "torch._inductor.ir.Conditional.get_free_symbol_uses",
        ),
        "hooks.upstream_fixes",
        "A predicate such as u0 > 2 is a relation, in which Inductor finds no symbols: the code "
        "that computes u0 is removed as dead, and the generated code does not compile.",
        parameters=("unbacked_only",),
        relies_on=("torch._inductor.ir.Switch.selector|torch._inductor.ir.Conditional.predicate",),
    ),
)


def install_hooks() -> None:
    """Install the dispatchers, once per process."""
    dispatchers = {
        "exported_inputs": _dispatch_exported_inputs,
        "constant_items": _dispatch_may_turn_const,
        "branch_symbols": _dispatch_branch_symbols,
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


def _dispatch_branch_symbols(stock: Callable[..., Any]) -> Callable[..., Any]:
    # Inductor looks for symbols only in expressions, but a predicate such as u0 > 2 is a relation.
    # The code that computes u0 is removed as dead, and the branch uses an undeclared variable.
    @functools.wraps(stock)
    def get_free_symbol_uses(self: Any, unbacked_only: bool = False) -> Any:
        uses = stock(self, unbacked_only)
        if context.settings() is None:
            return uses
        from torch._inductor.utils import OrderedSet
        from torch.utils._sympy.symbol import SymT, symbol_is_type

        unbacked = (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)
        symbols = getattr(getattr(_compat.branch_selector(self), "expr", None), "free_symbols", ())
        return uses | OrderedSet(
            symbol
            for symbol in sorted(symbols, key=str)
            if not unbacked_only or symbol_is_type(symbol, unbacked)
        )

    return get_free_symbol_uses
