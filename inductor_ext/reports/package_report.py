"""The package report behind `inspect` and `diff`: what can be known without running a package.

A `Report` is read from a package of the extension or of Inductor. For a package of Inductor, only
the files and the metadata that the compiler wrote for the loader are known. Torch is imported only
to query the CUDA device.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from inductor_ext import _compat, exc
from inductor_ext.cpp_wrapper.build import cpu_isa
from inductor_ext.cpp_wrapper.package import (
    machine,
    manifest,
    self_test,
    signing,
    variants,
    zip_format,
    zip_reader,
)
from inductor_ext.cpp_wrapper.signature.signature import Signature
from inductor_ext.memory.planner.peak_report import human_bytes
from inductor_ext.reports.text import align_columns, format_count


@dataclasses.dataclass(frozen=True)
class Report:
    """The contents of a package file or folder."""

    path: str
    bytes: int
    entries: tuple[zip_format.Entry, ...]
    content: manifest.Manifest | None
    """None for a package of Inductor."""
    metadata: Mapping[str, Mapping[str, str]]
    """Metadata that the compiler wrote for the loaders, by model."""
    misfits: Mapping[str, str | None]
    """Why a model cannot run here, or None; by model. Empty for a package of Inductor."""
    signers: tuple[str, ...] = ()
    """Names of the keys of its signatures (`signing.key_id`), which are not checked."""

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON-serializable values."""
        content = None
        if self.content is not None:
            content = json.loads(manifest.dumps(self.content))
        return {
            "path": self.path,
            "bytes": self.bytes,
            "manifest": content,
            "metadata": {name: dict(values) for name, values in self.metadata.items()},
            "signers": list(self.signers),
            "fits": {name: why is None for name, why in self.misfits.items()},
            "misfits": {name: why for name, why in self.misfits.items() if why is not None},
            "entries": [
                {
                    "name": entry.name,
                    "bytes": entry.size,
                    "offset": entry.offset,
                    "stored": entry.stored,
                }
                for entry in self.entries
            ],
        }


def read(path: str) -> Report:
    """Read a package, and verify the files of its models as `inductor_ext.load` does.

    Raises:
        exc.BadPackageError, exc.IncompatibleArtifactError: the package cannot be read.
    """
    with zip_reader.open_package(path) as package:
        contents = manifest.read(package)
        content = None if contents is None else contents[0]
        metadata = {
            name: values
            for name in zip_format.model_names(package.entries)
            if (values := _read_metadata(package, name, content)) is not None
        }
        misfits: dict[str, str | None] = {}
        if contents is not None:
            _check_signatures(contents[0], package.where)
            misfits = _find_misfits(package, *contents)
        size = sum(entry.packed_size for entry in package.entries.values())
        if os.path.isfile(path):
            size = os.path.getsize(path)
        return Report(
            path=path,
            bytes=size,
            entries=tuple(package.entries.values()),
            content=content,
            metadata=metadata,
            misfits=misfits,
            signers=tuple(signature.key for signature in signing.read(package)),
        )


def _check_signatures(content: manifest.Manifest, where: str) -> None:
    for name, model in content.models.items():
        try:
            Signature.from_json(model.signature)
        except exc.BadSignatureError as error:
            why = f"the signature of its model {name!r} is damaged: {error}".rstrip(".")
            raise exc.BadPackageError(path=where, why=why) from None


def _read_metadata(
    package: zip_reader.Package, model: str, content: manifest.Manifest | None
) -> dict[str, str] | None:
    expected = None
    library = content.models[model].library if content and model in content.models else None
    if library is not None:
        expected = library.removesuffix(".so") + "_metadata.json"
    for name in package.entries:
        if name == expected or (
            expected is None
            and name.startswith(f"{zip_format.MODELS_FOLDER}{model}/")
            and name.endswith("wrapper_metadata.json")
        ):
            try:
                values = json.loads(package.read(name, limit=1 << 24))
                return {str(key): str(value) for key, value in values.items()}
            except (ValueError, AttributeError):
                return None
            except exc.BadPackageError:
                if content is None:
                    raise
                return None  # damage is a reason why the model does not run
    return None


def _find_misfits(
    package: zip_reader.Package, content: manifest.Manifest, data: bytes
) -> dict[str, str | None]:
    """Return by model why `inductor_ext.load` would refuse it here, or None."""
    seal = None
    try:
        manifest.check_seal(package, content, data)
        damage = package.find_damage(content.digests())
    except exc.BadPackageError as error:
        seal, damage = str(error.fields["why"]), {}
    misfits = {}
    for name in content.models:
        mismatch, model = _find_mismatch(content, name)
        reasons = [mismatch, seal]
        if model.library is None:
            reasons.append("it has the sources of the model, but no library")
        folder = model.library.rpartition("/")[0] if model.library else ""
        folders = (f"{folder or zip_format.MODELS_FOLDER + name}/", zip_format.CONSTANTS_FOLDER)
        reasons += [
            why
            for entry, why in damage.items()
            if entry.startswith(folders) or entry == model.weights
        ]
        misfits[name] = "; ".join(why for why in reasons if why is not None) or None
    return misfits


def _find_mismatch(content: manifest.Manifest, name: str) -> tuple[str | None, manifest.Model]:
    """Return why a model does not fit this machine and this torch, or None; and the model.

    The model is that for the target that fits best.
    """
    here = machine.Machine.current(_compat.torch_version(), content.models[name].device)
    try:
        chosen = variants.choose(content, name, here, "")
        machine.check_machine(chosen, chosen.models[name], here, "")
    except exc.IncompatibleArtifactError as error:
        return str(error.fields["why"]), content.models[name]
    return None, chosen.models[name]


# --- the text of `inspect` ------------------------------------------------------------------------


def text(report: Report, top: int = 10) -> str:
    """Format the report as text.

    Args:
        report: the package's report.
        top: how many of the largest constants of each model to list.
    """
    content = report.content
    if content is None:
        return "\n".join([*_format_default(report), *_format_files(report)])
    size, models = human_bytes(report.bytes), format_count(len(content.models), "model")
    lines = [
        f"{report.path}: {size}, {models}, manifest of format {content.format}",
        f"compiled by  {format_versions(content)}",
        f"compiled for {' '.join(content.platform.values()) or 'any platform'}",
    ]
    if report.signers:
        keys = ", ".join(report.signers)
        lines.append(f"signed by    key {keys} (`inductor-ext verify --key` checks it)")
    lines += [f"{key:<12} {format_value(value)}" for key, value in content.provenance.items()]
    for name, model in content.models.items():
        lines += ["", *_format_model(name, model, report.misfits[name], top)]
    return "\n".join([*lines, "", *_format_files(report)])


def _format_default(report: Report) -> Iterator[str]:
    names = [entry.name for entry in report.entries]
    description = (
        "compiled by Inductor (default): no manifest"
        if zip_format.model_names(names)
        else "no compiled model in it"
    )
    yield f"{report.path}: {human_bytes(report.bytes)}, {description}"
    for name, values in report.metadata.items():
        yield ""
        yield f'model "{name}"'
        yield from (f"  {key:<26} {value}" for key, value in values.items() if value)
    yield ""


def format_versions(content: manifest.Manifest) -> str:
    """Format the versions that compiled the package."""
    versions = [
        f"{name.replace('_', ' ') if name != 'inductor_ext' else name} {value}"
        for name, value in content.versions.items()
        if value and name != "compiler"
    ]
    if compiler := content.versions.get("compiler"):
        versions.append(compiler if len(compiler) <= 60 else f"{compiler[:57]}...")
    return ", ".join(versions)


def _format_model(name: str, model: manifest.Model, misfit: str | None, top: int) -> Iterator[str]:
    yield f'model "{name}" on {model.device}'
    yield f"  runs here    {'yes' if misfit is None else f'no: {misfit}'}"
    if model.library is None:
        yield "  library      none: the package contains its sources"
    if model.variants:
        yield "  targets"
        yield from _format_table(map(format_target, variants.candidates(model)))
    else:
        if model.cpu_features:
            yield f"  CPU needs    {format_features(model.cpu_features)}"
        if model.cuda_architectures:
            yield f"  compiled for {', '.join(model.cuda_architectures)}"
    if model.torch_functions:
        functions = format_count(len(model.torch_functions), "function")
        yield f"  torch        it calls {functions} of torch (listed by --json)"
    signature = model.signature
    yield "  inputs"
    yield from _format_table(format_inputs(signature.get("inputs", ())))
    conditions = list(format_conditions(signature))
    if conditions:
        yield "  where"
        yield from (f"    {condition}" for condition in conditions)
    yield "  outputs"
    yield from _format_table(format_outputs(signature.get("outputs", ())))
    if model.constants:
        yield from _format_constants(model, top)
    if model.kernels:
        yield f"  kernels      {len(model.kernels)}"
        yield from _format_table(
            (kernel.name, kernel.device, ", ".join(kernel.operators)) for kernel in model.kernels
        )
    if model.memory:
        yield f"  memory       {format_memory(model.memory)}"
    if model.self_test:
        results = format_count(self_test.count_results(model.self_test), "result")
        yield f"  self test    {results} (`inductor-ext verify --run` compares them)"
    if model.options:
        pairs = (f"{key}={value!r}" for key, value in model.options.items())
        yield f"  options      {', '.join(pairs)}"


def format_target(model: manifest.Model) -> tuple[str, ...]:
    """Return a row for a target: its name, requirements and number of kernels."""
    needs = ", ".join(model.cuda_architectures) or format_features(model.cpu_features)
    return str(model.target), needs, format_count(len(model.kernels), "kernel")


def format_features(features: Sequence[str]) -> str:
    """Format CPU features as the largest baseline level included, and the additional features."""
    feature_set = set(features)
    levels = [
        name
        for name, level_features in cpu_isa.LEVELS.items()
        if level_features and level_features <= feature_set
    ]
    if not levels:
        return ", ".join(features)
    level = max(levels, key=lambda name: len(cpu_isa.LEVELS[name]))
    return ", ".join([level, *sorted(feature_set - cpu_isa.LEVELS[level])])


def format_inputs(inputs: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield the name of each input and what it has to be."""
    for inp in inputs:
        name, kind = str(inp.get("name")), inp.get("kind")
        if kind == "tensor":
            yield name, *_format_tensor(inp)
        elif kind == "constant":
            yield name, f"always {format_value(inp.get('value'))}"
        else:
            yield name, str(inp.get("type")), str(inp.get("symbol"))


def format_outputs(outputs: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield the name of each output and what it is."""
    for output in outputs:
        name, kind = output.get("path") or "result", output.get("kind")
        if kind == "tensor":
            yield name, *_format_tensor(output)
        elif kind in ("constant", "none"):
            yield name, f"always {format_value(output.get('value'))}"
        else:
            yield name, str(output.get("type")), str(output.get("value"))


def _format_tensor(tensor: Mapping[str, Any]) -> tuple[str, ...]:
    strides = f"strides {_format_extents(tensor['stride'])}" if "stride" in tensor else ""
    return (
        str(tensor.get("dtype")),
        _format_extents(tensor.get("shape", ())),
        strides,
        str(tensor.get("device")),
    )


def _format_extents(extents: Sequence[object]) -> str:
    return f"[{', '.join(map(str, extents))}]"


def format_conditions(signature: Mapping[str, Any]) -> Iterator[str]:
    """Yield the conditions on the sizes of the inputs."""
    for name, limits in signature.get("symbols", {}).items():
        low, high = limits.get("min"), limits.get("max")
        left = f"{low} <= " if low is not None else ""
        right = f" <= {high}" if high is not None else ""
        if left or right:
            yield f"{left}{name}{right}"
    yield from map(str, signature.get("constraints", ()))
    yield from (f"{item} (not checked)" for item in signature.get("unchecked", ()))


def _format_constants(model: manifest.Model, top: int) -> Iterator[str]:
    yield f"  constants    {summarize_constants(model)}"
    yield from _format_table(format_constants(model, top))
    if len(model.constants) > top:
        yield f"    and {len(model.constants) - top} smaller ones"


def summarize_constants(model: manifest.Model) -> str:
    """Return the number of constants, their size, and where they are stored."""
    # Several constants may be views of one storage.
    storages = {
        (constant.offset if constant.offset is not None else constant.name): constant.bytes
        for constant in model.constants
    }
    place = "in the library"
    if model.outside is not None:
        place = f"outside, SHA-256 {model.outside.sha256[:12]}"
    elif model.weights is not None:
        place = "mapped"
    return f"{len(model.constants)}, {human_bytes(sum(storages.values()))}, {place}"


def format_constants(model: manifest.Model, top: int) -> Iterator[tuple[str, ...]]:
    """Yield the name, dtype, shape, size and digest of the `top` largest constants."""
    for tensor in sorted(model.constants, key=lambda constant: -constant.bytes)[:top]:
        yield (
            tensor.fqn or tensor.name,
            tensor.dtype,
            _format_extents(tensor.shape),
            human_bytes(tensor.bytes),
            "folded" if tensor.folded else (tensor.sha256 or "")[:12],
        )


def format_memory(memory: Mapping[str, Any]) -> str:
    """Format the summary of the memory plan."""
    parts = []
    for key, value in memory.items():
        name = key.replace("_", " ")
        if isinstance(value, list):
            parts.append(format_count(len(value), name.removesuffix("s")))
        elif key in ("peak", "lower_bound") and isinstance(value, int):
            parts.append(f"{name} {human_bytes(value)}")
        else:
            parts.append(f"{name} {value}")
    return ", ".join(parts)


def _format_files(report: Report) -> Iterator[str]:
    digests = report.content.digests() if report.content is not None else {}
    yield f"files        {len(report.entries)}"
    yield from _format_table(
        (
            human_bytes(entry.size),
            digests.get(entry.name, "")[:12],
            "" if entry.stored else "compressed",
            entry.name,
        )
        for entry in report.entries
    )


def _format_table(rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    return (f"    {line}" for line in align_columns(list(rows)))


def format_value(value: object) -> str:
    """Format a value of the manifest."""
    return value if isinstance(value, str) and value.isprintable() else repr(value)


# --- differences ----------------------------------------------------------------------------------

_HASHED = re.compile(r"/[a-z2-7]{40,}\.")
"""File names that Inductor derives from a hash of the content."""


def differences(one: Report, other: Report) -> list[dict[str, Any]]:
    """Return the differences between two packages.

    If one of them is a package of Inductor, only what is known of both is compared: file sizes and
    the loaders' metadata.

    Returns:
        A list of objects with `place` and, where they exist, the values `before` and `after`.
    """
    has_manifests = one.content is not None and other.content is not None
    return list(
        _find_changes(_comparable(one, has_manifests), _comparable(other, has_manifests), "")
    )


def _find_changes(before: Any, after: Any, place: str) -> Iterator[dict[str, Any]]:
    left, right = _keyed_items(before), _keyed_items(after)
    if left is None or right is None:
        if before != after:
            yield {"place": place, "before": before, "after": after}
        return
    for key in [*left, *(key for key in right if key not in left)]:
        inner = f"{place}{key}".removeprefix(".")
        if key not in right:
            yield {"place": inner, "before": left[key]}
        elif key not in left:
            yield {"place": inner, "after": right[key]}
        else:
            yield from _find_changes(left[key], right[key], inner)


def _keyed_items(value: Any) -> dict[str, Any] | None:
    """Return the children of a value by path suffix; list items are identified by name."""
    if isinstance(value, dict):
        return {f".{key}" if key.isidentifier() else f"[{key!r}]": value[key] for key in value}
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        items: dict[str, Any] = {}
        for index, item in enumerate(value):
            name = next(filter(None, map(item.get, ("fqn", "name", "path", "target"))), None)
            key = f"[{name!r}]" if name else f"[{index}]"
            items[key if key not in items else f"[{index}]"] = item
        return items
    return None


def _comparable(report: Report, has_manifests: bool) -> dict[str, Any]:
    if report.content is None or not has_manifests:
        sizes = {_stable_name(entry.name): {"bytes": entry.size} for entry in report.entries}
        return {"metadata": dict(report.metadata), "files": sizes}
    content = json.loads(manifest.dumps(report.content))
    content["files"] = {_stable_name(name): file for name, file in content["files"].items()}
    for model in content["models"].values():
        for entry in ("library", "weights"):
            if model[entry] is not None:
                model[entry] = _stable_name(model[entry])
        for variant in model.get("variants", ()):
            variant["library"] = _stable_name(variant["library"])
    loaded: dict[str, Any] = content
    return loaded


def _stable_name(name: str) -> str:
    return _HASHED.sub("/*.", name)
