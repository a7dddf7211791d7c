"""Loaded models: what `inductor_ext.load` returns.

`LoadedModel` is the interface, `Model` a model that the extension compiled, and `InductorModel` one
that Inductor (default) compiled. Errors are raised as classes of `exc`.
"""

from __future__ import annotations

import abc
import re
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, SupportsIndex

import torch

from inductor_ext import exc
from inductor_ext.cpp_wrapper.load import calling_convention
from inductor_ext.cpp_wrapper.load.constants import (
    ConstantRules,
    IncompatibleKeys,
    raise_mismatch,
    view_constant,
)
from inductor_ext.cpp_wrapper.load.native import ErrorCode, NativeLibrary
from inductor_ext.cpp_wrapper.package import manifest
from inductor_ext.cpp_wrapper.signature.signature import Signature

_Args = tuple[Any, ...]
_Kwargs = Mapping[str, Any]


class LoadedModel(abc.ABC):
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

    def __init__(
        self,
        path: str,
        name: str,
        run: Callable[[Any], Any],
        convention: calling_convention.Convention,
    ) -> None:
        self.path = path
        self.model_name = name
        self.signature = None
        self.manifest = None
        self._run = run
        self._convention = convention
        self._plain = convention.plain
        self._restore = convention.restore

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
                self._translate(error, args, kwargs)
                raise
        else:
            tensors = self._convention.flatten(args, kwargs)
            try:
                outputs = self._run(tensors)
            except RuntimeError as error:
                self._translate(error, args, kwargs)
                raise
        return self._restore(outputs)

    @abc.abstractmethod
    def _translate(self, error: Exception, args: _Args, kwargs: _Kwargs) -> None:
        """Raise a more specific error in place of `error`, if there is one."""

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

    def __init__(
        self,
        *,
        path: str,
        name: str,
        content: manifest.Manifest,
        signature: Signature,
        convention: calling_convention.Convention,
        runner: Any,
        library: NativeLibrary,
        metadata: dict[str, str],
        device: str,
    ) -> None:
        super().__init__(path, name, runner.run, convention)
        self.manifest = content
        self.signature = signature
        self._runner = runner
        self._library = library
        self._container = library.last_container()
        self._metadata = metadata
        fqns = runner.get_constant_names_to_original_fqns()
        described = content.models[name]
        self._index_inputs = {
            kernel.name: kernel.index_inputs for kernel in described.kernels if kernel.index_inputs
        }
        self._rules = ConstantRules(
            fqns, described.constants, device, described.frozen, described.state
        )
        # Runs before the runner is destroyed. The runner's own handle keeps the library loaded
        # until then.
        weakref.finalize(self, library.close).atexit = False

    def _translate(self, error: Exception, args: _Args, kwargs: _Kwargs) -> None:
        if isinstance(error, TypeError):
            self._convention.flatten(args, kwargs)
            return
        why = self._library.last_error()
        if why:
            code = self._library.last_error_code()
            translated: exc.InductorExtError | None = None
            if code is ErrorCode.INPUT:
                translated = exc.InputMismatchError(why=why)
            elif code is ErrorCode.BUDGET:
                translated = exc.MemoryBudgetCallError.from_message(why)
            raise (translated or self._run_error(why)) from None

    def _run_error(self, why: str) -> exc.ArtifactRunError:
        details = self._library.last_error_details()
        raised = re.match(r"Exception raised from (\w+) at ", details)
        inputs = self._index_inputs.get(raised[1], {}) if raised else {}
        why = _describe_index_error(why, inputs.get(why))
        return exc.ArtifactRunError(why=why, details=details)

    def get_metadata(self) -> dict[str, str]:
        return dict(self._metadata)

    def get_constant_fqns(self) -> list[str]:
        return list(self._rules.names)

    def load_state_dict(
        self, state_dict: Mapping[str, torch.Tensor], strict: bool = True
    ) -> IncompatibleKeys:
        values, keys = self._rules.match_state(state_dict, strict=strict)
        self._update(values, False, False, False, True)
        return keys

    def constants(self, *, inactive: bool = False) -> dict[str, torch.Tensor]:
        tensors = self._runner.extract_constants_map(inactive)
        return {name: view_constant(tensor, self) for name, tensor in tensors.items()}

    def _update(
        self,
        constants_map: Mapping[str, torch.Tensor],
        inactive: bool,
        full: bool,
        user_managed: bool,
        allow_h2d_copy: bool,
    ) -> None:
        tensors = self._rules.convert(
            constants_map, user_managed=user_managed, allow_h2d_copy=allow_h2d_copy
        )
        try:
            self._runner.update_constant_buffer(tensors, inactive, full, user_managed)
        except RuntimeError as error:
            why = self._library.last_error() or str(error)
            if self._library.last_error_code() is ErrorCode.FAILURE:
                raise self._run_error(why) from None
            raise_mismatch(why)

    def swap_constants(self) -> None:
        try:
            self._runner.swap_constant_buffer()
        except RuntimeError as error:
            raise self._run_error(self._library.last_error() or str(error)) from None

    def fold_constants(self, *, inactive: bool = False) -> None:
        if not self._library.fold(self._container, inactive):
            raise self._run_error(self._library.last_error() or "folding the constants failed")

    def free_inactive_constants(self) -> None:
        self._runner.free_inactive_constant_buffer()


def _describe_index_error(why: str, source: str | None) -> str:
    """Replace the expression of a failed check of an index by the size that it must be below.

    Args:
        why: the text of the error.
        source: the input that the index comes from; None if that is not known.
    """
    match = re.fullmatch(r"index out of bounds: 0 <= \w+ < (\d+)L*", why)
    if match is None:
        return why
    index = "An index" if source is None else f"An index from input '{source}'"
    return f"{index} is out of bounds for a dimension of size {match[1]}"


class InductorModel(LoadedModel):
    """A model of a package compiled by Inductor (default), loaded by torch's own loader."""

    def __init__(self, path: str, name: str, loader: Any) -> None:
        in_spec, out_spec = loader.get_call_spec()
        convention = calling_convention.Convention(in_spec, out_spec, None, path)
        super().__init__(path, name, loader.run, convention)
        self._loader = loader

    def _translate(self, error: Exception, args: _Args, kwargs: _Kwargs) -> None:
        """Keep torch's error."""

    def get_metadata(self) -> dict[str, str]:
        return dict(self._loader.get_metadata())

    def get_constant_fqns(self) -> list[str]:
        return list(self._loader.get_constant_fqns())

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
            self._loader.load_constants(dict(constants_map), inactive, full, user_managed)
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
