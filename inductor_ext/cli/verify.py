"""`inductor-ext verify PACKAGE`: whether a package is what it was when it was written.

Every file is read: names, sizes and places, CRC-32 and, by the manifest, SHA-256. The exit code is
0 for an intact package; a damaged or unsafe one ends with 2 and the reason.
"""

from __future__ import annotations

import argparse

from inductor_ext.cpp_wrapper.package import archive, manifest
from inductor_ext.memory.planner.peak_report import human_bytes

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("package", help="a .pt2 file, or the folder that one was unpacked into")


def run(arguments: argparse.Namespace) -> int:
    """Check the package and say what was checked.

    Raises:
        exc.BadPackageError: it is damaged or unsafe.
        exc.IncompatibleArtifactError: its manifest is of a later format.
    """
    with archive.open_package(arguments.package) as package:
        found = manifest.read(package)
        digests = {}
        if found is not None:
            manifest.check_seal(package, *found)
            digests = found[0].digests()
        package.verify(digests)
        size = human_bytes(sum(entry.size for entry in package.entries.values()))
        how = "SHA-256"
        if not digests:
            made = archive.models(package.entries)
            why = "stock Inductor made it, so there is no manifest" if made else "no compiled model"
            how = f"CRC-32; {why}"
        print(f"{arguments.package}: {len(package.entries)} files, {size}, intact by {how}")
    return 0
