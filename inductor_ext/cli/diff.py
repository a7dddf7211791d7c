"""`inductor-ext diff A B`: shows the differences between two packages.

Compares their manifests: signatures, constants by name and digest, options, versions, kernels,
memory plans, and the digests of files by name, without the hashes that Inductor puts into file
names.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from inductor_ext.reports import package_report

EXAMPLE = "inductor-ext diff old.pt2 new.pt2"
EXIT_CODES = {
    0: "the packages do not differ",
    1: "they differ",
    2: "one of them cannot be read",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("one", help="a .pt2 file, or the folder that it was extracted to")
    parser.add_argument("other", help="the package to compare it with")
    parser.add_argument("--json", action="store_true", help="print one JSON list")


def run(arguments: argparse.Namespace) -> int:
    """Print the differences, one per line.

    Raises:
        exc.BadPackageError, exc.IncompatibleArtifactError: see `package_report.read`.
    """
    changes = package_report.differences(
        package_report.read(arguments.one), package_report.read(arguments.other)
    )
    if arguments.json:
        print(json.dumps(changes, indent=2))
    else:
        for change in changes:
            print(_format_change(change))
    return 1 if changes else 0


def _format_change(change: dict[str, Any]) -> str:
    if "before" not in change:
        return f"+ {change['place']}: {change['after']!r}"
    if "after" not in change:
        return f"- {change['place']}: {change['before']!r}"
    return f"  {change['place']}: {change['before']!r} -> {change['after']!r}"
