"""Workarounds for Inductor bugs, in effect only in compiles of the extension.

`hook_table` declares them, with the first torch release that no longer needs them if known.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from inductor_ext import _compat
from inductor_ext.hooks import context, registry, scope


def install_hooks() -> None:
    """Install the dispatchers, once per process."""
    registry.replace("exported_inputs", _dispatch_exported_inputs)
    registry.replace("constant_items", _dispatch_may_turn_const)
    registry.replace("branch_symbols", _dispatch_branch_symbols)


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
        if scope.settings() is None:
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
        if scope.settings() is None:
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
