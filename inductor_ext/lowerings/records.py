"""Records about lowerings other than matmuls."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from inductor_ext.events import Record


@dataclasses.dataclass(frozen=True)
class AttentionRecord(Record):
    """What has been changed at one call of attention."""

    name: ClassVar[str] = "attention"

    module: str
    """Path of the model's module that calls it, such as "layers.0.self_attn"."""
    changes: tuple[str, ...]

    def describe(self) -> str:
        """Return a one-line, human-readable description."""
        location = f" in {self.module}" if self.module else ""
        return f"attention{location}: {'; '.join(self.changes)}"
