"""Generated texts that tests compare with `test/goldens/AREA/NAME.expected`.

`EXPECTTEST_ACCEPT=1` writes what is generated into the files, as it does for the inline texts of
`expecttest`.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["assert_matches_golden", "golden_names"]

_FOLDER = Path(__file__).parents[1] / "goldens"
_SUFFIX = ".expected"


def assert_matches_golden(text: str, area: str, name: str) -> None:
    """Compare a generated text with its file."""
    file = _FOLDER / area / f"{name}{_SUFFIX}"
    if os.environ.get("EXPECTTEST_ACCEPT"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    expected = file.read_text(encoding="utf-8") if file.exists() else ""
    assert text == expected, f"{file} differs; EXPECTTEST_ACCEPT=1 writes it"


def golden_names(area: str) -> set[str]:
    """Return the names of an area that have a file."""
    return {file.name.removesuffix(_SUFFIX) for file in (_FOLDER / area).glob(f"*{_SUFFIX}")}
