"""Signatures of packages: by whom one is trusted, what a signature covers, and which keys work."""

from __future__ import annotations

import builtins
import json
import pathlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import inductor_ext
from inductor_ext import exc
from inductor_ext.cli import main
from inductor_ext.cpp_wrapper.load import load as load_module
from inductor_ext.cpp_wrapper.package import manifest, signing, zip_format, zip_reader
from test.support import altered_packages
from test.support.built_models import Built

serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")

CONTENT = {
    "format": 1,
    "models": {},
    "versions": {"torch": "2.0.1"},
    "platform": {},
    "provenance": {},
}
ENTRIES = {
    "data/aotinductor/model/a.wrapper.so": b"library" * 100,
    "data/aotinductor/model/a.wrapper.weights": bytes(4096),
    "data/empty": b"",
}


class Pair:
    """The files of a new private key and of its public key."""

    def __init__(self, folder: pathlib.Path, name: str, password: bytes | None = None) -> None:
        private = ed25519.Ed25519PrivateKey.generate()
        encryption: Any = serialization.NoEncryption()
        if password is not None:
            encryption = serialization.BestAvailableEncryption(password)
        self.private = folder / f"{name}.pem"
        self.public = folder / f"{name}.public.pem"
        self.private.write_bytes(
            private.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
            )
        )
        public = private.public_key()
        self.public.write_bytes(
            public.public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            )
        )
        self.id = signing.key_id(public.public_bytes_raw())


@pytest.fixture
def alice(tmp_path: pathlib.Path) -> Pair:
    return Pair(tmp_path, "alice")


@pytest.fixture
def bob(tmp_path: pathlib.Path) -> Pair:
    return Pair(tmp_path, "bob")


@pytest.fixture
def package(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "net.pt2"
    path.write_bytes(altered_packages.seal(ENTRIES, CONTENT))
    return path


def require(path: pathlib.Path, *keys: signing.Key) -> str:
    with zip_reader.open_package(path) as package:
        contents = manifest.read(package)
        return signing.require(package, contents[1] if contents else None, keys)


def entries(path: pathlib.Path) -> dict[str, bytes]:
    with zip_reader.open_package(path) as package:
        return {name: package.read(name) for name in package.entries}


def test_a_signature_is_an_entry_and_changes_no_other(package: pathlib.Path, alice: Pair) -> None:
    before = entries(package)
    assert signing.sign(package, alice.private) == alice.id
    after = entries(package)
    assert set(after) - set(before) == {zip_format.SIGNATURES}
    assert {name: after[name] for name in before} == before
    with zip_reader.open_package(package) as opened:
        assert manifest.verify(opened) is not None
        weights = opened.entries["data/aotinductor/model/a.wrapper.weights"]
        assert weights.offset % zip_format.PAGE == 0
    assert require(package, alice.public) == alice.id


def test_signing_twice_gives_the_same_bytes(package: pathlib.Path, alice: Pair) -> None:
    signing.sign(package, alice.private)
    first = package.read_bytes()
    signing.sign(package, alice.private)
    assert package.read_bytes() == first


def test_several_keys_sign(
    package: pathlib.Path, tmp_path: pathlib.Path, alice: Pair, bob: Pair
) -> None:
    both = tmp_path / "both.pt2"
    unsigned = package.read_bytes()
    signing.sign(package, alice.private, both)
    assert package.read_bytes() == unsigned
    signing.sign(both, bob.private)
    for pair in (alice, bob):
        assert require(both, pair.public) == pair.id
        assert require(both, pair.public.read_bytes()) == pair.id
    with zip_reader.open_package(both) as opened:
        assert [signature.key for signature in signing.read(opened)] == [alice.id, bob.id]


def test_packages_that_are_not_trusted(
    package: pathlib.Path, tmp_path: pathlib.Path, alice: Pair, bob: Pair
) -> None:
    def refused(path: pathlib.Path, message: str) -> None:
        with pytest.raises(exc.UntrustedPackageError, match=message):
            require(path, alice.public)

    refused(package, "it has no signature")
    signing.sign(package, bob.private)
    refused(package, f"it is signed by key {bob.id}, and trusted are {alice.id}")
    default = tmp_path / "default.pt2"
    default.write_bytes(altered_packages.write(ENTRIES, "default"))
    refused(default, "it was compiled by Inductor")


def test_a_change_makes_a_signature_invalid(package: pathlib.Path, alice: Pair) -> None:
    signing.sign(package, alice.private)
    signed = package.read_bytes()
    changes: list[Callable[[dict[str, bytes], dict[str, Any]], object]] = [
        lambda files, content: files.update({"data/empty": b"x"}),
        lambda files, content: files.update({"data/new": b""}),
        lambda files, content: files.pop("data/empty"),
        lambda files, content: content["versions"].update(torch="2.0.2"),
    ]
    for change in changes:
        files, content = altered_packages.contents(signed), altered_packages.manifest_of(signed)
        change(files, content)
        package.write_bytes(altered_packages.seal(files, content))
        with zip_reader.open_package(package) as opened:
            assert manifest.verify(opened) is not None
        with pytest.raises(exc.UntrustedPackageError, match="was changed after it was signed"):
            require(package, alice.public)


def test_a_file_that_does_not_match_the_signed_manifest(package: pathlib.Path, alice: Pair) -> None:
    signing.sign(package, alice.private)
    data = package.read_bytes()
    package.write_bytes(data.replace(b"librarylibrary", b"malwarelibrary", 1))
    with zip_reader.open_package(package) as opened, pytest.raises(exc.BadPackageError):
        manifest.verify(opened)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{}" * 2,
        b'{"signatures": 3}',
        b'{"signatures": [{"key": "ab"}]}',
        b'{"signatures": [{"key": "ab", "signature": 7}]}',
        b"\xff",
        b"[" * 100_000,
    ],
)
def test_a_damaged_entry_with_signatures(tmp_path: pathlib.Path, text: bytes, alice: Pair) -> None:
    path = tmp_path / "net.pt2"
    files = ENTRIES | {zip_format.SIGNATURES: text}
    path.write_bytes(altered_packages.seal(files, CONTENT))
    with pytest.raises(exc.BadPackageError, match="the entry with its signatures is damaged"):
        require(path, alice.public)


@pytest.mark.parametrize("signature", ["", "zz", "00" * 64, "00" * 63])
def test_a_made_up_signature(package: pathlib.Path, alice: Pair, signature: str) -> None:
    signing.sign(package, alice.private)
    made_up = {"signatures": [{"key": alice.id, "signature": signature}]}
    data = package.read_bytes()
    files = altered_packages.contents(data) | {zip_format.SIGNATURES: json.dumps(made_up).encode()}
    package.write_bytes(altered_packages.seal(files, altered_packages.manifest_of(data)))
    with pytest.raises(exc.UntrustedPackageError, match=f"its signature by key {alice.id}"):
        require(package, alice.public)


def test_keys_that_cannot_be_used(
    package: pathlib.Path, tmp_path: pathlib.Path, alice: Pair
) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec

    elliptic = ec.generate_private_key(ec.SECP256R1())
    other = tmp_path / "other.pem"
    other.write_bytes(
        elliptic.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    locked = Pair(tmp_path, "locked", b"secret")
    for key, why in (
        (tmp_path / "missing.pem", "No such file"),
        (b"nonsense", "the given bytes"),
        (alice.public, "Cannot use the key"),
        (other, "another algorithm"),
        (locked.private, "[Pp]assword"),
        (3, "neither a path nor bytes"),
    ):
        with pytest.raises(exc.BadKeyError, match=why):
            signing.sign(package, key)  # type: ignore[arg-type]
    for key, why in ((alice.private, "not a public key"), (b"", "not a public key")):
        with pytest.raises(exc.BadKeyError, match=why):
            require(package, key)
    with pytest.raises(exc.BadKeyError, match="it names no key"):
        require(package)
    assert signing.sign(package, locked.private, password=lambda: b"secret") == locked.id
    with pytest.raises(exc.BadKeyError):
        signing.sign(package, locked.private, password=lambda: b"wrong")


def test_packages_that_cannot_be_signed(
    package: pathlib.Path, tmp_path: pathlib.Path, alice: Pair
) -> None:
    data = package.read_bytes()
    package.write_bytes(data.replace(b"library", b"malware", 1))
    with pytest.raises(exc.BadPackageError, match="damaged"):
        signing.sign(package, alice.private)
    package.write_bytes(data)
    with pytest.raises(exc.BadPackagePathError):
        signing.sign(package, alice.private, tmp_path / "missing" / "net.pt2")
    folder = tmp_path / "unpacked"
    for name, text in entries(package).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    with pytest.raises(exc.UnsignablePackageError, match="it is a folder"):
        signing.sign(folder, alice.private, tmp_path / "signed.pt2")
    assert package.read_bytes() == data
    assert not list(tmp_path.glob("*signed*"))


def test_without_cryptography(
    package: pathlib.Path, alice: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported = builtins.__import__

    def fail(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("cryptography"):
            raise ImportError(name)
        return imported(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", fail)
    with pytest.raises(exc.MissingDependencyError, match="pip install cryptography"):
        signing.sign(package, alice.private)


class TestCommandLine:
    def run(self, capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
        code = main.main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    def test_sign_verify_inspect(
        self, package: pathlib.Path, alice: Pair, bob: Pair, capsys: pytest.CaptureFixture[str]
    ) -> None:
        code, text = self.run(capsys, "sign", package, "--key", alice.private)
        assert (code, text) == (0, f"{package}: signed with key {alice.id}\n")
        code, text = self.run(capsys, "verify", package, "--key", bob.public, "--key", alice.public)
        assert code == 0
        assert text.endswith(f"intact (checked by SHA-256), signed by key {alice.id}\n")
        code, text = self.run(capsys, "verify", package, "--key", bob.public)
        assert (code, "is not trusted" in text) == (2, True)
        code, text = self.run(capsys, "inspect", package)
        assert f"signed by    key {alice.id} (`inductor-ext verify --key` checks it)" in text
        code, text = self.run(capsys, "inspect", "--json", package)
        assert json.loads(text)["signers"] == [alice.id]

    def test_the_password_is_asked_for(
        self,
        package: pathlib.Path,
        tmp_path: pathlib.Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        locked = Pair(tmp_path, "locked", b"secret")
        with mock.patch("getpass.getpass", return_value="secret"):
            code, text = self.run(capsys, "sign", package, "--key", locked.private)
        assert (code, locked.id in text) == (0, True)


class TestLoad:
    @pytest.fixture
    def signed(self, tied: Built, tmp_path: pathlib.Path, alice: Pair) -> pathlib.Path:
        path = tmp_path / "signed.pt2"
        signing.sign(tied.path, alice.private, path)
        return path

    def test_a_signed_package_runs(
        self, tied: Built, signed: pathlib.Path, alice: Pair, bob: Pair
    ) -> None:
        expected = inductor_ext.load(tied.path)(*tied.inputs)
        keys = [bob.public, str(alice.public)]
        model = inductor_ext.load(signed, require_signature=keys)
        torch.testing.assert_close(model(*tied.inputs), expected, rtol=0, atol=0)
        # Torch's own loader ignores the signature.
        default = torch._inductor.aoti_load_package(str(signed))
        torch.testing.assert_close(default(*tied.inputs), expected, rtol=0, atol=0)

    def test_no_library_is_opened_of_one_that_is_not_trusted(
        self, tied: Built, signed: pathlib.Path, bob: Pair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened = mock.Mock()
        monkeypatch.setattr(load_module, "NativeLibrary", opened)
        for path in (tied.path, signed):
            with pytest.raises(exc.UntrustedPackageError):
                inductor_ext.load(path, require_signature=bob.public)
        opened.assert_not_called()

    def test_reload_requires_it_too(
        self, tied: Built, signed: pathlib.Path, alice: Pair, tmp_path: pathlib.Path
    ) -> None:
        model = inductor_ext.load(signed, require_signature=alice.public)
        unsigned = tmp_path / "unsigned.pt2"
        unsigned.write_bytes(pathlib.Path(tied.path).read_bytes())
        with pytest.raises(exc.UntrustedPackageError):
            model.reload(unsigned)
        assert model.path == str(signed)
        model.reload()

    def test_a_signature_needs_digests(self, signed: pathlib.Path, alice: Pair) -> None:
        with pytest.raises(exc.BadOptionError, match="True if a signature is required"):
            inductor_ext.load(signed, require_signature=alice.public, verify=False)
