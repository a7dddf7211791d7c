"""Which tensors can replace the constants of a loaded model, and tensors on a model's memory."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

import torch

from inductor_ext import exc
from inductor_ext.cpp_wrapper.package import manifest

_ALIGNMENT = 16
"""Alignment of tensors in bytes that kernels for GPUs are compiled for."""


def raise_mismatch(why: str, remedy: str = "") -> NoReturn:
    """Raise `exc.ConstantMismatchError`. Both texts are without a full stop."""
    raise exc.ConstantMismatchError(why=why, fix=f"{remedy}." if remedy else "")


class IncompatibleKeys(NamedTuple):
    """What `load_state_dict` found missing or superfluous, as torch's `Module.load_state_dict`."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class ConstantRules:
    """The constants of one model: their names, and what a new value must be."""

    names: Mapping[str, Sequence[str]]
    """Names in the generated code by the fully qualified name of the constant."""

    def __init__(
        self,
        fqns: Mapping[str, str],
        records: Sequence[manifest.Constant],
        device: torch.device,
        frozen: Sequence[str] = (),
        state: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            fqns: the fully qualified name by the name in the generated code; may be empty.
            records: the manifest's description of the constants.
            device: device of the model, with its index.
            frozen: the manifest's names of constants that were compiled into others.
            state: the manifest's names of the module's `state_dict()`, with the names of the
                constants. Default: None, every constant with a name has an entry.
        """
        names: dict[str, list[str]] = {}
        for name, fqn in fqns.items():
            names.setdefault(fqn or name, []).append(name)
        self.names = names
        self._records = {record.name: record for record in records}
        self._device = device
        self._frozen = frozenset(frozen)
        self._state = {name: name for name in fqns.values() if name} if state is None else state

    def convert(
        self, tensors: Mapping[str, torch.Tensor], *, user_managed: bool, allow_h2d_copy: bool
    ) -> dict[str, torch.Tensor]:
        """Check new values, and return them by name in the code, on the constants' devices.

        Args:
            tensors: new values by fully qualified name.
            user_managed: whether the model will use the tensors instead of copies.
            allow_h2d_copy: whether CPU tensors may be copied to the constants' device.

        Raises:
            exc.ConstantMismatchError: see `model.LoadedModel.load_constants`.
        """
        converted: dict[str, torch.Tensor] = {}
        for fqn, tensor in tensors.items():
            if fqn not in self.names:
                if fqn in self._frozen:
                    raise_mismatch(
                        f"the value of {fqn!r} was compiled into the model with freezing",
                        "Compile it without freezing to update it",
                    )
                names = ", ".join(sorted(self.names)[:8])
                more = ", ..." if len(self.names) > 8 else ""
                raise_mismatch(f"it has no constant {fqn!r}", f"It has {names}{more}")
            for name in self.names[fqn]:
                converted[name] = self._convert_one(
                    fqn, tensor, self._records.get(name), user_managed, allow_h2d_copy
                )
        return converted

    def match_state(
        self, state: Mapping[str, torch.Tensor], *, strict: bool
    ) -> tuple[dict[str, torch.Tensor], IncompatibleKeys]:
        """Return new values of constants from a `state_dict()`, with the dtypes of the constants.

        Args:
            state: tensors by name.
            strict: whether every name must be given, and no other.

        Raises:
            exc.ConstantMismatchError: see `model.LoadedModel.load_state_dict`.
        """
        keys = self._compare_names(state)
        if strict:
            self._require_all(state, "With strict=False it loads what it knows")
        values = {
            constant: self._cast(constant, state[name])
            for name, constant in self._state.items()
            if constant and name in state
        }
        return values, keys

    def _compare_names(self, state: Mapping[str, torch.Tensor]) -> IncompatibleKeys:
        return IncompatibleKeys(
            [name for name in self._state if name not in state],
            [name for name in state if name not in self._state],
        )

    def _require_all(self, state: Mapping[str, torch.Tensor], remedy: str) -> None:
        """Raise `exc.ConstantMismatchError` unless a state has the names of the module's only."""
        keys = self._compare_names(state)
        if any(keys):
            parts = {"no value for": keys.missing_keys, "an unknown entry": keys.unexpected_keys}
            found = [
                f"{what} {', '.join(map(repr, names))}" for what, names in parts.items() if names
            ]
            raise_mismatch(f"the state has {' and '.join(found)}", remedy)

    def use_state(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Check a `state_dict()` whose tensors the model is to use.

        Returns:
            The tensors by name in the code.

        Raises:
            exc.ConstantMismatchError: see `load.load`.
        """
        self._require_all(state, "Pass all of the module's state_dict(), or use update_constants")
        values = {self._state[name]: state[name] for name in state if self._state[name]}
        return self.convert(values, user_managed=True, allow_h2d_copy=False)

    def _cast(self, fqn: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the dtype and on the device of a constant."""
        record = next((self._records.get(name) for name in self.names.get(fqn, ())), None)
        if record is None or not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta":
            return tensor
        return tensor.detach().to(self._device_of(record), getattr(torch, record.dtype))

    def _device_of(self, record: manifest.Constant | None) -> torch.device:
        # A GPU model may have constants on the CPU.
        is_on_cpu = record is not None and torch.device(record.device).type == "cpu"
        return torch.device("cpu") if is_on_cpu else self._device

    def _convert_one(
        self,
        fqn: str,
        tensor: object,
        record: manifest.Constant | None,
        user_managed: bool,
        allow_h2d_copy: bool,
    ) -> torch.Tensor:
        if not isinstance(tensor, torch.Tensor):
            raise_mismatch(f"{fqn!r} is of type {type(tensor).__name__}", "Pass a tensor")
        tensor = tensor.detach()
        if record is not None:
            dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
            if (dtype, shape) != (record.dtype, record.shape):
                raise_mismatch(
                    f"{fqn!r} is a tensor ({dtype}, {list(shape)}), but the model needs "
                    f"({record.dtype}, {list(record.shape)})"
                )
        if tensor.device.type != "meta" and tensor.layout == torch.strided:
            try:
                storage = tensor.untyped_storage()
            except NotImplementedError:  # a wrapper of torch.func
                raise_mismatch(f"{fqn!r} has no memory", "Pass a tensor with data")
            if storage.device.type == "meta":
                raise_mismatch(f"{fqn!r} is a fake tensor", "Pass a tensor with data")
            if user_managed and (tensor.is_conj() or tensor.is_neg()):
                # The model would read the memory, which holds the values before conj or neg.
                kind = "conj" if tensor.is_conj() else "neg"
                raise_mismatch(f"{fqn!r} is a lazy {kind} view", f"Call .resolve_{kind}() on it")
        device = self._device_of(record)
        # Copies reach another GPU; code that uses the tensor itself does not.
        if tensor.device.type != device.type or (user_managed and tensor.device != device):
            if user_managed or not allow_h2d_copy or tensor.device.type != "cpu":
                raise_mismatch(f"{fqn!r} is on {tensor.device}, and the model's is on {device}")
            tensor = tensor.to(device)
        if user_managed and device.type != "cpu" and tensor.data_ptr() % _ALIGNMENT:
            why = f"{fqn!r} is not aligned to {_ALIGNMENT} bytes, which GPU kernels assume"
            raise_mismatch(why, "Call .clone() on it")
        return tensor


def view_constant(tensor: torch.Tensor, owner: object) -> torch.Tensor:
    """Return a CPU tensor on the same memory whose storage keeps `owner` alive.

    A tensor on another device is returned unchanged.
    """
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or not tensor.numel():
        return tensor
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * step for size, step in steps)
    size = (last + 1) * tensor.element_size()
    memory = (ctypes.c_char * size).from_address(tensor.data_ptr())
    memory.holder = owner  # type: ignore[attr-defined]
    flat = torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride())
