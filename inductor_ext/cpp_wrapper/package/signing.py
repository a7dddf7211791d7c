"""Ed25519 signatures of packages: `sign` adds one, `require` checks that a
trusted key has made one.

A signature covers the manifest, which has the SHA-256 of every other file. It is in an entry of its
own, so that a signed package has the same manifest as before, and several parties can sign it. The
cryptography is that of the package `cryptography`, which is imported when it is needed. No
settings; does not import torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from inductor_ext import exc
from inductor_ext.cpp_wrapper.package import manifest, output_path, zip_format, zip_reader
from inductor_ext.cpp_wrapper.package.zip_writer import Chunks, Writer
from inductor_ext.storage import json_codec

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

Key: TypeAlias = str | os.PathLike[str] | bytes
"""The path of a key in PEM format, or its content."""

PATH = zip_format.SIGNATURES

_LIMIT = 1 << 20
"""Maximum size of the entry with signatures in bytes."""

_PURPOSE = b"inductor_ext package 1\n"
"""Precedes the manifest in the signed message, so that a signature is valid for nothing else."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signature:
    """A signature by one key."""

    key: str
    """`key_id` of the public key."""
    signature: str
    """The 64 bytes of the Ed25519 signature in hex."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Signatures:
    """The content of the entry."""

    signatures: tuple[Signature, ...] = ()


def read(package: zip_reader.Package) -> tuple[Signature, ...]:
    """Return the signatures of a package without checking them; none for an unsigned package.

    Raises:
        exc.BadPackageError: the entry with signatures is damaged.
    """
    if PATH not in package.entries:
        return ()
    try:
        content = json.loads(package.read(PATH, limit=_LIMIT))
        signatures: _Signatures = json_codec.decode(_Signatures, content)
    except (ValueError, RecursionError) as error:
        why = f"the entry with its signatures is damaged: {error}"
        raise exc.BadPackageError(path=package.where, why=why) from None
    return signatures.signatures


def key_id(raw: bytes) -> str:
    """Return the name of a public key: the first 16 hex digits of the SHA-256 of its 32 bytes."""
    return hashlib.sha256(raw).hexdigest()[:16]


def require(
    package: zip_reader.Package, manifest_bytes: bytes | None, keys: Key | Sequence[Key]
) -> str:
    """Check that a trusted key has signed a package; return the key's `key_id`.

    The signature is that of the manifest. Whether the other files are those of the manifest is not
    checked here.

    Args:
        package: the package.
        manifest_bytes: its manifest as it is used; None if it has none. Another process might
            replace the file between two reads.
        keys: the trusted public keys, of which one must have signed.

    Raises:
        exc.BadKeyError: a key cannot be read, or there is none.
        exc.MissingDependencyError: the package `cryptography` is not installed.
        exc.UntrustedPackageError: there is no valid signature by any of the keys.
        exc.BadPackageError: the entry with signatures is damaged.
    """
    trusted = _read_public_keys(keys)
    if manifest_bytes is None:
        why = "it was compiled by Inductor (default), whose packages cannot be signed"
        raise exc.UntrustedPackageError(path=package.where, why=why)
    signatures = read(package)
    for signature in signatures:
        key = trusted.get(signature.key)
        if key is not None and _is_valid(key, signature, manifest_bytes):
            return signature.key
    raise exc.UntrustedPackageError(path=package.where, why=_explain(signatures, trusted))


def _explain(signatures: Sequence[Signature], trusted: Mapping[str, object]) -> str:
    """Return why none of the signatures counts."""
    if not signatures:
        return "it has no signature"
    names = [signature.key for signature in signatures]
    wrong = [name for name in names if name in trusted]
    if wrong:
        return f"its signature by key {wrong[0]} is not valid: it was changed after it was signed"
    return f"it is signed by key {', '.join(names)}, and trusted are {', '.join(sorted(trusted))}"


def _is_valid(key: Ed25519PublicKey, signature: Signature, manifest_bytes: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(bytes.fromhex(signature.signature), _PURPOSE + manifest_bytes)
    except (InvalidSignature, ValueError):
        return False
    return True


def sign(
    path: str | os.PathLike[str],
    key: Key,
    output: str | os.PathLike[str] | None = None,
    *,
    password: Callable[[], bytes] | None = None,
) -> str:
    """Sign a package that the extension has written; return the `key_id` of the key.

    Every byte of the package is checked before. Signatures by other keys are kept.

    Args:
        path: path of a .pt2 file.
        key: an Ed25519 private key in PEM format.
        output: path of the signed package. Default: None, which replaces the file at `path`, at
            once or not at all.
        password: returns the password of an encrypted key. Default: None.

    Raises:
        exc.BadKeyError, exc.MissingDependencyError: see `require`.
        exc.BadPackageError: the package is damaged, was changed, or was not written by the
            extension.
        exc.BadPackagePathError: the signed package cannot be written.
    """
    private = _read_private_key(key, password)
    target = os.fspath(path if output is None else output)
    output_path.check_package_path(target)
    with zip_reader.open_package(path) as package:
        if not package.root:
            _refuse(package, "it is a folder; sign the .pt2 file")
        if (contents := manifest.verify(package)) is None:
            _refuse(package, "it was written by Inductor (default) and has no manifest")
        content, data = contents
        name = key_id(private.public_key().public_bytes_raw())
        own = Signature(key=name, signature=private.sign(_PURPOSE + data).hex())
        others = [signature for signature in read(package) if signature.key != name]
        with output_path.open_for_writing(target) as file:
            _copy(package, content, Writer(file, package.root), [*others, own])
    return name


def _refuse(package: zip_reader.Package, why: str) -> NoReturn:
    raise exc.UnsignablePackageError(path=package.where, why=why)


def _copy(
    package: zip_reader.Package,
    content: manifest.Manifest,
    writer: Writer,
    signatures: Sequence[Signature],
) -> None:
    """Write the entries of a package in their order, with other signatures."""
    for entry in sorted(package.entries.values(), key=lambda entry: entry.offset):
        if entry.name == PATH or entry.name in zip_format.BOOKKEEPING:
            continue
        digest = content.files[entry.name].sha256 if entry.name != manifest.PATH else None
        source = Chunks(entry.size, package.read_chunks(entry.name, digest))
        writer.add(entry.name, source, aligned=entry.offset % zip_format.PAGE == 0)
    stored = json_codec.encode(_Signatures(signatures=tuple(signatures)))
    writer.add(PATH, json.dumps(stored, indent=1).encode() + b"\n")
    writer.finish()


def _read_private_key(key: Key, password: Callable[[], bytes] | None) -> Ed25519PrivateKey:
    serialization, ed25519 = _import_cryptography()
    where, data = _read_key(key)
    secret = None
    if b"ENCRYPTED" in data and password is not None:
        secret = password()
    try:
        private: Any = serialization.load_pem_private_key(data, secret)
    except Exception as error:
        why = str(error).splitlines()[0].rstrip(".")
        if b"PRIVATE KEY" not in data:
            why = "it is not a private key in PEM format"
        raise exc.BadKeyError(key=where, why=why) from None
    if not isinstance(private, ed25519.Ed25519PrivateKey):
        raise exc.BadKeyError(key=where, why="it is the private key of another algorithm")
    result: Ed25519PrivateKey = private
    return result


def _read_public_keys(keys: Key | Sequence[Key]) -> dict[str, Ed25519PublicKey]:
    """Return public keys by `key_id`."""
    serialization, ed25519 = _import_cryptography()
    if isinstance(keys, (str, bytes, os.PathLike)):
        keys = [keys]
    result = {}
    for key in keys:
        where, data = _read_key(key)
        try:
            public = serialization.load_pem_public_key(data)
        except Exception:
            why = "it is not a public key in PEM format"
            raise exc.BadKeyError(key=where, why=why) from None
        if not isinstance(public, ed25519.Ed25519PublicKey):
            raise exc.BadKeyError(key=where, why="it is the public key of another algorithm")
        result[key_id(public.public_bytes_raw())] = public
    if not result:
        raise exc.BadKeyError(key=repr(keys), why="it names no key")
    return result


def _read_key(key: Key) -> tuple[str, bytes]:
    """Return (description, content) of a key."""
    if isinstance(key, bytes):
        return "the given bytes", key
    if not isinstance(key, (str, os.PathLike)):
        raise exc.BadKeyError(key=repr(key), why="it is neither a path nor bytes")
    try:
        with open(key, "rb") as file:
            return os.fspath(key), file.read(_LIMIT)
    except OSError as error:
        raise exc.BadKeyError(key=os.fspath(key), why=error.strerror or str(error)) from None


def _import_cryptography() -> tuple[Any, Any]:
    """Return (serialization, ed25519) of the package `cryptography`."""
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise exc.MissingDependencyError(
            feature="Signing packages and checking signatures", package="cryptography"
        ) from None
    return serialization, ed25519
