#!/usr/bin/env python3
"""Finds words in docs, docstrings, comments and messages that have a better one.

    scripts/check_wording.py [FILE ...]

Without files it checks the package, the benchmarks, docs/ and the other pages of the repository.
Messages are string literals in what is raised, logged or printed, in the help of the command line
and in the meanings of settings. Identifiers and other strings are not read. `make lint` runs it.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

WORDS: dict[str, str] = {
    r"stock's|\bstock\b(?! kernel| price)": "Inductor (default), or the ATen/cuBLAS fallback",
    r"\bours?\b|\bwe\b": "the extension's",
    r"\bproducts? of (?:matrices|few rows|many rows)\b|\bmatrix products?\b": "matmul, GEMM",
    r"\bfactors? [ab]\b|\b(?:first|second) factors?\b": "operand A, operand B, weight",
    r"\btold\b|\btells apart\b": "passed, described, distinguished",
    r"\blies?\b": "is, is stored; layout, contiguous, strided",
    r"\bto mend\b|\bmended?\b": "fix, remedy",
    r"\bkeeps? its turn\b|\bin (?:its|their) turn\b": "keeps its relative order",
    r"\bcomplete sums?\b": "accumulators",
    r"\bstands? (?:there|in (?:the|its) (?:place|stead))\b": "exists, replaces",
    r"\blest\b|\bwhence\b|\bthereof\b|\bin vain\b|\bwhom\b|\banew\b": "plain words",
    r"\bcontenders?\b": "variants",
    r"\bwish(?:es)?\b": "request",
    r"\bcircumstances\b": "candidate set, conditions",
    r"\bin sum\b|\bbeforehand\b|\bfor (?:want|lack|fear) of\b": "in total, in advance, without",
    r"\bon the way\b": "fused into the prologue",
    r"\b(?:some|no)body\b": "another process, no process, the user",
    r"\bis asked for\b|\b(?:was|were|has been) asked\b": "requested",
    r"\bis no (?:JSON|text|list|object|table|number|product|zip|path)\b": "is not a ...",
}
"""Regular expressions of words to replace, and what to write instead."""

_MESSAGE_CALLS = re.compile(
    r"Error$|^warn|^(?:warning|info|error|print)$|^_setting$|^add_(?:argument|parser)$|^NotCovered$"
    r"|^(?:Problem|Finding|Command|Probe)$|^_?(?:fail|bad|raise_\w+)$"
)
"""Names of functions and classes whose arguments are messages."""

_MESSAGE_NAMES = {"template", "remedy", "why", "reason", "install", "text"}
"""Variables that hold messages."""

_CODE = re.compile(r"`[^`]*`|\"[\w-]+\"|^ {4,}\w+: |^ {4,}(?:return|if|def) .*$")
"""The parts of a line that are code: spans, literals, an argument's name, indented statements."""


def iterate_prose(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of prose in a file with their numbers.

    In a page these are the lines outside of code blocks, in Python the docstrings, comments and
    messages.
    """
    source = file.read_text(encoding="utf-8")
    if file.suffix != ".py":
        fenced = False
        for number, line in enumerate(source.splitlines(), 1):
            fence = line.lstrip().startswith("```")
            if not fenced and not fence:
                yield number, line
            fenced ^= fence
        return
    messages: dict[ast.Constant, None] = {}
    for node in ast.walk(ast.parse(source)):
        # A docstring, also one of an attribute, is an expression statement.
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield from enumerate(value.value.splitlines(), value.lineno)
        messages.update(dict.fromkeys(_find_messages(node)))
    for message in messages:
        # A single word is a key or a name.
        if " " in message.value:
            yield message.lineno, message.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _find_messages(node: ast.AST) -> Iterator[ast.Constant]:
    """Yield the string literals of a node that are messages."""
    roots: list[ast.AST] = []
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func).rpartition(".")[2]
        if _MESSAGE_CALLS.search(name):
            roots = [*node.args, *node.keywords]
    elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in _MESSAGE_NAMES:
        roots = [node.value]
    for root in roots:
        for child in ast.walk(root):
            if isinstance(child, ast.Constant) and isinstance(child.value, str):
                yield child


def find_problems(file: Path) -> Iterator[str]:
    """Yield one line for each word that has a better one."""
    name = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file
    for number, line in iterate_prose(file):
        prose = _CODE.sub("", line)
        for pattern, instead in WORDS.items():
            match = re.search(pattern, prose, re.IGNORECASE)
            if match:
                yield f"{name}:{number}: {match[0]!r}; write: {instead}"


def main(arguments: Sequence[str]) -> int:
    """Print the problems and return the exit code, 1 if there are any."""
    files = [Path(name).resolve() for name in arguments] or sorted(
        [
            *(ROOT / "inductor_ext").rglob("*.py"),
            *(ROOT / "benchmarks").rglob("*.py"),
            *(ROOT / "docs").rglob("*.md"),
            *(ROOT / "examples").rglob("*.md"),
            ROOT / "benchmarks" / "README.md",
            *ROOT.glob("*.md"),
        ]
    )
    problems = [problem for file in files for problem in find_problems(file)]
    print("\n".join(problems) if problems else f"wording: {len(files)} files are fine")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
