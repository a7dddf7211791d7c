"""`inductor-ext verify PACKAGE`: checks that a package is unchanged since it was written.

Every byte counts. If there is a manifest, contents are checked by SHA-256, and the rest of the zip
file must be as the extension writes it. Otherwise, contents are checked by CRC-32, and the records
of the zip file against each other. With --key, one of the keys must have signed it. The exit code
is 0 for such a package, and 2 with the reason for any other.
"""

from __future__ import annotations

import argparse

from inductor_ext.cpp_wrapper.package import manifest, signing, zip_format, zip_reader
from inductor_ext.memory.planner.peak_report import human_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("package", help="a .pt2 file, or the folder that it was extracted to")
    parser.add_argument(
        "--key",
        action="append",
        metavar="PUBLIC.pem",
        help="require a signature by this public key, or by another --key",
    )


def run(arguments: argparse.Namespace) -> int:
    """Check the package and print what was checked.

    Raises:
        exc.BadPackageError: the package is damaged or unsafe.
        exc.IncompatibleArtifactError: its manifest has a newer format.
        exc.UntrustedPackageError, exc.BadKeyError, exc.MissingDependencyError: see
            `signing.require`.
    """
    with zip_reader.open_package(arguments.package) as package:
        signed = ""
        if arguments.key:
            contents = manifest.read(package)
            key = signing.require(package, contents[1] if contents else None, arguments.key)
            signed = f", signed by key {key}"
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
        print(f"{arguments.package}: {len(package.entries)} files, {size}, intact ({how}){signed}")
    return 0
