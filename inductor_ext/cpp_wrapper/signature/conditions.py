"""Adding conditions on symbols to a signature.

A condition that compares a symbol with an integer narrows the symbol's range. Of the others, those
that the ranges imply are dropped, and those that cannot be expressed go to `Signature.unchecked`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import sympy  # type: ignore[import-untyped]
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from inductor_ext.cpp_wrapper.signature import expression
from inductor_ext.cpp_wrapper.signature.guard_filter import list_guards
from inductor_ext.cpp_wrapper.signature.signature import Range, Signature
from inductor_ext.cpp_wrapper.signature.symbolic import to_node

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv


def add_guards(signature: Signature, environment: ShapeEnv) -> Signature:
    """Return a signature with the guards of a shape environment added.

    Compilation may specialize the code further than torch.export did, and records that as guards: a
    size is fixed to a constant, or an index to 32 bits. Guards with which the compiler only chose
    the faster of two correct variants are left out, as are guards on symbols of other programs.
    """
    specializations = [
        sympy.Eq(symbol, environment.replace(symbol), evaluate=False)
        for symbol in environment.replacements
        if symbol.name in signature.symbols
    ]
    return add_conditions(signature, [*specializations, *list_guards(environment)])


def add_conditions(signature: Signature, conditions: Iterable[sympy.Basic]) -> Signature:
    """Return a signature with conditions added; those on symbols that it lacks are ignored."""
    symbols = dict(signature.symbols)
    others: list[sympy.Basic] = []
    for plain in _split_conditions(conditions):
        names = {symbol.name for symbol in plain.free_symbols}
        if names and names <= symbols.keys():
            limits = _read_range(plain)
            if limits is None:
                others.append(plain)
            else:
                (name,) = names
                symbols[name] = intersect(symbols[name], limits)
    ranges = {
        sympy.Symbol(name, integer=True): ValueRanges(
            -int_oo if limits.min is None else limits.min,
            int_oo if limits.max is None else limits.max,
        )
        for name, limits in symbols.items()
        if not _is_empty(limits)
    }
    constraints = list(signature.constraints)
    unchecked = list(signature.unchecked)
    for plain in others:
        if _is_implied(plain, ranges):
            continue
        try:
            text = expression.show(to_node(plain))
            target = constraints
        except ValueError:
            text = str(plain)
            target = unchecked
        if text not in target:
            target.append(text)
    return replace(
        signature, symbols=symbols, constraints=tuple(constraints), unchecked=tuple(unchecked)
    )


def _read_range(condition: sympy.Basic) -> Range | None:
    """Return the range that a condition expresses, if it compares a symbol with an integer."""
    match condition:
        case (
            sympy.Eq(lhs=sympy.Symbol(), rhs=sympy.Integer() as number)
            | sympy.Eq(lhs=sympy.Integer() as number, rhs=sympy.Symbol())
        ):
            return Range(int(number), int(number))
        case (
            sympy.Ge(lhs=sympy.Symbol(), rhs=sympy.Integer() as number)
            | sympy.Le(lhs=sympy.Integer() as number, rhs=sympy.Symbol())
        ):
            return Range(int(number), None)
        case (
            sympy.Gt(lhs=sympy.Symbol(), rhs=sympy.Integer() as number)
            | sympy.Lt(lhs=sympy.Integer() as number, rhs=sympy.Symbol())
        ):
            return Range(int(number) + 1, None)
        case (
            sympy.Le(lhs=sympy.Symbol(), rhs=sympy.Integer() as number)
            | sympy.Ge(lhs=sympy.Integer() as number, rhs=sympy.Symbol())
        ):
            return Range(None, int(number))
        case (
            sympy.Lt(lhs=sympy.Symbol(), rhs=sympy.Integer() as number)
            | sympy.Gt(lhs=sympy.Integer() as number, rhs=sympy.Symbol())
        ):
            return Range(None, int(number) - 1)
    return None


def intersect(left: Range, right: Range) -> Range:
    """Return the range of the values that are in both ranges; it may be empty."""
    lows = [low for low in (left.min, right.min) if low is not None]
    highs = [high for high in (left.max, right.max) if high is not None]
    return Range(max(lows, default=None), min(highs, default=None))


def _is_empty(limits: Range) -> bool:
    return limits.min is not None and limits.max is not None and limits.min > limits.max


def _split_conditions(conditions: Iterable[sympy.Basic]) -> Iterator[sympy.Basic]:
    """Split conditions into conjuncts over integer symbols that are identified by name alone."""
    for condition in conditions:
        plain = condition.xreplace(
            {symbol: sympy.Symbol(symbol.name, integer=True) for symbol in condition.free_symbols}
        )
        yield from sympy.And.make_args(plain)


def _is_implied(condition: sympy.Basic, ranges: dict[Any, ValueRanges[Any]]) -> bool:
    """Whether a condition holds for all values within the ranges."""
    if not isinstance(condition, sympy.core.relational.Relational):
        return False
    try:
        bounds = bound_sympy(condition.lhs - condition.rhs, ranges)
    except Exception:
        # Functions without bounds raise arbitrary exceptions; the condition is then checked.
        return False
    lower, upper = bounds.lower, bounds.upper
    match condition:
        case sympy.Ge():
            return bool(lower >= 0)
        case sympy.Gt():
            return bool(lower > 0)
        case sympy.Le():
            return bool(upper <= 0)
        case sympy.Lt():
            return bool(upper < 0)
        case sympy.Ne():
            return bool(lower > 0) or bool(upper < 0)
    return False
