"""The probe for Triton."""

from __future__ import annotations

import importlib.machinery
import os
import re
from collections.abc import Iterable
from importlib import metadata

from inductor_ext.toolchain.probes.common import (
    Finding,
    Probe,
    import_path,
    package_folder,
    package_version,
)


def _triton_requirement() -> str | None:
    """Return the Triton that this torch requires ("triton==3.6.0", from torch 2.14 on
    "triton~=3.8.0").

    torch's CPU builds require none.
    """
    try:
        requirements: Iterable[str] = metadata.requires("torch") or ()
    except metadata.PackageNotFoundError:
        return None
    for requirement in requirements:
        match = re.match(r"((?:pytorch-)?triton\s*[=~]=\s*[\w.+]+)", requirement)
        if match:
            return match[1].replace(" ", "")
    return None


def _examine_triton(_path: tuple[str, ...]) -> Finding:
    requirement = _triton_requirement()
    folder = package_folder("triton")
    version = package_version("triton", "pytorch-triton")
    if folder is None:
        return Finding(
            why="it is not installed for this Python",
            install=f"pip install {requirement or 'triton'}",
        )
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    libraries = [os.path.join(folder, "_C", f"libtriton{suffix}") for suffix in suffixes]
    if not any(map(os.path.isfile, libraries)):
        return Finding(
            version=version,
            path=folder,
            why=f"{os.path.join(folder, '_C')} has no libtriton that this Python can load",
            install=f"pip install --force-reinstall {requirement or 'triton'}",
        )
    clause = re.split(r"([=~]=)", requirement or "", maxsplit=1)[1:]
    fits = not clause or _meets(version, *clause)
    detail = None if fits else f"this torch requires {''.join(clause).removeprefix('==')}"
    return Finding(version=version, path=folder, detail=detail)


def _meets(version: str | None, operator: str, required: str) -> bool:
    """Whether a version meets `==required` or `~=required` (whose last number may be higher)."""
    if operator == "==" or version is None:
        return version == required
    release, lowest = (list(map(int, re.findall(r"\d+", text)[:3])) for text in (version, required))
    return release[: len(lowest) - 1] == lowest[:-1] and release >= lowest


TRITON = Probe("Triton", import_path, _examine_triton)
