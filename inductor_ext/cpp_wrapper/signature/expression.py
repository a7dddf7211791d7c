"""Integer expressions over the symbols of a signature: parse, evaluate, print, compile to bytecode.

Expressions have Python's syntax (`2*s0 + 1`, `s0 % 4 == 0`, `max(1, u0)`) and semantics: `//` and
`%` round down; `and`, `or` and `a if c else b` short-circuit. A program is the same expression as a
list of 64-bit words for the stack machine in runtime/expression.cpp. Pure: imports only the
standard library.

Text that is not such an expression raises `exc.BadExpressionError`. A division by zero during
evaluation raises ZeroDivisionError, as in Python.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from inductor_ext import exc


@dataclass(frozen=True, slots=True)
class Apply:
    """An operator, by its symbol or name, and its operands."""

    operator: str
    arguments: tuple[Node, ...]


Node = int | str | Apply
"""An integer, a symbol's name, or an operator applied to nodes."""

DEPTH = 32
"""Maximum stack depth of a program; equal to the stack size in runtime/expression.cpp."""

_BINARY: dict[type[ast.AST], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Pow: "**",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.BitXor: "^",
    ast.LShift: "<<",
    ast.RShift: ">>",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.And: "and",
    ast.Or: "or",
}

_CALLS = ("min", "max", "abs")


def parse(text: str) -> Node:
    """Parse an expression.

    Raises:
        exc.BadExpressionError: `text` has anything but integers, names and supported operators.
    """
    try:
        return _read(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise exc.BadExpressionError(text=text, why=str(error)) from None


def _read(node: ast.expr) -> Node:
    match node:
        case ast.Constant(value=bool() | int()):
            number = int(node.value)  # type: ignore[arg-type]
            if not -(1 << 63) <= number < 1 << 63:
                raise ValueError(f"{number} does not fit into 64 bits")
            return number
        case ast.Name(id=name):
            return name
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inner = _read(operand)
            return -inner if isinstance(inner, int) else Apply("neg", (inner,))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return Apply("not", (_read(operand),))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return Apply(_BINARY[type(op)], (_read(left), _read(right)))
        case ast.BoolOp(op=op, values=[first, *rest]):
            result = _read(first)
            for value in rest:
                result = Apply(_BINARY[type(op)], (result, _read(value)))
            return result
        case ast.Compare(left=left, ops=ops, comparators=right) if all(
            type(op) in _BINARY for op in ops
        ):
            operands = [_read(left), *map(_read, right)]
            pairs = [
                Apply(_BINARY[type(op)], (operands[i], operands[i + 1])) for i, op in enumerate(ops)
            ]
            result = pairs[0]
            for pair in pairs[1:]:
                result = Apply("and", (result, pair))
            return result
        case ast.IfExp(test=test, body=body, orelse=other):
            return Apply("if", (_read(test), _read(body), _read(other)))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if (
            name in _CALLS and args and (len(args) == 1) == (name == "abs")
        ):
            result = _read(args[0])
            if name == "abs":
                return Apply(name, (result,))
            for argument in args[1:]:
                result = Apply(name, (result, _read(argument)))
            return result
    raise ValueError(f"{ast.unparse(node)!r} is no integer, symbol or supported operator")


def symbols(node: Node) -> list[str]:
    """Return the names in an expression without duplicates, in order of first appearance."""
    if isinstance(node, str):
        return [node]
    if isinstance(node, int):
        return []
    return list(dict.fromkeys(name for part in node.arguments for name in symbols(part)))


_MEANING: dict[str, Callable[..., Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
    "<<": operator.lshift,
    ">>": operator.rshift,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "neg": operator.neg,
    "not": operator.not_,
    "abs": abs,
    "min": min,
    "max": max,
}


def evaluate(node: Node, values: Mapping[str, int]) -> int:
    """Return the value of an expression; a condition evaluates to 1 or 0.

    Raises:
        KeyError: a symbol has no value.
        ZeroDivisionError: as in Python.
    """
    if isinstance(node, str):
        return values[node]
    if isinstance(node, int):
        return node
    name, arguments = node.operator, node.arguments
    if name in ("and", "or"):
        left = evaluate(arguments[0], values)
        if bool(left) == (name == "or"):
            return int(bool(left))
        return int(bool(evaluate(arguments[1], values)))
    if name == "if":
        return evaluate(arguments[1 if evaluate(arguments[0], values) else 2], values)
    return int(_MEANING[name](*(evaluate(part, values) for part in arguments)))


_PRECEDENCE = {
    "if": 0,
    "or": 1,
    "and": 2,
    "not": 3,
    **dict.fromkeys(("==", "!=", "<", "<=", ">", ">="), 4),
    "|": 5,
    "^": 6,
    "&": 7,
    "<<": 8,
    ">>": 8,
    "+": 9,
    "-": 9,
    "*": 10,
    "//": 10,
    "%": 10,
    "neg": 11,
    "**": 12,
}


def show(node: Node, names: Mapping[str, str] | None = None, above: int = 0) -> str:
    """Return an expression as text that `parse` accepts, with as few parentheses as possible.

    Args:
        names: replacement text for symbols.
        above: precedence of the enclosing operator.
    """
    if isinstance(node, str):
        return (names or {}).get(node, node)
    if isinstance(node, int):
        return f"({node})" if node < 0 and above > _PRECEDENCE["+"] else str(node)
    name = node.operator
    if name in _CALLS:
        return f"{name}({', '.join(show(part, names) for part in node.arguments)})"
    level = _PRECEDENCE[name]
    if name == "if":
        test, body, other = (show(part, names, 1) for part in node.arguments)
        text = f"{body} if {test} else {other}"
    elif name in ("neg", "not"):
        text = f"{'-' if name == 'neg' else 'not '}{show(node.arguments[0], names, level)}"
    else:
        left, right = node.arguments
        # Binary operators are left-associative, except `**`; comparisons would chain.
        chains = level == _PRECEDENCE["=="] or name == "**"
        sign = name if name in ("*", "**") else f" {name} "
        text = f"{show(left, names, level + chains)}{sign}{show(right, names, level + 1)}"
    return f"({text})" if level < above else text


OPCODES = (
    "end",
    "number",
    "symbol",
    "+",
    "-",
    "*",
    "//",
    "%",
    "**",
    "&",
    "|",
    "^",
    "<<",
    ">>",
    "==",
    "!=",
    "<",
    "<=",
    ">",
    ">=",
    "neg",
    "not",
    "abs",
    "min",
    "max",
    "and",
    "or",
    "if",
)
"""Opcode names, in the order of `enum Opcode` in runtime/expression.h."""


def program(node: Node, numbers: Mapping[str, int]) -> list[int]:
    """Compile an expression to postfix words for `evaluate` in runtime/expression.cpp.

    Args:
        numbers: index of each symbol in the symbol table.

    Raises:
        exc.BadExpressionError: the expression needs a deeper stack than `DEPTH`.
    """
    words: list[int] = []
    if _emit(node, numbers, words) > DEPTH:
        raise exc.BadExpressionError(
            text=show(node), why=f"it is nested more than {DEPTH} levels deep"
        )
    return [*words, OPCODES.index("end")]


def _emit(node: Node, numbers: Mapping[str, int], words: list[int]) -> int:
    """Append a node's words and return the stack depth that they need."""
    if isinstance(node, str):
        words += [OPCODES.index("symbol"), numbers[node]]
        return 1
    if isinstance(node, int):
        words += [OPCODES.index("number"), node]
        return 1
    depth = max(i + _emit(part, numbers, words) for i, part in enumerate(node.arguments))
    words.append(OPCODES.index(node.operator))
    return depth
