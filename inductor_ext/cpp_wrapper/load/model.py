"""Loaded models: what `inductor_ext.load` returns.

`LoadedModel` is the interface, `Model` a model that the extension compiled, and `InductorModel` one
that Inductor (default) compiled. Errors are raised as classes of `exc`.
"""

from __future__ import annotations

import abc
import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from typing import IO, Any, NoReturn, SupportsIndex, TypeAlias

import torch

from inductor_ext import exc
from inductor_ext.cpp_wrapper.load.constants import (
    IncompatibleKeys,
    raise_mismatch,
    view_constant,
)
from inductor_ext.cpp_wrapper.load.instance import (
    ExtensionInstance,
    InductorInstance,
    Instance,
)
from inductor_ext.cpp_wrapper.load.native import ErrorCode
from inductor_ext.cpp_wrapper.package import manifest
from inductor_ext.cpp_wrapper.signature.signature import Signature

Path: TypeAlias = "str | os.PathLike[str]"
WeightsSource: TypeAlias = "Path | Mapping[str, torch.Tensor]"
"""A weights file, another package, or a `state_dict()`."""
Loader: TypeAlias = "Callable[[Path | IO[bytes], WeightsSource | None], LoadedModel]"
"""Loads a model from a path or buffer, with other weights or those of the first load."""


class LoadedModel(abc.ABC):
    """A loaded compiled model. Call it with the same arguments as the exported model.

    Several threads may call it concurrently; up to `num_runners` of them run at the same time.
    """

    model_name: str
    """Name of the model in the package."""

    def __init__(self, name: str, instance: Instance, load: Loader) -> None:
        """
        Args:
            name: name of the model in its package.
            instance: the model in memory.
            load: calls `inductor_ext.load` with the arguments that this model was loaded with.
        """
        self.model_name = name
        self._instance = instance
        self._load = load
        self._reloading = threading.Lock()

    @property
    def path(self) -> str:
        """Path of the package; empty for a buffer."""
        return self._instance.path

    @property
    def signature(self) -> Signature | None:
        """Signature of a call; None for a package compiled by Inductor (default)."""
        return self._instance.signature

    @property
    def manifest(self) -> manifest.Manifest | None:
        """Manifest of the package; None for a package compiled by Inductor (default)."""
        return self._instance.content

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
        instance = self._instance
        # Fast path for positional tensors; torch's binding raises TypeError for anything else.
        if len(args) == instance.plain and not kwargs:
            try:
                outputs = instance.run(args)
            except (RuntimeError, TypeError) as error:
                instance.translate(error, args, kwargs)
                raise
        else:
            tensors = instance.convention.flatten(args, kwargs)
            try:
                outputs = instance.run(tensors)
            except RuntimeError as error:
                instance.translate(error, args, kwargs)
                raise
        return instance.restore(outputs)

    def reload(
        self,
        path: Path | IO[bytes] | None = None,
        *,
        weights: WeightsSource | None = None,
    ) -> None:
        """Replace the model by the one of another package, while calls continue.

        Calls that have begun end with the model that they began with; later calls use the new one.
        The old model is destroyed, and its file no longer used, after its last call. Until then
        both are in memory. Constants have the values of the new package. If an error is raised,
        the old model stays.

        Args:
            path: as for `inductor_ext.load`. Default: None, the path of the present package, whose
                file another one has replaced.
            weights: as for `inductor_ext.load`. Default: None, the argument of the first load.

        Raises:
            exc.InductorExtError: see `inductor_ext.load`, whose other arguments are those of the
                first load.
            exc.IncompatibleReloadError: the new model is called in another way: the structure of
                the arguments or results, or the name, dtype, device or number of dimensions of one
                differs. Ranges of sizes may differ.
            exc.BadArgumentError: `path` is None, and the present package was a buffer.
        """
        with self._reloading:
            if path is None and not self.path:
                allowed = "a path or a buffer: the present package was a buffer, which has no path"
                raise exc.BadArgumentError(name="path", actual=None, allowed=allowed)
            loaded = self._load(self.path if path is None else path, weights)
            why = self._instance.find_difference(loaded._instance)
            if type(loaded) is not type(self):
                why = "one of the two packages was compiled by Inductor (default)"
            if why is not None:
                raise exc.IncompatibleReloadError(path=loaded.path or "in a buffer", why=why)
            self._instance = loaded._instance

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse `copy.copy`, `copy.deepcopy` and pickle: the weights would be shared or lost.

        Raises:
            exc.UncopyableModelError: always.
        """
        raise exc.UncopyableModelError(model=repr(self))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.model_name!r} of {self.path or 'a buffer'}>"

    @abc.abstractmethod
    def get_metadata(self) -> dict[str, str]:
        """Return the metadata that the compiler wrote for torch's loaders, such as the device."""

    @abc.abstractmethod
    def get_constant_fqns(self) -> list[str]:
        """Return the fully qualified names of the constants, such as "encoder.layer.0.weight"."""

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
        self._update(constants_map, False, check_full_update, user_managed, allow_h2d_copy)

    def update_constants(
        self,
        constants_map: Mapping[str, torch.Tensor],
        *,
        inactive: bool = False,
        partial: bool = True,
    ) -> None:
        """Copy new values into the constants of the model.

        The first update of the inactive set after loading, `swap_constants` or
        `free_inactive_constants` starts from the values of the active set, and later updates add to
        it. Updates of the active set, and buffers that calls mutate, do not reach it from then on.

        Args:
            constants_map: tensors by the constants' fully qualified names. A model compiled by the
                extension copies CPU tensors to its device.
            inactive: whether to update the inactive set of constants, which `swap_constants`
                activates. Calls continue to use the active set. Default: False.
            partial: whether parameters and buffers may be omitted. Default: True.

        Raises:
            exc.ConstantMismatchError: see `load_constants`.
        """
        self._update(constants_map, inactive, not partial, False, True)

    @abc.abstractmethod
    def load_state_dict(
        self, state_dict: Mapping[str, torch.Tensor], strict: bool = True
    ) -> IncompatibleKeys:
        """Copy the values of a module's `state_dict()` into the model, as `Module.load_state_dict`.

        The names are those of the exported module: tied weights have all their names, and buffers
        that are not persistent have none and keep their values. What the model does not read is
        ignored. Values are converted to the dtype and device of the model's.

        Args:
            state_dict: tensors by name.
            strict: whether every name must be given, and no other. Default: True.

        Returns:
            The names that are missing in `state_dict`, and the ones that the module does not have.

        Raises:
            exc.ConstantMismatchError: a name is missing or unknown (with `strict`), a shape is
                wrong, or a value was compiled into the model (`freezing`). Nothing was changed.
            exc.UnsupportedArtifactError: the package was compiled by Inductor (default), which does
                not store the names.
        """

    @abc.abstractmethod
    def _update(
        self,
        constants_map: Mapping[str, torch.Tensor],
        inactive: bool,
        full: bool,
        user_managed: bool,
        allow_h2d_copy: bool,
    ) -> None:
        """Replace constants in one of the two sets, as `load_constants` and `update_constants`."""

    @abc.abstractmethod
    def swap_constants(self) -> None:
        """Exchange the active and the inactive set of constants.

        A second call restores the previous constants, unless the inactive set was updated or freed
        in between. If the inactive set is empty, it becomes a copy of the active set first.

        Raises:
            exc.ArtifactRunError: there is no memory for the second set. Nothing was changed.
            exc.UnsupportedArtifactError: the package was compiled by Inductor (default).
        """

    @abc.abstractmethod
    def fold_constants(self, *, inactive: bool = False) -> None:
        """Run runtime constant folding now. Otherwise, the next call runs it.

        If the folded code calls custom operators, folding is always left to the next call.

        Args:
            inactive: whether to fold the inactive set of constants. Default: False.

        Raises:
            exc.ArtifactRunError: folding failed.
            exc.UnsupportedArtifactError: the package was compiled by Inductor (default).
        """

    @abc.abstractmethod
    def free_inactive_constants(self) -> None:
        """Free the memory of the inactive set of constants, and discard its updates.

        Raises:
            exc.UnsupportedArtifactError: the package was compiled by Inductor (default).
        """

    @abc.abstractmethod
    def constants(self, *, inactive: bool = False) -> dict[str, torch.Tensor]:
        """Return the tensors that the model uses, by name. Writes to them affect the model.

        They are valid until the constants are next updated or freed.

        Args:
            inactive: whether to return the inactive set of constants, which is empty after loading
                and after `free_inactive_constants`. Default: False.

        Raises:
            exc.UnsupportedArtifactError: the package was compiled by Inductor (default).
        """


class Model(LoadedModel):
    """A model of a package compiled by the extension."""

    _instance: ExtensionInstance

    @property
    def device(self) -> torch.device:
        """The device that the model runs on."""
        return self._instance.device

    def get_metadata(self) -> dict[str, str]:
        return dict(self._instance.metadata)

    def get_constant_fqns(self) -> list[str]:
        return list(self._instance.rules.names)

    def load_state_dict(
        self, state_dict: Mapping[str, torch.Tensor], strict: bool = True
    ) -> IncompatibleKeys:
        instance = self._instance
        values, keys = instance.rules.match_state(state_dict, strict=strict)
        with instance.changing_constants():
            _update(instance, values, allow_h2d_copy=True)
        return keys

    def constants(self, *, inactive: bool = False) -> dict[str, torch.Tensor]:
        instance = self._instance
        tensors = instance.runner.extract_constants_map(inactive)
        return {name: view_constant(tensor, instance) for name, tensor in tensors.items()}

    def _update(
        self,
        constants_map: Mapping[str, torch.Tensor],
        inactive: bool,
        full: bool,
        user_managed: bool,
        allow_h2d_copy: bool,
    ) -> None:
        instance = self._instance
        with contextlib.nullcontext() if inactive else instance.changing_constants():
            _update(instance, constants_map, inactive, full, user_managed, allow_h2d_copy)

    def swap_constants(self) -> None:
        instance = self._instance
        with instance.changing_constants():
            try:
                instance.runner.swap_constant_buffer()
            except RuntimeError as error:
                raise instance.run_error(instance.library.last_error() or str(error)) from None

    def fold_constants(self, *, inactive: bool = False) -> None:
        instance = self._instance
        with contextlib.nullcontext() if inactive else instance.changing_constants():
            if not instance.library.fold(instance.container, inactive):
                why = instance.library.last_error() or "folding the constants failed"
                raise instance.run_error(why)

    def free_inactive_constants(self) -> None:
        self._instance.runner.free_inactive_constant_buffer()


def use_tensors(instance: ExtensionInstance, tensors: Mapping[str, torch.Tensor]) -> None:
    """Make a model use tensors of the caller as constants, by name in the generated code."""
    try:
        instance.runner.update_constant_buffer(dict(tensors), False, False, True)
    except RuntimeError as error:
        raise_mismatch(instance.library.last_error() or str(error))


def _update(
    instance: ExtensionInstance,
    constants_map: Mapping[str, torch.Tensor],
    inactive: bool = False,
    full: bool = False,
    user_managed: bool = False,
    allow_h2d_copy: bool = False,
) -> None:
    tensors = instance.rules.convert(
        constants_map, user_managed=user_managed, allow_h2d_copy=allow_h2d_copy
    )
    try:
        instance.runner.update_constant_buffer(tensors, inactive, full, user_managed)
    except RuntimeError as error:
        why = instance.library.last_error() or str(error)
        if instance.library.last_error_code() is ErrorCode.FAILURE:
            raise instance.run_error(why) from None
        raise_mismatch(why)


class InductorModel(LoadedModel):
    """A model of a package compiled by Inductor (default), loaded by torch's own loader."""

    _instance: InductorInstance

    def get_metadata(self) -> dict[str, str]:
        return dict(self._instance.loader.get_metadata())

    def get_constant_fqns(self) -> list[str]:
        return list(self._instance.loader.get_constant_fqns())

    def load_state_dict(
        self, state_dict: Mapping[str, torch.Tensor], strict: bool = True
    ) -> IncompatibleKeys:
        raise self._unsupported("Loading a state_dict")

    def _update(
        self,
        constants_map: Mapping[str, torch.Tensor],
        inactive: bool,
        full: bool,
        user_managed: bool,
        allow_h2d_copy: bool,
    ) -> None:
        frozen = [name for name in self.get_constant_fqns() if name.startswith("_frozen_param")]
        if full and not constants_map.keys() >= set(frozen):
            raise_mismatch(
                f"{frozen[0]!r} was computed from its weights when it was compiled with freezing",
                "Compile it without freezing to update them",
            )
        try:
            self._instance.loader.load_constants(dict(constants_map), inactive, full, user_managed)
        except RuntimeError as error:
            raise_mismatch(str(error).splitlines()[0].rstrip("."))

    def _unsupported(self, feature: str) -> exc.UnsupportedArtifactError:
        why = "it was compiled by Inductor (default), whose loader does not support it"
        return exc.UnsupportedArtifactError(what=feature, path=self.path or "in a buffer", why=why)

    def swap_constants(self) -> None:
        raise self._unsupported("Swapping constants")

    def fold_constants(self, *, inactive: bool = False) -> None:
        raise self._unsupported("Folding constants")

    def free_inactive_constants(self) -> None:
        raise self._unsupported("Freeing inactive constants")

    def constants(self, *, inactive: bool = False) -> dict[str, torch.Tensor]:
        raise self._unsupported("Reading constants")
