"""Records of compiles."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from inductor_ext.events import Record


@dataclasses.dataclass(frozen=True)
class CompileRecord(Record):
    """A graph that Inductor compiled, or loaded from its cache, with the extension active."""

    name: ClassVar[str] = "compile"

    kind: str
    """"inference", "forward", "backward", "aot"; "whole" for a forward and backward graph loaded
    together from the AOTAutograd cache."""
    operators: int
    """Number of calls in the FX graph."""
    seconds: float
    """Wall time."""
    cache: str
    """State of the FX graph cache: "hit", "miss", "bypass" or "off"."""
    cache_key: str | None
    settings: dict[str, Any]
    """Settings of the extension that differ from their defaults."""
