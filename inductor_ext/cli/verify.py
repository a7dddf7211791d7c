"""`inductor-ext verify PACKAGE`: checks that a package is unchanged since it was written.

Every byte counts. If there is a manifest, contents are checked by SHA-256, and the rest of the zip
file must be as the extension writes it. Otherwise, contents are checked by CRC-32, and the records
of the zip file against each other. With --key, one of the keys must have signed it. With --run,
the models are loaded, and must compute what their self tests have recorded.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from inductor_ext import exc
from inductor_ext.cpp_wrapper.package import (
    manifest,
    self_test,
    signing,
    zip_format,
    zip_reader,
)
from inductor_ext.memory.planner.peak_report import human_bytes
from inductor_ext.reports.text import format_count

EXAMPLE = "inductor-ext verify model.pt2 --key team.pem --run"
EXIT_CODES = {0: "the package is intact", 2: "it is not, or cannot be read"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("package", help="a .pt2 file, or the folder that it was extracted to")
    parser.add_argument(
        "--key",
        action="append",
        metavar="PUBLIC.pem",
        help="require a signature by this public key, or by another --key",
    )
    parser.add_argument(
        "--run",
        action="store_true",
        help="run the models with recorded inputs, and compare the results (aot_self_test)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Check the package and print what was checked.

    Raises:
        exc.BadPackageError: the package is damaged or unsafe.
        exc.IncompatibleArtifactError: its manifest has a newer format.
        exc.UntrustedPackageError, exc.BadKeyError, exc.MissingDependencyError: see
            `signing.require`.
        exc.NoSelfTestError, exc.SelfTestError: see `self_test.run`.
    """
    with zip_reader.open_package(arguments.package) as package:
        content, data = manifest.verify(package) or (None, None)
        report: dict[str, Any] = {
            "package": arguments.package,
            "intact": True,
            "files": len(package.entries),
            "bytes": sum(entry.size for entry in package.entries.values()),
            "checked_by": "SHA-256" if content is not None else "CRC-32",
            "models": list(content.models if content else zip_format.model_names(package.entries)),
            "signed_by": (signing.require(package, data, arguments.key) if arguments.key else None),
        }
    if not arguments.json:
        print(_format(report))
    if arguments.run:
        report["self_tests"] = {}
        for name, outcome in _run_self_tests(arguments.package, content, arguments.key):
            report["self_tests"][name] = dataclasses.asdict(outcome)
            if not arguments.json:
                print(
                    f'model "{name}": {format_count(outcome.compared, "result")} as recorded '
                    f"(largest relative difference {outcome.difference:.2g})"
                )
    if arguments.json:
        print(json.dumps(report, indent=2))
    return 0


def _format(report: dict[str, Any]) -> str:
    how = f"checked by {report['checked_by']}"
    if report["checked_by"] != "SHA-256":
        why = "compiled by Inductor (default), so there is no manifest"
        how += f"; {why if report['models'] else 'no compiled model'}"
    signed = f", signed by key {report['signed_by']}" if report["signed_by"] else ""
    size = human_bytes(report["bytes"])
    return f"{report['package']}: {report['files']} files, {size}, intact ({how}){signed}"


def _run_self_tests(
    path: str, content: manifest.Manifest | None, keys: list[str] | None
) -> Iterator[tuple[str, self_test.Outcome]]:
    """Run the self test of each model that has one; at least one must."""
    tested = [name for name, model in content.models.items() if model.self_test] if content else []
    if not tested:
        raise exc.NoSelfTestError(path=path, name=", ".join(content.models) if content else "model")
    for name in tested:
        yield name, self_test.run(path, name, require_signature=keys)
