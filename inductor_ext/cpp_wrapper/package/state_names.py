"""The names of a module's `state_dict()`, and the constants of the compiled model behind them."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from inductor_ext.cpp_wrapper.codegen.frozen_constants import find_memory

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
    tied = {find_memory(tensor): name for name, tensor in state.items() if name in read}
    tied |= {find_memory(tensor): name for name, tensor in state.items() if name in names}
    return {
        name: name if name in names else tied.get(find_memory(tensor), "")
        for name, tensor in state.items()
    }
