"""Writing compiled models into a .pt2 package that both torch's and the extension's loaders read.

The models' files are at the paths that torch's packaging uses. The weights are aligned for
memory-mapping. A manifest (see `manifest`) and a C header per model (see `c_header`) are added for
`inductor_ext.load` and other readers. The files of further targets are where torch's loaders ignore
them. The caller publishes the file; after an error it is invalid.
The setting `aot_weights_file` moves the weights out of the package.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import hashlib
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from inductor_ext import __version__, exc
from inductor_ext.cpp_wrapper.codegen import constant_names, weights_layout
from inductor_ext.cpp_wrapper.package import (
    c_header,
    manifest,
    self_test,
    state_names,
    zip_format,
    zip_writer,
)
from inductor_ext.cpp_wrapper.package.build_results import Build, check_shared
from inductor_ext.storage import digest
from inductor_ext.storage.atomic import atomic_write
from inductor_ext.toolchain import components

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from inductor_ext.cpp_wrapper.build.artifact import Artifact


def write_package(
    file: IO[bytes],
    root: str,
    builds: Sequence[Build],
    *,
    programs: Mapping[str, ExportedProgram],
    compiler: str,
    weights_file: str | None = None,
    self_tests: Mapping[str, tuple[dict[str, Any], bytes]] | None = None,
    find_checksums: Callable[[Artifact], str] | None = None,
) -> None:
    """Write a package of one or several models.

    Args:
        file: writable and seekable, positioned at its beginning.
        root: name of the root folder of all entries.
        builds: the compiled models, once per target. Torch's own loaders use the first ones.
        programs: what the models were compiled from, by model name.
        compiler: name and version of the C++ compiler.
        weights_file: path of a file for the weights, which are then left out of the package; only
            for a single model. Default: None, weights in the package.
        self_tests: results of `self_test.record` by model name. Default: None.
        find_checksums: returns the checksums of a model's weights. Default: None, it has none.

    Raises:
        exc.SharedWeightsFileError: `weights_file` was given for several models.
        exc.BadWeightsFileError: `weights_file` cannot be written.
        exc.TargetMismatchError: the models of two targets have other constants or signatures.
    """
    base, *others = builds
    artifacts = base.artifacts
    for build in others:
        check_shared(base, build)
    if weights_file is not None and len(artifacts) > 1:
        raise exc.SharedWeightsFileError(path=weights_file, models=", ".join(artifacts))
    writer = zip_writer.Writer(file, root)
    _add_files(writer, artifacts, without_weights=weights_file is not None)
    for build in others:
        _add_variants(writer, build)
    for name, (_, recorded) in (self_tests or {}).items():
        writer.add(self_test.entry(name), recorded)
    checksums = _find_all_checksums(artifacts, find_checksums)
    models = {
        name: _describe_targets(name, builds, programs[name], weights_file, checksums.get(name))
        for name in artifacts
    }
    for name, (described, _) in (self_tests or {}).items():
        models[name] = dataclasses.replace(models[name], self_test=described)
    content = manifest.Manifest(
        models=models,
        files=_describe_files(writer, models, checksums),
        versions=_list_versions(compiler),
        platform={"system": sys.platform, "machine": next(iter(artifacts.values())).machine},
    )
    writer.add(manifest.PATH, manifest.dumps(content))
    writer.finish()


def _find_all_checksums(
    artifacts: Mapping[str, Artifact], find_checksums: Callable[[Artifact], str] | None
) -> dict[str, str]:
    """Return the checksums of weights that a library reads, by model name."""
    return {
        name: find_checksums(artifact)
        for name, artifact in artifacts.items()
        if find_checksums is not None and artifact.weights_path and artifact.shared_object
    }


def _describe_files(
    writer: zip_writer.Writer, models: Mapping[str, manifest.Model], checksums: Mapping[str, str]
) -> dict[str, manifest.File]:
    by_entry = {models[name].weights: text for name, text in checksums.items()}
    return {
        name: manifest.File(
            bytes=entry.size, sha256=str(entry.sha256), checksums=by_entry.get(name)
        )
        for name, entry in writer.entries.items()
    }


def _add_files(
    writer: zip_writer.Writer, artifacts: Mapping[str, Artifact], without_weights: bool
) -> None:
    """Write the models' files and headers."""
    # torch's packaging function decides the path of each file and pickles weights.
    from torch.export.pt2_archive import _package

    files = {
        name: [
            file for file in artifact.files if not without_weights or file != artifact.weights_path
        ]
        for name, artifact in artifacts.items()
    }
    adapter: Any = _Adapter(writer, artifacts)
    _package._package_aoti_files(adapter, files)
    for name, artifact in artifacts.items():
        writer.add(c_header.path(name), c_header.render(name, artifact.signature).encode())


def _add_variants(writer: zip_writer.Writer, build: Build) -> None:
    """Write the files of models for a further target, except their weights."""
    from torch.export.pt2_archive import _package

    files: dict[str, list[Any]] = {
        name: [
            file
            for file in artifact.files
            if isinstance(file, str) and file not in ("", artifact.weights_path)
        ]
        for name, artifact in build.artifacts.items()
    }
    adapter: Any = _Adapter(writer, {}, build.target)
    _package._package_aoti_files(adapter, files)


class _Adapter:
    """Replacement for torch's PT2ArchiveWriter that writes to a `zip_writer.Writer`.

    With a target, the models' files are put into the folders of variants. Other files are those of
    the first target, which are there already.
    """

    def __init__(
        self,
        writer: zip_writer.Writer,
        artifacts: Mapping[str, Artifact],
        target: str | None = None,
    ) -> None:
        self._writer = writer
        self._target = target
        # Keyed by entry, not by path: models with the same code have files of the same names but
        # different weights.
        self._weights = {
            _entry_name(name, artifact.weights_path): artifact
            for name, artifact in artifacts.items()
            if artifact.weights_path is not None
        }

    def write_file(self, name: str, file_path: str) -> None:
        """Add a file. Weights are streamed from the tensors, because their file does not exist."""
        if self._target is not None:
            if name.startswith(zip_format.MODELS_FOLDER):
                model, file = name.removeprefix(zip_format.MODELS_FOLDER).split("/", 1)
                folder = manifest.variant_folder(self._target, model)
                self._writer.add(f"{folder}/{file}", file_path)
            return
        artifact = self._weights.get(name)
        if artifact is None:
            self._writer.add(name, file_path)
            return
        pieces = weights_layout.parts(artifact.constants, artifact.plan)
        # torch's loader builds the library of a sources-only package and appends this entry to it.
        # The library finds the weights by the footer.
        end = weights_layout.footer(artifact.plan) if artifact.shared_object is None else b""
        source = zip_writer.Chunks(artifact.plan.bytes + len(end), itertools.chain(pieces, [end]))
        self._writer.add(name, source, aligned=True)

    def write_bytes(self, name: str, data: bytes) -> None:
        """Add an entry."""
        self._writer.add(name, data)

    def write_string(self, name: str, data: str) -> None:
        """Add a text entry."""
        self._writer.add(name, data.encode())


def _write_weights(path: str, artifact: Artifact, checksums: str | None) -> manifest.File:
    """Write the weights to a separate file, unless it already contains the same weights."""
    digest = _hash_parts(weights_layout.parts(artifact.constants, artifact.plan))
    file_record = manifest.File(bytes=artifact.plan.bytes, sha256=digest, checksums=checksums)
    try:
        if os.path.isfile(path) and os.path.getsize(path) == file_record.bytes:
            with open(path, "rb") as file:
                if _hash_parts(iter(functools.partial(file.read, 1 << 20), b"")) == digest:
                    return file_record
        with atomic_write(path) as temporary, open(temporary, "wb") as file:
            weights_layout.write(file, artifact.constants, artifact.plan)
    except OSError as error:
        raise exc.BadWeightsFileError(path=path, why=error.strerror or str(error)) from error
    return file_record


def _hash_parts(parts: Iterable[bytes | memoryview]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _entry_name(model: str, path: str) -> str:
    """Return the entry at which torch's packaging puts a file of a model."""
    return f"{zip_format.MODELS_FOLDER}{model}/{os.path.basename(path)}"


def _describe_targets(
    name: str,
    builds: Sequence[Build],
    program: ExportedProgram,
    weights_file: str | None,
    checksums: str | None,
) -> manifest.Model:
    """Return the entry of a model. Writes its weights to `weights_file`, unless it is None."""
    base, *others = builds
    artifact = base.artifacts[name]
    outside = None
    if weights_file is not None and artifact.weights_path is not None:
        outside = _write_weights(weights_file, artifact, checksums)
    return dataclasses.replace(
        _describe_model(name, base, program, outside),
        target=base.target,
        variants=tuple(_describe_variant(name, build, artifact.machine) for build in others),
    )


def _describe_model(
    name: str, build: Build, program: ExportedProgram, outside: manifest.File | None
) -> manifest.Model:
    artifact = build.artifacts[name]
    return manifest.Model(
        device=artifact.device_type,
        library=_entry_name(name, artifact.shared_object) if artifact.shared_object else None,
        weights=(
            _entry_name(name, artifact.weights_path)
            if artifact.weights_path and not outside
            else None
        ),
        outside=outside,
        signature=artifact.signature.to_json(),
        constants=_describe_constants(artifact),
        frozen=artifact.frozen,
        state=state_names.find_constants(program, {*artifact.fqns.values(), *artifact.frozen}),
        mutated_buffers=artifact.mutated_buffers,
        mutates_inputs=artifact.mutates_inputs,
        **_describe_code(name, build),
    )


def _describe_variant(name: str, build: Build, machine: str) -> manifest.Variant:
    """Return the entry of a further target; `machine` is that of the package's platform."""
    assert build.target is not None
    artifact = build.artifacts[name]
    folder = manifest.variant_folder(build.target, name)
    return manifest.Variant(
        target=build.target,
        library=f"{folder}/{os.path.basename(str(artifact.shared_object))}",
        machine=artifact.machine if artifact.machine != machine else None,
        **_describe_code(name, build),
    )


def _describe_code(name: str, build: Build) -> dict[str, Any]:
    """Return the fields of the manifest that differ between targets."""
    artifact = build.artifacts[name]
    return {
        "kernels": tuple(
            manifest.Kernel(
                name=kernel,
                operators=_list_operators(kernel),
                device=artifact.device_type,
                index_inputs=artifact.index_inputs.get(kernel),
            )
            for kernel in artifact.kernels
        ),
        "cpu_features": artifact.features,
        "torch_functions": artifact.torch_functions,
        "cuda_architectures": artifact.cuda_architectures,
        "options": {key: _to_json(value) for key, value in sorted(build.options.items())},
        "memory": dict(build.memory.get(name, {})),
    }


def _describe_constants(artifact: Artifact) -> tuple[manifest.Constant, ...]:
    plan = artifact.plan

    def digest(name: str) -> str:
        content = weights_layout.storage_bytes(artifact.constants[name], plan.sizes[name])
        return hashlib.sha256(content).hexdigest()

    stored = [name for name in artifact.constants if plan.sizes[name]]
    # Constants that share a storage share its digest. Threads help: hashing releases the GIL.
    first = {plan.offsets[name]: name for name in reversed(stored)}
    with concurrent.futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        digests = dict(zip(first, pool.map(digest, first.values()), strict=True))
    return tuple(
        manifest.Constant(
            name=constant_names.public_name(name),
            fqn=artifact.fqns[name],
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            stride=() if tensor.is_mkldnn else tensor.stride(),
            bytes=plan.sizes[name],
            offset=plan.offsets[name] if artifact.weights_path is not None else None,
            sha256=digests.get(plan.offsets[name]) if plan.sizes[name] else None,
            device=artifact.constant_devices.get(name, tensor.device.type),
        )
        for name, tensor in artifact.constants.items()
    )


def _list_operators(kernel: str) -> tuple[str, ...]:
    """Return the operators encoded in the name of a kernel."""
    match = re.search(r"fused_(\w+?)_\d+$", kernel)
    return (match[1],) if match else ()


def _list_versions(compiler: str) -> dict[str, str | None]:
    import torch

    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": components.probe("triton").version,
        "compiler": compiler,
        "inductor_ext": __version__,
        "source_key": digest.source_key(),
    }


def _to_json(value: object) -> Any:
    """Convert the value of an option to a JSON-serializable value."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_to_json(item) for item in value]
    return repr(value)
