"""`inductor-ext inspect PACKAGE`: shows a package's contents, signatures and requirements.

Runs nothing of the package. It verifies the files of the models, as `inductor_ext.load` does, at
about 0.6 s per GB, and shows damage as a reason why a model does not run here.
"""

from __future__ import annotations

import argparse
import json

from inductor_ext.cli.argument_types import parse_natural
from inductor_ext.reports import package_report

EXAMPLE = "inductor-ext inspect model.pt2"
EXIT_CODES = {0: "the package was read", 2: "it cannot be read"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("package", help="a .pt2 file, or the folder that it was extracted to")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--top",
        type=parse_natural,
        default=10,
        metavar="N",
        help="list the N largest constants of each model (default: 10)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the contents of the package.

    Raises:
        exc.BadPackageError, exc.IncompatibleArtifactError: see `package_report.read`.
    """
    report = package_report.read(arguments.package)
    if arguments.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        print(package_report.text(report, arguments.top))
    return 0
