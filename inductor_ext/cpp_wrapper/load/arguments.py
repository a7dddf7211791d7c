"""The arguments of `inductor_ext.load`, checked before the package is opened."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence

import torch

from inductor_ext import exc
from inductor_ext.cpp_wrapper.load.model import WeightsSource
from inductor_ext.cpp_wrapper.load.warm_up import Example
from inductor_ext.cpp_wrapper.package import signing


def parse_device(device: str | torch.device | None, index: int) -> torch.device | int:
    """Return the device, or the index of a CUDA device if no device was named.

    Raises:
        exc.BadArgumentError: see `load`.
    """
    if device is None:
        return index
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError):
        allowed = 'a device, such as "cuda:1" or "cpu"'
        raise exc.BadArgumentError(name="device", actual=repr(device), allowed=allowed) from None
    if index != -1:
        allowed = 'omitted if device is given, which has an index: "cuda:1"'
        raise exc.BadArgumentError(name="device_index", actual=index, allowed=allowed)
    return parsed


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of `load` apart from the package."""

    name: str
    num_runners: int
    single_threaded: bool
    device: torch.device | int
    verify: bool
    weights: WeightsSource | None
    map_weights: bool
    keys: signing.Key | Sequence[signing.Key] | None
    warm_up: bool | Sequence[Example]
    cuda_graphs: Sequence[Example]

    @property
    def device_index(self) -> int:
        """Index of the CUDA device; -1 for the current one."""
        if isinstance(self.device, int):
            return self.device
        return -1 if self.device.index is None else self.device.index

    def check(self) -> None:
        """Check the values that do not depend on the package.

        Raises:
            exc.BadOptionError: see `load`.
        """
        count = self.num_runners
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            allowed = "an integer of at least 1"
            raise exc.BadArgumentError(name="num_runners", actual=repr(count), allowed=allowed)
        if self.weights is not None and not isinstance(self.weights, str | os.PathLike | Mapping):
            allowed = "the path of a weights file or of a package, or a state_dict()"
            raise exc.BadArgumentError(name="weights", actual=_show(self.weights), allowed=allowed)
        calls = (
            "a sequence of calls, each a tuple of arguments or a dictionary of keyword arguments"
        )
        if not isinstance(self.warm_up, bool) and not _are_calls(self.warm_up):
            allowed = f"True, False, or {calls}"
            raise exc.BadArgumentError(name="warm_up", actual=_show(self.warm_up), allowed=allowed)
        if not _are_calls(self.cuda_graphs):
            actual = _show(self.cuda_graphs)
            raise exc.BadArgumentError(name="cuda_graphs", actual=actual, allowed=calls)
        if self.keys is not None and not self.verify:
            allowed = "True if a signature is required, which covers the digests of the files"
            raise exc.BadArgumentError(name="verify", actual=self.verify, allowed=allowed)


def _show(value: object) -> str:
    """Return what an argument is, without the values of tensors."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"a {type(value).__name__} of {', '.join(type(item).__name__ for item in value)}"
    return f"{value!r:.60}"


def _are_calls(value: object) -> bool:
    return isinstance(value, Sequence) and all(
        isinstance(example, tuple | list | Mapping) for example in value
    )
