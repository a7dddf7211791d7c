"""From compiled artifacts to the .pt2 package: its layout, which stock's loaders read, and ours.

A package holds the models' files where stock's packaging puts them, the weights where they can be
mapped, and a manifest of all of it (see `manifest`), by which our loader knows what it loads.
"""

from __future__ import annotations

import concurrent.futures
import functools
import hashlib
import itertools
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from typing import IO, TYPE_CHECKING, Any

from inductor_ext import __version__, events, exc
from inductor_ext.cpp_wrapper.codegen import weights_layout
from inductor_ext.cpp_wrapper.package import archive, c_header, manifest
from inductor_ext.storage import artifact_store
from inductor_ext.toolchain import components

if TYPE_CHECKING:
    from inductor_ext.cpp_wrapper.build.artifact import Artifact

__all__ = ["write"]


def write(
    file: IO[bytes],
    root: str,
    artifacts: Mapping[str, Artifact],
    *,
    options: Mapping[str, Any],
    plans: Mapping[str, events.MemoryPlanRecord],
    compiler: str,
    weights_file: str | None = None,
) -> None:
    """Write the package of one or several models.

    Args:
        file: writable and seekable, at its beginning.
        root: name of the folder that holds all entries.
        artifacts: by the models' names.
        options: Inductor's and ours that differ from their defaults.
        plans: how the models' buffers share memory, by the models' names, where it is known.
        compiler: name and version.
        weights_file: where the weights go instead of into the package; of one model at most.

    Raises:
        exc.SharedWeightsFileError: there are weights of several models for one file.
        exc.BadWeightsFileError: the file of the weights cannot be written.
    """
    if weights_file is not None and len(artifacts) > 1:
        raise exc.SharedWeightsFileError(path=weights_file, models=", ".join(artifacts))
    writer = archive.Writer(file, root)
    adapter = _Adapter(writer, artifacts)
    # Stock's own packaging knows where which file belongs, and how to pickle weights.
    from torch.export.pt2_archive import _package

    _package._package_aoti_files(
        adapter,  # type: ignore[arg-type]
        {
            name: [
                file
                for file in artifact.files
                if weights_file is None or file != artifact.weights_path
            ]
            for name, artifact in artifacts.items()
        },
    )
    outside = {
        name: _write_weights(weights_file, artifact)
        for name, artifact in artifacts.items()
        if weights_file is not None and artifact.weights_path is not None
    }
    for name, artifact in artifacts.items():
        writer.add(c_header.path(name), c_header.render(name, artifact.signature).encode())
    content = manifest.Manifest(
        models={
            name: _model(name, artifact, options, plans.get(name), outside.get(name))
            for name, artifact in artifacts.items()
        },
        files={
            name: manifest.File(bytes=entry.size, sha256=str(entry.sha256))
            for name, entry in writer.entries.items()
        },
        versions=_versions(compiler),
        platform={"system": sys.platform, "machine": platform.machine()},
    )
    writer.add(manifest.PATH, manifest.dumps(content))
    writer.finish()


class _Adapter:
    """In the place of torch's PT2ArchiveWriter."""

    def __init__(self, writer: archive.Writer, artifacts: Mapping[str, Artifact]) -> None:
        self._writer = writer
        # By entry: models of the same code, whose files have the same names, differ in weights.
        self._weights = {
            _entry(name, artifact.weights_path): artifact
            for name, artifact in artifacts.items()
            if artifact.weights_path is not None
        }

    def write_file(self, name: str, file_path: str) -> None:
        """Add a file, or the weights of which it would have been the file."""
        artifact = self._weights.get(name)
        if artifact is None:
            self._writer.add(name, file_path)
            return
        pieces = weights_layout.parts(artifact.constants, artifact.plan)
        # Torch's loader puts the weights behind the library that it makes of sources.
        end = weights_layout.footer(artifact.plan) if artifact.shared_object is None else b""
        source = archive.Chunks(artifact.plan.bytes + len(end), itertools.chain(pieces, [end]))
        self._writer.add(name, source, aligned=True)

    def write_bytes(self, name: str, data: bytes) -> None:
        """Add an entry."""
        self._writer.add(name, data)

    def write_string(self, name: str, data: str) -> None:
        """Add an entry of text."""
        self._writer.add(name, data.encode())


def _write_weights(path: str, artifact: Artifact) -> manifest.File:
    """Write the weights to a file of their own, unless it holds them already."""
    digest = _sha256(weights_layout.parts(artifact.constants, artifact.plan))
    known = manifest.File(bytes=artifact.plan.bytes, sha256=digest)
    try:
        if os.path.isfile(path) and os.path.getsize(path) == known.bytes:
            with open(path, "rb") as file:
                if _sha256(iter(functools.partial(file.read, 1 << 20), b"")) == digest:
                    return known
        with artifact_store.publish(path) as temporary, open(temporary, "wb") as file:
            weights_layout.write(file, artifact.constants, artifact.plan)
    except OSError as error:
        raise exc.BadWeightsFileError(path=path, why=error.strerror or str(error)) from error
    return known


def _sha256(parts: Iterable[bytes | memoryview]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _entry(model: str, path: str) -> str:
    """Where stock's packaging puts a model's file."""
    return f"data/aotinductor/{model}/{os.path.basename(path)}"


def _model(
    name: str,
    artifact: Artifact,
    options: Mapping[str, Any],
    plan: events.MemoryPlanRecord | None,
    outside: manifest.File | None,
) -> manifest.Model:
    summary: dict[str, Any] = {}
    if plan is not None:
        summary = {
            "peak": plan.peak,
            "lower_bound": plan.lower_bound,
            "allocator_calls": plan.calls,
            "arenas": [{"bytes": arena.bytes, "device": arena.device} for arena in plan.arenas],
        }
    return manifest.Model(
        device=artifact.device_type,
        library=_entry(name, artifact.shared_object) if artifact.shared_object else None,
        weights=(
            _entry(name, artifact.weights_path) if artifact.weights_path and not outside else None
        ),
        outside=outside,
        signature=artifact.signature.to_json(),
        constants=_constants(artifact),
        kernels=tuple(
            manifest.Kernel(name=kernel, operators=_operators(kernel), device=artifact.device_type)
            for kernel in artifact.kernels
        ),
        cpu_features=artifact.features,
        cuda_architectures=artifact.cuda_architectures,
        options={key: _plain(value) for key, value in sorted(options.items())},
        memory=summary,
    )


def _constants(artifact: Artifact) -> tuple[manifest.Constant, ...]:
    plan = artifact.plan

    def digest(name: str) -> str:
        content = weights_layout.storage_bytes(artifact.constants[name], plan.sizes[name])
        return hashlib.sha256(content.view).hexdigest()

    stored = [name for name in artifact.constants if plan.sizes[name]]
    # Constants that share a storage share its digest; hashing lets other threads run.
    first = {plan.offsets[name]: name for name in reversed(stored)}
    with concurrent.futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        digests = dict(zip(first, pool.map(digest, first.values()), strict=True))
    return tuple(
        manifest.Constant(
            name=name,
            fqn=artifact.fqns[name],
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            stride=() if tensor.is_mkldnn else tensor.stride(),
            bytes=plan.sizes[name],
            offset=plan.offsets[name] if artifact.weights_path is not None else None,
            sha256=digests.get(plan.offsets[name]) if plan.sizes[name] else None,
            device=tensor.device.type,
        )
        for name, tensor in artifact.constants.items()
    )


def _operators(kernel: str) -> tuple[str, ...]:
    """What a kernel's name says of the operators in it."""
    found = re.search(r"fused_(\w+?)_\d+$", kernel)
    return (found[1],) if found else ()


def _versions(compiler: str) -> dict[str, str | None]:
    import torch

    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": components.probe("triton").version,
        "compiler": compiler,
        "inductor_ext": __version__,
        "source_key": artifact_store.source_key(),
    }


def _plain(value: object) -> Any:
    """What JSON can hold of an option's value."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return repr(value)
