"""One line of an error of a compiler."""

from __future__ import annotations

import pytest

from inductor_ext.toolchain import compiler_errors

TRITON = """at 3:8:
def kernel(x):
    y = tl.load(x)
        ^
cannot load from a float"""

WORKER = """An exception occurred in a subprocess:

Traceback (most recent call last):
  File "compile.py", line 1, in <module>
ValueError: no such option
"""


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("", ""),
        ("ptxas failed\nregister allocation", "ptxas failed"),
        (TRITON, "cannot load from a float"),
        (WORKER, "ValueError: no such option"),
        ("x" * 300, "x" * (200 - len("RuntimeError: "))),
    ],
)
def test_describe(message: str, line: str) -> None:
    assert compiler_errors.describe(RuntimeError(message)) == f"RuntimeError: {line}"


def test_causes() -> None:
    first, second, third, fourth = (RuntimeError(str(index)) for index in range(4))
    first.inner_exception = second  # type: ignore[attr-defined]
    second.__cause__, third.__context__ = third, fourth
    assert list(compiler_errors.walk_causes(first)) == [first, second, third, fourth]
