#!/usr/bin/env python3
"""Writes the messages in docs/user/errors.md from the classes in `inductor_ext.exc`.

The page has a section for each class. The quotation below its heading is the message, and is
replaced; the rest is written by hand: when the error occurs, what to do, examples of messages.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from inductor_ext import exc

PAGE = Path(__file__).resolve().parent.parent / "docs" / "user" / "errors.md"

OPTIONAL = frozenset({"check", "nearest", "table", "tried", "where"})
"""Fields of messages that are empty or an addition; the page leaves them out."""

_SECTION = re.compile(r"^### `(\w+)`\n\n(?:>.*\n)*\n?", flags=re.MULTILINE)

_FIELD = re.compile(r"\{(\w+)(?:![rsa])?\}")


def render_message(error: type[exc.InductorExtError]) -> str:
    """Return the message of a class, with the names of its fields in italics.

    In code, which cannot have italics, they are in capitals.
    """

    def name_field(match: re.Match[str]) -> str:
        in_code = match.string[: match.start()].count("`") % 2
        name = match[1].upper() if in_code else f"*{match[1]}*"
        return "" if match[1] in OPTIONAL else name

    text = _FIELD.sub(name_field, f"{error.template} {error.remedy}")
    return " ".join(text.split())


def match_message(error: type[exc.InductorExtError], message: str) -> bool:
    """Tell whether a message, with or without its remedy, can be one of a class."""

    def make_pattern(template: str) -> str:
        parts = _FIELD.split(template)
        return "".join(".*" if i % 2 else re.escape(part) for i, part in enumerate(parts))

    pattern = rf"{make_pattern(error.template)}( {make_pattern(error.remedy)})?"
    return re.fullmatch(pattern, message, flags=re.DOTALL) is not None


def render_page(page: str) -> str:
    """Return the page with the messages of the classes."""

    def render_section(match: re.Match[str]) -> str:
        message = render_message(getattr(exc, match[1]))
        lines = textwrap.wrap(message, 98, break_long_words=False, break_on_hyphens=False)
        quotation = "".join(f"> {line}\n" for line in lines)
        return f"### `{match[1]}`\n\n{quotation}\n"

    return _SECTION.sub(render_section, page)


if __name__ == "__main__":
    PAGE.write_text(render_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
