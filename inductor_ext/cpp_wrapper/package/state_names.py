"""The names of a module's `state_dict()`, and the constants of the compiled model behind them."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def find_constants(program: ExportedProgram, names: Collection[str]) -> dict[str, str]:
    """Return the name of the constant with the value of each entry of the `state_dict()`.

    Tied entries, which are one tensor under several names, have one constant. An entry that the
    program does not read has none; its name is empty. One that it reads and that is no constant,
    because its value is in the code, has its own name, so that loading it is refused.

    Args:
        program: the exported program.
        names: fully qualified names of the constants.
    """
    state, signature = program.state_dict, program.graph_signature
    sources = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    read = {
        sources[node.name]
        for node in program.graph.find_nodes(op="placeholder")
        if node.name in sources and node.users
    }
    tied = {_place(tensor): name for name, tensor in state.items() if name in read}
    tied |= {_place(tensor): name for name, tensor in state.items() if name in names}
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
