"""Modules and functions of the package stay short enough to be read at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "inductor_ext"

MODULE_LINES = 500
FUNCTION_LINES = 60

LONG_MODULES: dict[str, str] = {
    "exc.py": "a list: every error of the package is a class here, with its message",
}
"""Longer modules, each with the reason."""

LONG_FUNCTIONS: dict[str, str] = {
    "cpp_wrapper/load/load.py:load": "the public function: its docstring describes 13 arguments "
    "and the errors",
    "templates/triton/kernels/decode_attention.py:attend": "a GPU kernel: a loop over keys with "
    "its state, and one parameter per stride",
}
"""Longer functions (with docstring), each with the reason."""


def modules() -> dict[str, str]:
    """Source texts of the package's modules by path."""
    files = sorted(PACKAGE.rglob("*.py"))
    return {file.relative_to(PACKAGE).as_posix(): file.read_text("utf-8") for file in files}


def long_functions(name: str, source: str, limit: int = FUNCTION_LINES) -> Iterator[str]:
    """Yield `module:function` for each function that is longer than the limit."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            if node.end_lineno - node.lineno + 1 > limit:
                yield f"{name}:{node.name}"


def test_long_modules_are_listed_with_a_reason() -> None:
    too_long = {name for name, text in modules().items() if text.count("\n") > MODULE_LINES}
    assert too_long == set(LONG_MODULES)


def test_long_functions_are_listed_with_a_reason() -> None:
    too_long = {
        function for name, text in modules().items() for function in long_functions(name, text)
    }
    assert too_long == set(LONG_FUNCTIONS)


def test_exceptions_stay_few() -> None:
    assert len(LONG_MODULES) <= 5
    assert len(LONG_FUNCTIONS) <= 5


def test_a_function_is_measured_with_its_docstring() -> None:
    source = 'def f():\n    """One.\n\n    Two.\n    """\n    return 1\n'
    assert list(long_functions("m.py", source, limit=6)) == []
    assert list(long_functions("m.py", source, limit=5)) == ["m.py:f"]
