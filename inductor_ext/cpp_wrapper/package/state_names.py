"""The names of a module's `state_dict()`, and the constants of the compiled model behind them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


def find_constants(state: Mapping[str, Any], names: Collection[str]) -> dict[str, str]:
    """Return the name of the constant with the value of each entry of a `state_dict()`.

    Tied entries, which are one tensor under several names, have one constant. An entry that the
    model does not read has none; its name is empty.

    Args:
        state: tensors of the exported program by their fully qualified names.
        names: fully qualified names of the constants.
    """
    tied = {_place(tensor): name for name, tensor in state.items() if name in names}
    return {
        name: name if name in names else tied.get(_place(tensor), "")
        for name, tensor in state.items()
    }


def _place(tensor: Any) -> object:
    """Return what is equal for tensors that are the same elements of the same memory."""
    try:
        memory = tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        memory = 0
    if not memory or not tensor.numel():
        # Without memory, only the same object is the same tensor.
        return id(tensor)
    return memory, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype
