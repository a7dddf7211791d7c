"""docs/user/stability.md names the public interface."""

from __future__ import annotations

import re
from pathlib import Path

import inductor_ext

PAGE = Path(__file__).parents[2] / "docs" / "user" / "stability.md"


def test_every_public_name_is_listed() -> None:
    text = PAGE.read_text().partition("The functions are ")[2].partition("Other modules")[0]
    assert set(re.findall(r"`(\w+)`", text)) == set(inductor_ext.__all__)
