"""`inductor-ext verify PACKAGE`: checks that a package is unchanged since it was written.

Every byte counts. If there is a manifest, contents are checked by SHA-256, and the rest of the zip
file must be as the extension writes it. Otherwise, contents are checked by CRC-32, and the records
of the zip file against each other. With --key, one of the keys must have signed it. With --run,
the models are loaded, and must compute what their self tests have recorded. The exit code is 0 for
such a package, and 2 with the reason for any other.
"""

from __future__ import annotations

import argparse

from inductor_ext import exc
from inductor_ext.cpp_wrapper.package import (
    manifest,
    self_test,
    signing,
    zip_format,
    zip_reader,
)
from inductor_ext.memory.planner.peak_report import human_bytes
from inductor_ext.report.text import format_count


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
        signed = ""
        if arguments.key:
            signed = f", signed by key {signing.require(package, data, arguments.key)}"
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
    if arguments.run:
        _run_self_tests(arguments.package, content, arguments.key)
    return 0


def _run_self_tests(path: str, content: manifest.Manifest | None, keys: list[str] | None) -> None:
    """Run the self test of each model that has one; at least one must."""
    tested = [name for name, model in content.models.items() if model.self_test] if content else []
    if not tested:
        raise exc.NoSelfTestError(path=path, name=", ".join(content.models) if content else "model")
    for name in tested:
        outcome = self_test.run(path, name, require_signature=keys)
        print(
            f'model "{name}": {format_count(outcome.compared, "result")} as recorded '
            f"(largest relative difference {outcome.difference:.2g})"
        )
