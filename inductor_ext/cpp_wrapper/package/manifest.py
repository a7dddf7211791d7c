"""The manifest of a package: `extra/inductor_ext/manifest.json`.

A `Manifest` describes a package without running code from it: the signature and constants of each
model, the machine requirements, the options and versions that it was compiled with, and the SHA-256
of every file. The manifest is deterministic: the same compile gives the same bytes. It contains no
date, path or host name unless the caller adds one.

A model that was compiled for several targets has a `Variant` per further target: what differs
between the compiles. Its constants and signature are those of the model.

Reading checks the type of every field and preserves fields added by later versions.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from inductor_ext import exc
from inductor_ext.cpp_wrapper.package import checksums, zip_format, zip_reader
from inductor_ext.storage import json_codec
from inductor_ext.storage.json_codec import EXTRA, OPTIONAL, Size

FORMAT = 1
"""Version of the manifest format. A reader rejects a higher version."""

_FOLDER = "extra/inductor_ext/"
"""Folder that only packages written by the extension contain."""

PATH = f"{_FOLDER}manifest.json"
"""Entry of the manifest, relative to the root folder of the package."""

VARIANTS_FOLDER = "data/inductor_ext/"
"""Folder of the files of variants, `<target>/<model>/` below it. torch's loaders ignore it; those
below extra/ they would read as text."""

_LIMIT = 1 << 28
"""Maximum size of a manifest in bytes."""

_Json = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class File:
    """An entry of the package."""

    bytes: Size
    sha256: str
    checksums: str | None = dataclasses.field(default=None, metadata={OPTIONAL: True})
    """Checksums of its blocks (`package.checksums`); only of weights, None in packages of earlier
    versions."""
    more: _Json = dataclasses.field(default_factory=dict, metadata={EXTRA: True})
    """Here and in the classes below: fields added by later versions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constant:
    """A constant of a model: a parameter, a buffer or another tensor."""

    name: str
    """Name in the generated code."""
    fqn: str
    """Fully qualified name in the original module, such as "encoder.layer.0.weight"; empty for a
    constant created by the compiler."""
    dtype: str
    """Such as "float32"."""
    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    """In elements; empty if the layout has no strides."""
    bytes: Size
    """Size of its storage in bytes."""
    offset: Size | None
    """Offset of its storage in the model's weights, in bytes; None if it is not stored there."""
    sha256: str | None
    """Hex digest of its storage."""
    device: str = "cpu"
    folded: bool = False
    """Whether it is computed from other constants when the model is loaded or updated."""
    more: _Json = dataclasses.field(default_factory=dict, metadata={EXTRA: True})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """A generated kernel."""

    name: str
    operators: tuple[str, ...] = ()
    """Operators of the exported graph that the kernel computes."""
    device: str = "cpu"
    index_inputs: Mapping[str, str] | None = dataclasses.field(
        default=None, metadata={OPTIONAL: True}
    )
    """By message of a check in the kernel that reports an index as out of bounds: the name of the
    input that the index comes from. Only of checks for which that is known. On a GPU the check is
    an assert of the device."""
    more: _Json = dataclasses.field(default_factory=dict, metadata={EXTRA: True})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """The same model compiled for another target. The fields are those of `Model`."""

    target: str
    """Name of the target: "x86-64-v3", "sm_90", "ptx"."""
    library: str
    kernels: tuple[Kernel, ...] = ()
    cpu_features: tuple[str, ...] = ()
    machine: str | None = dataclasses.field(default=None, metadata={OPTIONAL: True})
    torch_functions: Mapping[str, str] | None = dataclasses.field(
        default=None, metadata={OPTIONAL: True}
    )
    cuda_architectures: tuple[str, ...] = ()
    options: _Json = dataclasses.field(default_factory=dict)
    memory: _Json = dataclasses.field(default_factory=dict)
    more: _Json = dataclasses.field(default_factory=dict, metadata={EXTRA: True})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A compiled model in a package."""

    device: str
    """Device type that the model runs on: "cpu", "cuda"."""
    library: str | None
    """Entry of the shared library; None if the package contains the model's sources instead."""
    weights: str | None = None
    """Entry of the weights; None if there are none or they are outside of the package."""
    outside: File | None = None
    """Size and digest of the weights file, if the weights are outside of the package."""
    signature: _Json = dataclasses.field(default_factory=dict)
    """Signature of a call (`signature.Signature` as JSON)."""
    constants: tuple[Constant, ...] = ()
    frozen: tuple[str, ...] = dataclasses.field(default=(), metadata={OPTIONAL: True})
    """Constants of the exported program, by fully qualified name, that other constants or the code
    were computed from when it was compiled (`freezing`). They cannot be updated."""
    state: Mapping[str, str] | None = dataclasses.field(default=None, metadata={OPTIONAL: True})
    """For every name of the exported module's `state_dict()`, the fully qualified name of the
    constant that has its value: another one for a tied weight, and empty if the model does not read
    it. Buffers that are not persistent are not listed. None in packages of earlier versions."""
    mutated_buffers: tuple[str, ...] = dataclasses.field(default=(), metadata={OPTIONAL: True})
    """Buffers that a call changes, by fully qualified name."""
    mutates_inputs: bool | None = dataclasses.field(default=None, metadata={OPTIONAL: True})
    """Whether a call changes its inputs. None in packages of earlier versions, of which neither is
    known."""
    kernels: tuple[Kernel, ...] = ()
    cpu_features: tuple[str, ...] = ()
    """Required CPU features, by the names of `build.cpu_isa`."""
    machine: str | None = dataclasses.field(default=None, metadata={OPTIONAL: True})
    """Processor architecture, if it is not that of the package's platform."""
    torch_functions: Mapping[str, str] | None = dataclasses.field(
        default=None, metadata={OPTIONAL: True}
    )
    """Functions of torch that the library calls, with their declarations, by name
    (`build.torch_functions`). None if they are not known, and in packages of earlier versions."""
    cuda_architectures: tuple[str, ...] = ()
    """Architectures that its kernels were compiled for: "sm_90", "sm_90a", "compute_90"."""
    options: _Json = dataclasses.field(default_factory=dict)
    """Non-default options of Inductor and settings of the extension."""
    memory: _Json = dataclasses.field(default_factory=dict)
    """Summary of the memory plan: peak and lower bound in bytes, arenas, allocator calls."""
    self_test: _Json | None = dataclasses.field(default=None, metadata={OPTIONAL: True})
    """Recorded inputs and results (`self_test.Recording` as JSON); None without a self test."""
    target: str | None = dataclasses.field(default=None, metadata={OPTIONAL: True})
    """Name of the target that `library` was compiled for; None if no target was named."""
    variants: tuple[Variant, ...] = dataclasses.field(default=(), metadata={OPTIONAL: True})
    """The compiles for other targets. Torch's own loaders and earlier versions use `library`."""
    more: _Json = dataclasses.field(default_factory=dict, metadata={EXTRA: True})

    def for_target(self, variant: Variant) -> Model:
        """Return the model as compiled for the target of one of its variants."""
        names = (field.name for field in dataclasses.fields(variant) if field.name != "more")
        return dataclasses.replace(self, **{name: getattr(variant, name) for name in names})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """The models, files, versions and platform of a package."""

    format: Size = FORMAT
    models: Mapping[str, Model]
    files: Mapping[str, File]
    """By entry name: all entries except the manifest, `zip_format.BOOKKEEPING` and
    `zip_format.SIGNATURES`."""
    versions: Mapping[str, str | None]
    """Versions it was compiled with, by "torch", "cuda", "triton", "compiler", "inductor_ext" and
    "source_key"."""
    platform: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Platform it runs on: "system" (`sys.platform`) and "machine" (`platform.machine()`). Targets
    of a model can be for other machines."""
    provenance: _Json = dataclasses.field(default_factory=dict)
    """Free-form information about the origin, added by the caller."""
    more: _Json = dataclasses.field(default_factory=dict, metadata={EXTRA: True})

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 in hex by entry name."""
        return {name: file.sha256 for name, file in self.files.items()}

    def model(self, name: str, path: str) -> Model:
        """Return the model called `name`.

        Args:
            name: name of the model.
            path: path of the package, for the error message.

        Raises:
            exc.ModelNotFoundError: there is no such model.
        """
        if name not in self.models:
            known = ", ".join(map(repr, self.models))
            raise exc.ModelNotFoundError(path=path, name=name, models=known)
        return self.models[name]


def dumps(manifest: Manifest) -> bytes:
    """Serialize a manifest as UTF-8 JSON. Equal manifests give equal bytes.

    Raises:
        TypeError, ValueError: a free-form field contains a value that is not JSON-serializable.
    """
    text = json.dumps(json_codec.encode(manifest), indent=1, ensure_ascii=False, allow_nan=False)
    return text.encode() + b"\n"


def loads(data: bytes, path: str) -> Manifest:
    """Parse a manifest.

    Args:
        data: JSON in UTF-8.
        path: path of the package, for error messages.

    Raises:
        exc.BadPackageError: the data is not valid JSON, lacks a field, or has a field of the wrong
            type or value.
        exc.IncompatibleArtifactError: the manifest has a higher format version than `FORMAT`.
    """
    try:
        content = json.loads(data.decode(), parse_constant=_reject_constant)
        if isinstance(content, dict):
            form = content.get("format")
            if isinstance(form, int) and not isinstance(form, bool) and form > FORMAT:
                raise exc.IncompatibleArtifactError(
                    path=path,
                    why=f"its manifest has format {form}, and this inductor_ext reads up to "
                    f"{FORMAT}",
                    fix="Install a newer inductor_ext, or compile it again with this version",
                )
        manifest: Manifest = json_codec.decode(
            Manifest, content, allow_unknown=True, allow_missing=True
        )
        _check_values(manifest)
    except (ValueError, RecursionError) as error:
        raise exc.BadPackageError(path=path, why=f"its manifest is damaged: {error}") from None
    return manifest


def _reject_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _check_values(manifest: Manifest) -> None:
    for name, file in manifest.files.items():
        _check_file(f"files[{name!r}]", file)
    for name, model in manifest.models.items():
        if model.outside is not None:
            _check_file(f"models[{name!r}].outside", model.outside)
        for entry in (model.library, model.weights):
            if entry is not None and entry not in manifest.files:
                raise ValueError(f"models[{name!r}] needs the file {entry!r}, which is not listed")
        room = manifest.files[model.weights].bytes if model.weights is not None else None
        for constant in model.constants:
            where = f"models[{name!r}].constants: {constant.name}"
            if constant.sha256 is not None:
                _check_digest(f"{where}.sha256", constant.sha256)
            if constant.stride and len(constant.shape) != len(constant.stride):
                raise ValueError(f"{where} has a shape and a stride of different lengths")
            offset = constant.offset
            if offset is not None and room is not None and offset + constant.bytes > room:
                raise ValueError(f"{where} is beyond the end of the weights")
        _check_variants(name, model, manifest.files)


def _check_variants(name: str, model: Model, files: Mapping[str, File]) -> None:
    targets = [model.target] if model.variants else []
    for variant in model.variants:
        where, target = f"models[{name!r}].variants: {variant.target!r}", variant.target
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", target, re.ASCII):
            raise ValueError(f"{where} is not the name of a target")
        folder = variant.library.rpartition("/")[0]
        if folder != variant_folder(target, name):
            raise ValueError(f"{where} has a library in another folder, {variant.library!r}")
        if variant.library not in files:
            raise ValueError(f"{where} needs the file {variant.library!r}, which is not listed")
        targets.append(target)
    if None in targets or len(set(targets)) < len(targets):
        raise ValueError(f"models[{name!r}].variants: the targets are not named or not different")
    if model.variants and model.library is None:
        raise ValueError(f"models[{name!r}] has variants, but no library")


def variant_folder(target: str, model: str) -> str:
    """Return the folder of the files of a model's variant, without a slash at the end."""
    return f"{VARIANTS_FOLDER}{target}/{model}"


def _check_file(where: str, file: File) -> None:
    _check_digest(f"{where}.sha256", file.sha256)
    if file.checksums is not None and checksums.parse(file.checksums, file.bytes) is None:
        raise ValueError(f"{where}.checksums are not those of {file.bytes} bytes")


def _check_digest(where: str, digest: str) -> None:
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise ValueError(f"{where} is not a SHA-256 digest")


def read(package: zip_reader.Package) -> tuple[Manifest, bytes] | None:
    """Return (manifest, its JSON bytes) of a package; None if Inductor (default) compiled it.

    Raises:
        exc.BadPackageError: see `loads`; or the extension compiled the package, and its manifest
            is missing.
        exc.IncompatibleArtifactError: see `loads`.
    """
    if PATH not in package.entries:
        if any(name.startswith(_FOLDER) for name in package.entries):
            why = "it was written by inductor_ext, but its manifest is missing"
            raise exc.BadPackageError(path=package.where, why=why)
        return None
    data = package.read(PATH, limit=_LIMIT)
    return loads(data, package.where), data


def check_seal(package: zip_reader.Package, content: Manifest, data: bytes) -> None:
    """Check that the manifest is the one that the package was written with.

    The package's `.data/serialization_id` is derived from the SHA-256 of all files, including the
    manifest.

    Args:
        package: the package.
        content, data: its manifest, as returned by `read`.

    Raises:
        exc.BadPackageError: the manifest was changed, or the package has files below `data/`, where
            torch's loaders would use them, that the manifest does not list.
    """
    digests = {**content.digests(), PATH: hashlib.sha256(data).hexdigest()}
    serialization_id = package.read(".data/serialization_id", limit=64).decode(errors="replace")
    if serialization_id != zip_format.serialization_id(digests):
        why = "its manifest is not the one that it was written with"
        raise exc.BadPackageError(path=package.where, why=why)
    for name in package.entries:
        if name.startswith("data/") and name not in content.files:
            why = f"it has an entry {name!r} that its manifest does not list"
            raise exc.BadPackageError(path=package.where, why=why)


def verify(package: zip_reader.Package) -> tuple[Manifest, bytes] | None:
    """Check that no byte of a package was changed since it was written.

    Returns:
        What `read` returns: None if Inductor (default) compiled the package. Then there are no
        digests: contents are checked by CRC-32, and the zip file's records against each other.

    Raises:
        exc.BadPackageError: the package was changed, also by another zip program that preserves the
            contents.
        exc.IncompatibleArtifactError: see `loads`.
    """
    contents = read(package)
    if contents is None:
        package.verify_structure(is_own=False)
        package.verify({})
        return None
    content, data = contents
    check_seal(package, content, data)
    package.verify(content.digests())
    identity = package.read(".data/serialization_id", limit=64).decode()
    for name, value in zip_format.bookkeeping(identity).items():
        if package.read(name, limit=64) != value:
            why = f"{name} is not what it was written with"
            raise exc.BadPackageError(path=package.where, why=why)
    listed = {*content.files, *zip_format.BOOKKEEPING, PATH, zip_format.SIGNATURES}
    for name in package.entries.keys() - listed:
        why = f"it has an entry {name!r} that its manifest does not list"
        raise exc.BadPackageError(path=package.where, why=why)
    package.verify_structure(is_own=True)
    return contents
