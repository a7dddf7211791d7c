"""`inductor-ext sign PACKAGE --key KEY`: signs a package with an Ed25519 key.

The package is checked first, as by `inductor-ext verify`. The exit code is 0, or 2 with the reason
if it cannot be signed.
"""

from __future__ import annotations

import argparse
import getpass

from inductor_ext.cpp_wrapper.package import signing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("package", help="a .pt2 file")
    parser.add_argument(
        "--key",
        required=True,
        metavar="PRIVATE.pem",
        help="the private key, made by `openssl genpkey -algorithm ed25519 -out PRIVATE.pem`",
    )
    parser.add_argument(
        "--output", metavar="PATH", help="where to write the signed package (default: in place)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Sign the package and print the name of the key.

    Raises:
        exc.InductorExtError: see `signing.sign`.
    """
    name = signing.sign(arguments.package, arguments.key, arguments.output, password=_ask_password)
    print(f"{arguments.output or arguments.package}: signed with key {name}")
    return 0


def _ask_password() -> bytes:
    return getpass.getpass("Password of the private key: ").encode()
