"""Fix for errors in parallel C++ loops, such as an index that is out of bounds.

Generated C++ checks indices by a macro that throws. An exception that leaves an OpenMP construct
ends the process, so that one bad index ends a server. Here the body of a parallel loop with a check
catches the exception. The other iterations go on, and the region's first error is thrown after it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from inductor_ext.hooks import context, registry
from inductor_ext.hooks.registry import Hook

HOOKS = (
    Hook(
        "parallel_errors",
        "replaced",
        ("torch._inductor.codegen.cpp.CppScheduling.define_kernel",),
        "hooks.upstream_fixes.parallel_errors",
        "An index that is out of bounds in a parallel loop on CPU ends the process.",
        parameters=("src_code",),
        upstream="195402",
    ),
)

_CHECK = "TORCH_CHECK("
_DIRECTIVE = re.compile(r"\s*#\s*pragma omp (?P<clauses>.*\b(parallel|for|single)\b.*)")
_COLLAPSE = re.compile(r"\bcollapse\((\d+)\)")
_STRING = re.compile(r'"(\\.|[^"\\])*"')


def install_hooks() -> None:
    """Install the dispatcher, once per process."""
    registry.install(HOOKS, {"parallel_errors": dispatch_kernels(catch_errors)})


def dispatch_kernels(rewrite: Callable[[str], str]) -> registry.MakeDispatcher:
    """A dispatcher of `define_kernel` that rewrites kernels in the extension's compiles."""

    def make(stock: Callable[..., str]) -> Callable[..., str]:
        @functools.wraps(stock)
        def define_kernel(self: Any, src_code: str, *args: Any, **kwargs: Any) -> str:
            if context.settings() is not None:
                src_code = rewrite(src_code)
            return stock(self, src_code, *args, **kwargs)

        return define_kernel

    return make


class Block(NamedTuple):
    """The lines with the braces of a block."""

    begin: int
    end: int


def catch_errors(source: str) -> str:
    """Return a C++ kernel that throws the errors of its checks outside of OpenMP constructs.

    Args:
        source: the kernel. Each brace of a loop or region is the last on its line, or the first.
    """
    if _CHECK not in source or "pragma omp" not in source:
        return source
    lines = source.split("\n")
    before: dict[int, str] = {}
    after: dict[int, str] = {}
    region = Block(-1, -1)
    count = 0
    for number, line in enumerate(lines):
        directive = _DIRECTIVE.match(line)
        if directive is None:
            continue
        block = find_block(lines, number + 1)
        if block is None or _CHECK not in "".join(lines[block.begin : block.end]):
            continue
        constructs = directive["clauses"].split()
        is_region = "parallel" in constructs
        count += is_region
        error, failed = f"parallel_error_{count}", f"parallel_failed_{count}"
        if is_region:
            region = block
            before[number] = (
                f"std::exception_ptr {error}; std::atomic_flag {failed} = ATOMIC_FLAG_INIT;"
            )
            after[block.end] = f"if ({error}) std::rethrow_exception({error});"
        if number <= region.end and ("for" in constructs or "single" in constructs):
            collapsed = _COLLAPSE.search(line)
            for _ in range(int(collapsed[1]) - 1 if collapsed else 0):
                block = find_block(lines, block.begin + 1) or block
            after[block.begin] = "try {"
            before[block.end] = (
                f"}} catch (...) {{ if (!{failed}.test_and_set()) "
                f"{error} = std::current_exception(); }}"
            )
    return "\n".join(
        text
        for number, line in enumerate(lines)
        for text in (before.get(number), line, after.get(number))
        if text is not None
    )


def find_block(lines: list[str], start: int) -> Block | None:
    """The first block that begins at line `start` or below."""
    depth, begin = 0, start
    for number in range(start, len(lines)):
        line = _STRING.sub("", lines[number])
        if depth == 0 and "{" in line:
            begin = number
        depth += line.count("{") - line.count("}")
        if depth == 0 and begin < number and "}" in line:
            return Block(begin, number)
    return None
