"""Loading a package: `inductor_ext.load`.

Neither imports Inductor nor needs a compiler. Before any code of a package runs, its entry names
and offsets, its requirements on machine and torch, and the SHA-256 of every file with code are
checked. The files of a model are copied into a private folder, which is deleted when `load` returns
(on CUDA, when the model is destroyed, because kernels are read at their first use).

On the CPU, the weights are memory-mapped from the package and shared by all processes that map
them. To a GPU they are copied by several threads through pinned memory. Their checksums are checked
meanwhile.

A package compiled by Inductor (default) is loaded by torch's own loader after its entry names were
checked. Errors are raised as classes of `exc`. No setting governs this module.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

import torch

from inductor_ext import exc
from inductor_ext.cpp_wrapper.load import calling_convention
from inductor_ext.cpp_wrapper.load import cuda_graphs as graphs
from inductor_ext.cpp_wrapper.load import warm_up as first_calls
from inductor_ext.cpp_wrapper.load.arguments import Arguments, parse_device
from inductor_ext.cpp_wrapper.load.constants import ConstantRules
from inductor_ext.cpp_wrapper.load.instance import ExtensionInstance, InductorInstance
from inductor_ext.cpp_wrapper.load.model import (
    InductorModel,
    LoadedModel,
    Model,
    Path,
    WeightsSource,
    use_tensors,
)
from inductor_ext.cpp_wrapper.load.native import ErrorCode, NativeLibrary, WeightsRequest
from inductor_ext.cpp_wrapper.load.package_files import OTHER_FOLDER, PackageFiles
from inductor_ext.cpp_wrapper.load.warm_up import Example
from inductor_ext.cpp_wrapper.package import (
    machine,
    manifest,
    self_test,
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
    device: str | torch.device | None = None,
    device_index: int = -1,
    verify: bool = True,
    weights: WeightsSource | None = None,
    map_weights: bool = True,
    require_signature: signing.Key | Sequence[signing.Key] | None = None,
    warm_up: bool | Sequence[Example] = False,
    cuda_graphs: Sequence[Example] = (),
) -> LoadedModel:
    """Load a compiled model from a package.

    Args:
        path: path of a .pt2 file, path of a folder into which one was unpacked, or a readable and
            seekable buffer. A file must not be modified while its weights are mapped.
        model_name: name of the model in the package. Default: "model".
        num_runners: maximum number of threads that run the model at the same time. Default: 1.
        run_single_threaded: whether to omit the synchronization between threads, as needed for
            CUDA graph capture. Default: False.
        device: the device to run on, of the type that the model was compiled for: "cuda:1".
            Default: None, the device of `device_index`.
        device_index: index of the CUDA device, as in torch's loader. Default: -1, the current
            device.
        verify: whether to check every file used: code by its SHA-256, weights by checksums that
            find damage (see `package.checksums`), a package compiled by Inductor (default) by its
            CRC-32. Default: True.
        weights: the weights file, or another package with the same weights, for a package compiled
            without its weights (setting `aot_weights_file`); or the `state_dict()` of the exported
            module, on the model's device, whose tensors the model then uses without a copy.
            Several models may use the same tensors. Default: None.
        map_weights: whether weights on the CPU are mapped from the file, in memory that processes
            share. False maps a temporary copy, so that others may overwrite the file. Default:
            True.
        require_signature: Ed25519 public keys, as paths of PEM files or their content, of which one
            must have signed the package. The weights are then checked by their SHA-256, which takes
            about 0.6 s per GB and thread. Needs the package `cryptography`. Default: None.
        warm_up: whether to call the model before `load` returns, so that the first call of the user
            is as fast as later ones; True, or the arguments of one or several calls, each a tuple
            of positional or a dictionary of keyword arguments. True takes the inputs of the self
            test (setting `aot_self_test`), or zeros of the smallest sizes. Buffers and random
            number generators keep their state. Default: False.
        cuda_graphs: arguments, as for `warm_up`, of calls that are captured as CUDA graphs. Calls
            with inputs of the same sizes and strides are then launched as a graph: faster if the
            GPU would wait for the CPU. Results are copies. Default: (), none.

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
        exc.BadOptionError: an argument is not of the kind described above, `device` and
            `device_index` were both given, or `verify` is False although a signature is required.
        exc.ConstantMismatchError: a tensor of the `state_dict()` in `weights` is missing, unknown,
            or of another dtype, shape, stride or device than the model's.
        exc.InputMismatchError, exc.ArtifactRunError: a call of `warm_up` failed.
        exc.NoExampleError: no inputs for `warm_up=True` were found.
        exc.CudaGraphError: a call of `cuda_graphs` cannot be captured.
        exc.UnsupportedArtifactError: the package was compiled by Inductor (default), for which
            `warm_up`, `cuda_graphs` and a `state_dict()` are not supported.
        exc.UntrustedPackageError, exc.BadKeyError, exc.MissingDependencyError: see `signing`.
    """
    arguments = Arguments(
        name=model_name,
        num_runners=num_runners,
        single_threaded=run_single_threaded,
        device=parse_device(device, device_index),
        verify=verify,
        weights=weights,
        map_weights=map_weights,
        keys=require_signature,
        warm_up=warm_up,
        cuda_graphs=cuda_graphs,
    )
    arguments.check()
    return _load(path, arguments)


def _load(path: Path | IO[bytes], arguments: Arguments) -> LoadedModel:
    with zip_reader.open_package(path) as package:
        content = manifest.read(package)
        if arguments.keys is not None:
            signing.require(package, content[1] if content else None, arguments.keys)
        if content is None:
            loader = _load_default(package, arguments)
            return InductorModel(arguments.name, loader, functools.partial(_reload, arguments))
        instance = _Loading(package, *content, arguments).load()
        _prepare_calls(package, content[0], instance, arguments)
        # Another device may be the current one when the model is loaded again.
        again = dataclasses.replace(arguments, device=instance.device)
        return Model(arguments.name, instance, functools.partial(_reload, again))


def _reload(
    arguments: Arguments, path: Path | IO[bytes], weights: WeightsSource | None
) -> LoadedModel:
    if weights is not None:
        arguments = dataclasses.replace(arguments, weights=weights)
    return _load(path, arguments)


def _prepare_calls(
    package: zip_reader.Package,
    content: manifest.Manifest,
    instance: ExtensionInstance,
    arguments: Arguments,
) -> None:
    """Make the calls of `warm_up`, and capture `cuda_graphs`."""
    if arguments.warm_up is True:
        recorded = self_test.read_inputs(package, content, arguments.name, instance.device)
        if recorded is None:
            calls = [first_calls.make_zeros(instance.signature, instance.device)]
        else:
            calls = [instance.convention.flatten(*recorded)]
    else:
        calls = first_calls.flatten(instance, arguments.warm_up or (), "warm_up")
    if calls:
        first_calls.warm_up(instance, calls)
    if arguments.cuda_graphs:
        captured = first_calls.flatten(instance, arguments.cuda_graphs, "cuda_graphs")
        instance.use_graphs(graphs.CudaGraphs(instance, captured))


class _Loading:
    """The process of loading a model that the extension compiled."""

    def __init__(
        self,
        package: zip_reader.Package,
        content: manifest.Manifest,
        manifest_bytes: bytes,
        arguments: Arguments,
    ) -> None:
        """Check the manifest.

        Raises:
            exc.InductorExtError: see `load`.
        """
        where, name = package.where, arguments.name
        model = content.model(name, where)
        if model.library is None:
            raise exc.SourcesOnlyError(path=where, name=name)
        _require_device_type(arguments, model.device, where)
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
            package,
            content,
            name,
            arguments.verify,
            map_weights=arguments.map_weights,
            signed=arguments.keys is not None,
        )
        if model.device not in _RUNNERS:
            why = f"it runs on {model.device}, for which there is no AOTI runner"
            self._files.raise_load_error(why)
        self._device = _choose_device(model.device, arguments.device_index)
        self._rules = ConstantRules(
            {constant.name: constant.fqn for constant in model.constants if not constant.folded},
            model.constants,
            self._device,
            model.frozen,
            model.state,
        )

    def load(self) -> ExtensionInstance:
        weights = self._arguments.weights
        given: dict[str, torch.Tensor] = {}
        if isinstance(weights, Mapping):
            given, weights = self._rules.use_state(weights), None
        folder = tempfile.mkdtemp(prefix="inductor_ext-")
        loaded = None
        try:
            self._files.extract(folder)
            request = self._request_weights(folder, weights, given)
            library = self._open_library(os.path.join(folder, self._files.library))
            try:
                loaded = self._create_instance(library, folder, request)
            except BaseException:
                library.close()
                raise
        finally:
            if loaded is None or self._model.device == "cpu":
                shutil.rmtree(folder, ignore_errors=True)
        if self._model.device != "cpu":
            weakref.finalize(loaded, shutil.rmtree, folder, ignore_errors=True)
        if given:
            use_tensors(loaded, given)
        return loaded

    def _request_weights(
        self, folder: str, weights: Path | None, given: Mapping[str, torch.Tensor]
    ) -> WeightsRequest:
        """Return how the library gets its weights; `given` are the constants of the caller."""
        needed = None
        if given:
            needed = [
                constant.name
                for constant in self._model.constants
                if constant.name not in given and constant.bytes and not constant.folded
            ]
            if not needed:
                return WeightsRequest(external=list(given))
        located = self._files.locate_weights(folder, weights, needed)
        return WeightsRequest(located.location, located.checksums, list(given))

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
        self, library: NativeLibrary, folder: str, request: WeightsRequest
    ) -> ExtensionInstance:
        path = os.path.join(folder, self._files.library)
        runner = self._create_runner(library, path, request)
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
            rules=self._rules,
            device=self._device,
        )

    def _create_runner(self, library: NativeLibrary, path: str, request: WeightsRequest) -> Any:
        runner_class = getattr(torch._C._aoti, _RUNNERS[self._model.device])
        try:
            library.prepare(request, self._arguments.single_threaded)
            if self._model.device == "cpu":
                return runner_class(path, self._arguments.num_runners)
            folder = os.path.dirname(path)
            return runner_class(path, self._arguments.num_runners, str(self._device), folder)
        except (RuntimeError, AttributeError) as error:
            if library.last_error_code() is ErrorCode.DAMAGED:
                weights = self._arguments.weights
                if weights is not None and not isinstance(weights, Mapping):
                    self._files.raise_other_weights(weights)
                self._files.raise_damaged()
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


def _require_device_type(arguments: Arguments, compiled: str, where: str) -> None:
    device = arguments.device
    if isinstance(device, torch.device) and device.type != compiled:
        why = f"it was compiled for {compiled}, and the device {str(device)!r} was requested"
        fix = f"Compile the model for {device.type}, or load it on a {compiled} device"
        raise exc.IncompatibleArtifactError(path=where, why=why, fix=fix)


def _choose_device(kind: str, index: int) -> torch.device:
    if kind == "cuda" and index < 0:
        index = torch.cuda.current_device()
    return torch.device(kind) if kind == "cpu" else torch.device(kind, max(index, 0))


def _read_metadata(library_path: str) -> dict[str, str]:
    path = library_path.removesuffix(".so") + "_metadata.json"
    try:
        content = json.loads(pathlib.Path(path).read_bytes())
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in content.items()}


def _load_default(package: zip_reader.Package, arguments: Arguments) -> InductorInstance:
    """Load a package compiled by Inductor (default)."""
    where, name = package.where, arguments.name
    if arguments.weights is not None and not isinstance(arguments.weights, Mapping):
        why = "it was compiled by Inductor (default), so its weights are in the package"
        raise exc.ArtifactLoadError(path=where, name=name, why=why, fix="")
    for option in ("weights", "warm_up", "cuda_graphs"):
        if getattr(arguments, option):
            why = "it was compiled by Inductor (default)"
            raise exc.UnsupportedArtifactError(what=f"The argument {option}", path=where, why=why)
    if arguments.verify:
        package.verify({})
    names = zip_format.model_names(package.entries)
    if not names:
        raise exc.NoModelError(path=where)
    if name not in names:
        known = ", ".join(map(repr, sorted(names)))
        raise exc.ModelNotFoundError(path=where, name=name, models=known)
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
