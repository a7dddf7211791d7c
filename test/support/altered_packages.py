"""Contents and manifests of packages, and packages with altered ones and correct checksums."""

from __future__ import annotations

import copy
import hashlib
import io
import json
from typing import Any

from inductor_ext.cpp_wrapper.package import manifest, zip_format, zip_reader, zip_writer


def contents(package: bytes) -> dict[str, bytes]:
    """The entries except the manifest and the archive's bookkeeping."""
    with zip_reader.open_package(io.BytesIO(package)) as opened:
        return {
            name: opened.read(name)
            for name in opened.entries
            if name not in (*zip_format.BOOKKEEPING, manifest.PATH)
        }


def manifest_of(package: bytes) -> dict[str, Any]:
    """The manifest as JSON."""
    with zip_reader.open_package(io.BytesIO(package)) as opened:
        content: dict[str, Any] = json.loads(opened.read(manifest.PATH))
    return content


def seal(entries: dict[str, bytes], content: Any, root: str = "net") -> bytes:
    """A package in which every checksum is correct. Signatures stay as they are.

    Args:
        entries: contents by name below the root folder.
        content: the manifest as JSON; its list of files is filled in.
        root: the root folder's name.
    """
    content = copy.deepcopy(content)
    if isinstance(content, dict):
        content["files"] = {
            name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in entries.items()
            if name != zip_format.SIGNATURES
        }
    return write({**entries, manifest.PATH: json.dumps(content).encode()}, root)


def write(entries: dict[str, bytes], root: str) -> bytes:
    """A package of these entries: without a manifest, as torch writes it, unless it is one of them.

    Args:
        entries: contents by name below the root folder.
        root: the root folder's name.
    """
    file = io.BytesIO()
    writer = zip_writer.Writer(file, root)
    for name, data in entries.items():
        writer.add(name, data, aligned=name.endswith(".weights"))
    writer.finish()
    return file.getvalue()
