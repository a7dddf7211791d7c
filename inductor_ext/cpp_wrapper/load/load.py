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

import concurrent.futures
import contextlib
import ctypes
import json
import os
import pathlib
import re
import shutil
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import IO, Any, NoReturn

import torch

from inductor_ext import exc
from inductor_ext.cpp_wrapper.build import cpu_isa
from inductor_ext.cpp_wrapper.load import calling_convention
from inductor_ext.cpp_wrapper.package import manifest, zip_format, zip_reader, zip_writer
from inductor_ext.cpp_wrapper.signature.signature import Signature

__all__ = ["LoadedModel", "load"]

_CONSTANTS = "data/constants/"
_ALIGNMENT = 64
"""Alignment of weights in bytes that compiled code requires."""

_LARGE = 64 << 20
"""Minimum size of weights in bytes for which hashing by several threads pays off."""

_SOURCES = (".c", ".cpp", ".cu", ".h", ".o", ".py", ".txt", ".weights")
"""Suffixes of files in a package that running the model does not need."""

_OURS = "extra/inductor_ext/"
"""Folder that only packages written by the extension contain."""

_RUNNERS = {"cpu": "AOTIModelContainerRunnerCpu", "cuda": "AOTIModelContainerRunnerCuda"}


class _Library:
    """The functions that the extension's shared libraries export beyond torch's C interface."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)
        self.last_error = self._function("inductor_ext_last_error", ctypes.c_char_p)

    def _function(self, name: str, result: Any, *arguments: Any) -> Any:
        function = getattr(self._library, name)
        function.restype = result
        function.argtypes = arguments
        return function

    def close(self) -> None:
        """Release this handle. The library stays loaded while a runner holds a handle."""
        import _ctypes

        _ctypes.dlclose(self._library._handle)

    def missing_cpu_features(self) -> str:
        function = self._function("inductor_ext_missing_cpu_features", ctypes.c_char_p)
        return str(function().decode())

    def prepare(self, weights: tuple[str, int, int] | None, single_threaded: bool) -> None:
        """Configure the library. Call this before creating a container in the same thread.

        Args:
            weights: (file path, offset, size) of the weights, offset and size in bytes; None if
                there are none.
            single_threaded: whether to run without synchronization between threads.
        """
        self._function("inductor_ext_quiet", None, ctypes.c_int)(1)
        if weights is not None:
            path, offset, size = weights
            set_weights = self._function(
                "inductor_ext_set_weights", None, ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64
            )
            set_weights(os.fsencode(path), offset, size)
        if single_threaded:
            self._function("inductor_ext_set_single_threaded", None, ctypes.c_int)(1)
        with contextlib.suppress(AttributeError):
            # torch's runners hold the GIL while a model runs, which would block other threads.
            release = self._function(
                "inductor_ext_release_gil", None, ctypes.c_void_p, ctypes.c_void_p
            )
            save, restore = (
                ctypes.pythonapi.PyEval_SaveThread,
                ctypes.pythonapi.PyEval_RestoreThread,
            )
            release(ctypes.cast(save, ctypes.c_void_p), ctypes.cast(restore, ctypes.c_void_p))

    def last_container(self) -> int:
        return int(self._function("inductor_ext_last_container", ctypes.c_void_p)() or 0)

    def fold(self, container: int, inactive: bool) -> int:
        function = self._function(
            "AOTInductorModelContainerRunConstantFolding",
            ctypes.c_int32,
            ctypes.c_void_p,
            ctypes.c_bool,
            ctypes.c_void_p,
            ctypes.c_void_p,
        )
        return int(function(container, inactive, None, None))


class LoadedModel:
    """A loaded compiled model. Call it with the same arguments as the exported model.

    Several threads may call it concurrently; up to `num_runners` of them run at the same time.
    """

    path: str
    """Path of the package; empty for a buffer."""
    model_name: str
    """Name of the model in the package."""
    signature: Signature | None
    """Signature of a call; None for a package compiled by Inductor (default)."""
    manifest: manifest.Manifest | None
    """Manifest of the package; None for a package compiled by Inductor (default)."""

    _run: Any
    _plain: int
    _restore: Any
    _convention: calling_convention.Convention

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model.

        Args:
            args, kwargs: arguments with the pytree structure that the model was exported with.

        Returns:
            The same structure as the exported model returns.

        Raises:
            exc.InputMismatchError: the inputs do not match the signature. Nothing was computed.
            exc.ArtifactRunError: the call failed at run time. A model compiled by Inductor
                (default) raises RuntimeError instead.
        """
        # Fast path for positional tensors; torch's binding raises TypeError for anything else.
        if len(args) == self._plain and not kwargs:
            try:
                outputs = self._run(args)
            except (RuntimeError, TypeError) as error:
                self._fail(error, args, kwargs)
                raise
        else:
            tensors = self._convention.flatten(args, kwargs)
            try:
                outputs = self._run(tensors)
            except RuntimeError as error:
                self._fail(error, args, kwargs)
                raise
        return self._restore(outputs)

    def _fail(self, error: Exception, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise a more specific error in place of `error`, if there is one."""
        raise NotImplementedError

    def __copy__(self) -> LoadedModel:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> LoadedModel:
        return self

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__.lstrip('_')} {self.model_name!r} of {self.path or 'a buffer'}>"
        )

    def get_metadata(self) -> dict[str, str]:
        """Return the metadata that the compiler wrote for torch's loaders, such as the device."""
        raise NotImplementedError

    def get_constant_fqns(self) -> list[str]:
        """Return the fully qualified names of the constants, such as "encoder.layer.0.weight"."""
        raise NotImplementedError

    def load_constants(
        self,
        constants_map: Mapping[str, torch.Tensor],
        *,
        check_full_update: bool,
        user_managed: bool = False,
        allow_h2d_copy: bool = False,
    ) -> None:
        """Replace constants of the model, with the interface of torch's method of this name.

        Args:
            constants_map: tensors by the constants' fully qualified names.
            check_full_update: whether every parameter and buffer must be given.
            user_managed: whether the model uses the given tensors themselves instead of copies.
                Default: False.
            allow_h2d_copy: whether CPU tensors are copied to the device of the model. Has no effect
                on a package compiled by Inductor (default). Default: False.

        Raises:
            exc.ConstantMismatchError: a name, dtype, shape or device is wrong, or a constant is
                missing. Nothing was changed.
        """
        raise NotImplementedError

    def update_constants(
        self,
        constants_map: Mapping[str, torch.Tensor],
        *,
        inactive: bool = False,
        partial: bool = True,
    ) -> None:
        """Copy new values into the constants of the model.

        Args:
            constants_map: tensors by the constants' fully qualified names. A model compiled by the
                extension copies CPU tensors to its device.
            inactive: whether to update the inactive set of constants, which `swap_constants`
                activates. Calls continue to use the active set. Default: False.
            partial: whether parameters and buffers may be omitted. Default: True.

        Raises:
            exc.ConstantMismatchError: see `load_constants`.
        """
        raise NotImplementedError

    def swap_constants(self) -> None:
        """Exchange the active and the inactive set of constants.

        Raises:
            exc.UnsupportedArtifactError: the package was compiled by Inductor (default).
        """
        raise NotImplementedError

    def fold_constants(self, *, inactive: bool = False) -> None:
        """Run runtime constant folding now. Otherwise, the next call runs it.

        If the folded code calls custom operators, folding is always left to the next call.

        Args:
            inactive: whether to fold the inactive set of constants. Default: False.

        Raises:
            exc.ArtifactRunError: folding failed.
            exc.UnsupportedArtifactError: the package was compiled by Inductor (default).
        """
        raise NotImplementedError

    def free_inactive_constants(self) -> None:
        """Free the memory of the inactive set of constants.

        Raises:
            exc.UnsupportedArtifactError: the package was compiled by Inductor (default).
        """
        raise NotImplementedError

    def constants(self, *, inactive: bool = False) -> dict[str, torch.Tensor]:
        """Return the tensors that the model uses, by name. Writes to them affect the model.

        They are valid until the constants are next updated or freed.

        Args:
            inactive: whether to return the inactive set of constants. Default: False.

        Raises:
            exc.UnsupportedArtifactError: the package was compiled by Inductor (default).
        """
        raise NotImplementedError


class _Model(LoadedModel):
    """A model of a package compiled by the extension."""

    def __init__(
        self,
        *,
        path: str,
        name: str,
        content: manifest.Manifest,
        signature: Signature,
        convention: calling_convention.Convention,
        runner: Any,
        library: _Library,
        metadata: dict[str, str],
        device: str,
    ) -> None:
        self.path = path
        self.model_name = name
        self.manifest = content
        self.signature = signature
        self._model = content.models[name]
        self._convention = convention
        self._plain = convention.plain
        self._restore = convention.restore
        self._runner = runner
        self._run = runner.run
        self._library = library
        self._container = library.last_container()
        self._metadata = metadata
        self._device = device
        self._names: dict[str, list[str]] = {}
        for constant, fqn in runner.get_constant_names_to_original_fqns().items():
            self._names.setdefault(fqn or constant, []).append(constant)
        self._managed: list[dict[str, torch.Tensor]] = [{}, {}]
        self._lock = threading.Lock()
        # Runs before the runner is destroyed. The runner's own handle keeps the library loaded
        # until then.
        weakref.finalize(self, library.close).atexit = False

    def _fail(self, error: Exception, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if isinstance(error, TypeError):
            self._convention.flatten(args, kwargs)
            return
        why = self._library.last_error().decode(errors="replace").rstrip(".\n")
        if why:
            raise _run_error(why) from None

    def get_metadata(self) -> dict[str, str]:
        return dict(self._metadata)

    def get_constant_fqns(self) -> list[str]:
        return list(self._names)

    def constants(self, *, inactive: bool = False) -> dict[str, torch.Tensor]:
        found = self._runner.extract_constants_map(inactive)
        return {name: self._kept_alive(tensor) for name, tensor in found.items()}

    def _kept_alive(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the same memory whose storage keeps the model alive."""
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or not tensor.numel():
            return tensor
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last = sum((size - 1) * step for size, step in steps)
        size = (last + 1) * tensor.element_size()
        memory = (ctypes.c_char * size).from_address(tensor.data_ptr())
        memory.holder = self  # type: ignore[attr-defined]
        flat = torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride())

    def load_constants(
        self,
        constants_map: Mapping[str, torch.Tensor],
        *,
        check_full_update: bool,
        user_managed: bool = False,
        allow_h2d_copy: bool = False,
    ) -> None:
        self._update(constants_map, False, check_full_update, user_managed, allow_h2d_copy)

    def update_constants(
        self,
        constants_map: Mapping[str, torch.Tensor],
        *,
        inactive: bool = False,
        partial: bool = True,
    ) -> None:
        self._update(constants_map, inactive, not partial, False, True)

    def _update(
        self,
        given: Mapping[str, torch.Tensor],
        inactive: bool,
        full: bool,
        managed: bool,
        copies: bool,
    ) -> None:
        records = {constant.name: constant for constant in self._model.constants}
        tensors: dict[str, torch.Tensor] = {}
        for fqn, tensor in given.items():
            if fqn not in self._names:
                known = ", ".join(sorted(self._names)[:8])
                more = ", ..." if len(self._names) > 8 else ""
                _refuse(f"it has no constant {fqn!r}", f"It has {known}{more}")
            for name in self._names[fqn]:
                tensors[name] = self._fitting(fqn, tensor, records.get(name), managed, copies)
        try:
            self._runner.update_constant_buffer(tensors, inactive, full, managed)
        except RuntimeError as error:
            why = self._library.last_error().decode(errors="replace").rstrip(".\n") or str(error)
            _refuse(why, "")
        with self._lock:
            held = self._managed[1 if inactive else 0]
            for name, tensor in tensors.items():
                if managed:
                    held[name] = tensor
                else:
                    held.pop(name, None)

    def _fitting(
        self,
        fqn: str,
        tensor: object,
        record: manifest.Constant | None,
        managed: bool,
        copies: bool,
    ) -> torch.Tensor:
        """Check that a tensor matches a constant, and return it on the constant's device."""
        if not isinstance(tensor, torch.Tensor):
            _refuse(f"{fqn!r} is of type {type(tensor).__name__}", "Give a tensor")
        tensor = tensor.detach()
        if record is not None:
            dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
            if (dtype, shape) != (record.dtype, record.shape):
                _refuse(
                    f"{fqn!r} is a tensor ({dtype}, {list(shape)}), and the model has one of "
                    f"({record.dtype}, {list(record.shape)})",
                    "",
                )
        if tensor.device.type != "meta" and tensor.layout == torch.strided:
            if tensor.untyped_storage().device.type == "meta":
                _refuse(f"{fqn!r} is a fake tensor", "Give one that has values")
            if managed and (tensor.is_conj() or tensor.is_neg()):
                # The model would read the memory, which holds the values before conj or neg.
                kind = "conj" if tensor.is_conj() else "neg"
                _refuse(f"{fqn!r} is lazy", f"Call .resolve_{kind}() on it")
        # A GPU model may have constants on the CPU.
        device = self._device
        if record is not None and torch.device(record.device).type == "cpu":
            device = "cpu"
        if tensor.device.type != torch.device(device).type:
            if managed or not copies or tensor.device.type != "cpu":
                _refuse(f"{fqn!r} is on {tensor.device}, and the model's is on {device}", "")
            tensor = tensor.to(device)
        return tensor

    def swap_constants(self) -> None:
        with self._lock:
            self._runner.swap_constant_buffer()
            self._managed.reverse()

    def fold_constants(self, *, inactive: bool = False) -> None:
        if self._library.fold(self._container, inactive):
            why = self._library.last_error().decode(errors="replace").rstrip(".\n")
            raise exc.ArtifactRunError(why=why or "folding the constants failed")

    def free_inactive_constants(self) -> None:
        with self._lock:
            self._runner.free_inactive_constant_buffer()
            self._managed[1].clear()


class _StockModel(LoadedModel):
    """A model of a package compiled by Inductor (default), loaded by torch's own loader."""

    def __init__(self, path: str, name: str, loader: Any) -> None:
        self.path = path
        self.model_name = name
        self.signature = None
        self.manifest = None
        self._loader = loader
        self._run = loader.run
        in_spec, out_spec = loader.get_call_spec()
        self._convention = calling_convention.Convention(in_spec, out_spec, None, path)
        self._plain = self._convention.plain
        self._restore = self._convention.restore

    def _fail(self, error: Exception, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        return

    def get_metadata(self) -> dict[str, str]:
        return dict(self._loader.get_metadata())

    def get_constant_fqns(self) -> list[str]:
        return list(self._loader.get_constant_fqns())

    def load_constants(
        self,
        constants_map: Mapping[str, torch.Tensor],
        *,
        check_full_update: bool,
        user_managed: bool = False,
        allow_h2d_copy: bool = False,
    ) -> None:
        self._update(constants_map, False, check_full_update, user_managed)

    def update_constants(
        self,
        constants_map: Mapping[str, torch.Tensor],
        *,
        inactive: bool = False,
        partial: bool = True,
    ) -> None:
        self._update(constants_map, inactive, not partial, False)

    def _update(
        self, given: Mapping[str, torch.Tensor], inactive: bool, full: bool, managed: bool
    ) -> None:
        try:
            self._loader.load_constants(dict(given), inactive, full, managed)
        except RuntimeError as error:
            _refuse(str(error).splitlines()[0].rstrip("."), "")

    def _only_ours(self, what: str) -> exc.UnsupportedArtifactError:
        why = "it is one of stock Inductor's, whose loader does not offer it"
        return exc.UnsupportedArtifactError(what=what, path=self.path or "in a buffer", why=why)

    def swap_constants(self) -> None:
        raise self._only_ours("Swapping constants")

    def fold_constants(self, *, inactive: bool = False) -> None:
        raise self._only_ours("Folding constants")

    def free_inactive_constants(self) -> None:
        raise self._only_ours("Freeing inactive constants")

    def constants(self, *, inactive: bool = False) -> dict[str, torch.Tensor]:
        raise self._only_ours("Looking at constants")


def _refuse(why: str, mend: str) -> NoReturn:
    raise exc.ConstantMismatchError(why=why, mend=f"{mend}." if mend else "")


def _run_error(why: str) -> exc.ArtifactRunError:
    if re.match(r"(input '|the artifact (takes|was called))", why, re.IGNORECASE):
        return exc.InputMismatchError(why=why)
    return exc.ArtifactRunError(why=why)


def load(
    path: str | os.PathLike[str] | IO[bytes],
    model_name: str = "model",
    *,
    num_runners: int = 1,
    run_single_threaded: bool = False,
    device_index: int = -1,
    verify: bool = True,
    weights: str | os.PathLike[str] | None = None,
) -> LoadedModel:
    """Load a compiled model from a package.

    Args:
        path: path of a .pt2 file, path of a folder into which one was unpacked, or a readable and
            seekable buffer. A file must not be modified while the model exists, because its weights
            are memory-mapped.
        model_name: name of the model in the package. Default: "model".
        num_runners: maximum number of threads that run the model at the same time. Default: 1.
        run_single_threaded: whether to omit the synchronization between threads, as needed for
            CUDA graph capture. Default: False.
        device_index: index of the CUDA device. Default: -1, the current device.
        verify: whether to check the SHA-256 of every file used, at about 0.6 s per GB. A package
            compiled by Inductor (default) has no SHA-256; its CRC-32 is checked instead. Default:
            True.
        weights: the weights file, or another package with the same weights, for a package compiled
            without its weights (setting `aot_weights_file`). Default: None.

    Returns:
        The model. Call it with the same arguments as the exported model.

    Raises:
        exc.BadPackageError: the package cannot be read, is damaged, or has unsafe entry names.
        exc.IncompatibleArtifactError: the model cannot run on this machine or with this torch.
        exc.ModelNotFoundError: the package has no model of this name.
        exc.SourcesOnlyError: the package has the model's sources, but no library.
        exc.ArtifactLoadError: the library or the weights cannot be loaded.
        exc.UnknownNodeError: an input or output has a class that is not registered with pytree in
            this process.
        exc.BadOptionError: `num_runners` is not a positive integer, or `path` is neither a path nor
            a readable and seekable buffer.
    """
    if not isinstance(num_runners, int) or isinstance(num_runners, bool) or num_runners < 1:
        raise exc.BadOptionError(
            name="num_runners",
            value=num_runners,
            found=type(num_runners).__name__,
            allowed="a number from 1",
            default=1,
        )
    with zip_reader.open_package(path) as package:
        where = package.where
        found = manifest.read(package)
        if found is None:
            if weights is not None:
                why = "it is one of stock Inductor's, which have their weights inside"
                raise exc.ArtifactLoadError(path=where, name=model_name, why=why, mend="")
            if verify:
                package.verify({})
            return _load_stock(
                package, where, model_name, run_single_threaded, num_runners, device_index
            )
        content, data = found
        model = content.model(model_name, where)
        if model.library is None:
            raise exc.SourcesOnlyError(path=where, name=model_name)
        manifest.check_machine(content, model, _machine(model.device, device_index), where)
        try:
            signature = Signature.from_json(model.signature)
        except exc.BadSignatureError as error:
            why = f"its manifest is damaged: {error}"
            raise exc.BadPackageError(path=where, why=why.rstrip(".")) from None
        convention = calling_convention.Convention(
            signature.in_spec, signature.out_spec, signature, where
        )
        if verify:
            manifest.check_seal(package, content, data)
        loading = _Loading(package, content, model_name, model.library, where, verify)
        return loading.load(
            signature, convention, num_runners, run_single_threaded, device_index, weights
        )


def _machine(device: str, index: int) -> manifest.Machine:
    capability = None
    if device == "cuda" and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(index if index >= 0 else None)
    return manifest.Machine(
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        system=sys.platform,
        machine=os.uname().machine,
        cpu_features=cpu_isa.machine_features(),
        capability=capability,
    )


class _Loading:
    """The process of loading one model of a package."""

    def __init__(
        self,
        package: zip_reader.Package,
        content: manifest.Manifest,
        name: str,
        library: str,
        where: str,
        verify: bool,
    ) -> None:
        self._package = package
        self._content = content
        self._name = name
        self._where = where
        self._verify = verify
        self._model = content.models[name]
        self._library = library

    def load(
        self,
        signature: Signature,
        convention: calling_convention.Convention,
        num_runners: int,
        single_threaded: bool,
        device_index: int,
        weights: str | os.PathLike[str] | None,
    ) -> LoadedModel:
        if self._model.device not in _RUNNERS:
            self._fail(f"it runs on {self._model.device}, for which there is no runner", "")
        if _parent(self._library) != f"{zip_format.MODELS_FOLDER}{self._name}":
            self._bad(f"its manifest names {self._library!r} as a library")
        folder = tempfile.mkdtemp(prefix="inductor_ext-")
        kept = False
        try:
            self._extract(folder)
            place = self._weights(folder, weights)
            library_path = os.path.join(folder, self._library)
            library = self._open(library_path)
            try:
                runner = self._runner(
                    library, library_path, place, num_runners, single_threaded, device_index
                )
                self._compare(runner, signature)
                loaded = _Model(
                    path=self._package.path,
                    name=self._name,
                    content=self._content,
                    signature=signature,
                    convention=convention,
                    runner=runner,
                    library=library,
                    metadata=_metadata(library_path),
                    device=self._device(device_index),
                )
            except BaseException:
                library.close()
                raise
            if self._model.device != "cpu":
                kept = True
                weakref.finalize(loaded, shutil.rmtree, folder, ignore_errors=True)
            return loaded
        finally:
            if not kept:
                shutil.rmtree(folder, ignore_errors=True)

    def _bad(self, why: str) -> NoReturn:
        raise exc.BadPackageError(path=self._where, why=why)

    def _fail(self, why: str, mend: str) -> NoReturn:
        raise exc.ArtifactLoadError(path=self._where, name=self._name, why=why, mend=mend)

    def _digest(self, name: str) -> str | None:
        """Return the expected SHA-256 of an entry; None if it is not to be checked."""
        if not self._verify:
            return None
        if name not in self._content.files:
            self._bad(f"its manifest does not list {name!r}")
        return self._content.files[name].sha256

    def _extract(self, folder: str) -> None:
        """Copy the files that running the model needs to `folder`, checking their SHA-256."""
        prefixes = (f"{zip_format.MODELS_FOLDER}{self._name}/", _CONSTANTS)
        needed = [
            name
            for name in self._package.entries
            if name.startswith(prefixes) and not name.endswith(_SOURCES)
        ]
        for name in sorted({*needed, self._library}):
            target = os.path.join(folder, *name.split("/"))
            os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
            try:
                self._package.extract(name, target, self._digest(name))
            except OSError as error:
                self._fail(f"{error.strerror} while writing to {folder}", _OTHER_FOLDER)

    def _weights(
        self, folder: str, outside: str | os.PathLike[str] | None
    ) -> tuple[str, int, int] | None:
        """Return (file path, offset, size) for mapping the weights, in bytes; None without any."""
        known = self._model.outside
        if self._model.weights is not None:
            known = self._content.files.get(self._model.weights)
        if outside is not None:
            return self._outside(os.path.abspath(os.fspath(outside)), known)
        if self._model.weights is None:
            if known is not None:
                self._fail(
                    "its weights are kept outside of the package", "Give their file as `weights`."
                )
            return None
        name = self._model.weights
        place = self._package.locate(name)
        if place is not None and place[1] % _ALIGNMENT == 0:
            if self._verify and not self._intact(place, str(self._digest(name))):
                self._bad(f"{name} is damaged: its content does not fit its SHA-256")
            return place
        # The package is a buffer, or another tool rewrote it without alignment.
        target = os.path.join(folder, "weights")
        self._package.extract(name, target, self._digest(name))
        return target, 0, self._package.entries[name].size

    def _outside(self, path: str, known: manifest.File | None) -> tuple[str, int, int]:
        if known is None:
            self._fail("it has no weights, and some are given", "Leave `weights` out.")
        if path.endswith(".pt2"):
            with zip_reader.open_package(path) as package:
                place = self._in_package(package, known)
                if place is not None:
                    return place
            self._fail(f"{path} has no entry with its weights", "Give the one that does.")
        try:
            size = os.stat(path).st_size
        except OSError as error:
            self._fail(f"its weights in {path} cannot be read ({error.strerror})", "")
        place = path, 0, size
        if size != known.bytes or (self._verify and not self._intact(place, known.sha256)):
            self._fail(f"{path} does not have its weights", "Give the file that does.")
        return place

    def _in_package(
        self, package: zip_reader.Package, known: manifest.File
    ) -> tuple[str, int, int] | None:
        for name, entry in package.entries.items():
            place = package.locate(name)
            if entry.size != known.bytes or place is None or place[1] % _ALIGNMENT:
                continue
            if not self._verify or self._intact(place, known.sha256):
                return place
        return None

    def _intact(self, place: tuple[str, int, int], expected: str) -> bool:
        """Whether weights match their SHA-256. Large weights are checked by several threads."""
        path, begin, size = place
        parts = self._parts(size) if size >= _LARGE else None
        if parts is None:
            return zip_format.file_sha256(path, begin, size) == expected

        def check(part: tuple[int, int, str]) -> bool:
            return zip_format.file_sha256(path, begin + part[0], part[1]) == part[2]

        workers = min(8, len(os.sched_getaffinity(0)))
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            return all(pool.map(check, parts))

    def _parts(self, size: int) -> list[tuple[int, int, str]] | None:
        """Return (offset, size, SHA-256) of all constants; None if they do not cover the weights.

        Gaps between constants must be padding of less than a page, which is never read.
        """
        parts = set()
        for constant in self._model.constants:
            if constant.offset is not None and constant.bytes:
                if constant.sha256 is None:
                    return None
                parts.add((constant.offset, constant.bytes, constant.sha256))
        end = 0
        for offset, count, _ in [*sorted(parts), (size, 0, "")]:
            if offset - end >= zip_format.PAGE:
                return None
            end = max(end, offset + count)
        # Largest first, for a balanced load of the threads.
        return sorted(parts, key=lambda part: -part[1])

    def _open(self, path: str) -> _Library:
        try:
            library = _Library(path)
        except (OSError, AttributeError) as error:
            self._fail(str(error).replace("\n", " "), _OTHER_FOLDER)
        lacking = library.missing_cpu_features()
        if lacking:
            library.close()
            raise exc.IncompatibleArtifactError(
                path=self._where,
                why=f"its code needs {lacking}, which this CPU lacks",
                mend="Compile it again for this machine, or load it on one that fits",
            )
        return library

    def _runner(
        self,
        library: _Library,
        path: str,
        place: tuple[str, int, int] | None,
        num_runners: int,
        single_threaded: bool,
        device_index: int,
    ) -> Any:
        kind = getattr(torch._C._aoti, _RUNNERS[self._model.device])
        try:
            library.prepare(place, single_threaded)
            if self._model.device == "cpu":
                return kind(path, num_runners)
            device = self._device(device_index)
            return kind(path, num_runners, device, os.path.dirname(path))
        except (RuntimeError, AttributeError) as error:
            why = library.last_error().decode(errors="replace") or str(error).splitlines()[0]
            self._fail(why.rstrip(".\n"), "")

    def _device(self, index: int) -> str:
        kind = self._model.device
        return kind if kind == "cpu" or index < 0 else f"{kind}:{index}"

    def _compare(self, runner: Any, signature: Signature) -> None:
        """Check that the manifest and the library belong to the same model."""
        if list(runner.get_call_spec()) != [signature.in_spec, signature.out_spec]:
            self._bad("its library takes or returns something else than its manifest says")
        known = {constant.name: constant.fqn for constant in self._model.constants}
        found = runner.get_constant_names_to_original_fqns()
        if any(found.get(name, fqn) != fqn for name, fqn in known.items()):
            self._bad("its library has other constants than its manifest says")


_OTHER_FOLDER = (
    "If the folder for temporary files is full or does not allow libraries to be loaded from it "
    "(mount option noexec), set TMPDIR to another."
)


def _parent(name: str) -> str:
    return name.rpartition("/")[0]


def _metadata(library_path: str) -> dict[str, str]:
    path = library_path.removesuffix(".so") + "_metadata.json"
    try:
        content = json.loads(pathlib.Path(path).read_bytes())
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in content.items()}


def _load_stock(
    package: zip_reader.Package,
    where: str,
    name: str,
    single_threaded: bool,
    num_runners: int,
    device_index: int,
) -> LoadedModel:
    models = zip_format.model_names(package.entries)
    if not models:
        raise exc.NoModelError(path=where)
    if name not in models:
        raise exc.ModelNotFoundError(path=where, name=name, models=", ".join(sorted(models)))
    if any(entry.startswith(_OURS) for entry in package.entries):
        why = "it is one of inductor_ext's, and its manifest is missing"
        raise exc.BadPackageError(path=where, why=why)
    with _as_file(package) as path:
        try:
            loader = torch._C._aoti.AOTIModelPackageLoader(
                path, name, single_threaded, num_runners, device_index
            )
        except RuntimeError as error:
            why = str(error).splitlines()[0].rstrip(".")
            raise exc.ArtifactLoadError(path=where, name=name, why=why, mend="") from None
    return _StockModel(package.path, name, loader)


@contextlib.contextmanager
def _as_file(package: zip_reader.Package) -> Iterator[str]:
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
