"""What a package says of itself: `extra/inductor_ext/manifest.json`.

A `Manifest` holds all that a loader, a reader or another build wants to know without running
anything: how each model is called, its constants, what the machine has to offer, with what options
and by which versions it was compiled, and the SHA-256 of every file. The same compile gives the
same bytes: no date, no path and no machine's name is in it unless the caller puts it there.

Reading checks the type of every field, and keeps what a later version has added. `check_machine`
refuses what cannot run here. Pure: no torch.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from inductor_ext import exc
from inductor_ext.cpp_wrapper.package import archive

__all__ = [
    "FORMAT",
    "PATH",
    "Constant",
    "File",
    "Kernel",
    "Machine",
    "Manifest",
    "Model",
    "check_machine",
    "check_seal",
    "dumps",
    "loads",
    "read",
]

FORMAT = 1
"""Version of the manifest's form. A reader refuses a higher one."""

PATH = "extra/inductor_ext/manifest.json"
"""The manifest's place below the package's root folder."""

_LIMIT = 1 << 28
"""Bytes that a manifest may have."""

_Json = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class File:
    """An entry of the package."""

    bytes: int
    sha256: str
    more: _Json = dataclasses.field(default_factory=dict)
    """Here and below: what a later version has added."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constant:
    """A parameter, a buffer or another tensor that a model carries with it."""

    name: str
    """In the generated code."""
    fqn: str
    """In the model, "encoder.layer.0.weight"; empty for what the compiler made."""
    dtype: str
    """As in "float32"."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements; empty if the layout knows no strides."""
    bytes: int
    """Of its storage."""
    offset: int | None
    """In bytes, from the beginning of the model's weights; None if it is not stored there."""
    sha256: str | None
    """Of its bytes."""
    device: str = "cpu"
    folded: bool = False
    """Whether it is computed from the others when the model is loaded or updated."""
    more: _Json = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """A generated kernel."""

    name: str
    operators: tuple[str, ...] = ()
    """What it computes, in the operators of the exported graph."""
    device: str = "cpu"
    more: _Json = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """One of the package's models."""

    device: str
    """Type of the device that it runs on: "cpu", "cuda"."""
    library: str | None
    """Entry of the shared library; None if the package holds the model's sources instead."""
    weights: str | None = None
    """Entry of the constants' bytes; None if there are none, or they are elsewhere."""
    outside: File | None = None
    """The constants' bytes, if they are kept outside of the package."""
    signature: _Json = dataclasses.field(default_factory=dict)
    """How it is called (`signature.Signature` as JSON)."""
    constants: tuple[Constant, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    cpu_features: tuple[str, ...] = ()
    """What the CPU must have, as in `isa`."""
    cuda_architectures: tuple[str, ...] = ()
    """What its kernels were compiled for: "sm_90", "sm_90a", "compute_90"."""
    options: _Json = dataclasses.field(default_factory=dict)
    """Options of Inductor and of ours that differ from their defaults."""
    memory: _Json = dataclasses.field(default_factory=dict)
    """Summary of the memory plan: bytes at the peak, lower bound, arenas."""
    more: _Json = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """A package's models, files and origin."""

    format: int = FORMAT
    models: Mapping[str, Model]
    files: Mapping[str, File]
    """By entry below the root folder: all but the manifest and the archive's bookkeeping."""
    versions: Mapping[str, str | None]
    """What made it: of "torch", "cuda", "triton", "compiler", "inductor_ext", "source_key"."""
    platform: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Where it runs: "system" (`sys.platform`) and "machine" (`platform.machine()`)."""
    provenance: _Json = dataclasses.field(default_factory=dict)
    """Whatever else the maker wants to be known."""
    more: _Json = dataclasses.field(default_factory=dict)

    def digests(self) -> dict[str, str]:
        """SHA-256 in hex by entry."""
        return {name: file.sha256 for name, file in self.files.items()}

    def model(self, name: str, path: str) -> Model:
        """The model of that name.

        Args:
            name: the model's.
            path: the package's, for the message.

        Raises:
            exc.ModelNotFoundError: there is none.
        """
        if name not in self.models:
            raise exc.ModelNotFoundError(path=path, name=name, models=", ".join(self.models))
        return self.models[name]


def _encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            field.name: _encode(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if field.name != "more"
        }
        return {**fields, **value.more}  # type: ignore[attr-defined]
    if isinstance(value, Mapping):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_encode(item) for item in value]
    return value


def dumps(manifest: Manifest) -> bytes:
    """The manifest as JSON in UTF-8, the same bytes for an equal manifest.

    Raises:
        TypeError, ValueError: one of its free fields holds what JSON cannot hold.
    """
    text = json.dumps(_encode(manifest), indent=1, ensure_ascii=False, allow_nan=False)
    return text.encode() + b"\n"


def loads(data: bytes, path: str) -> Manifest:
    """Read a manifest.

    Args:
        data: JSON in UTF-8.
        path: the package's, for the messages.

    Raises:
        exc.BadPackageError: it is no JSON, lacks a field, or has one of a wrong type or value.
        exc.IncompatibleArtifactError: it has a format that only a later inductor_ext knows.
    """
    try:
        content = json.loads(data.decode(), parse_constant=_no_constant)
        if isinstance(content, dict):
            form = content.get("format")
            if isinstance(form, int) and not isinstance(form, bool) and form > FORMAT:
                raise exc.IncompatibleArtifactError(
                    path=path,
                    why=f"its manifest has format {form}, and this inductor_ext reads up to "
                    f"{FORMAT}",
                    mend="Install a later inductor_ext, or compile it again with this one",
                )
        manifest: Manifest = _decode(Manifest, content, "")
        _check_values(manifest)
    except (ValueError, RecursionError) as error:
        raise exc.BadPackageError(path=path, why=f"its manifest is damaged: {error}") from None
    return manifest


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _decode(annotation: Any, value: Any, where: str) -> Any:
    """`value` as the annotation has it; ValueError, with the place, where it does not fit."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return value
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return _decode_record(annotation, value, where)
    if origin is types.UnionType:
        if value is None:
            return None
        return _decode(args[0], value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where} is no list")
        return tuple(_decode(args[0], item, f"{where}[{at}]") for at, item in enumerate(value))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise ValueError(f"{where} is no object")
        return {key: _decode(args[1], item, f"{where}[{key!r}]") for key, item in value.items()}
    if not isinstance(value, annotation) or (annotation is int and isinstance(value, bool)):
        raise ValueError(f"{where} is {value!r:.60} and not of type {annotation.__name__}")
    if annotation is int and value < 0:
        raise ValueError(f"{where} is negative: {value}")
    return value


@functools.cache
def _annotations(cls: type) -> dict[str, Any]:
    annotations = typing.get_type_hints(cls)
    del annotations["more"]
    return annotations


def _decode_record(cls: type, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where or 'all of it'} is no object")
    annotations = _annotations(cls)
    found = {}
    for field in dataclasses.fields(cls):
        if field.name in annotations and field.name in value:
            place = f"{where}.{field.name}" if where else field.name
            found[field.name] = _decode(annotations[field.name], value[field.name], place)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{where or 'it'} lacks {field.name!r}")
    more = {key: item for key, item in value.items() if key not in annotations}
    return cls(**found, more=more)


def _check_values(manifest: Manifest) -> None:
    for name, file in manifest.files.items():
        _check_digest(f"files[{name!r}].sha256", file.sha256)
    for name, model in manifest.models.items():
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
                raise ValueError(f"{where} lies beyond the end of the weights")


def _check_digest(where: str, digest: str) -> None:
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise ValueError(f"{where} is no SHA-256")


def read(package: archive.Package) -> tuple[Manifest, bytes] | None:
    """A package's manifest and the bytes that it was read from; None for a package of stock's.

    Raises:
        exc.BadPackageError, exc.IncompatibleArtifactError: see `loads`.
    """
    if PATH not in package.entries:
        return None
    data = package.read(PATH, limit=_LIMIT)
    return loads(data, package.where), data


def check_seal(package: archive.Package, content: Manifest, data: bytes) -> None:
    """Whether the manifest is the one that the package was written with.

    The archive's identity is derived from the SHA-256 of all files, the manifest's among them.

    Args:
        package: the package.
        content, data: its manifest, as `read` returns it.

    Raises:
        exc.BadPackageError: it is another one, or there are files that it does not list where
            stock's loaders would pick them up.
    """
    digests = {**content.digests(), PATH: hashlib.sha256(data).hexdigest()}
    found = package.read(".data/serialization_id", limit=64).decode(errors="replace")
    if found != archive.identity(digests):
        why = "its manifest is not the one that it was written with"
        raise exc.BadPackageError(path=package.where, why=why)
    for name in package.entries:
        if name.startswith("data/") and name not in content.files:
            why = f"it has an entry {name!r} that its manifest does not list"
            raise exc.BadPackageError(path=package.where, why=why)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """What a process that wants to run a model has to offer."""

    torch: str
    """Version of the installed torch."""
    cuda: str | None
    """CUDA version that torch was built with; None without CUDA."""
    system: str
    machine: str
    cpu_features: frozenset[str] | None
    """As in `isa`; None if unknown."""
    capability: tuple[int, int] | None = None
    """Compute capability of the CUDA device that is to be used."""


def check_machine(manifest: Manifest, model: Model, machine: Machine, path: str) -> None:
    """Refuse a model that does not fit a machine.

    Compiled code relies on the layout of torch's C interface, which changes with minor releases,
    and on the CUDA runtime, which changes with major ones.

    Args:
        manifest, model: the package's, and the one of its models that is to be loaded.
        machine: what there is.
        path: the package's, for the message.

    Raises:
        exc.IncompatibleArtifactError: it names everything that does not fit.
    """
    reasons = []
    for name, found in (("system", machine.system), ("machine", machine.machine)):
        wanted = manifest.platform.get(name)
        if wanted is not None and wanted != found:
            reasons.append(f"it was compiled for {wanted}, and this is {found}")
    mend = "Compile it again for this machine, or load it on one that fits"
    torch = manifest.versions.get("torch")
    if torch is not None and _parts(torch, 2) != _parts(machine.torch, 2):
        reasons.append(f"it was compiled for torch {torch}, and this is torch {machine.torch}")
        minor = ".".join(_parts(torch, 2))
        mend = f"Compile it again with torch {machine.torch}, or load it with torch {minor}"
    if machine.cpu_features is not None:
        lacking = sorted(set(model.cpu_features) - machine.cpu_features)
        if lacking:
            reasons.append(f"its code needs {', '.join(lacking)}, which this CPU lacks")
    if model.device == "cuda":
        reasons += _cuda_reasons(manifest, model, machine)
    if reasons:
        raise exc.IncompatibleArtifactError(
            path=path,
            why="; ".join(reasons),
            mend=mend,
        )


def _cuda_reasons(manifest: Manifest, model: Model, machine: Machine) -> list[str]:
    if machine.cuda is None:
        return ["it runs on CUDA, and this torch is built without it"]
    reasons = []
    cuda = manifest.versions.get("cuda")
    if cuda is not None and _parts(cuda, 1) != _parts(machine.cuda, 1):
        reasons.append(f"it was compiled for CUDA {cuda}, and this torch has CUDA {machine.cuda}")
    if machine.capability is None:
        reasons.append("it runs on CUDA, and there is no CUDA device")
    elif model.cuda_architectures and not _runs_on(model.cuda_architectures, machine.capability):
        found = "sm_{}{}".format(*machine.capability)
        reasons.append(
            f"its kernels are compiled for {', '.join(model.cuda_architectures)}, and the device "
            f"is {found}"
        )
    return reasons


def _parts(version: str, count: int) -> tuple[str, ...]:
    return tuple(re.split(r"[.+]", version)[:count])


def _runs_on(architectures: Sequence[str], capability: tuple[int, int]) -> bool:
    for architecture in architectures:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
        if found is None:
            continue
        compiled = int(found[2]), int(found[3])
        if found[1] == "compute" and not found[4]:
            fits = capability >= compiled  # PTX, which the driver compiles for any later device
        elif found[4] == "a":
            fits = capability == compiled
        else:
            fits = capability[0] == compiled[0] and capability[1] >= compiled[1]
        if fits:
            return True
    return False
