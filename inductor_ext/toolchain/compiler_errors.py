"""Reads the errors of compilers: Triton, nvcc, and Inductor's compile workers."""

from __future__ import annotations

import re
from collections.abc import Iterator


def walk_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause of this, and so on."""
    while error is not None:
        yield error
        # Inductor keeps the error of a compile in an attribute.
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__


_DETAILS_FIRST = re.compile(r"at \d+:\d+:$|An exception occurred in a subprocess")
"""First line of an error with its message in the last line: Triton's with the kernel's source, and
one of a compile worker with its traceback."""


def describe(error: BaseException) -> str:
    """Return an error as one line; compiler errors have many."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = lines[-1] if _DETAILS_FIRST.match(lines[0]) else lines[0]
    return f"{type(error).__name__}: {text}"[:200]
