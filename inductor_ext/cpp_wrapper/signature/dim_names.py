"""The names of dynamic sizes: those of `torch.export.Dim` in place of torch's symbols.

torch.export keeps the name that the user gave to a size (`batch`, or `2*batch + 1` for a derived
one) in the shape environment of the exported program. Saving the program loses it: the file has
only symbols, and `given_shapes` reads the names from an argument. A signature shows the name
wherever it would show the symbol, unless the name would be ambiguous. Sizes of `Dim.AUTO` and
`Dim.DYNAMIC` have no name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import sympy  # type: ignore[import-untyped]

from inductor_ext import exc
from inductor_ext.cpp_wrapper.signature import expression
from inductor_ext.cpp_wrapper.signature.signature import (
    Extent,
    Input,
    Output,
    Signature,
    SymbolInput,
    SymbolOutput,
    TensorInput,
    TensorOutput,
)
from inductor_ext.cpp_wrapper.signature.symbolic import to_sympy

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

_NAME = re.compile(r"(?<![\w'\"])[^\W\d]\w*")
"""A name in an expression, but not a key in a guard such as `L['x'].size()[0]`."""

_ASSERT = re.compile(
    r'(?P<start>if \(!\((?P<condition>.*)\)\) \{ throw std::runtime_error\("Expected )'
    r'(?P<text>.*) but received " \+ std::to_string\(\w+\)\); \}'
)
"""The C++ that Inductor generates for an assert on sizes."""

_SIZE = re.compile(r"(?<![\w:.])[a-z]+\d+\b(?!\s*(?:\(|::))")
"""A symbol in C++, such as `s43` or `u0`; not a function, a namespace or a type."""


def read_dim_names(environment: ShapeEnv) -> dict[str, str]:
    """Return the names of the sizes of an exported program by symbol.

    To be called before the program is compiled, which may replace symbols.
    """
    candidates: dict[str, set[str]] = {}
    for source, text in environment.source_name_to_debug_name.items():
        size = environment.source_to_var.get(source)
        pair = match_name(environment.replace(size), text) if size is not None else None
        if pair is not None:
            candidates.setdefault(pair[0], set()).add(pair[1])
    return {symbol: names.pop() for symbol, names in candidates.items() if len(names) == 1}


def match_name(size: sympy.Expr, text: str) -> tuple[str, str] | None:
    """Return the symbol in a size and the name in the text that it was given; None without one.

    Args:
        size: the size in the program, such as `2*s43`.
        text: the size as the user has named it, such as `2*batch`.
    """
    try:
        node = expression.parse(text)
        names = expression.symbols(node)
        if len(names) != 1 or len(size.free_symbols) != 1:
            return None
        (symbol,) = size.free_symbols
        named = size.xreplace({symbol: sympy.Symbol(names[0], integer=True)})
        return (symbol.name, names[0]) if named == to_sympy(node) else None
    except (ValueError, exc.BadExpressionError):
        # Such as a name that is a keyword of Python.
        return None


def is_usable(text: str) -> bool:
    """Whether a size that the user has named is an expression of one name; a keyword is none."""
    try:
        return len(expression.symbols(expression.parse(text))) == 1
    except (ValueError, exc.BadExpressionError):
        return False


def rename_symbols(signature: Signature, names: Mapping[str, str]) -> Signature:
    """Return a signature with names in place of symbols.

    A symbol is kept if its name is also that of another symbol or of a scalar input, which an
    expression could not tell apart.

    Args:
        names: by symbol, such as the result of `read_dim_names`.
    """
    scalars = [inp for inp in signature.inputs if isinstance(inp, SymbolInput)]
    others = {inp.name for inp in scalars if names.get(inp.symbol) != inp.name}
    names = _drop_ambiguous(names, others.union(*map(_find_names, _list_expressions(signature))))

    def rename(text: str) -> str:
        return _rename(text, names)

    def rename_extents(extents: tuple[Extent, ...]) -> tuple[Extent, ...]:
        return tuple(rename(extent) if isinstance(extent, str) else extent for extent in extents)

    def rename_input(inp: Input) -> Input:
        if isinstance(inp, TensorInput):
            return replace(inp, shape=rename_extents(inp.shape), stride=rename_extents(inp.stride))
        return replace(inp, symbol=rename(inp.symbol)) if isinstance(inp, SymbolInput) else inp

    def rename_output(out: Output) -> Output:
        if isinstance(out, TensorOutput):
            return replace(out, shape=rename_extents(out.shape))
        return replace(out, value=rename(out.value)) if isinstance(out, SymbolOutput) else out

    return replace(
        signature,
        inputs=tuple(map(rename_input, signature.inputs)),
        outputs=tuple(map(rename_output, signature.outputs)),
        symbols={rename(symbol): limits for symbol, limits in signature.symbols.items()},
        constraints=tuple(map(rename, signature.constraints)),
        unchecked=tuple(map(rename, signature.unchecked)),
    )


def complete_assert(line: str, names: Mapping[str, str]) -> str:
    """Return a line of generated C++ in which the message of an assert on sizes is complete.

    Inductor reports the value of one of the condition's symbols; which one depends on the order of
    a set. The message has the values of all, and names for symbols.

    Args:
        line: any line. Other than those asserts are returned as they are.
        names: by symbol, such as the result of `read_dim_names`.
    """
    if " but received " not in line or (found := _ASSERT.fullmatch(line.strip())) is None:
        return line
    text = found["text"]
    names = _drop_ambiguous(names, _find_names(text))
    symbols = sorted(set(_SIZE.findall(found["condition"])), key=lambda n: (n[0], len(n), n))
    if not symbols:
        return line
    labels = [f"{_rename(symbol, names)} = " for symbol in symbols] if len(symbols) > 1 else [""]
    received = ' + ", '.join(
        f'{label}" + std::to_string({symbol})'
        for label, symbol in zip(labels, symbols, strict=True)
    )
    return f"{found['start']}{_rename(text, names)} but received {received}); }}"


def _rename(text: str, names: Mapping[str, str]) -> str:
    return _NAME.sub(lambda found: names.get(found[0], found[0]), text)


def _drop_ambiguous(names: Mapping[str, str], used: Collection[str]) -> dict[str, str]:
    counts = Counter(names.values())
    return {
        symbol: name for symbol, name in names.items() if counts[name] == 1 and name not in used
    }


def _find_names(text: str) -> set[str]:
    return set(_NAME.findall(text))


def _list_expressions(signature: Signature) -> list[str]:
    texts = [*signature.symbols, *signature.constraints, *signature.unchecked]
    for value in (*signature.inputs, *signature.outputs):
        if isinstance(value, (TensorInput, TensorOutput)):
            texts += map(str, value.shape)
        elif isinstance(value, SymbolInput):
            texts.append(value.symbol)
        elif isinstance(value, SymbolOutput):
            texts.append(value.value)
    return texts
