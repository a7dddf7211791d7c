"""Types of command-line arguments, for argparse."""

from __future__ import annotations

import argparse
import ast
from typing import Any


def parse_natural(text: str, lowest: int = 0) -> int:
    """Parse an integer of at least `lowest`."""
    # isdecimal accepts digits of all scripts, and int limits the number of digits.
    if not (text.isascii() and text.isdecimal() and len(text) <= 18 and int(text) >= lowest):
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {lowest}")
    return int(text)


def parse_input(text: str) -> str:
    """Return the path of a file to read; `-` is the standard input."""
    return "/dev/stdin" if text == "-" else text


def parse_positive(text: str) -> int:
    """Parse an integer of at least 1."""
    return parse_natural(text, 1)


def parse_option(text: str) -> tuple[str, Any]:
    """Parse NAME=VALUE; a value that is no Python literal is a string."""
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not of the form NAME=VALUE, such as max_autotune=True"
        )
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
