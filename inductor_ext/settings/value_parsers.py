"""Parsers of settings whose type allows more than their value may be: sizes, counts, lists.

A parser raises ValueError, whose text describes what is allowed.
"""

from __future__ import annotations

import math
import re

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def parse_bytes(value: float | str) -> int:
    """Parse a number of bytes: a whole number, or a string with a unit: 8GiB, "1.5 MB", "4096".

    Raises:
        ValueError: the value is neither; the error text describes what is allowed.
    """
    allowed = f"a positive number of bytes, in a string optionally with a unit: {', '.join(_UNITS)}"
    value = int(value) if isinstance(value, float) and value.is_integer() else value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)?\s*", str(value))
    if match is None or (match[2] or "B") not in _UNITS or isinstance(value, float):
        raise ValueError(allowed)
    size = float(match[1]) * _UNITS[match[2] or "B"]
    if not 1 <= size < math.inf:
        raise ValueError(allowed)
    return int(size)


def parse_rows(value: str) -> tuple[int, ...]:
    """Parse comma-separated values of M (the number of rows of a GEMM); return them ascending.

    Raises:
        ValueError: not a comma-separated list of positive integers; the error text describes what
            is allowed.
    """
    allowed = "comma-separated positive integers, such as 1, 16, 2048"
    words = [word.strip() for word in value.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise ValueError(allowed)
    return tuple(sorted(set(map(int, words))))


def check_positive(value: int) -> int:
    """Return the value; raise ValueError unless it is at least 1."""
    if value < 1:
        raise ValueError("an integer of at least 1")
    return value


def check_not_negative(value: int) -> int:
    """Return the value; raise ValueError if it is negative."""
    if value < 0:
        raise ValueError("an integer of at least 0")
    return value
