"""`inductor-ext sign PACKAGE --key KEY`: signs a package with an Ed25519 key.

The package is checked first, as by `inductor-ext verify`.
"""

from __future__ import annotations

import argparse
import getpass
import json

from inductor_ext.cpp_wrapper.package import signing

EXAMPLE = "inductor-ext sign model.pt2 --key private.pem"
EXIT_CODES = {0: "the package is signed", 2: "it cannot be signed"}


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
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Sign the package and print the name of the key.

    Raises:
        exc.InductorExtError: see `signing.sign`.
    """
    name = signing.sign(arguments.package, arguments.key, arguments.output, password=_ask_password)
    package = arguments.output or arguments.package
    if arguments.json:
        print(json.dumps({"package": package, "key": name}))
    else:
        print(f"{package}: signed with key {name}")
    return 0


def _ask_password() -> bytes:
    return getpass.getpass("Password of the private key: ").encode()
