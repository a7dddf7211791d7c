"""Fixes for control flow: `cond`, `while_loop`, `scan`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from inductor_ext import _compat
from inductor_ext.hooks import context, registry
from inductor_ext.hooks.registry import Hook

HOOKS = (
    Hook(
        "branch_symbols",
        "replaced",
        (
            "torch._inductor.ir.Switch.get_free_symbol_uses",
            "torch._inductor.ir.Conditional.get_free_symbol_uses",
        ),
        "hooks.upstream_fixes.control_flow",
        "A predicate such as u0 > 2 is a relation, in which Inductor finds no symbols: the code "
        "that computes u0 is removed as dead, and the generated code does not compile.",
        parameters=("unbacked_only",),
        relies_on=("torch._inductor.ir.Switch.selector|torch._inductor.ir.Conditional.predicate",),
    ),
)


def install_hooks() -> None:
    """Install the dispatchers, once per process."""
    registry.install(HOOKS, {"branch_symbols": _dispatch_branch_symbols})


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
