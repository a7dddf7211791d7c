"""Integer expressions of a signature: parsing, printing and compilation to bytecode."""

from __future__ import annotations

import re

import pytest

from inductor_ext import exc
from inductor_ext.cpp_wrapper.build import compiler
from inductor_ext.cpp_wrapper.signature import expression
from inductor_ext.cpp_wrapper.signature.expression import Apply


def test_python_and_cpp_have_the_same_opcodes_and_stack() -> None:
    source = (compiler.RUNTIME / "expression.h").read_text()
    (body,) = re.findall(r"enum Opcode : int64_t \{(.*?)\};", source, re.DOTALL)
    pairs = (
        "+:Add -:Subtract *:Multiply //:FloorDivide %:Modulo **:Power &:BitAnd |:BitOr ^:BitXor "
        "<<:LeftShift >>:RightShift ==:Equal !=:NotEqual <:Less <=:LessEqual >:Greater "
        ">=:GreaterEqual neg:Negate"
    )
    cpp = dict(re.findall(r"(\S+):(\w+)", pairs))
    names = [f"k{cpp.get(name, name.capitalize())}" for name in expression.OPCODES]
    assert re.findall(r"k\w+", body) == names
    assert re.findall(r"int kDepth = (\d+);", source) == [str(expression.DEPTH)]


@pytest.mark.parametrize(
    "text",
    [
        "s0",
        "-3",
        "2*s0 + 1",
        "a - (b - c)",
        "a - b - c",
        "(a + b)*c",
        "a // (b - c + 9)",
        "a // b // c",
        "a*(b // c)",
        "a // b*c",
        "-a**2",
        "(-a)**2",
        "2**(a**b)",
        "(a % b) == 0 and not (c < d)",
        "(a == b) == c",
        "a if b else c if d else e",
        "(a if b else c)*d",
        "max(1, u0)*min(a, b, c)",
        "1 <= a < b",
        "(a & b) | (c ^ d) << 2 >> e",
        "not (a and b) or c > 2",
        "-(-a // b)",
        "a*-1",
    ],
)
def test_expressions_are_shown_unambiguously(text: str) -> None:
    node = expression.parse(text)
    assert expression.parse(expression.show(node)) == node
    names = expression.symbols(node)
    for step in range(1, 6):
        values = {name: (index * 7 + step * 3) % 5 + 1 for index, name in enumerate(names)}
        assert expression.evaluate(node, values) == int(eval(text, {}, values))


def test_expressions_are_shown_with_input_names() -> None:
    node = expression.parse("(2*s0 + 1) // s1")
    names = {"s0": "x.size(0)", "s1": "n"}
    assert expression.show(node, names) == "(2*x.size(0) + 1) // n"


@pytest.mark.parametrize(
    "text",
    [
        *("", "s0 +", "s0 / 2", "f(s0)", "x.size(0)", "1.5", "'a'", "a[0]", "2**a.b", "a in b"),
        *("max()", "abs(1, 2)", "9223372036854775808", "(" * 300 + "a" + ")" * 300, "~a"),
    ],
)
def test_other_text_is_rejected(text: str) -> None:
    with pytest.raises(exc.BadExpressionError):
        expression.parse(text)


def test_programs_with_too_deep_a_stack_are_rejected() -> None:
    deep: expression.Node = "a"
    for _ in range(expression.DEPTH - 1):
        deep = Apply("-", ("a", deep))
    assert expression.program(deep, {"a": 0})[-1] == 0
    with pytest.raises(exc.BadExpressionError, match="nested more than"):
        expression.program(Apply("-", ("a", deep)), {"a": 0})
