#!/usr/bin/env python3
"""Finds words of a private language in docstrings, comments and docs, and names the field's word.

    scripts/check_wording.py [FILE ...]

Without files it checks the package, README.md, CONTRIBUTING.md and docs/. Identifiers and strings
that are values are not read. `make lint` runs it.
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
    r"\bours\b|\b(?:kernels?|lowerings?|code|rooms?|packages?) of ours\b": "the extension's",
    r"\bproducts? of (?:matrices|few rows|many rows)\b|\bmatrix products?\b": "matmul, GEMM",
    r"\bfactors? [ab]\b|\b(?:first|second) factors?\b": "operand A, operand B, weight",
    r"\b(?:is|are|be|was|what is) told\b|\btells apart\b": "passed, described, distinguished",
    r"\blies? (?:otherwise|apart|as (?:it|they)|where)\b": "layout, contiguous, strided",
    r"\bto mend\b|\bmended?\b": "fix, remedy",
    r"\bkeeps? its turn\b|\bin (?:its|their) turn\b": "keeps its relative order",
    r"\bcomplete sums?\b": "accumulators",
    r"\bstands? in (?:the|its) (?:place|stead)\b": "replaces",
    r"\blest\b|\bwhence\b|\bthereof\b|\bin vain\b": "plain words",
    r"\bcontenders?\b": "variants",
    r"\bwish(?:es)?\b": "request",
}
"""Regular expressions of words that stay out, each with what the field says instead."""

_CODE = re.compile(r"`[^`]*`|\"[\w-]+\"|^ {4,}\w+: |^ {4,}(?:return|if|def) .*$")
"""What of a line is code: spans of it, literals, an argument's name, indented statements."""


def texts(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of prose in a file with their numbers.

    Those of a page are all but its code blocks, those of Python its docstrings and comments.
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
    for node in ast.walk(ast.parse(source)):
        # A docstring, of an attribute as well, is a statement that is a string and nothing else.
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield from enumerate(value.value.splitlines(), value.lineno)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def findings(file: Path) -> Iterator[str]:
    """Yield one line for each word that should not be there."""
    shown = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file
    for number, line in texts(file):
        prose = _CODE.sub("", line)
        for pattern, instead in WORDS.items():
            found = re.search(pattern, prose, re.IGNORECASE)
            if found:
                yield f"{shown}:{number}: {found[0]!r}; write: {instead}"


def main(arguments: Sequence[str]) -> int:
    """Print the findings; the exit code is 1 if there are any."""
    files = [Path(name).resolve() for name in arguments] or sorted(
        [
            *(ROOT / "inductor_ext").rglob("*.py"),
            *(ROOT / "docs").rglob("*.md"),
            ROOT / "README.md",
            ROOT / "CONTRIBUTING.md",
        ]
    )
    problems = [problem for file in files for problem in findings(file)]
    print("\n".join(problems) if problems else f"wording: {len(files)} files are fine")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
