"""Loading a package: `inductor_ext.load`.

Neither imports Inductor nor needs a compiler. Before any code of a package runs, its entry names
and offsets, its requirements on machine and torch, and the SHA-256 of every file used are checked.
The files of a model are copied into a private folder, which is deleted when `load` returns (on
CUDA, when the model is destroyed, because kernels are read at their first use). The weights are
memory-mapped from the package and shared by all processes that map them. A package compiled by
Inductor (default) is loaded by torch's own loader after its entry names were checked. Errors are
raised as classes of `exc`. No setting governs this module.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from typing import IO, Any

import torch

from inductor_ext import exc
from inductor_ext.cpp_wrapper.load import calling_convention
from inductor_ext.cpp_wrapper.load.instance import ExtensionInstance, InductorInstance
from inductor_ext.cpp_wrapper.load.model import InductorModel, LoadedModel, Model, Path
from inductor_ext.cpp_wrapper.load.native import NativeLibrary
from inductor_ext.cpp_wrapper.load.package_files import OTHER_FOLDER, Location, PackageFiles
from inductor_ext.cpp_wrapper.package import (
    machine,
    manifest,
    signing,
    variants,
    zip_format,
    zip_reader,
    zip_writer,
)
from inductor_ext.cpp_wrapper.signature.signature import Signature

_RUNNERS = {"cpu": "AOTIModelContainerRunnerCpu", "cuda": "AOTIModelContainerRunnerCuda"}


def load(
    path: Path | IO[bytes],
    model_name: str = "model",
    *,
    num_runners: int = 1,
    run_single_threaded: bool = False,
    device_index: int = -1,
    verify: bool = True,
    weights: Path | None = None,
    map_weights: bool = True,
    require_signature: signing.Key | Sequence[signing.Key] | None = None,
) -> LoadedModel:
    """Load a compiled model from a package.

    Args:
        path: path of a .pt2 file, path of a folder into which one was unpacked, or a readable and
            seekable buffer. A file must not be modified while its weights are mapped.
        model_name: name of the model in the package. Default: "model".
        num_runners: maximum number of threads that run the model at the same time. Default: 1.
        run_single_threaded: whether to omit the synchronization between threads, as needed for
            CUDA graph capture. Default: False.
        device_index: index of the CUDA device. Default: -1, the current device.
        verify: whether to check the SHA-256 of every file used (about 0.6 s per GB), or the CRC-32
            of a package compiled by Inductor (default). Default: True.
        weights: the weights file, or another package with the same weights, for a package compiled
            without its weights (setting `aot_weights_file`). Default: None.
        map_weights: whether the weights are mapped from the file, in memory that processes share.
            False maps a temporary copy, so that others may overwrite the file. Default: True.
        require_signature: Ed25519 public keys, as paths of PEM files or their content, of which one
            must have signed the package. Needs the package `cryptography`. Default: None.

    Returns:
        The model. Call it with the same arguments as the exported model.

    Raises:
        exc.PackageNotFoundError: there is no file or folder at `path`.
        exc.BadPackageError: the file is no package, is unreadable or damaged, or has unsafe names.
        exc.IncompatibleArtifactError: the model cannot run on this machine or with this torch.
        exc.ModelNotFoundError: the package has no model of this name.
        exc.SourcesOnlyError: the package has the model's sources, but no library.
        exc.ArtifactLoadError: the library or the weights cannot be loaded.
        exc.UnknownNodeError: an input has a class that is not registered with pytree in this
            process, or an output has one that cannot be replaced (`result_record`).
        exc.BadOptionError: `num_runners` is not a positive integer, `path` is neither a path nor
            a readable and seekable buffer, or `verify` is False although a signature is required.
        exc.UntrustedPackageError, exc.BadKeyError, exc.MissingDependencyError: see `signing`.
    """
    arguments = _Arguments(
        name=model_name,
        num_runners=num_runners,
        single_threaded=run_single_threaded,
        device_index=device_index,
        verify=verify,
        weights=weights,
        map_weights=map_weights,
        keys=require_signature,
    )
    arguments.check()
    return _load(path, arguments)


def _load(path: Path | IO[bytes], arguments: _Arguments) -> LoadedModel:
    def load_again(other: Path | IO[bytes], weights: Path | None) -> LoadedModel:
        again = arguments
        if weights is not None:
            again = dataclasses.replace(arguments, weights=weights)
        return _load(other, again)

    with zip_reader.open_package(path) as package:
        content = manifest.read(package)
        if arguments.keys is not None:
            signing.require(package, content[1] if content else None, arguments.keys)
        if content is None:
            return InductorModel(arguments.name, _load_default(package, arguments), load_again)
        instance = _Loading(package, *content, arguments).load()
        return Model(arguments.name, instance, load_again)


@dataclasses.dataclass(frozen=True)
class _Arguments:
    """Arguments of `load`."""

    name: str
    num_runners: int
    single_threaded: bool
    device_index: int
    verify: bool
    weights: Path | None
    map_weights: bool
    keys: signing.Key | Sequence[signing.Key] | None

    def check(self) -> None:
        """Check the values that do not depend on the package.

        Raises:
            exc.BadOptionError: see `load`.
        """
        count = self.num_runners
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise exc.BadOptionError(
                name="num_runners",
                value=count,
                actual=type(count).__name__,
                allowed="an integer of at least 1",
                default=1,
            )
        if self.keys is not None and not self.verify:
            allowed = "True if a signature is required, which covers the digests of the files"
            raise exc.BadArgumentError(name="verify", actual=self.verify, allowed=allowed)


class _Loading:
    """The process of loading a model that the extension compiled."""

    def __init__(
        self,
        package: zip_reader.Package,
        content: manifest.Manifest,
        manifest_bytes: bytes,
        arguments: _Arguments,
    ) -> None:
        """Check the manifest.

        Raises:
            exc.InductorExtError: see `load`.
        """
        where, name = package.where, arguments.name
        model = content.model(name, where)
        if model.library is None:
            raise exc.SourcesOnlyError(path=where, name=name)
        here = machine.Machine.current(str(torch.__version__), model.device, arguments.device_index)
        content = variants.choose(content, name, here, where)
        model = content.models[name]
        machine.check_machine(content, model, here, where)
        try:
            signature = Signature.from_json(model.signature)
        except exc.BadSignatureError as error:
            why = f"its manifest is damaged: {error}"
            raise exc.BadPackageError(path=where, why=why.rstrip(".")) from None
        self._convention = calling_convention.Convention(
            signature.in_spec, signature.out_spec, signature, where
        )
        if arguments.verify:
            manifest.check_seal(package, content, manifest_bytes)
        self._package = package
        self._content = content
        self._model = model
        self._signature = signature
        self._arguments = arguments
        self._files = PackageFiles(
            package, content, name, arguments.verify, map_weights=arguments.map_weights
        )
        self._device = model.device
        if model.device != "cpu" and arguments.device_index >= 0:
            self._device += f":{arguments.device_index}"

    def load(self) -> ExtensionInstance:
        if self._model.device not in _RUNNERS:
            why = f"it runs on {self._model.device}, for which there is no AOTI runner"
            self._files.raise_load_error(why)
        folder = tempfile.mkdtemp(prefix="inductor_ext-")
        loaded = None
        try:
            self._files.extract(folder)
            location = self._files.locate_weights(folder, self._arguments.weights)
            library = self._open_library(os.path.join(folder, self._files.library))
            try:
                loaded = self._create_instance(library, folder, location)
            except BaseException:
                library.close()
                raise
        finally:
            if loaded is None or self._model.device == "cpu":
                shutil.rmtree(folder, ignore_errors=True)
        if self._model.device != "cpu":
            weakref.finalize(loaded, shutil.rmtree, folder, ignore_errors=True)
        return loaded

    def _open_library(self, path: str) -> NativeLibrary:
        try:
            library = NativeLibrary(path)
        except (OSError, AttributeError) as error:
            self._files.raise_load_error(str(error).replace("\n", " "), OTHER_FOLDER)
        features = library.missing_cpu_features()
        if features:
            library.close()
            raise exc.IncompatibleArtifactError(
                path=self._package.where,
                why=f"its code needs {features}, which this CPU lacks",
                fix="Compile it again for this machine, or load it on a CPU with these features",
            )
        return library

    def _create_instance(
        self, library: NativeLibrary, folder: str, location: Location | None
    ) -> ExtensionInstance:
        path = os.path.join(folder, self._files.library)
        runner = self._create_runner(library, path, location)
        self._compare(runner)
        return ExtensionInstance(
            path=self._package.path,
            name=self._arguments.name,
            content=self._content,
            signature=self._signature,
            convention=self._convention,
            runner=runner,
            library=library,
            metadata=_read_metadata(path),
            device=self._device,
        )

    def _create_runner(self, library: NativeLibrary, path: str, location: Location | None) -> Any:
        runner_class = getattr(torch._C._aoti, _RUNNERS[self._model.device])
        try:
            library.prepare(location, self._arguments.single_threaded)
            if self._model.device == "cpu":
                return runner_class(path, self._arguments.num_runners)
            folder = os.path.dirname(path)
            return runner_class(path, self._arguments.num_runners, self._device, folder)
        except (RuntimeError, AttributeError) as error:
            why = library.last_error() or str(error).splitlines()[0].rstrip(".")
            self._files.raise_load_error(why)

    def _compare(self, runner: Any) -> None:
        """Check that the manifest and the library belong to the same model."""
        if list(runner.get_call_spec()) != [self._signature.in_spec, self._signature.out_spec]:
            self._files.raise_bad("the signature of its library differs from its manifest")
        expected = {constant.name: constant.fqn for constant in self._model.constants}
        fqns = runner.get_constant_names_to_original_fqns()
        if any(fqns.get(name, fqn) != fqn for name, fqn in expected.items()):
            self._files.raise_bad("the constants of its library differ from its manifest")


def _read_metadata(library_path: str) -> dict[str, str]:
    path = library_path.removesuffix(".so") + "_metadata.json"
    try:
        content = json.loads(pathlib.Path(path).read_bytes())
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in content.items()}


def _load_default(package: zip_reader.Package, arguments: _Arguments) -> InductorInstance:
    """Load a package compiled by Inductor (default)."""
    where, name = package.where, arguments.name
    if arguments.weights is not None:
        why = "it was compiled by Inductor (default), so its weights are in the package"
        raise exc.ArtifactLoadError(path=where, name=name, why=why, fix="")
    if arguments.verify:
        package.verify({})
    names = zip_format.model_names(package.entries)
    if not names:
        raise exc.NoModelError(path=where)
    if name not in names:
        raise exc.ModelNotFoundError(path=where, name=name, models=", ".join(sorted(names)))
    options = (arguments.single_threaded, arguments.num_runners, arguments.device_index)
    with _open_as_file(package) as path:
        try:
            loader = torch._C._aoti.AOTIModelPackageLoader(path, name, *options)
        except RuntimeError as error:
            why = str(error).splitlines()[0].rstrip(".")
            raise exc.ArtifactLoadError(path=where, name=name, why=why, fix="") from None
    return InductorInstance(package.path, loader)


@contextlib.contextmanager
def _open_as_file(package: zip_reader.Package) -> Iterator[str]:
    """Yield the path of the package as an uncompressed file, which torch's loader requires."""
    if package.path and not os.path.isdir(package.path):
        yield package.path
        return
    with tempfile.TemporaryDirectory(prefix="inductor_ext-") as folder:
        path = os.path.join(folder, "package.pt2")
        with open(path, "wb") as file:
            writer = zip_writer.Writer(file, "package")
            for name, entry in package.entries.items():
                writer.add(name, zip_writer.Chunks(entry.size, package.read_chunks(name)))
            writer.finish()
        yield path
