"""`python -m inductor_ext` in a process, and the schema of `doctor --json`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).parents[2]

VARIABLES = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE", "TRITON_CACHE_DIR")
"""Environment variables that change the report."""

SCHEMA = {
    "schema": int,
    "ok": bool,
    "compiles_for": list,
    "problems": list,
    "remarks": list,
    "python": {"version": str, "implementation": str, "executable": str},
    "platform": {"system": str, "release": str, "machine": str, "libc": str},
    "versions": dict,
    "torch": {"version": (str, type(None)), "cuda": (str, type(None))}
    | {"supported": list, "in_range": bool},
    "hooks": {"checked": int, "fit": int, "misfits": list},
    "devices": list,
    "parts": dict,
    "features": dict,
    "caches": list,
    "backend": {"registered": bool, "target": (str, type(None))},
    "settings": dict,
    "environment": dict,
}
"""The keys of the JSON object and the types of their values, as the module documents them."""


def flat(text: str) -> str:
    """Text without its line breaks and its indents."""
    return " ".join(text.split())


def assert_schema(value: dict[str, Any], schema: dict[str, Any]) -> None:
    assert value.keys() == schema.keys()
    for key, expected in schema.items():
        if isinstance(expected, dict):
            assert_schema(value[key], expected)
        else:
            assert isinstance(value[key], expected), key


def doctor_process(
    *arguments: str, environment: dict[str, str | None], cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """`python -m inductor_ext ...` with variables set, or unset if their value is None."""
    variables = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, "-m", "inductor_ext", *arguments],
        cwd=cwd or CHECKOUT,
        env={key: value for key, value in variables.items() if value is not None},
        capture_output=True,
        text=True,
        check=False,
    )
