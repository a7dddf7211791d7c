"""`inductor-ext verify PACKAGE`: checks that a package is unchanged since it was written.

Every byte counts. If there is a manifest, contents are checked by SHA-256, and the rest of the zip
file must be as the extension writes it. Otherwise, contents are checked by CRC-32, and the records
of the zip file against each other. The exit code is 0 for an intact package, and 2 with the reason
for a damaged, changed or unsafe one.
"""

from __future__ import annotations

import argparse

from inductor_ext.cpp_wrapper.package import manifest, zip_format, zip_reader
from inductor_ext.memory.planner.peak_report import human_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("package", help="a .pt2 file, or the folder that it was extracted to")


def run(arguments: argparse.Namespace) -> int:
    """Check the package and print what was checked.

    Raises:
        exc.BadPackageError: the package is damaged or unsafe.
        exc.IncompatibleArtifactError: its manifest has a newer format.
    """
    with zip_reader.open_package(arguments.package) as package:
        content = manifest.verify(package)
        size = human_bytes(sum(entry.size for entry in package.entries.values()))
        how = "checked by SHA-256"
        if content is None:
            models = zip_format.model_names(package.entries)
            why = (
                "compiled by Inductor (default), so there is no manifest"
                if models
                else "no compiled model"
            )
            how = f"checked by CRC-32; {why}"
        print(f"{arguments.package}: {len(package.entries)} files, {size}, intact ({how})")
    return 0
