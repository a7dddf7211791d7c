"""Records of AOT packages: written, and looked up in the artifact cache."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from inductor_ext.events import Record


@dataclasses.dataclass(frozen=True)
class PackageRecord(Record):
    """An AOT package that was written: compiled, or copied from the artifact cache."""

    name: ClassVar[str] = "package"

    path: str
    bytes: int
    seconds: float
    """Wall time of the whole compile and packaging, or of the lookup and copy on a cache hit."""


@dataclasses.dataclass(frozen=True)
class ArtifactCacheRecord(Record):
    """The result of a lookup of an AOT package in the artifact cache."""

    name: ClassVar[str] = "artifact_cache"

    state: str
    """"hit", "miss", "bypass" (no key can be computed) or "off"."""
    key: str | None
    why: str | None
    """The reason, for "bypass" and "off"."""
    seconds: float
    """Wall time of computing the key and, on a hit, of copying the package."""
